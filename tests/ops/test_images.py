"""The Dockerfiles' own install lines, run here in clean venvs; what they install is then started as the images' user.

Minutes and gigabytes, gone afterwards: `pytest tests/ops -k "not xla"` leaves out the largest. Needs a package index.
"""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ostrya.client import Client
from tests.fakes.redis_server import RunningRedis, free_port, start_redis
from tests.ops.dockerfile import parse
from tests.ops.install import UID, Built, as_nobody, built

ROOT = Path(__file__).parents[2]
SERVING_S = 90.0


def dockerfile(name: str) -> str:
    return (ROOT / "deploy" / "docker" / f"{name}.Dockerfile").read_text()


@pytest.fixture(scope="module")
def router_image() -> Iterator[Built]:
    with built(parse(dockerfile("router")), ROOT) as image:
        yield image


@pytest.fixture(scope="module")
def worker_image() -> Iterator[Built]:
    with built(parse(dockerfile("worker-cpu")), ROOT) as image:
        yield image


@pytest.fixture
def redis() -> Iterator[RunningRedis]:
    server = start_redis()
    yield server
    server.stop()


def started(image: Built, log: Path, *words: str) -> subprocess.Popen[bytes]:
    """As a container runtime would: the image's environment and nothing else, in a folder it cannot write to."""
    with log.open("wb") as out:
        return subprocess.Popen(
            image.command(*words),
            env=dict(image.environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )


def wait_serving(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until its gRPC health says SERVING; AssertionError with its log if it ends or takes too long."""
    deadline = time.monotonic() + SERVING_S
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_reconnect_backoff_ms", 200)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)  # type: ignore[attr-defined]
            except grpc.RpcError:
                answer = None
            if answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)  # a real process starts


def has_module(image: Built, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    python = image.root / "opt/ostrya/bin/python"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def owner(process: subprocess.Popen[bytes]) -> int:
    return Path(f"/proc/{process.pid}").stat().st_uid


def files(image: Built) -> set[Path]:
    return set(image.root.rglob("*"))


def test_the_router_image_has_no_torch_and_no_pip(router_image: Built) -> None:
    absent = ["torch", "numpy", "gguf", "llguidance", "safetensors", "pip"]
    assert [name for name in absent if has_module(router_image, name)] == []
    assert has_module(router_image, "kubernetes")


def test_router_and_worker_images_answer_together(
    router_image: Built, worker_image: Built, redis: RunningRedis, tmp_path: Path
) -> None:
    before = files(router_image), files(worker_image)
    worker_port, router_port = free_port(), free_port()
    common = ("--redis-url", redis.url, "--metrics-port", "0")
    logs = {name: tmp_path / f"{name}.log" for name in ("router", "worker")}
    size = ("--num-pages", "512", "--num-threads", "1")
    worker_words = ("worker", "--worker-id", "worker-0", "--port", str(worker_port), *size, *common)
    processes = {
        "worker": started(worker_image, logs["worker"], *worker_words),
        "router": started(router_image, logs["router"], "router", "--port", str(router_port), *common),
    }
    try:
        wait_serving(processes["router"], router_port, logs["router"])
        with Client(f"127.0.0.1:{router_port}") as client:
            assert client.tokenize(text="Ironwood is hard.")
            wait_serving(processes["worker"], worker_port, logs["worker"])
            answer = client.generate(text="The capital of France is", max_tokens=4, temperature=0, timeout_s=30).read()
        assert "Paris" in answer
        if as_nobody(router_image.root):
            assert {name: owner(process) for name, process in processes.items()} == {"worker": UID, "router": UID}
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        assert {name: process.wait(45) for name, process in processes.items()} == {"worker": 0, "router": 0}
        # Their root file system may be read-only: nothing was written to it.
        assert (files(router_image), files(worker_image)) == before
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("name", "has"), [("worker-torchtpu", ["torch", "torch_tpu", "libtpu"]), ("worker-xla", ["torch_xla", "libtpu"])]
)
def test_a_tpu_image_installs_and_its_own_import_check_passes(name: str, has: list[str]) -> None:
    with built(parse(dockerfile(name)), ROOT, compiled=False) as image:
        assert [one for one in has if not has_module(image, one)] == []
        environment = {**image.environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        done = subprocess.run(image.command("worker", "--help"), env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        took = ", ".join(f"{text[:40]}… {seconds:.0f} s" for text, seconds in image.seconds.items())
        print(f"{name}: {image.size_bytes() / 1e9:.1f} GB; {took}")
