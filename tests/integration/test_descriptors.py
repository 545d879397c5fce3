"""Router and worker processes with few file descriptors: connections that do nothing take none that others need."""

import asyncio
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from ostrya.engine.config import EngineConfig
from ostrya.service.server import LIVENESS, channel
from ostrya.worker.settings import WorkerSettings
from tests.fakes.redis_server import free_port
from tests.fakes.waiting import until

LIMIT = 256
BUSY_S = 30.0
NOWHERE = "127.0.0.1:1"
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


def words_of(part: str, port: int, metrics_port: int) -> list[str]:
    if part == "router":
        ports = ("--port", str(port), "--metrics-port", str(metrics_port), "--redis-url", f"redis://{NOWHERE}/0")
        return ["-m", "ostrya.cli.main", "router", *ports, "--discovery", "static", "--static-workers", NOWHERE]
    settings = WorkerSettings(worker_id="w", port=port, metrics_port=metrics_port, redis_url=f"redis://{NOWHERE}/0")
    config = EngineConfig(model_path="/", model_name="fake", tokenizer_fingerprint="t", num_pages=257, page_size=4)
    made = (msgspec.json.encode(settings).decode(), msgspec.json.encode(config).decode())
    return ["-m", "tests.fakes.worker_process", *made, "tests.fakes.runner:load_runner"]


class Process:
    """One of the two services."""

    def __init__(self, part: str, log: Path) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        # A soft limit below the hard one, as systems set them: it must be lifted.
        script = f'ulimit -S -n 64; ulimit -H -n {LIMIT}; exec "$@"'
        command = ["sh", "-c", script, "sh", sys.executable, *words_of(part, self.port, self.metrics_port)]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def scrape(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=BUSY_S) as answer:
            text = answer.read().decode()
        return {sample.name: sample.value for f in text_string_to_metric_families(text) for sample in f.samples}

    async def answers(self, *, timeout_s: float = BUSY_S) -> bool:
        async with channel(f"127.0.0.1:{self.port}", max_message_bytes=1 << 20) as open_channel:
            stub = health_pb2_grpc.HealthStub(open_channel)
            request = health_pb2.HealthCheckRequest(service=LIVENESS)
            answer = await stub.Check(request, timeout=timeout_s, wait_for_ready=True)  # type: ignore[attr-defined]
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture(scope="module", params=["router", "worker"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    made = Process(request.param, tmp_path_factory.mktemp("logs") / "log")
    yield made
    made.process.terminate()
    made.process.wait(BUSY_S)


def connections(stack: ExitStack, port: int, number: int, *, send: bytes = b"") -> list[socket.socket]:
    made = []
    for _ in range(number):
        made.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=BUSY_S)))
        made[-1].sendall(send)
    return made


@pytest.mark.parametrize("send", [b"", GET], ids=["idle", "not-reading"])
async def test_300_connections_to_the_metrics_port_keep_nobody_out(running: Process, send: bytes) -> None:
    assert await running.answers()
    with ExitStack() as stack:
        await asyncio.to_thread(connections, stack, running.metrics_port, 300, send=send)
        for _ in range(3):
            assert await running.answers()  # each over a connection of its own
            seen = await asyncio.to_thread(running.scrape)
            assert seen["process_max_fds"] == LIMIT
            assert seen["process_open_fds"] < LIMIT / 2


async def test_300_connections_to_the_grpc_port_that_never_speak_are_closed_and_leave_room(running: Process) -> None:
    assert await running.answers()
    with ExitStack() as stack:
        silent = await asyncio.to_thread(connections, stack, running.port, 300)
        seen = await asyncio.to_thread(running.scrape)
        assert seen["process_open_fds"] < LIMIT
        assert await running.answers()

        def closed() -> int:
            return sum(is_closed(client) for client in silent)

        await until(lambda: closed() == len(silent), timeout_s=2 * BUSY_S)


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        while client.recv(1 << 16):  # the server's own preface comes first
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True
