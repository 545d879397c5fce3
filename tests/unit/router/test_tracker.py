"""The tracker against a real Redis: never out of order, never worse than what it knew."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator

import pytest

from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import SLICE, Cleared, Event, Removed, Stored
from ostrya.router.types import WorkerId
from ostrya.state import keys
from ostrya.state.connection import Connection
from ostrya.state.journal import JournalWriter
from tests.fakes.logs import ours
from tests.fakes.pool import following
from tests.fakes.redis_server import RunningRedis, start_redis
from tests.fakes.waiting import until

W0 = WorkerId("w0")
JOURNAL = keys.worker_keys("default", "w0")


def digests(*numbers: int) -> tuple[RoutingDigest, ...]:
    return tuple(map(RoutingDigest, numbers))


def stored(*numbers: int) -> list[Event]:
    return [Stored(digests(*numbers))]


@pytest.fixture
def redis() -> Iterator[RunningRedis]:
    server = start_redis()
    yield server
    server.stop()


@pytest.fixture
async def connection(redis: RunningRedis) -> AsyncIterator[Connection]:
    connection = Connection(redis.url)
    yield connection
    await connection.close()


@pytest.fixture
def writer(connection: Connection) -> JournalWriter:
    return JournalWriter(connection, pool="default", worker_id="w0")


async def begin(writer: JournalWriter, *numbers: int) -> int:
    epoch = await writer.register()
    await writer.write_snapshot(epoch, 1, digests(*numbers))
    return epoch


async def test_every_kind_of_event_is_applied_and_counted(redis: RunningRedis, writer: JournalWriter) -> None:
    epoch = await begin(writer, 1)
    async with following(redis.url) as follower:
        follower.add(epoch=epoch)
        await until(lambda: follower.holds() == {1})
        await writer.append(epoch, 2, [Removed(digests(1)), Stored(digests(2, 3))])
        await writer.append(epoch, 3, [Cleared(), Stored(digests(4))])
        await until(lambda: follower.holds() == {4})
        assert follower.tracker.num_events == {"removed": 1, "stored": 3, "cleared": 1}
        assert (follower.tracker.num_gaps, follower.tracker.num_snapshots) == (0, 1)
        assert follower.tracker.staleness_s() == {"w0": 0.0}


async def test_many_small_batches_give_way_to_others_like_a_large_one(
    redis: RunningRedis, writer: JournalWriter
) -> None:
    epoch = await begin(writer, 1)
    for seq in range(2, 17):
        await writer.append(epoch, seq, stored(*range(1_000 * seq, 1_000 * seq + 900)))
    async with following(redis.url) as follower:
        follower.add(epoch=epoch)
        num_stored, at_a_stretch = 0, 0
        async with asyncio.timeout(30):
            while num_stored < 15 * 900:
                before = num_stored
                await asyncio.sleep(0)
                num_stored = follower.tracker.num_events["stored"]
                at_a_stretch = max(at_a_stretch, num_stored - before)
    assert at_a_stretch < 2 * SLICE


async def test_redis_may_be_absent_at_start(redis: RunningRedis) -> None:
    redis.kill()
    async with following(redis.url) as follower:
        follower.add()
        await until(lambda: W0 in follower.tracker.staleness_s())
        assert follower.fleet.snapshot().index_age_s == math.inf
        redis.restart()
        connection = Connection(redis.url)
        await begin(JournalWriter(connection, pool="default", worker_id="w0"), 5)
        await until(lambda: follower.holds() == {5})
        await connection.close()


async def test_a_registration_without_its_snapshot_does_not_empty_the_slot(
    redis: RunningRedis, writer: JournalWriter
) -> None:
    epoch = await begin(writer, 1, 2)
    async with following(redis.url) as follower:
        follower.add(epoch=epoch)
        await until(lambda: follower.holds() == {1, 2})
        again = await writer.register(floor=epoch)
        await until(lambda: follower.tracker.staleness_s()[W0] > 0)
        assert follower.holds() == {1, 2}
        await writer.write_snapshot(again, 1, digests(2, 3))
        await until(lambda: follower.holds() == {2, 3})


async def test_a_corrupt_snapshot_is_counted_once_and_the_next_one_is_used(
    redis: RunningRedis, writer: JournalWriter, connection: Connection
) -> None:
    epoch = await begin(writer, 1)
    await connection.call("SETRANGE", JOURNAL.snapshot, 30, b"\xff")
    async with following(redis.url) as follower:
        follower.add(epoch=epoch)
        await until(lambda: follower.tracker.num_corrupt == 1)
        await until(lambda: follower.tracker.staleness_s()[W0] > 0.2)
        assert follower.tracker.num_corrupt == 1
        await writer.write_snapshot(epoch, 2, digests(7))
        await until(lambda: follower.holds() == {7})


async def test_a_batch_that_cannot_be_read_waits_for_a_snapshot(
    redis: RunningRedis, writer: JournalWriter, connection: Connection
) -> None:
    epoch = await begin(writer, 1)
    async with following(redis.url) as follower:
        follower.add(epoch=epoch)
        await until(lambda: follower.holds() == {1})
        await connection.call("XADD", JOURNAL.journal, f"{epoch}-2", "b", b"\x09nonsense")
        await until(lambda: follower.tracker.num_corrupt == 1)
        assert follower.holds() == {1}
        await writer.write_snapshot(epoch, 3, digests(1, 9))
        await until(lambda: follower.holds() == {1, 9})


async def test_entries_after_a_gap_are_not_applied(
    redis: RunningRedis, writer: JournalWriter, connection: Connection
) -> None:
    epoch = await begin(writer, 1)
    async with following(redis.url) as follower:
        follower.add(epoch=epoch)
        await until(lambda: follower.holds() == {1})
        await connection.call("HSET", JOURNAL.meta, "s", 8)
        await writer.append(epoch, 9, stored(9))
        await writer.append(epoch, 10, stored(10))
        await until(lambda: follower.tracker.num_gaps == 1)
        assert follower.holds() == {1}
        await writer.write_snapshot(epoch, 10, digests(2, 9))
        await writer.append(epoch, 11, stored(11))
        await until(lambda: follower.holds() == {2, 9, 11})


async def test_a_log_trimmed_to_nothing_is_noticed(
    redis: RunningRedis, writer: JournalWriter, connection: Connection
) -> None:
    epoch = await begin(writer, 1)
    async with following(redis.url) as follower:
        follower.add(epoch=epoch)
        await until(lambda: follower.holds() == {1})
        await connection.all([("DEL", JOURNAL.journal), ("HSET", JOURNAL.meta, "s", 4)])
        await until(lambda: follower.tracker.staleness_s()[W0] > 0)
        await writer.write_snapshot(epoch, 4, digests(4))
        await until(lambda: follower.holds() == {4})


async def test_an_older_snapshot_never_replaces_newer_knowledge(
    redis: RunningRedis, writer: JournalWriter, connection: Connection
) -> None:
    epoch = await begin(writer, 1)
    async with following(redis.url) as follower:
        follower.add(epoch=epoch)
        await writer.append(epoch, 2, stored(2))
        await until(lambda: follower.holds() == {1, 2})
        await connection.call("HSET", JOURNAL.meta, "s", 1)  # a failover lost batch 2
        await until(lambda: follower.tracker.staleness_s()[W0] > 0)
        assert follower.holds() == {1, 2}
        assert follower.tracker.num_snapshots == 1


async def test_the_journal_of_a_predecessor_is_not_followed(redis: RunningRedis, writer: JournalWriter) -> None:
    epoch = await begin(writer, 1)
    async with following(redis.url) as follower:
        follower.add(epoch=epoch + 1)
        await until(lambda: follower.tracker.staleness_s().get(W0, 0) > 0.2)
        assert follower.holds() == set()
        later = await writer.register(floor=epoch + 1)
        await writer.write_snapshot(later, 1, digests(3))
        await until(lambda: follower.holds() == {3})


async def test_a_successor_in_an_emptied_redis_whose_clock_went_back_is_followed(
    redis: RunningRedis, writer: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostrya.router.tracker._STRAY_S", 0.2)
    epoch = await begin(writer, 1)
    async with following(redis.url) as follower:
        follower.add(epoch=epoch + 3_600_000)
        follower.add(epoch=0)
        await until(lambda: follower.tracker.staleness_s().get(W0, 0) > 0.5)
        assert follower.holds() == set()
        follower.fleet.registered(W0, epoch)
        await until(lambda: follower.holds() == {1})


async def test_a_removed_replica_is_swept_out(redis: RunningRedis, writer: JournalWriter) -> None:
    epoch = await begin(writer, *range(1_000))
    async with following(redis.url) as follower:
        follower.add(epoch=epoch)
        await until(lambda: len(follower.holds()) == 1_000)
        follower.fleet.remove(W0)
        assert follower.index.depths(digests(*range(10))) == {}
        await until(lambda: follower.index.num_entries == 0)
        assert follower.tracker.staleness_s() == {}


async def test_redis_is_back_only_if_it_was_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ostrya.router.tracker")
    server = start_redis()
    try:
        async with following(server.url) as follower:
            await until(lambda: follower.tracker.redis_up)
            assert ours(caplog) == []
            server.kill()
            await until(lambda: not follower.tracker.redis_up)
            server.restart()
            await until(lambda: follower.tracker.redis_up)
    finally:
        server.stop()
    assert [record.getMessage() for record in ours(caplog)] == ["Redis is gone; the index is frozen", "Redis is back"]
