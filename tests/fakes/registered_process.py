"""A worker process without an engine that registers in Redis: `python -m tests.fakes.registered_process JSON`.

A FakeWorker with the worker's own publisher and metrics-free wiring. It prints its address when it listens, and ends
with SIGTERM, leaving as a worker does, or when its standard input ends.
"""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec

from ostrya.api.v1 import worker_pb2
from ostrya.engine.types import Load
from ostrya.prefix.chain import RoutingDigest
from ostrya.state import keys
from ostrya.state.members import Member
from ostrya.worker import publisher as publishing
from ostrya.worker.publisher import Publisher
from ostrya.worker.settings import WorkerSettings
from tests.fakes.worker import FakeWorker, Identity


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told. Times are shorter than in life, so that tests do not wait."""

    worker_id: str
    redis_url: str
    tokenizer_fingerprint: str
    lease_ms: int = keys.LEASE_MS
    kept_ms: int = keys.KEPT_MS
    digests: tuple[int, ...] = ()
    """What it says it has cached."""


@dataclass(slots=True)
class RegisteredProcess:
    """One running."""

    worker_id: str
    address: str
    process: "subprocess.Popen[str]"

    def stop(self) -> None:
        """SIGTERM: it leaves."""
        self.process.terminate()
        self.wait()

    def kill(self) -> None:
        """SIGKILL: it is gone, and its port is closed."""
        self.process.kill()
        self.wait()

    def hang(self) -> None:
        """SIGSTOP: its connections stay, and nothing answers."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def wait(self) -> None:
        self.process.wait(15)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def start(*setups: Setup) -> list[RegisteredProcess]:
    """All at once; each listens when this returns."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.registered_process", msgspec.json.encode(setup).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for setup in setups
    ]
    started = []
    for setup, process in zip(setups, processes, strict=True):
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, f"{setup.worker_id} did not start: exit code {process.wait(15)}"
        started.append(RegisteredProcess(setup.worker_id, address, process))
    return started


class _Registered(FakeWorker):
    """Tells the publisher's epoch, as a worker does."""

    publisher: Publisher | None = None

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.GetInfoResponse:
        self.identity.epoch = self.publisher.epoch if self.publisher is not None else 0
        return await super().GetInfo(request, context)


async def _serve(setup: Setup) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(sys.stdin.fileno(), stop.set)  # readable: it ended
    identity = Identity(worker_id=setup.worker_id, tokenizer_fingerprint=setup.tokenizer_fingerprint)
    worker = _Registered(identity)
    async with worker:
        member = Member(
            worker_id=setup.worker_id,
            address=worker.address,
            model=identity.model,
            page_size=identity.page_size,
            routing_stride=identity.routing_stride,
            chain_self_test=b"",
            max_running=identity.max_running,
            context_tokens=identity.context_tokens,
            vocab_size=identity.vocab_size,
        )
        settings = WorkerSettings(worker_id=setup.worker_id, redis_url=setup.redis_url)
        publisher = worker.publisher = Publisher(settings, member=member)
        publisher.publish([RoutingDigest(digest) for digest in setup.digests], (), Load(total_pages=100))
        publish = asyncio.create_task(publisher.run())
        print(worker.address, flush=True)
        await stop.wait()
        await worker.set_serving(False)
        publish.cancel()
        await asyncio.gather(publish, return_exceptions=True)
        await publisher.close()


if __name__ == "__main__":
    told = msgspec.json.decode(sys.argv[1], type=Setup)
    keys.LEASE_MS, keys.KEPT_MS = told.lease_ms, told.kept_ms
    vars(publishing)["RENEW_S"] = told.lease_ms / 3_000
    asyncio.run(_serve(told))
