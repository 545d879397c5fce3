"""The worker's publisher against a real Redis that comes and goes."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import pytest

from ostrya.engine.types import Load
from ostrya.prefix.chain import RoutingDigest
from ostrya.state import board, lease, members
from ostrya.state.connection import Connection, Refusal
from ostrya.state.journal import Answer, JournalReader, JournalWriter
from ostrya.worker.publisher import Publisher
from ostrya.worker.settings import WorkerSettings
from tests.fakes.pool import following, member, publishing, running
from tests.fakes.redis_server import RunningRedis, free_port, start_redis
from tests.fakes.waiting import until


def digests(*numbers: int) -> tuple[RoutingDigest, ...]:
    return tuple(map(RoutingDigest, numbers))


@pytest.fixture
def redis() -> Iterator[RunningRedis]:
    server = start_redis()
    yield server
    server.stop()


async def test_a_worker_appears_with_lease_member_and_load(redis: RunningRedis) -> None:
    connection = Connection(redis.url)
    async with publishing(redis.url) as publisher:
        publisher.publish((), (), Load(num_running=3, queried_tokens=70))
        await until(lambda: publisher.is_flushed)
        assert (await lease.remaining_s(connection, "default", ["w0"])).keys() == {"w0"}
        assert (await members.read(connection, "default"))["w0"].epoch == publisher.epoch
        row = (await board.read(connection, "default"))["w0"]
        assert (row.num_running, row.queried_tokens) == (3, 70)
    await connection.close()


async def test_a_worker_whose_writes_are_refused_says_why_and_goes_on_when_they_are_taken(redis: RunningRedis) -> None:
    connection, refused = Connection(redis.url), Counter[str]()

    def hear(refusal: str) -> None:
        refused[refusal] += 1

    async with publishing(redis.url, refused=hear) as publisher:
        publisher.publish(digests(1, 2), (), Load())
        await until(lambda: publisher.is_flushed)
        epoch = publisher.epoch
        await connection.call("CONFIG", "SET", "maxmemory", "1")
        await until(lambda: refused[Refusal.OOM] >= 2)
        assert (publisher.refusal, publisher.redis_up, publisher.is_registered) == (Refusal.OOM, False, False)
        publisher.publish(digests(3), (), Load())
        await connection.call("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: publisher.is_flushed and publisher.redis_up)
        assert publisher.refusal == ""
        assert publisher.epoch == epoch, "its journal is still there, so it goes on in it"
        assert (await lease.remaining_s(connection, "default", ["w0"])).keys() == {"w0"}
        await connection.call("REPLICAOF", "127.0.0.1", "1")
        await until(lambda: refused[Refusal.READONLY] >= 1)
        await connection.call("REPLICAOF", "NO", "ONE")
        await until(lambda: publisher.is_flushed and publisher.redis_up)
    assert refused.keys() == {Refusal.OOM, Refusal.READONLY}
    await connection.close()


async def test_leaving_removes_everything_at_once(redis: RunningRedis) -> None:
    connection = Connection(redis.url)
    publisher = Publisher(WorkerSettings(worker_id="w0", redis_url=redis.url), member=member())
    async with running(publisher.run):
        await until(lambda: publisher.is_flushed)
    await publisher.close()
    assert not publisher.is_registered
    assert await lease.remaining_s(connection, "default", ["w0"]) == {}
    assert await members.read(connection, "default") == {}
    assert await board.read(connection, "default") == {}
    await connection.close()


async def test_redis_may_be_absent_at_start(redis: RunningRedis) -> None:
    redis.kill()
    async with publishing(redis.url) as publisher:
        publisher.publish(digests(1, 2), (), Load())
        assert (publisher.epoch, publisher.redis_up) == (0, False)
        redis.restart()
        await until(lambda: publisher.is_flushed)
        await _redis_has(redis, publisher, {1, 2})


async def test_who_asks_is_told_whether_redis_has_the_lease(redis: RunningRedis) -> None:
    async with publishing(redis.url) as publisher:
        await until(lambda: publisher.is_registered)
        redis.kill()
        await until(lambda: not publisher.is_registered)
        redis.restart()
        await until(lambda: publisher.is_registered)


async def test_absence_is_logged_once_until_it_ends(redis: RunningRedis, caplog: pytest.LogCaptureFixture) -> None:
    redis.kill()
    async with publishing(redis.url) as publisher:

        def seen() -> int:
            return caplog.text.count("Redis is gone")

        await until(lambda: seen() == 1)
        redis.restart()
        await until(lambda: publisher.is_flushed)
        assert seen() == 1
        redis.kill()
        await until(lambda: seen() == 2)


async def test_leaving_without_redis_does_not_fail() -> None:
    settings = WorkerSettings(worker_id="w0", redis_url=f"redis://127.0.0.1:{free_port()}/0")
    publisher = Publisher(settings, member=member())
    async with running(publisher.run):
        publisher.publish(digests(1), (), Load())
    await publisher.close()


async def test_one_batch_carries_what_came_together(redis: RunningRedis) -> None:
    async with publishing(redis.url) as publisher:
        await until(lambda: publisher.is_flushed)
        for number in range(50):
            publisher.publish(digests(number), (), Load())
        await until(lambda: publisher.is_flushed)
        assert publisher.num_batches == 1


async def test_an_overflow_becomes_one_snapshot(redis: RunningRedis) -> None:
    async with publishing(redis.url) as publisher:
        await until(lambda: publisher.is_flushed)
        before = publisher.num_snapshots
        for start in range(0, 100_000, 1_000):
            publisher.publish(digests(*range(start, start + 1_000)), (), Load())
        await until(lambda: publisher.is_flushed)
        assert (publisher.num_overflows, publisher.num_snapshots - before, publisher.num_batches) == (1, 1, 0)
        await _redis_has(redis, publisher, set(range(100_000)))


async def test_events_while_redis_is_away_cost_no_memory_and_are_not_lost(redis: RunningRedis) -> None:
    async with publishing(redis.url) as publisher:
        publisher.publish(digests(1, 2), (), Load())
        await until(lambda: publisher.is_flushed)
        redis.kill()
        await until(lambda: not publisher.redis_up)
        for number in range(10, 1_000):
            publisher.publish(digests(number), digests(number - 1), Load())
        assert publisher._num_pending == 0
        redis.restart()
        assert await until(lambda: publisher.redis_up and publisher.is_flushed, timeout_s=3.0) < 3.0
        await _redis_has(redis, publisher, {1, 2, 999})


async def test_a_new_engine_is_a_new_registration_and_followers_forget_the_old_ones_pages(redis: RunningRedis) -> None:
    async with publishing(redis.url) as publisher, following(redis.url) as follower:
        follower.add()
        for round_ in range(3):
            publisher.publish(digests(1, 2, 10 + round_), (), Load(num_running=2))
            await until(lambda round_=round_: follower.holds() == {1, 2, 10 + round_})  # type: ignore[misc]
            before = publisher.epoch
            publisher.start_anew()
            assert (publisher.epoch, publisher.live(), publisher.is_registered) == (0, (), False)
            await until(lambda: follower.holds() == set())
            await until(lambda before=before: publisher.is_flushed and publisher.epoch > before)  # type: ignore[misc]
        assert not publisher.fenced.done()


async def test_an_engine_lost_while_redis_is_away_has_no_epoch_until_it_is_back(redis: RunningRedis) -> None:
    async with publishing(redis.url) as publisher:
        publisher.publish(digests(1, 2), (), Load())
        await until(lambda: publisher.is_flushed)
        before = publisher.epoch
        redis.kill()
        publisher.start_anew()
        publisher.publish(digests(3), (), Load())
        await until(lambda: not publisher.redis_up)
        assert publisher.epoch == 0
        redis.restart()
        await until(lambda: publisher.redis_up and publisher.is_flushed)
        assert publisher.epoch > before
        await _redis_has(redis, publisher, {3})


async def test_an_engine_lost_at_any_moment_of_a_write_leaves_a_whole_journal(redis: RunningRedis) -> None:
    async with publishing(redis.url) as publisher, following(redis.url) as follower:
        follower.add()
        for step in range(0, 100, 4):
            publisher.publish(digests(step), (), Load())
            await asyncio.sleep(step * 250e-6)  # the moment is the point: batching, registering, sending, receiving
            publisher.start_anew()
            publisher.publish(digests(100 + step), (), Load())
        await until(lambda: follower.holds() == {196})
        assert not publisher.fenced.done()


async def test_a_publisher_that_broke_and_is_run_again_has_lost_nothing(
    redis: RunningRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: JournalWriter, epoch: int, seq: int, events: object) -> Answer:
        raise KeyError("after the events were taken")

    publisher = Publisher(WorkerSettings(worker_id="w0", redis_url=redis.url), member=member("w0"))
    async with following(redis.url) as follower:
        follower.add()
        with monkeypatch.context() as patch:
            patch.setattr(JournalWriter, "append", broken)
            breaking = asyncio.create_task(publisher.run())
            await until(lambda: publisher.is_flushed)
            publisher.publish(digests(1, 2), (), Load())
            await asyncio.wait({breaking})
        assert isinstance(breaking.exception(), KeyError)
        async with running(publisher.run):
            await until(lambda: follower.holds() == {1, 2})
        await publisher.close()


async def test_parents_stay_before_children(redis: RunningRedis) -> None:
    async with publishing(redis.url) as publisher:
        publisher.publish(digests(5, 3, 9), (), Load())
        publisher.publish(digests(1), digests(3), Load())
        assert publisher.live() == (5, 9, 1)


async def test_a_thousand_batches_are_compacted(redis: RunningRedis) -> None:
    async with publishing(redis.url) as publisher:
        publisher.publish(digests(1), (), Load())
        await until(lambda: publisher.is_flushed)
        before, publisher._batches_since_snapshot = publisher.num_snapshots, 1_000
        publisher.publish(digests(2), (), Load())
        await until(lambda: publisher.num_snapshots == before + 1 and publisher.is_flushed)
        publisher.publish(digests(3), (), Load())
        await until(lambda: publisher.is_flushed)
        assert publisher.num_snapshots == before + 1


async def _redis_has(redis: RunningRedis, publisher: Publisher, expected: set[int]) -> None:
    connection = Connection(redis.url)
    snapshot = await JournalReader(connection, pool="default").snapshot("w0", most=10**6)
    await connection.close()
    assert snapshot is not None
    assert snapshot.epoch == publisher.epoch
    assert set(chain(*snapshot.parts)) == set(publisher.live()) == expected


async def test_a_cancel_is_never_lost_wherever_it_comes(redis: RunningRedis) -> None:
    settings = WorkerSettings(worker_id="w0", redis_url=redis.url)
    for step in range(100):
        publisher = Publisher(settings, member=member())
        task = asyncio.create_task(publisher.run())
        await asyncio.sleep(step * 25e-6)  # the moment is the point: connecting, sending, receiving
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=3)
        assert done, f"still runs after a cancel {step * 25} µs from its start"
        await publisher._connection.close()
