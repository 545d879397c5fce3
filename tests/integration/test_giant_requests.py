"""Giants against a real router process: refused at once, and nobody else notices."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ostrya.client import AsyncClient
from ostrya.errors import OstryaError
from ostrya.service.server import channel
from ostrya.text.source import resolve_model
from ostrya.text.tokenizer import load_tokenizer
from tests.fakes.redis_server import free_port
from tests.fakes.worker import FakeWorker, Identity
from tests.integration.bed import NO_REDIS
from tests.integration.edge import SERVICES, failure_of, violation

AT_ONCE = 6
GENERATE = SERVICES[0].methods_by_name["Generate"]
TURN = b"\x22\x09\x0a\x04user\x12\x01a"
"""ChatMessage(role="user", content="a") as field 4 of a request."""
NUM_IDS = 8_000_000
MODEL = "smollm2-135m-instruct"
START_S = 60.0
LONGEST_S = 3.0
"""For a bystander; before there were bounds it was 28 s on a busy machine, and now it is a fifth of a second."""
GROWTH_MB = 250
"""Of the router; before, 1,250, and now 60 to 90."""


def varint(number: int) -> bytes:
    low = [(number >> shift) & 0x7F for shift in range(0, number.bit_length(), 7)]
    return bytes(part | 0x80 for part in low[:-1]) + bytes(low[-1:])


def stop_ids(number: int) -> bytes:
    """A text (field 3) and SamplingParams (field 6) with that many ids (its field 6), as the wire has them."""
    packed = b"\x32" + varint(number) + b"\x05" * number
    return b"\x1a\x01a" + b"\x32" + varint(len(packed)) + packed


GIANTS = {
    "messages": (TURN * 700_000, "at most 4096 messages"),
    "sampling": (stop_ids(NUM_IDS), "at most 1024 stop_token_ids"),
    "token_ids": (b"\x2a" + varint(NUM_IDS) + b"\x05" * NUM_IDS, "at most 1048576 ids"),
}


@dataclass
class Bystander:
    """Asks for health and for answers, again and again."""

    target: str
    longest_s: float = 0.0
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)

    async def check_health(self, stop: asyncio.Event) -> None:
        async with channel(self.target, max_message_bytes=1 << 20) as way:
            stub = health_pb2_grpc.HealthStub(way)
            while not stop.is_set():
                started = time.monotonic()
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)  # type: ignore[attr-defined]
                self._took(started, "" if answer.status == health_pb2.HealthCheckResponse.SERVING else str(answer))

    async def ask(self, stop: asyncio.Event) -> None:
        async with AsyncClient(self.target) as client:
            while not stop.is_set():
                started = time.monotonic()
                stream = client.generate(token_ids=[1, 2], max_tokens=3, timeout_s=60)
                await stream.read()
                self.num_answers += 1
                self._took(started, "" if stream.finish_reason == "length" else str(stream.finish_reason))

    def _took(self, started: float, failure: str) -> None:
        self.longest_s = max(self.longest_s, time.monotonic() - started)
        self.failures += [failure] if failure else []


@asynccontextmanager
async def router() -> AsyncIterator[tuple[str, int]]:
    """A router process that serves; its address and process id."""
    fingerprint = load_tokenizer(resolve_model(MODEL).path).fingerprint
    async with FakeWorker(Identity(model=MODEL, tokenizer_fingerprint=fingerprint)) as worker:
        port = free_port()
        options = ("--port", str(port), "--redis-url", NO_REDIS, "--static-workers", worker.address)
        command = (sys.executable, "-m", "ostrya.cli.main", "router", *options, "--discovery", "static")
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
        try:
            async with asyncio.timeout(START_S), AsyncClient(f"127.0.0.1:{port}") as client:
                while not await is_ready(client):  # noqa: ASYNC110 - it changes in another process
                    await asyncio.sleep(0.05)
            yield f"127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            await process.wait()


async def is_ready(client: AsyncClient) -> bool:
    try:
        return any(model.num_replicas_ready for model in await client.models(timeout_s=1.0))
    except OstryaError:
        return False


def memory_mb(pid: int, what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


@pytest.mark.alone
async def test_six_giants_at_once_are_refused_with_field_and_limit_and_nobody_else_notices() -> None:
    async with router() as (target, pid), channel(target, max_message_bytes=64 << 20) as way:
        bystander, stop = Bystander(target), asyncio.Event()
        before_mb = memory_mb(pid, "VmRSS")
        others = [asyncio.create_task(one(stop)) for one in (bystander.check_health, bystander.ask)]
        for name, (raw, limit) in GIANTS.items():
            refusals = await asyncio.gather(*(failure_of(way, GENERATE, raw) for _ in range(AT_ONCE)))
            assert {error.code() for error in refusals} == {grpc.StatusCode.INVALID_ARGUMENT}
            assert {violation(error)[0] for error in refusals} == {name}
            assert all(limit in violation(error)[1] for error in refusals)
        stop.set()
        await asyncio.gather(*others)
        assert bystander.failures == []
        assert bystander.num_answers > 1
        assert bystander.longest_s < LONGEST_S
        assert memory_mb(pid, "VmHWM") - before_mb < GROWTH_MB
