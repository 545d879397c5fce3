"""The fleet: exact counts, the newest load, channels that outlive their replica by its requests."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from ostrya.api.v1.common_pb2 import LoadReport
from ostrya.errors import Unavailable
from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import Stored
from ostrya.prefix.index import PrefixIndex
from ostrya.router.fleet import Fleet
from ostrya.router.replica import ReplicaInfo
from ostrya.router.types import ABSOLUTE_HOLDS, Hold, KnowledgeLevel, Load, ReplicaState, ReplicaView, WorkerId
from tests.fakes.pool import replica


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def fleet(clock: Clock) -> AsyncIterator[Fleet]:
    fleet = Fleet(index=PrefixIndex(), clock=clock)
    yield fleet
    await fleet.close()


def info(worker_id: str, *, epoch: int = 1, credit: bool = True, address: str = "127.0.0.1:1") -> ReplicaInfo:
    return replace(replica(worker_id, address, epoch=epoch), routing_stride=2, prefix_credit=credit)


def add_ready(fleet: Fleet, worker_id: str = "w0", *, epoch: int = 1, credit: bool = True) -> WorkerId:
    fleet.add(info(worker_id, epoch=epoch, credit=credit), grpc.aio.insecure_channel("127.0.0.1:1"))
    fleet.set_state(WorkerId(worker_id), ReplicaState.READY)
    return WorkerId(worker_id)


def only(fleet: Fleet) -> ReplicaView:
    (view,) = fleet.snapshot().replicas
    return view


async def test_a_snapshot_has_the_ready_ones_in_order(fleet: Fleet) -> None:
    for name in ("w2", "w0", "w1"):
        add_ready(fleet, name)
    fleet.set_state(WorkerId("w1"), ReplicaState.DRAINING)
    assert [view.worker_id for view in fleet.snapshot().replicas] == ["w0", "w2"]
    assert [row.state.name for row in fleet.replicas()] == ["READY", "DRAINING", "READY"]


async def test_requests_are_counted_exactly_however_often_they_end(fleet: Fleet) -> None:
    worker = add_ready(fleet)
    first, second = fleet.begin(worker, prefill_tokens=100), fleet.begin(worker, prefill_tokens=30)
    assert (only(fleet).own_requests, only(fleet).own_prefill_tokens) == (2, 130)
    first.first_token()
    first.first_token()
    assert (only(fleet).own_requests, only(fleet).own_prefill_tokens) == (2, 30)
    first.end()
    first.end()
    first.first_token()
    second.end()
    assert (only(fleet).own_requests, only(fleet).own_prefill_tokens) == (0, 0)


async def test_rows_that_did_not_change_are_not_built_again(fleet: Fleet, clock: Clock) -> None:
    first, _ = add_ready(fleet, "w0"), add_ready(fleet, "w1")
    before = fleet.snapshot().replicas
    fleet.begin(first, prefill_tokens=1).end()
    after = fleet.snapshot().replicas
    assert after[0] is not before[0]
    assert after[1] is before[1]
    clock.now += 0.2
    assert fleet.snapshot().replicas[1] is not before[1]


async def test_the_newest_load_wins(fleet: Fleet, clock: Clock) -> None:
    worker = add_ready(fleet)
    fleet.board(worker, Load(num_running=1), stamp=1)
    assert only(fleet).load.num_running == 1
    fleet.report(worker, LoadReport(num_running=2))
    fleet.board(worker, Load(num_running=1), stamp=2)  # written before the response, read after it
    assert only(fleet).load.num_running == 2
    clock.now += 1
    fleet.board(worker, Load(num_running=1), stamp=2)  # nothing new
    assert only(fleet).load.num_running == 2
    assert only(fleet).load_age_s == pytest.approx(1.0)
    fleet.board(worker, Load(num_running=3), stamp=3)
    assert (only(fleet).load.num_running, only(fleet).load_age_s) == (3, 0.0)


async def test_the_level_says_what_is_missing(fleet: Fleet, clock: Clock) -> None:
    worker = add_ready(fleet)
    assert fleet.snapshot().level is KnowledgeLevel.NO_LOAD
    fleet.report(worker, LoadReport())
    assert fleet.snapshot().level is KnowledgeLevel.NO_INDEX
    fleet.set_following(True)
    assert (fleet.snapshot().level, fleet.snapshot().index_age_s) == (KnowledgeLevel.FRESH, 0.0)
    fleet.set_following(False)
    clock.now += 7
    assert fleet.snapshot().level is KnowledgeLevel.NO_INDEX  # frozen, and empty
    assert fleet.snapshot().index_age_s == pytest.approx(7.0)


async def test_the_index_is_frozen_when_nobody_is_heard_of_and_fades_for_each_alone(fleet: Fleet, clock: Clock) -> None:
    workers = [add_ready(fleet, name) for name in ("w0", "w1")]
    for worker in workers:
        fleet.report(worker, LoadReport())
        fleet._index.apply(fleet.followed()[worker].slot, [Stored((RoutingDigest(1),))])
    fleet.set_following(True)
    fleet.set_unheard({workers[0]: clock.now - 3.0})
    snapshot = fleet.snapshot()
    assert (snapshot.level, snapshot.index_age_s) == (KnowledgeLevel.FRESH, 0.0)
    assert [view.index_age_s for view in snapshot.replicas] == [3.0, 0.0]
    fleet.set_unheard({workers[0]: clock.now - 3.0, workers[1]: clock.now - 1.0})
    clock.now += 1.0
    snapshot = fleet.snapshot()
    assert (snapshot.level, snapshot.index_age_s) == (KnowledgeLevel.FROZEN_INDEX, 2.0)
    assert [view.index_age_s for view in snapshot.replicas] == [4.0, 2.0]
    fleet.set_unheard({})
    assert not fleet.has_unheard
    assert fleet.snapshot().level is KnowledgeLevel.FRESH


async def test_a_frozen_index_is_still_used(fleet: Fleet) -> None:
    worker = add_ready(fleet)
    fleet.report(worker, LoadReport())
    fleet.set_following(True)
    fleet._index.replace(fleet.followed()[worker].slot, [RoutingDigest(5)])
    fleet.set_following(False)
    assert fleet.snapshot().level is KnowledgeLevel.FROZEN_INDEX
    assert fleet.replicas()[0].indexed_blocks == 1


async def test_another_chain_is_no_prefix_credit(fleet: Fleet) -> None:
    worker = add_ready(fleet, credit=False)
    fleet.report(worker, LoadReport())
    fleet.set_following(True)
    assert only(fleet).slot == -1
    assert fleet.followed() == {}
    assert fleet.snapshot().level is KnowledgeLevel.NO_INDEX


async def test_a_failed_replica_is_unroutable_until_it_serves_again(fleet: Fleet) -> None:
    worker = add_ready(fleet)
    fleet.failed(worker)
    assert fleet.snapshot().replicas == ()
    fleet.set_state(worker, ReplicaState.READY)
    assert len(fleet.snapshot().replicas) == 1


async def test_a_new_process_takes_a_new_slot_and_the_old_requests_end_on_the_old_channel(fleet: Fleet) -> None:
    worker = add_ready(fleet, epoch=1)
    old_slot, old_channel = only(fleet).slot, fleet.channel(worker, "127.0.0.1:1")
    request = fleet.begin(worker, prefill_tokens=5)
    add_ready(fleet, epoch=2)
    assert only(fleet).slot != old_slot
    assert (only(fleet).own_requests, only(fleet).own_prefill_tokens) == (0, 0)
    assert old_channel is not None
    assert old_channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
    request.end()
    await asyncio.gather(*fleet._closing)
    assert old_channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    assert only(fleet).own_requests == 0


async def test_a_new_epoch_of_the_same_process_keeps_slot_and_channel(fleet: Fleet) -> None:
    worker = add_ready(fleet, epoch=1)
    slot, channel = only(fleet).slot, fleet.channel(worker, "127.0.0.1:1")
    fleet.registered(worker, 5)
    fleet.registered(worker, 4)
    assert (only(fleet).slot, fleet.channel(worker, "127.0.0.1:1")) == (slot, channel)
    assert fleet.followed()[worker].min_epoch == 5


async def test_an_unregistered_successor_does_not_follow_its_predecessors_journal(fleet: Fleet) -> None:
    worker = add_ready(fleet, epoch=7)
    add_ready(fleet, epoch=0)
    assert fleet.followed()[worker].min_epoch == 8
    fleet.registered(worker, 7)  # its row and its lease are still there
    assert fleet.followed()[worker].min_epoch == 8
    add_ready(fleet, epoch=0)  # nor is it the next one's
    fleet.registered(worker, 7)
    assert fleet.followed()[worker].min_epoch == 8
    fleet.registered(worker, 9)
    assert fleet.followed()[worker].min_epoch == 9


async def test_a_removed_replica_is_unavailable(fleet: Fleet) -> None:
    worker = add_ready(fleet)
    fleet.remove(worker)
    fleet.remove(worker)
    with pytest.raises(Unavailable):
        fleet.stub(worker)
    with pytest.raises(Unavailable):
        fleet.begin(worker, prefill_tokens=0)
    fleet.report(worker, LoadReport())
    fleet.failed(worker)
    assert fleet.replicas() == []


@pytest.mark.parametrize("hold", Hold)
async def test_a_hold_by_address_keeps_new_work_away_and_what_runs_goes_on(fleet: Fleet, hold: Hold) -> None:
    worker = add_ready(fleet)
    request = fleet.begin(worker, prefill_tokens=5)
    fleet.set_holds({"127.0.0.1:1": (hold,), "127.0.0.1:9": (hold,)})
    is_absolute = hold in ABSOLUTE_HOLDS
    (row,) = fleet.replicas()
    assert (row.holds, row.state, row.is_routable) == ((hold,), ReplicaState.READY, not is_absolute)
    assert len(fleet.snapshot().replicas) == (0 if is_absolute else 1)
    assert fleet.stub(worker) is not None
    request.end()
    fleet.set_holds({})
    assert (fleet.replicas()[0].holds, len(fleet.snapshot().replicas)) == ((), 1)


async def test_a_hold_is_there_before_the_replica_is(fleet: Fleet) -> None:
    fleet.set_holds({"127.0.0.1:1": (Hold.TERMINATING,)})
    add_ready(fleet)
    assert fleet.snapshot().replicas == ()


async def test_only_routable_replicas_are_avoided_and_the_urgent_come_first(fleet: Fleet) -> None:
    for number in range(4):
        address = f"127.0.0.1:{number + 1}"
        fleet.add(info(f"w{number}", address=address), grpc.aio.insecure_channel(address))
        fleet.set_state(WorkerId(f"w{number}"), ReplicaState.READY)
    assert fleet.avoided(is_long=True) == fleet.avoided(is_long=False) == ()
    fleet.set_holds(
        {
            "127.0.0.1:1": (Hold.MAINTENANCE,),
            "127.0.0.1:2": (Hold.TERMINATION_IMPENDING, Hold.MAINTENANCE),
            "127.0.0.1:3": (Hold.TERMINATING, Hold.MAINTENANCE),
        }
    )
    assert fleet.avoided(is_long=False) == ({"w1"},)
    assert fleet.avoided(is_long=True) == ({"w1"}, {"w0", "w1"})
    fleet.set_state(WorkerId("w1"), ReplicaState.DRAINING)
    assert fleet.avoided(is_long=False) == ()


async def test_a_change_of_holds_wakes_who_waits_and_no_change_does_not(fleet: Fleet) -> None:
    add_ready(fleet)
    fleet.set_holds({"127.0.0.1:1": (Hold.NOT_READY,)})
    quiet = asyncio.ensure_future(fleet.wait_changed())
    await asyncio.sleep(0)
    fleet.set_holds({"127.0.0.1:1": (Hold.NOT_READY,)})
    await asyncio.sleep(0)
    assert not quiet.done()
    fleet.set_holds({})
    await quiet
