"""A router process over a Redis in which everything is damaged while requests run: none fails, and it lives."""

import asyncio
import math
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import cast

import msgspec
import pytest

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc
from ostrya.client import AsyncClient
from ostrya.errors import StateUnavailable, Unavailable, Unreadable
from ostrya.prefix.chain import RoutingDigest
from ostrya.service.server import channel
from ostrya.state import keys
from ostrya.state.board import LoadRow
from ostrya.state.connection import Command, Connection
from ostrya.text.source import resolve_model
from ostrya.text.tokenizer import load_tokenizer
from tests.fakes import garbage
from tests.fakes.pool import publishing, running
from tests.fakes.redis_server import RunningRedis, free_port, start_redis
from tests.fakes.waiting import until
from tests.fakes.worker import FakeWorker, Identity

MODEL = "smollm2-135m-instruct"
MAX_EPOCH_E = b"9007199254740993"
"""A greater epoch below keys.MAX_EPOCH is a younger process, plausibly: its worker ends, as it must."""
WORKERS = ("w0", "w1")
NO_TEXT = b"\xff\xfe"
MARK = 77
"""A count that nobody has otherwise."""

ONE_FAULT: dict[str, Command] = {
    "a member that is called no text": ("HSET", keys.members("default"), NO_TEXT, b"x"),
    "a load of somebody who is called no text": ("HSET", keys.load("default"), NO_TEXT, b"x"),
    "an epoch that is no number": ("HSET", keys.worker_keys("default", "w0").meta, "e", "x"),
}
WILD_LOADS = ((0, math.nan), (-1, -1.0), (2**63, math.inf))
"""Counts, and a rate."""


def loads(number: int, rate: float) -> Iterator[list[Command]]:
    """Rows of all workers, each time with a new stamp; every count but one is that number."""
    for stamp in count():
        row = LoadRow(
            stamp=stamp,
            num_running=MARK,
            num_waiting=number,
            queued_tokens=number,
            free_pages=number,
            reusable_pages=number,
            total_pages=number,
            queried_tokens=number,
            hit_tokens=number,
            prefill_tokens_per_s=rate,
        )
        packed = msgspec.msgpack.encode(row)
        yield [("HSET", keys.load("default"), worker_id, packed) for worker_id in WORKERS]


@dataclass
class Asking:
    """Clients that ask all the time."""

    target: str
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)
    listed: int = 0

    async def ask(self, stop: asyncio.Event) -> None:
        async with AsyncClient(self.target) as client:
            while not stop.is_set():
                try:
                    await client.generate(token_ids=[1, 2, 3] * 20, max_tokens=5, timeout_s=30.0).read()
                    self.num_answers += 1
                except Exception as error:
                    self.failures.append(repr(error))

    async def look(self, stop: asyncio.Event) -> None:
        async with channel(self.target, max_message_bytes=1 << 20) as way:
            admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(way)
            while not stop.is_set():
                try:
                    await admin.ListReplicas(admin_pb2.ListReplicasRequest(), timeout=30)
                    status = await admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
                    self.failures += [f"{part.name}: {part.error}" for part in status.failing_parts]
                    self.listed += 1
                except Exception as error:
                    self.failures.append(repr(error))
                await asyncio.sleep(0.05)  # operators look now and then

    @asynccontextmanager
    async def asking(self, number: int) -> AsyncIterator[None]:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(number):
                tasks.create_task(self.ask(stop))
            tasks.create_task(self.look(stop))
            try:
                yield
            finally:
                stop.set()

    async def seen(self, *, answers: int, lists: int) -> None:
        """Waits for so many more of both, or for a failure."""
        answers, lists = self.num_answers + answers, self.listed + lists
        await until(lambda: self.failures or (self.num_answers >= answers and self.listed >= lists), timeout_s=60)


@pytest.fixture
def redis() -> Iterator[RunningRedis]:
    running = start_redis()
    yield running
    running.stop()


