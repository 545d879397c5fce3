"""A whole worker process with the fake runner: from its first line to its exit code."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import msgspec
import pytest

from ostrya.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from ostrya.engine.config import EngineConfig
from ostrya.service.server import channel
from ostrya.state import members
from ostrya.state.connection import Connection
from ostrya.worker.settings import WorkerSettings
from tests.fakes.redis_server import start_redis

CONFIG = EngineConfig(model_path="/", model_name="fake", tokenizer_fingerprint="t", num_pages=257, page_size=4)
NO_REDIS = "redis://127.0.0.1:1/0"
READY_S = 20.0


class RunningWorker:
    """One child process and its stderr."""

    def __init__(self, log: Path, *, factory: str, redis_url: str) -> None:
        self.log = log
        settings = WorkerSettings(worker_id="w-0", redis_url=redis_url, drain_timeout_s=5)
        arguments = (
            msgspec.json.encode(settings).decode(),
            msgspec.json.encode(CONFIG).decode(),
            f"tests.fakes.runner:{factory}",
        )
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.worker_process", *arguments], stderr=stderr
            )

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def fields(self, message: str) -> dict[str, object]:
        """The log line with this message; waits for it."""
        poll(lambda: self._find(message) is not None, READY_S, lambda: f"no {message!r} in {self.lines()}")
        return self._find(message) or {}

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def _find(self, message: str) -> dict[str, object] | None:
        parsed = [msgspec.json.decode(line, type=dict[str, object]) for line in self.lines() if line.startswith("{")]
        return next((line for line in parsed if line["message"] == message), None)


def poll(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    """Waits for another process; AssertionError with `what()` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def worker(tmp_path: Path, factory: str = "load_paced_runner", *, redis_url: str = NO_REDIS) -> Iterator[RunningWorker]:
    running = RunningWorker(tmp_path / "worker.log", factory=factory, redis_url=redis_url)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait(5)


def request(max_tokens: int) -> worker_pb2.WorkerServiceGenerateRequest:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return worker_pb2.WorkerServiceGenerateRequest(request_id="r", token_ids=range(10), sampling=sampling)


async def count_tokens(stub: "worker_pb2_grpc.WorkerServiceAsyncStub", max_tokens: int) -> int:
    messages = [message async for message in stub.Generate(request(max_tokens))]
    return int(messages[-1].usage.completion_tokens)


async def test_worker_serves_drains_on_sigterm_and_leaves_nothing(tmp_path: Path) -> None:
    with worker(tmp_path) as running:
        listening = running.fields("listening")
        (engine_pid,) = running.children()
        async with channel(str(listening["address"]), max_message_bytes=1 << 20) as open_channel:
            stub = worker_pb2_grpc.WorkerServiceStub(open_channel)
            answer = asyncio.create_task(count_tokens(stub, 60))
            url = f"http://127.0.0.1:{listening['metrics_port']}/metrics"
            await asyncio.to_thread(
                poll, lambda: b'requests_running{model="fake"} 1.0' in read(url), 5, lambda: "never seen running"
            )
            running.process.send_signal(signal.SIGTERM)
            assert await answer == 60
        assert running.process.wait(5) == 0
        assert not is_alive(engine_pid)
        assert running.fields("drained")["num_cancelled"] == 0
        logged = running.fields("request")
        assert (logged["ending"], logged["prompt_tokens"], logged["completion_tokens"]) == ("length", 10, 60)


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        body: bytes = answer.read()
    return body


async def test_engine_death_fails_requests_and_ends_the_worker(tmp_path: Path) -> None:
    with worker(tmp_path) as running:
        address = str(running.fields("listening")["address"])
        async with channel(address, max_message_bytes=1 << 20) as open_channel:
            call = worker_pb2_grpc.WorkerServiceStub(open_channel).Generate(request(900))
            messages = aiter(call)
            await anext(messages)
            (engine_pid,) = running.children()
            os.kill(engine_pid, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in messages:
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert running.process.wait(5) == 1
        assert "signal 9" in str(running.fields("engine died; the worker exits")["reason"])


def test_workers_own_process_never_imports_torch() -> None:
    check = "import ostrya.worker.app, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_killed_worker_leaves_no_engine_behind(tmp_path: Path) -> None:
    with worker(tmp_path, "load_slow_runner") as running:
        running.fields("listening")
        (engine_pid,) = running.children()
        running.process.kill()
        poll(lambda: not is_alive(engine_pid), 5, lambda: "the engine outlived its worker")


def test_model_that_cannot_load_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    with worker(tmp_path, "refuse_to_load") as running:
        assert running.process.wait(READY_S) == 1
        assert running.lines() == ["error: / is cut short: 12 of 40 bytes; fetch it again"]


def test_sigterm_while_loading_ends_at_once(tmp_path: Path) -> None:
    with worker(tmp_path, "never_load") as running:
        poll(lambda: bool(running.children()), READY_S, lambda: "no engine was started")
        poll(lambda: "loading" in running.log.read_text(), READY_S, lambda: "the engine never began")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(5) == 0


async def test_registered_worker_leaves_redis_and_a_younger_one_fences_it(tmp_path: Path) -> None:
    redis = start_redis()
    connection = Connection(redis.url)
    try:
        with worker(tmp_path, redis_url=redis.url) as running:
            address = running.fields("listening")["address"]
            running.fields("registered")
            assert (await rows(connection))["w-0"].address == address
            (tmp_path / "younger").mkdir()
            with worker(tmp_path / "younger", redis_url=redis.url) as younger:
                younger.fields("registered")
                assert running.process.wait(10) == 1
                assert "was taken by a younger process" in str(running.fields("fenced; the worker exits")["reason"])
                younger.process.send_signal(signal.SIGTERM)
                assert younger.process.wait(5) == 0
            assert await members.read(connection, "default") == {}
    finally:
        await connection.close()
        redis.stop()


async def rows(connection: Connection) -> dict[str, members.Member]:
    """The pool's members once there is one."""
    async with asyncio.timeout(5):
        while not (found := await members.read(connection, "default")):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
    return found
