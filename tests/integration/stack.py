"""The real stack as child processes: Redis, router, workers with the real model. For integration tests and the soak.

Started through the `ostrya` command, as a user would. Everything binds 127.0.0.1 on free ports and ends with `close()`.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from ostrya.client import Client
from ostrya.errors import OstryaError
from tests import leaks
from tests.fakes.redis_server import RunningRedis, free_port, start_redis

Samples = dict[tuple[str, str], float]
"""(name, labels as text) -> value."""

_READY_TIMEOUT_S = 180.0


@dataclass(slots=True)
class RunningStack:
    """Processes and their addresses."""

    redis: RunningRedis
    target: str
    metrics_urls: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]]
    commands: dict[str, tuple[str, ...]]
    logs: Path

    def samples(self, process: str) -> Samples:
        """What `process` exports right now."""
        with urllib.request.urlopen(self.metrics_urls[process], timeout=5) as answer:
            text = answer.read().decode()
        return {
            (sample.name, ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, process: str, name: str, having: str = "") -> float:
        """Sum of the samples called `name` whose labels contain `having`."""
        samples = self.samples(process)
        found = [value for (sample, labels), value in samples.items() if sample == name and having in labels]
        assert found, f"{process} exports no {name} with {having!r}"
        return sum(found)

    def pids(self, process: str) -> list[int]:
        """A process and its child, the engine."""
        pid = self.processes[process].pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def resident_bytes(self, process: str) -> int:
        """Memory of a process and its child, the engine."""
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids(process)]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def workers(self) -> list[str]:
        return [name for name in self.processes if name.startswith("worker")]

    def busy(self) -> dict[str, float]:
        """Everything that must be zero when nobody asks for anything."""
        counts = {f"{worker} {what}": value for worker in self.workers for what, value in self._worker_busy(worker)}
        counts["router in flight"] = self.total("router", "ostrya_router_requests_in_flight")
        return {what: value for what, value in counts.items() if value}

    def _worker_busy(self, worker: str) -> list[tuple[str, float]]:
        return [
            ("running", self.total(worker, "ostrya_worker_requests_running")),
            ("waiting", self.total(worker, "ostrya_worker_requests_waiting")),
            ("referenced pages", self.total(worker, "ostrya_worker_kv_cache_blocks", "state=referenced")),
        ]

    async def idle(self, timeout_s: float = 10.0) -> None:
        """Waits until nothing is held anywhere; AssertionError names what still is."""
        await eventually(lambda: not self.busy(), timeout_s=timeout_s, what=lambda: f"still held: {self.busy()}")

    def restart(self, name: str) -> None:
        """Starts `name` again with the same options; it must have ended."""
        old = self.processes[name]
        old.wait(10)
        self.processes[name] = _launch(self.logs / f"{name}.log", *self.commands[name])
        leaks.replaces(old.pid, self.processes[name].pid)

    def close(self) -> None:
        """SIGTERM to all; AssertionError if one does not end."""
        try:
            self._end_all()
        finally:
            self.redis.stop()
            shutil.rmtree(self.logs)

    def _end_all(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for name, process in self.processes.items():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(f"{name} did not end within 30 s of SIGTERM") from None


async def eventually(condition: Callable[[], bool], *, timeout_s: float, what: Callable[[], str]) -> None:
    """Polls a real process until `condition` holds. AssertionError with `what()` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            raise AssertionError(what())
        await asyncio.sleep(0.05)


def start_stack(
    *,
    num_workers: int = 2,
    worker_options: tuple[str, ...] = (),
    router_options: tuple[str, ...] = (),
    redis: Literal["running", "absent"] = "running",
) -> RunningStack:
    """Starts everything at once and waits until every worker is routable."""
    server = start_redis()
    if redis == "absent":
        server.kill()
    names = [f"worker-{index}" for index in range(num_workers)]
    ports, metrics = (
        {name: free_port() for name in (*names, "router")},
        {name: free_port() for name in (*names, "router")},
    )
    threads = max(1, (os.cpu_count() or 1) // num_workers)
    common = {name: ("--redis-url", server.url, *_ports(ports[name], metrics[name])) for name in ports}
    commands = {
        name: ("worker", "--worker-id", name, "--num-threads", str(threads), *common[name], *worker_options)
        for name in names
    }
    static = tuple(word for name in names for word in ("--static-workers", f"127.0.0.1:{ports[name]}"))
    commands["router"] = ("router", *common["router"], *static, *router_options)
    logs = Path(tempfile.mkdtemp(prefix="ostrya-test-"))
    stack = RunningStack(
        redis=server,
        target=f"127.0.0.1:{ports['router']}",
        metrics_urls={name: f"http://127.0.0.1:{port}/metrics" for name, port in metrics.items()},
        processes={name: _launch(logs / f"{name}.log", *command) for name, command in commands.items()},
        commands=commands,
        logs=logs,
    )
    try:
        _wait_ready(stack, num_workers)
    except BaseException:
        stack.close()
        raise
    return stack


def _ports(port: int, metrics_port: int) -> tuple[str, ...]:
    return ("--port", str(port), "--metrics-port", str(metrics_port))


def _launch(log: Path, *command: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "ostrya.cli.main", *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


def _wait_ready(stack: RunningStack, num_workers: int) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while _num_ready(stack.target) < num_workers:
        ended = [name for name, process in stack.processes.items() if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            tails = {name: (stack.logs / f"{name}.log").read_text()[-2000:] for name in ended or stack.processes}
            raise AssertionError(f"stack is not ready; ended: {ended}; logs: {tails}")
        time.sleep(0.1)


def _num_ready(target: str) -> int:
    try:
        with Client(target) as client:
            return sum(model.num_replicas_ready for model in client.models(timeout_s=1))
    except OstryaError:
        return 0