@asynccontextmanager
async def router_process(redis: RunningRedis, log: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    port = free_port()
    command = (sys.executable, "-m", "ostrya.cli.main", "router", "--port", str(port), "--redis-url", redis.url)
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield process, f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def keep(writing: Iterable[list[Command]], connection: Connection) -> None:
    """Over and over, as workers write their rows anew."""
    for commands in writing:
        with suppress(StateUnavailable):  # it is busy
            await connection.all(commands)
        await asyncio.sleep(0.02)  # the bound of this load


async def ask_over(wild: Iterable[list[Command]], client: AsyncClient, connection: Connection) -> None:
    """Lists and asks once the router has read these loads, and before an answer tells it others."""
    async with running(partial(keep, wild, connection)), asyncio.timeout(60):
        while {one.load.num_running for one in (await client.replicas()).replicas} != {MARK}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await client.generate(token_ids=[1, 2, 3] * 20, max_tokens=2).read()


async def damage(rng: random.Random, connection: Connection) -> None:
    """One key, in one way, whatever stands there now."""
    worker_id = rng.choice(WORKERS)
    names = keys.worker_keys("default", worker_id)
    table = rng.choice((keys.members("default"), keys.load("default")))
    match rng.randrange(10):
        case 0 | 1 | 2:
            row = await connection.call("HGET", table, worker_id)
            await connection.call(
                "HSET", table, worker_id, garbage.mutated(rng, row if isinstance(row, bytes) else b"")
            )
        case 3:
            await connection.call("HSET", table, rng.choice((b"\xff\xfe", b"", b"w\n", b"w" * 300)), rng.randbytes(20))
        case 4:
            await connection.call("HSET", names.meta, rng.choice(("e", "s", "ss")), rng.choice(garbage.NOT_NUMBERS))
        case 5:
            await connection.call("HSET", names.meta, "e", MAX_EPOCH_E)
        case 6:
            raw = await connection.call("GET", names.snapshot)
            await connection.call("SET", names.snapshot, garbage.mutated(rng, raw if isinstance(raw, bytes) else b""))
        case 7:
            epoch, seq = cast("list[bytes | None]", await connection.call("HMGET", names.meta, "e", "s"))
            if epoch and seq and (epoch + seq).isdigit() and len(epoch + seq) < 40:  # as yet undamaged
                await connection.call("XADD", names.journal, f"{int(epoch)}-{int(seq) + 1}", "b", garbage.batch(rng))
        case 8:
            await connection.call("SET", rng.choice((names.meta, names.journal, table)), rng.randbytes(8))
        case 9:
            await connection.all([("DEL", names.lease), ("RPUSH", names.lease, "x"), ("PEXPIRE", names.lease, 900)])


async def test_requests_run_while_every_key_of_redis_is_damaged(redis: RunningRedis, tmp_path: Path) -> None:
    rng, log = random.Random(5), tmp_path / "router.log"
    fingerprint = load_tokenizer(resolve_model(MODEL).path).fingerprint
    async with AsyncExitStack() as stack:
        publishers = []
        for worker_id in WORKERS:
            identity = Identity(worker_id=worker_id, model=MODEL, tokenizer_fingerprint=fingerprint)
            worker = await stack.enter_async_context(FakeWorker(identity))
            publishing_one = publishing(redis.url, worker_id, address=worker.address)
            publishers.append(await stack.enter_async_context(publishing_one))
        process, target = await stack.enter_async_context(router_process(redis, log))
        connection = Connection(redis.url)
        stack.push_async_callback(connection.close)
        await until_replicas(target, 2)
        async with AsyncClient(target) as client:
            for number, rate in WILD_LOADS:
                await ask_over(loads(number, rate), client, connection)
        asking = Asking(target)
        async with asking.asking(4):
            for name, command in ONE_FAULT.items():
                async with running(partial(keep, repeat([command]), connection)):
                    await asking.seen(answers=20, lists=20)  # the router reads four times a second, this is a second
                assert (name, process.returncode, asking.failures) == (name, None, [])
            for number in range(garbage.num_mutations(600)):
                with suppress(StateUnavailable, Unreadable):  # it is damaged already, and of another type
                    await damage(rng, connection)
                publishers[number % 2].publish([RoutingDigest(rng.getrandbits(64))], (), publishers[0]._load)
                if number % 10 == 0:
                    await asyncio.sleep(0.02)
            await asking.seen(answers=20, lists=1)
        assert process.returncode is None
        assert asking.failures == []
        assert asking.listed > 0
        assert not any(publisher.fenced.done() for publisher in publishers)
        await until_replicas(target, 2)
    assert "broke" not in log.read_text()


async def until_replicas(target: str, number: int) -> None:
    """A process starts, or heals; nothing tells when."""
    async with AsyncClient(target) as client, asyncio.timeout(60):
        ready = [0]
        while ready != [number]:
            await asyncio.sleep(0.05)
            with suppress(Unavailable):
                ready = [model.num_replicas_ready for model in await client.models(timeout_s=1.0)]
