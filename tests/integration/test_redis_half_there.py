"""A Redis that answers and does not do its work: no request fails, and all heals by itself.

A router in front of workers in their own processes that register, renew and publish as workers do. Between each side
and Redis is a switch: a name that can be pointed elsewhere while connections stay. Leases are shorter than in life.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import grpc
import pytest
import redis

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ostrya.router import registry
from ostrya.router.app import Router
from ostrya.router.settings import RouterSettings
from ostrya.router.types import KnowledgeLevel, ReplicaState
from ostrya.service.server import channel
from ostrya.state import keys
from ostrya.state.connection import Connection
from tests.fakes.redis_server import RunningRedis, start_redis
from tests.fakes.registered_process import RegisteredProcess, Setup, start
from tests.fakes.switch import Switch
from tests.fakes.waiting import until
from tests.integration.bed import TOKENIZER

LEASE_S, AWAY_S, KEPT_S = 1.2, 0.5, 3.0
LEAVES_S = 5.0
"""What is promised with leases of 3 s; with those of here it takes 1.3 s less."""
HEALS_S = 15.0
ALL = ("w0", "w1")


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LEASE_MS", round(LEASE_S * 1000))
    monkeypatch.setattr(registry, "_AWAY_S", AWAY_S)
    monkeypatch.setattr(registry, "_GRACE_S", LEASE_S + AWAY_S)
    monkeypatch.setattr(registry, "_ASK_BELOW_S", LEASE_S / 3, raising=False)


@dataclass(slots=True)
class Pool:
    """A router, workers, and the Redis that both sides are pointed at."""

    redis: RunningRedis
    workers_way: Switch
    routers_way: Switch
    router: Router
    workers: list[RegisteredProcess]
    inference: "inference_pb2_grpc.InferenceServiceAsyncStub"
    admin: "admin_pb2_grpc.AdminServiceAsyncStub"
    servers: list[RunningRedis] = field(default_factory=list)

    @property
    def ready(self) -> tuple[str, ...]:
        return tuple(view.worker_id for view in self.router.fleet.snapshot().replicas)

    @property
    def ages(self) -> list[float]:
        return [view.index_age_s for view in self.router.fleet.snapshot().replicas]

    @property
    def is_heard(self) -> bool:
        return all(row.info.epoch and not row.holds for row in self.router.fleet.replicas())

    @property
    def blocks(self) -> list[int]:
        return [row.indexed_blocks for row in self.router.fleet.replicas()]

    def is_whole(self) -> bool:
        """Everybody is there, with a lease and all that it has cached."""
        is_fresh = self.router.fleet.snapshot().level is KnowledgeLevel.FRESH
        return self.ready == ALL and is_fresh and self.is_heard and self.blocks == [3, 3]

    @property
    def holds(self) -> dict[str, tuple[str, ...]]:
        return {row.info.worker_id: row.holds for row in self.router.fleet.replicas()}

    async def config(self, *words: str | int) -> None:
        """On the Redis of now."""
        connection = Connection(self.redis.url)
        await connection.call(*words)
        await connection.close()

    def another_redis(self) -> RunningRedis:
        server = start_redis()
        self.servers.append(server)
        return server

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Nobody left: these are all used, and the router says that their leases are not renewed."""
        yield
        assert self.holds == dict.fromkeys(ALL, ("lease_not_renewed",))
        assert self.ready == ALL
        assert all(age_s > 0 for age_s in self.ages)
        assert self.blocks == [3, 3]

    async def lose_leases(self) -> None:
        """Waits until they are over, their rows have expired too, and the router has had the time to notice both."""
        with redis.Redis(port=self.redis.port) as client:
            await until(lambda: not client.exists(keys.members("default")), timeout_s=HEALS_S)
        # Of its clock too, as the machine may be slow.
        noticed_at, noticed_s = time.monotonic(), registry._GRACE_S + 1.0
        discovery = self.router._discovery
        turn = discovery._registry._turn
        await until(
            lambda: discovery._registry._turn >= turn + 4 and time.monotonic() - noticed_at > noticed_s,
            timeout_s=HEALS_S,
        )

    @asynccontextmanager
    async def asked(self, *, at_least: int = 20) -> AsyncIterator[None]:
        """Requests, one after the other, from before the block to a while after it. None may fail."""
        outcomes: list[str] = []
        stop = asyncio.Event()

        async def ask() -> None:
            while not stop.is_set():
                try:
                    request = inference_pb2.GenerateRequest(token_ids=range(40))
                    async for _ in self.inference.Generate(request, timeout=10):
                        pass
                    outcomes.append("OK")
                except grpc.aio.AioRpcError as error:
                    outcomes.append(f"{error.code().name} {error.details()}")
                await asyncio.sleep(0.02)  # the bound of this load

        asking = asyncio.create_task(ask())
        try:
            await until(lambda: outcomes)
            yield
            number = len(outcomes)
            await until(lambda: len(outcomes) >= max(at_least, number + 5), timeout_s=10)
        finally:
            stop.set()
            await asking
        assert [outcome for outcome in outcomes if outcome != "OK"] == []


def setup(worker_id: str, redis_url: str, kept_s: float) -> Setup:
    return Setup(
        worker_id=worker_id,
        redis_url=redis_url,
        tokenizer_fingerprint=TOKENIZER.fingerprint,
        lease_ms=round(LEASE_S * 1000),
        kept_ms=round(kept_s * 1000),
        digests=(1, 2, 3),
    )


