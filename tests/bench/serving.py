"""What a worker costs before and beside its work: how long it takes to start, and its resident memory.

A real `ostrya worker` on loopback, without Redis. Both processes count, the worker's and the engine's, with all that
the kernel counts as resident: also files they map, a library that both map twice.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ostrya.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from ostrya.cli.ports import HOST, free_ports
from ostrya.engine.models.source import open_source
from tests.bench.side_ours import weights_setting

START_LIMIT_S, POLL_S, ANSWER_LIMIT_S = 120.0, 0.01, 120.0
NUM_NEW = 64
KV_VALUE_BYTES = 2
"""bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Bytes, of both processes together."""

    total_bytes: int
    file_bytes: int
    """The part of it that is mapped files: code, and weights where they are used in place."""

    def __str__(self) -> str:
        return f"{self.total_bytes / 1e6:.0f} MB, {self.file_bytes / 1e6:.0f} MB of it files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One worker's figures."""

    start_s: float
    """From the start of its process to the first SERVING."""
    idle: Resident
    worked: Resident
    """After a long prompt and an answer."""
    kv_bytes: int
    """Of the KV pages that those filled."""


def serve(gguf: Path, weights: str, *, threads: int, prompt: Sequence[int], directory: Path) -> Serving:
    """Starts a worker, has it answer once, and ends it."""
    with _worker(gguf, weights, threads, directory / "worker.log") as (pid, channel, start_s):
        idle = _resident(pid)
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        request = worker_pb2.WorkerServiceGenerateRequest(request_id="bench", token_ids=prompt, sampling=sampling)
        for _ in worker_pb2_grpc.WorkerServiceStub(channel).Generate(request, timeout=ANSWER_LIMIT_S):
            pass
        worked = _resident(pid)
    kv_bytes = _kv_bytes(gguf, num_tokens=len(prompt) + NUM_NEW)
    return Serving(start_s=start_s, idle=idle, worked=worked, kv_bytes=kv_bytes)


@contextmanager
def _worker(gguf: Path, weights: str, threads: int, log: Path) -> Iterator[tuple[int, grpc.Channel, float]]:
    with free_ports() as take:
        port, metrics_port = take(0), take(0)
    options = {
        "worker-id": "bench",
        "model": gguf,
        "port": port,
        "metrics-port": metrics_port,
        "redis-url": f"redis://{HOST}:1/0",  # nobody listens there
        "num-threads": threads,
        **weights_setting(weights),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    started = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "ostrya.cli.main", "worker", *words],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
    backoff = [(f"grpc.{which}_reconnect_backoff_ms", 20) for which in ("min", "initial", "max")]
    try:
        with grpc.insecure_channel(f"{HOST}:{port}", options=backoff) as channel:
            while not _is_serving(channel):
                if process.poll() is not None or time.perf_counter() - started > START_LIMIT_S:
                    raise RuntimeError(f"the worker does not serve: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(POLL_S)
            yield process.pid, channel, time.perf_counter() - started
    finally:
        process.terminate()
        try:
            process.wait(START_LIMIT_S)
        finally:
            process.kill()


def _is_serving(channel: grpc.Channel) -> bool:
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)  # type: ignore[attr-defined]
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _resident(pid: int) -> Resident:
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    statuses = [Path(f"/proc/{one}/status").read_text() for one in pids]

    def total(field: str) -> int:
        return sum(1024 * int(cast("re.Match[str]", re.search(rf"{field}:\s+(\d+)", text))[1]) for text in statuses)

    return Resident(total_bytes=total("VmRSS"), file_bytes=total("RssFile"))


def _kv_bytes(gguf: Path, *, num_tokens: int) -> int:
    sizes = [layer.mixer.sizes for layer in open_source(gguf).spec.layers]
    return num_tokens * KV_VALUE_BYTES * sum(2 * size.num_kv_heads * size.head_dim for size in sizes)
