"""Discovery over real sockets: a real Redis, fake workers with real health, real publishers."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import grpc
import pytest

from ostrya.api.v1 import worker_pb2
from ostrya.engine.types import Load
from ostrya.errors import StateUnavailable
from ostrya.prefix.chain import ChainKey
from ostrya.prefix.index import PrefixIndex
from ostrya.router.discovery import _ENDS, Discovery
from ostrya.router.fleet import Fleet
from ostrya.router.link import Link
from ostrya.router.registry import Registry
from ostrya.router.settings import RouterSettings
from ostrya.router.types import Hold, ReplicaState, ReplicaView, WorkerId
from ostrya.service.server import channel
from ostrya.state import keys, members
from ostrya.state.connection import Connection
from ostrya.state.rows import Rejects
from ostrya.worker.publisher import Publisher
from ostrya.worker.settings import WorkerSettings
from tests.fakes.kube_api import KubeApi, endpoint
from tests.fakes.logs import ours
from tests.fakes.pool import member, publishing, running
from tests.fakes.redis_server import RunningRedis, free_port, start_redis
from tests.fakes.waiting import until
from tests.fakes.worker import FakeWorker, Identity

CHAIN = ChainKey(model="tiny", tokenizer_fingerprint="fake")
W0 = WorkerId("w0")


class ShiftedClock:
    """Real time that a test can push forward."""

    def __init__(self) -> None:
        self.shift_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.shift_s


@pytest.fixture
def redis() -> Iterator[RunningRedis]:
    server = start_redis()
    yield server
    server.stop()


@asynccontextmanager
async def discovering(
    url: str = "",
    *,
    static: tuple[str, ...] = (),
    only_static: bool = False,
    api: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[Fleet, Discovery]]:
    """A fleet that discovery keeps; afterwards no task of it is left."""
    before = asyncio.all_tasks()
    fleet = Fleet(index=PrefixIndex())
    settings = RouterSettings(redis_url=url or f"redis://127.0.0.1:{free_port()}/0", static_workers=static)
    if only_static:
        settings = replace(settings, discovery="static")
    if api:
        settings = replace(
            settings,
            discovery="kubernetes",
            kubernetes_service="workers",
            kubernetes_namespace="default",
            kubernetes_api=api,
        )
    discovery = Discovery(settings, fleet=fleet, chain=CHAIN, clock=clock)
    try:
        async with running(discovery.run):
            yield fleet, discovery
    finally:
        await discovery.close()
        await fleet.close()
    assert {task.get_name() for task in asyncio.all_tasks() - before if "link" in task.get_name()} == set()


def views(fleet: Fleet) -> dict[str, ReplicaView]:
    return {view.worker_id: view for view in fleet.snapshot().replicas}


def is_ready(fleet: Fleet, *worker_ids: str) -> bool:
    return views(fleet).keys() == set(worker_ids)


async def test_a_worker_of_the_settings_is_used_without_redis() -> None:
    async with FakeWorker() as worker, discovering(static=(worker.address,)) as (fleet, discovery):
        await until(lambda: is_ready(fleet, "w0"))
        view = views(fleet)["w0"]
        assert (view.slot >= 0, view.page_size, view.max_running, view.load.free_pages) == (True, 16, 8, 100)
        assert not discovery.redis_up
        assert not fleet.redis_up


async def test_another_chain_gets_no_prefix_credit() -> None:
    async with (
        FakeWorker(Identity(chain_self_test=b"other")) as worker,
        discovering(static=(worker.address,)) as (fleet, _),
    ):
        await until(lambda: is_ready(fleet, "w0"))
        assert views(fleet)["w0"].slot == -1
        assert not fleet.replicas()[0].info.prefix_credit


@pytest.mark.parametrize("identity", [Identity(model="other"), Identity(pool="other")])
async def test_a_worker_of_another_model_or_pool_is_not_used(identity: Identity) -> None:
    async with FakeWorker(identity) as worker, discovering(static=(worker.address,)) as (fleet, _):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.wait_changed(), 0.3)
        assert fleet.replicas() == []


async def test_health_decides_who_is_routable() -> None:
    async with FakeWorker() as worker, discovering(static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        await worker.set_serving(False)
        await until(lambda: fleet.state(W0) is ReplicaState.DRAINING)
        assert is_ready(fleet)
        await worker.set_serving(True)
        await until(lambda: is_ready(fleet, "w0"))


async def test_a_draining_worker_that_refused_a_request_is_still_draining() -> None:
    async with FakeWorker(Identity(epoch=7)) as worker, discovering(static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        fleet.failed(W0)
        await worker.set_serving(False)
        await until(lambda: fleet.state(W0) is ReplicaState.DRAINING)


async def test_a_worker_that_does_not_serve_yet_is_starting() -> None:
    async with FakeWorker() as worker:
        await worker.set_serving(False)
        async with discovering(static=(worker.address,)) as (fleet, _):
            await until(lambda: fleet.state(W0) is ReplicaState.STARTING)
            await worker.set_serving(True)
            await until(lambda: is_ready(fleet, "w0"))


async def test_a_broken_stream_is_unroutable_at_once_and_a_new_process_gets_a_new_slot() -> None:
    async with FakeWorker(Identity(epoch=1)) as worker, discovering(static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        slot = views(fleet)["w0"].slot
        await worker.stop()
        assert await until(lambda: is_ready(fleet)) < 0.5
        worker.identity.epoch = 2
        await worker.start()
        await until(lambda: is_ready(fleet, "w0"))
        assert views(fleet)["w0"].slot != slot


async def test_the_same_process_keeps_its_slot_over_a_broken_stream() -> None:
    async with FakeWorker(Identity(epoch=1)) as worker, discovering(static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        slot = views(fleet)["w0"].slot
        await worker.stop()
        await until(lambda: is_ready(fleet))
        await worker.start()
        await until(lambda: is_ready(fleet, "w0"))
        assert views(fleet)["w0"].slot == slot


async def test_a_replica_that_a_request_could_not_reach_comes_back_by_itself() -> None:
    async with FakeWorker(Identity(epoch=1)) as worker, discovering(static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        fleet.failed(W0)
        assert is_ready(fleet)
        await until(lambda: is_ready(fleet, "w0"))


async def test_members_of_redis_are_dialled_and_their_load_is_read(redis: RunningRedis) -> None:
    async with (
        FakeWorker() as worker,
        publishing(redis.url, address=worker.address) as publisher,
        discovering(redis.url) as (fleet, discovery),
    ):
        await until(lambda: is_ready(fleet, "w0"))
        assert discovery.redis_up
        publisher.publish((), (), Load(num_running=5))
        await until(lambda: views(fleet)["w0"].load.num_running == 5)
        await until(lambda: fleet.replicas()[0].info.epoch == publisher.epoch)


async def test_a_silent_host_leaves_when_its_lease_has_ended(redis: RunningRedis) -> None:
    async with FakeWorker() as worker, discovering(redis.url) as (fleet, discovery):
        async with publishing(redis.url, address=worker.address):
            await until(lambda: is_ready(fleet, "w0"))
        # Its stream still says SERVING, but nobody renews, and nobody answers.
        worker.answer.close()
        assert await until(lambda: is_ready(fleet), timeout_s=5.5) <= 5.0
        await until(lambda: not fleet.replicas())
        assert discovery._registry.num_over == 1


async def test_a_lease_that_is_over_holds_a_worker_of_the_settings(redis: RunningRedis) -> None:
    async with FakeWorker() as worker, discovering(redis.url, static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        async with publishing(redis.url, address=worker.address):
            await until(lambda: fleet.replicas()[0].info.epoch)
        # Its stream still says SERVING, but nobody renews, and nobody answers.
        worker.answer.close()
        assert await until(lambda: is_ready(fleet), timeout_s=5.5) <= 5.0
        assert [row.holds for row in fleet.replicas()] == [(Hold.NO_LEASE,)]
        worker.answer.open()
        async with publishing(redis.url, address=worker.address):
            await until(lambda: is_ready(fleet, "w0"))


@pytest.mark.parametrize("mode", ["registry", "settings", "kubernetes", "static"])
async def test_a_lost_lease_is_a_question_to_the_replica_in_every_mode(redis: RunningRedis, mode: str) -> None:
    connection, clock = Connection(redis.url), ShiftedClock()
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(FakeWorker())
        api = stack.enter_context(KubeApi()) if mode == "kubernetes" else None
        if api is not None:
            api.put_slice("a", [endpoint("127.0.0.1")], port=int(worker.address.rpartition(":")[2]))
        fleet, discovery = await stack.enter_async_context(
            discovering(
                redis.url,
                static=(worker.address,) if mode in ("settings", "static") else (),
                api=api.url if api is not None else "",
                only_static=mode == "static",
                clock=clock,
            )
        )
        async with publishing(redis.url, address=worker.address) as publisher:
            await until(
                lambda: publisher.is_flushed and [row.info.epoch for row in fleet.replicas()] == [publisher.epoch]
            )
        await connection.call("DEL", keys.worker_keys("default", "w0").lease)
        clock.shift_s = 10.0
        await until(lambda: [row.holds for row in fleet.replicas()] == [(Hold.LEASE_NOT_RENEWED,)])
        clock.shift_s = 50.0  # a row without a lease would be removed by now
        turn = discovery._registry._turn
        await until(lambda: discovery._registry._turn >= turn + 4)
        assert is_ready(fleet, "w0")
        assert (await members.read(connection, "default")).keys() == {"w0"}
        assert (discovery._registry.num_over, fleet.has_unheard) == (0, True)
        worker.answer.close()
        if mode != "static":  # where nothing but its health keeps work from a replica
            await until(lambda: is_ready(fleet))
        await until(lambda: discovery._registry.num_over == 1 and not fleet.has_unheard)
        worker.answer.open()
        await until(lambda: is_ready(fleet, "w0") and fleet.has_unheard)
        async with publishing(redis.url, address=worker.address):
            await until(lambda: not fleet.has_unheard and fleet.replicas()[0].holds == ())
    await connection.close()


async def test_another_worker_at_the_address_does_not_answer_for_the_one_without_a_lease(redis: RunningRedis) -> None:
    async with FakeWorker() as worker, discovering(redis.url) as (fleet, discovery):
        async with publishing(redis.url, address=worker.address):
            await until(lambda: is_ready(fleet, "w0"))
        await worker.stop()
        worker.identity.worker_id = "w1"
        await worker.start()
        await until(lambda: discovery._registry.num_over == 1)
        assert discovery._registry.unrenewed == set()


async def test_a_replica_comes_back_after_a_break_although_redis_names_it_no_more(redis: RunningRedis) -> None:
    connection, clock = Connection(redis.url), ShiftedClock()
    async with FakeWorker() as worker, discovering(redis.url, clock=clock) as (fleet, discovery):
        async with publishing(redis.url, address=worker.address) as publisher:
            await until(
                lambda: publisher.is_flushed and [row.info.epoch for row in fleet.replicas()] == [publisher.epoch]
            )
        await connection.call("FLUSHALL")
        clock.shift_s = 10.0
        await until(lambda: discovery._registry.unrenewed == {W0})
        await worker.stop()
        await until(lambda: not fleet.replicas())
        await worker.start()
        await until(lambda: is_ready(fleet, "w0"))
        await worker.stop()
        await until(lambda: not fleet.replicas())
        clock.shift_s = 1_000.0
        await until(lambda: not discovery._registry._known)
    await connection.close()


async def test_a_row_that_cannot_be_removed_does_not_make_redis_be_gone(redis: RunningRedis) -> None:
    connection, clock = Connection(redis.url), ShiftedClock()
    await connection.all(members.put("default", member()))
    await connection.call("REPLICAOF", "127.0.0.1", "1")
    async with discovering(redis.url, clock=clock) as (_, discovery):
        await until(lambda: discovery.redis_up)
        clock.shift_s = 50.0
        await until(lambda: discovery._registry.num_over == 1)
        seen = set()

        def looked(turn: int = discovery._registry._turn) -> bool:
            seen.add(discovery.redis_up)
            return discovery._registry._turn >= turn + 4

        await until(looked)
        assert seen == {True}
        await connection.call("REPLICAOF", "NO", "ONE")
        await until(lambda: not discovery._registry._known)
    await connection.close()


async def test_a_row_that_never_had_a_lease_is_no_reason_to_dial_again_and_again(redis: RunningRedis) -> None:
    connection, clock = Connection(redis.url), ShiftedClock()
    await connection.all(members.put("default", member()))
    async with discovering(redis.url, clock=clock) as (_, discovery):
        await until(lambda: discovery.redis_up)
        clock.shift_s = 10.0
        await until(lambda: discovery._registry.num_over == 1)
        assert discovery._registry._questions._open == {}
    await connection.close()


async def test_a_worker_of_the_settings_that_never_registered_is_used(redis: RunningRedis) -> None:
    async with FakeWorker() as worker, discovering(redis.url, static=(worker.address,)) as (fleet, discovery):
        await until(lambda: is_ready(fleet, "w0") and discovery.redis_up)
        assert fleet.replicas()[0].holds == ()


async def test_another_worker_at_the_same_address_takes_the_place_of_the_first() -> None:
    async with FakeWorker() as worker, discovering(static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        await worker.stop()
        worker.identity.worker_id = "w1"
        await worker.start()
        await until(lambda: is_ready(fleet, "w1"))
        assert [row.info.worker_id for row in fleet.replicas()] == ["w1"]


async def test_a_cancel_that_comes_with_news_of_the_cluster_is_not_lost() -> None:
    settings = RouterSettings(discovery="static", static_workers=("127.0.0.1:1",), redis_url="redis://127.0.0.1:1/0")
    fleet = Fleet(index=PrefixIndex())
    discovery = Discovery(settings, fleet=fleet, chain=CHAIN)
    task = asyncio.create_task(discovery.run())
    await until(lambda: discovery._links)
    await asyncio.sleep(0)
    discovery._cluster_news.set()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=2.0)
    assert done == {task}
    await discovery.close()
    await fleet.close()


async def test_a_killed_and_emptied_redis_makes_nobody_unroutable(redis: RunningRedis) -> None:
    async with (
        FakeWorker() as worker,
        publishing(redis.url, address=worker.address, jitter=0.99) as publisher,
        discovering(redis.url) as (fleet, discovery),
    ):
        await until(lambda: is_ready(fleet, "w0"))
        slot, epoch = views(fleet)["w0"].slot, publisher.epoch
        redis.kill()
        await until(lambda: not discovery.redis_up)
        assert is_ready(fleet, "w0")
        redis.restart()

        def registered_again() -> bool:
            assert is_ready(fleet, "w0")
            return publisher.epoch > epoch and fleet.replicas()[0].info.epoch == publisher.epoch

        await until(registered_again)
        assert views(fleet)["w0"].slot == slot


async def test_a_worker_that_does_not_register_again_stays_while_its_stream_holds(redis: RunningRedis) -> None:
    async with FakeWorker() as worker, discovering(redis.url) as (fleet, discovery):
        async with publishing(redis.url, address=worker.address):
            await until(lambda: is_ready(fleet, "w0"))
        redis.restart()
        # 1.25 s of a lease away would be enough if the row were still there.
        with pytest.raises(AssertionError, match="did not hold"):
            await until(lambda: not is_ready(fleet, "w0"), timeout_s=2.5)
        assert discovery._registry.num_over == 0


async def test_a_restart_elsewhere_replaces_the_old(redis: RunningRedis) -> None:
    async with discovering(redis.url) as (fleet, _):
        async with FakeWorker() as worker, publishing(redis.url, address=worker.address):
            await until(lambda: is_ready(fleet, "w0"))
        async with FakeWorker() as worker, publishing(redis.url, address=worker.address) as publisher:
            worker.identity.epoch = publisher.epoch
            await until(lambda: is_ready(fleet, "w0") and fleet.replicas()[0].info.address == worker.address)
            assert len(fleet.replicas()) == 1


async def test_a_worker_that_leaves_is_gone_and_is_no_reason_for_a_warning(
    redis: RunningRedis, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeWorker() as worker, discovering(redis.url) as (fleet, discovery):
        settings = WorkerSettings(worker_id="w0", redis_url=redis.url)
        publisher = Publisher(settings, member=member(address=worker.address))
        async with running(publisher.run):
            await until(lambda: is_ready(fleet, "w0"))
        await publisher.close()
        await worker.stop()
        # A lease that is over would be noticed after 1.25 s.
        assert await until(lambda: is_ready(fleet)) < 1.0
        await until(lambda: not fleet.replicas())
        assert discovery._registry.num_over == 1
        assert ours(caplog, level=logging.WARNING) == []


async def test_a_member_long_without_a_lease_is_removed_from_redis(redis: RunningRedis) -> None:
    connection, clock = Connection(redis.url), ShiftedClock()
    await connection.all(members.put("default", member()))
    async with discovering(redis.url, clock=clock) as (_, discovery):
        await until(lambda: discovery.redis_up)
        clock.shift_s = 10.0
        await until(lambda: discovery._registry.num_over == 1)
        assert (await members.read(connection, "default")).keys() == {"w0"}
        clock.shift_s = 50.0
        await until(lambda: not discovery._registry._known)
        assert await members.read(connection, "default") == {}
    await connection.close()


async def test_a_lease_that_returns_brings_the_replica_back(redis: RunningRedis) -> None:
    connection, clock = Connection(redis.url), ShiftedClock()
    async with FakeWorker() as worker, discovering(redis.url, clock=clock) as (fleet, discovery):
        async with publishing(redis.url, address=worker.address) as publisher:
            await until(lambda: is_ready(fleet, "w0") and publisher.is_flushed)
        worker.answer.close()
        await connection.call("DEL", keys.worker_keys("default", "w0").lease)
        clock.shift_s = 10.0
        await until(lambda: discovery._registry.num_over == 1)
        worker.answer.open()
        async with publishing(redis.url, address=worker.address):
            await until(lambda: is_ready(fleet, "w0"))
    await connection.close()


class SkewedWorker(FakeWorker):
    """Its clock is an hour and a half ahead, and it is of another release."""

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.GetInfoResponse:
        answer = await super().GetInfo(request, context)
        answer.time_s, answer.state_schema, answer.version = time.time() + 5_400.0, 7, "9.9.9"
        return answer


async def test_what_a_worker_says_of_its_clock_schema_and_version_is_kept() -> None:
    async with SkewedWorker() as worker, discovering(static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        info = fleet.replicas()[0].info
        assert info.clock_offset_s == pytest.approx(5_400.0, abs=1.0)
        assert (info.state_schema, info.version) == (7, "9.9.9")


async def test_a_worker_that_does_not_tell_its_time_is_not_said_to_be_off() -> None:
    async with TimelessWorker() as worker, discovering(static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        assert fleet.replicas()[0].info.clock_offset_s == 0.0


class TimelessWorker(FakeWorker):
    """As of a release before the field."""

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.GetInfoResponse:
        answer = await super().GetInfo(request, context)
        answer.ClearField("time_s")
        return answer


async def test_without_kubernetes_there_is_nothing_to_say_of_it() -> None:
    async with discovering(static=("127.0.0.1:1",)) as (_, discovery):
        assert discovery.kubernetes_up is None
        assert discovery.watch_events == {"listed": 0, "reconnected": 0, "expired": 0, "failed": 0}
        assert discovery.endpoint_counts() == {"ready": 0, "serving": 0, "terminating": 0}


async def test_a_lease_that_is_over_holds_a_ready_endpoint_for_as_long_as_it_is_there(redis: RunningRedis) -> None:
    connection, clock = Connection(redis.url), ShiftedClock()
    with KubeApi() as api:
        async with FakeWorker() as worker, discovering(redis.url, api=api.url, clock=clock) as (fleet, discovery):
            api.put_slice("a", [endpoint("127.0.0.1")], port=int(worker.address.rpartition(":")[2]))
            async with publishing(redis.url, address=worker.address):
                await until(lambda: is_ready(fleet, "w0") and bool(fleet.replicas()[0].info.epoch))
            worker.answer.close()
            await connection.call("DEL", keys.worker_keys("default", "w0").lease)
            clock.shift_s = 10.0
            await until(lambda: [row.holds for row in fleet.replicas()] == [(Hold.NO_LEASE,)])
            clock.shift_s = 50.0
            await until(lambda: clock() - discovery._registry._known[W0].row_at > 1.0)  # Redis has it no more
            polls = discovery._registry._turn
            await until(lambda: discovery._registry._turn >= polls + 4)
            assert is_ready(fleet)
            assert fleet.state(W0) is ReplicaState.READY
            worker.answer.open()
            async with publishing(redis.url, address=worker.address):
                await until(lambda: is_ready(fleet, "w0"))
            assert discovery.endpoint_counts() == {"ready": 1, "serving": 1, "terminating": 0}
    await connection.close()


async def test_a_worker_that_never_registered_is_used_if_its_endpoint_is_ready(redis: RunningRedis) -> None:
    with KubeApi() as api:
        async with FakeWorker() as worker, discovering(redis.url, api=api.url) as (fleet, discovery):
            api.put_slice("a", [endpoint("127.0.0.1")], port=int(worker.address.rpartition(":")[2]))
            await until(lambda: is_ready(fleet, "w0") and discovery.redis_up and bool(discovery.kubernetes_up))
            assert fleet.replicas()[0].holds == ()


@pytest.mark.parametrize(
    "identity",
    [
        Identity(worker_id="w0\nforged"),
        Identity(worker_id=""),
        Identity(context_tokens=0),
        Identity(vocab_size=0),
        Identity(max_running=0),
    ],
    ids=repr,
)
async def test_a_worker_that_cannot_be_what_it_says_is_not_used(identity: Identity) -> None:
    async with FakeWorker(identity) as worker, discovering(static=(worker.address,)) as (fleet, _):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.wait_changed(), 0.3)
        assert fleet.replicas() == []


@pytest.mark.parametrize("identity", [Identity(page_size=0), Identity(routing_stride=0), Identity(page_size=2**31)])
async def test_a_worker_without_a_possible_page_size_is_used_without_prefix_credit(identity: Identity) -> None:
    identity.chain_self_test = b""
    async with FakeWorker(identity) as worker, discovering(static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        assert views(fleet)["w0"].slot == -1


class WildWorker(FakeWorker):
    """Its clock is no number, nor is its rate."""

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.GetInfoResponse:
        answer = await super().GetInfo(request, context)
        answer.time_s, answer.load.prefill_tokens_per_s, answer.limits.num_pages = math.nan, math.nan, 77
        return answer


async def test_what_is_no_number_says_nothing() -> None:
    async with WildWorker() as worker, discovering(static=(worker.address,)) as (fleet, _):
        await until(lambda: is_ready(fleet, "w0"))
        row = fleet.replicas()[0]
        assert (row.info.clock_offset_s, row.load.prefill_tokens_per_s) == (0.0, 0.0)
        assert fleet.followed()[W0].num_pages == 77


async def test_rows_that_cannot_be_removed_hold_up_no_look_one_by_one(
    redis: RunningRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks = ShiftedClock(), list[list[str]]()

    async def forget(connection: Connection, pool: str, row: members.Member) -> bool:
        looks[-1].append(row.worker_id)
        raise StateUnavailable("Redis: it hangs")

    monkeypatch.setattr(members, "forget", forget)
    registry = Registry(RouterSettings(redis_url=redis.url), fleet=Fleet(index=PrefixIndex()), clock=clock)
    connection = Connection(redis.url)
    for number in range(5):
        row = member(f"w{number}")
        await connection.all(members.put("default", row))
    for _ in range(8):
        looks.append([])
        await registry.poll()
        clock.shift_s += 10
    assert registry.is_up
    assert max(map(len, looks)) == 1
    await connection.close()
    await registry.close()


async def test_a_members_key_of_another_type_is_not_a_redis_that_is_gone(
    redis: RunningRedis, caplog: pytest.LogCaptureFixture
) -> None:
    connection, rejects, fleet = Connection(redis.url), Rejects(), Fleet(index=PrefixIndex())
    registry = Registry(RouterSettings(redis_url=redis.url), fleet=fleet, clock=time.monotonic, rejects=rejects)
    await registry.poll()
    await connection.all([*members.put("default", member()), ("SET", keys.members("default"), "x")])
    await registry.poll()
    await registry.poll()
    assert (fleet.redis_up, registry.is_up) == (True, False), "it is there, and tells nothing"
    (said,) = ours(caplog, level=logging.WARNING)
    assert "cannot be read" in said.message
    assert "WRONGTYPE" in said.fields["why"]  # type: ignore[attr-defined]
    redis.kill()
    await registry.poll()
    assert not fleet.redis_up
    assert "Redis is gone" in caplog.messages[-1]
    await connection.close()
    await registry.close()


async def test_links_begin_to_dial_one_by_one_and_end_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, begun, ended = 0, list[int](), Counter[int]()

    async def bystander() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run(one: Link) -> None:
        try:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await one._dial(None)
        finally:
            ended[turns] += 1

    def opened(address: str, *, max_message_bytes: int) -> grpc.aio.Channel:
        begun.append(turns)
        return channel(address, max_message_bytes=max_message_bytes)

    monkeypatch.setattr(Link, "run", run)
    monkeypatch.setattr("ostrya.router.link.open_channel", opened)
    port = free_port()
    addresses = tuple(f"127.0.1.{one}:{port}" for one in range(100))
    async with running(bystander), discovering(static=addresses) as (_, discovery):
        await until(lambda: len(discovery._links) == 100 and len(begun) >= 200)
    assert len(set(begun)) == len(begun), "others had the event loop in between"
    assert ended.total() == 100
    assert max(ended.values()) <= _ENDS


async def test_members_that_nobody_ever_reached_leave_without_a_line_in_the_log(
    redis: RunningRedis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    connection, clock = Connection(redis.url), ShiftedClock()
    fleet = Fleet(index=PrefixIndex())
    registry = Registry(RouterSettings(redis_url=redis.url), fleet=fleet, clock=clock)
    names = [f"x{number}" for number in range(100)]
    for name in names:
        await connection.all([*members.put("default", member(name)), ("SET", lease_of(name), "1", "PX", 60_000)])
    await registry.poll()
    await connection.call("DEL", *map(lease_of, names))
    clock.shift_s = 70.0
    for _ in range(4):
        await registry.poll()
    assert registry.num_over == len(names)
    assert ours(caplog) == []
    await connection.close()
    await registry.close()


def lease_of(worker_id: str) -> str:
    return keys.worker_keys("default", worker_id).lease