@pytest.fixture
async def pool(request: pytest.FixtureRequest, short_leases: None) -> AsyncIterator[Pool]:
    """Its parameter: how long rows in Redis outlive their worker's last word."""
    kept_s = getattr(request, "param", KEPT_S)
    async with AsyncExitStack() as stack:
        server = start_redis()
        workers_way = await stack.enter_async_context(Switch(server.port))
        routers_way = await stack.enter_async_context(Switch(server.port))
        workers = await asyncio.to_thread(start, *(setup(name, workers_way.url, kept_s) for name in ALL))
        settings = RouterSettings(port=0, redis_url=routers_way.url, no_replica_wait_s=0.2)
        router = Router(settings, name="tiny", tokenizer=TOKENIZER)
        await stack.enter_async_context(router.serving())
        way = await stack.enter_async_context(channel(f"127.0.0.1:{router.port}", max_message_bytes=1 << 20))
        inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(way)
        admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(way)
        made = Pool(server, workers_way, routers_way, router, workers, inference, admin, [server])
        for worker in workers:
            stack.callback(worker.kill)
        stack.push_async_callback(_stop, made)
        await until(made.is_whole, timeout_s=HEALS_S)
        yield made


async def _stop(pool: Pool) -> None:
    for server in pool.servers:
        server.stop()


def _num_replicas(port: int) -> int:
    """That have all of it; waits for the first."""
    with redis.Redis(port=port) as client:
        return int(client.wait(1, 10_000))


async def refuse_for_memory(pool: Pool) -> None:
    await pool.config("CONFIG", "SET", "maxmemory", "1mb")


async def refuse_as_a_replica(pool: Pool) -> None:
    await pool.config("REPLICAOF", "127.0.0.1", 1)


async def cut_the_workers_path(pool: Pool) -> None:
    pool.workers_way.target = None
    await pool.workers_way.cut()


async def mend(pool: Pool) -> None:
    pool.workers_way.target = pool.redis.port
    await pool.config("CONFIG", "SET", "maxmemory", "0")
    await pool.config("REPLICAOF", "NO", "ONE")


Fault = Callable[[Pool], "asyncio.Future[None]"]


@pytest.mark.parametrize("fault", [refuse_for_memory, refuse_as_a_replica, cut_the_workers_path])
async def test_a_redis_that_cannot_be_written_fails_no_request_and_heals(pool: Pool, fault: Fault) -> None:
    async with pool.asked():
        with pool.unheard():
            await fault(pool)
            await pool.lose_leases()
        seen = await pool.admin.ListReplicas(admin_pb2.ListReplicasRequest())
        assert (seen.redis_connected, seen.level) == (True, admin_pb2.KNOWLEDGE_LEVEL_FROZEN_INDEX)
        assert {tuple(one.holds) for one in seen.replicas} == {("lease_not_renewed",)}
        await mend(pool)
        await until(pool.is_whole, timeout_s=HEALS_S)


async def test_a_failover_heals_although_connections_stay_on_the_old_master(pool: Pool) -> None:
    old, new = pool.redis, pool.another_redis()
    connection = Connection(new.url)
    await connection.call("REPLICAOF", "127.0.0.1", old.port)
    assert await asyncio.to_thread(_num_replicas, old.port) == 1
    before = pool.routers_way.num_connections
    async with pool.asked():
        await connection.call("REPLICAOF", "NO", "ONE")
        await pool.config("REPLICAOF", "127.0.0.1", new.port)
        with pool.unheard():
            await pool.lose_leases()  # the name is late
        pool.workers_way.target = pool.routers_way.target = new.port
        await until(pool.is_whole, timeout_s=HEALS_S)
    await connection.close()
    assert pool.routers_way.num_connections > before
    assert old.process.poll() is None


async def test_a_router_left_alone_with_an_isolated_old_master_finds_the_new_one(pool: Pool) -> None:
    new = pool.another_redis()
    # The router's connections stay on the old one, where nobody writes any more.
    pool.routers_way.target = pool.workers_way.target = new.port
    async with pool.asked():
        await pool.workers_way.cut()
        with redis.Redis(port=new.port) as client:
            await until(lambda: client.hlen(keys.members("default")) == 2, timeout_s=HEALS_S)
        epochs = {row.info.worker_id: row.info.epoch for row in pool.router.fleet.replicas()}
        await until(
            lambda: (
                pool.is_whole()
                and all(row.info.epoch > epochs[row.info.worker_id] for row in pool.router.fleet.replicas())
            ),
            timeout_s=HEALS_S,
        )


@pytest.mark.parametrize("pool", [60.0], indirect=True)
@pytest.mark.parametrize("fault", [None, refuse_for_memory])
async def test_who_does_not_answer_leaves_as_fast_whether_redis_takes_writes_or_not(
    pool: Pool, fault: Fault | None
) -> None:
    first, second = pool.workers
    if fault is not None:
        await fault(pool)
        await until(lambda: all(holds == ("lease_not_renewed",) for holds in pool.holds.values()), timeout_s=HEALS_S)
    first.hang()
    assert await until(lambda: pool.ready == ("w1",), timeout_s=HEALS_S) < LEAVES_S
    first.wake()  # it is the same process, and its row is still there
    await until(lambda: pool.ready == ALL, timeout_s=HEALS_S)
    second.kill()
    assert await until(lambda: pool.ready == ("w0",), timeout_s=HEALS_S) < LEAVES_S
    await until(lambda: [row.info.worker_id for row in pool.router.fleet.replicas()] == ["w0"], timeout_s=HEALS_S)
    async with pool.asked():
        assert pool.router.fleet.replicas()[0].state is ReplicaState.READY
