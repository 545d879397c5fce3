"""Publisher, Redis and tracker together: the router's index equals the worker's set again, whatever happened."""

import random

import pytest

from ostrya.engine.types import Load
from ostrya.prefix.chain import RoutingDigest
from ostrya.router.types import KnowledgeLevel, WorkerId
from ostrya.state import keys
from ostrya.state.connection import Connection
from ostrya.worker.publisher import Publisher
from tests.fakes.pool import Follower, following, publishing
from tests.fakes.redis_server import RunningRedis
from tests.fakes.waiting import until


def digests(*numbers: int) -> tuple[RoutingDigest, ...]:
    return tuple(map(RoutingDigest, numbers))


def agree(follower: Follower, *publishers: Publisher) -> bool:
    return all(
        follower.holds(publisher.worker_id) == set(publisher.live()) and publisher.num_live for publisher in publishers
    )


def churn(publisher: Publisher, rng: random.Random, steps: int = 20) -> None:
    for _ in range(steps):
        stored = [RoutingDigest(rng.randrange(500)) for _ in range(rng.randrange(8))]
        removed = [digest for digest in publisher.live() if rng.random() < 0.05]
        publisher.publish(stored, removed, Load())


async def test_events_reach_the_index(server: RunningRedis) -> None:
    async with publishing(server.url) as publisher, following(server.url) as follower:
        follower.add()
        publisher.publish(digests(1, 2, 3), (), Load())
        await until(lambda: agree(follower, publisher))
        publisher.publish(digests(4), digests(2), Load())
        assert await until(lambda: follower.holds() == {1, 3, 4}) < 0.5
        assert follower.fleet.snapshot().index_age_s == 0.0


async def test_a_router_that_comes_late_starts_from_the_snapshot(server: RunningRedis) -> None:
    async with publishing(server.url) as publisher:
        churn(publisher, random.Random(1))
        await until(lambda: publisher.num_snapshots and publisher.redis_up)
        async with following(server.url) as follower:
            follower.add(epoch=publisher.epoch)
            await until(lambda: agree(follower, publisher))
            assert follower.tracker.num_snapshots == 1


@pytest.mark.parametrize("seed", [1, 2])
async def test_an_emptied_redis_is_whole_again_within_five_seconds(server: RunningRedis, seed: int) -> None:
    rng = random.Random(seed)
    async with (
        publishing(server.url, "w0", jitter=0.99) as first,
        publishing(server.url, "w1", jitter=0.5) as second,
        following(server.url) as follower,
    ):
        follower.add("w0")
        follower.add("w1")
        churn(first, rng)
        churn(second, rng)
        await until(lambda: agree(follower, first, second))
        server.kill()
        churn(first, rng)
        await until(lambda: not follower.tracker.redis_up and not first.redis_up)
        assert follower.fleet.snapshot().index_age_s > 0
        churn(second, rng)
        server.restart()
        churn(first, rng)
        await until(lambda: agree(follower, first, second))


async def test_old_knowledge_stays_while_redis_is_empty(server: RunningRedis) -> None:
    async with publishing(server.url, jitter=0.9) as publisher, following(server.url) as follower:
        follower.add()
        publisher.publish(digests(1, 2), (), Load())
        await until(lambda: agree(follower, publisher))
        epoch = publisher.epoch
        connection = Connection(server.url)
        await connection.call("FLUSHALL")
        await connection.close()

        def registered_again() -> bool:
            assert follower.holds() == {1, 2}
            return publisher.epoch > epoch and publisher.num_snapshots >= 2

        assert await until(registered_again) < 3.0


async def test_a_trimmed_log_heals_by_snapshot(server: RunningRedis) -> None:
    async with publishing(server.url) as publisher, following(server.url) as follower:
        follower.add()
        publisher.publish(digests(1), (), Load())
        await until(lambda: agree(follower, publisher))
    async with publishing(server.url) as publisher:
        connection = Connection(server.url)
        for number in range(5):
            publisher.publish(digests(number), (), Load())
            await until(lambda: publisher.is_flushed)
        await publisher._snapshot()
        await connection.call("XTRIM", keys.worker_keys("default", "w0").journal, "MAXLEN", 0)
        await connection.close()
        async with following(server.url) as follower:
            follower.add(epoch=publisher.epoch)
            await until(lambda: agree(follower, publisher))
            publisher.publish(digests(99), (), Load())
            await until(lambda: agree(follower, publisher))


async def test_entries_trimmed_behind_a_follower_are_noticed(server: RunningRedis) -> None:
    async with publishing(server.url) as publisher, following(server.url) as follower:
        follower.add()
        publisher.publish(digests(1), (), Load())
        await until(lambda: agree(follower, publisher))
        connection = Connection(server.url)
        names = keys.worker_keys("default", "w0")
        await connection.call("HINCRBY", names.meta, "s", 5)  # five batches that no longer are in the log
        publisher._seq += 5
        publisher.publish(digests(2), (), Load())
        await until(lambda: follower.tracker.num_gaps == 1)
        assert follower.tracker.staleness_s()[WorkerId("w0")] >= 0
        publisher._need_snapshot()
        await until(lambda: agree(follower, publisher))
        await connection.close()


async def test_a_restarted_worker_starts_from_an_empty_slot(server: RunningRedis) -> None:
    async with following(server.url) as follower:
        async with publishing(server.url) as first:
            follower.add()
            first.publish(digests(1, 2), (), Load())
            await until(lambda: agree(follower, first))
        follower.add(epoch=0)  # it does not know its new epoch yet
        assert follower.holds() == set()
        follower.fleet.registered(WorkerId("w0"), first.epoch)
        async with publishing(server.url) as second:
            second.publish(digests(7), (), Load())
            await until(lambda: agree(follower, second))


async def test_a_younger_process_fences_the_older(server: RunningRedis) -> None:
    async with publishing(server.url) as old:
        old.publish(digests(1), (), Load())
        await until(lambda: old.is_flushed)
        async with publishing(server.url) as young:
            young.publish(digests(2), (), Load())
            await until(lambda: young.is_flushed)
            old.publish(digests(3), (), Load())
            await until(old.fenced.done)
            assert "w0" in str(old.fenced.result())
            young.publish(digests(4), (), Load())
            await until(lambda: young.is_flushed)
            assert not young.fenced.done()


async def test_a_lost_tail_heals_while_the_worker_is_idle(server: RunningRedis) -> None:
    async with publishing(server.url) as publisher, following(server.url) as follower:
        follower.add()
        publisher.publish(digests(1), (), Load())
        await until(lambda: agree(follower, publisher))
        connection = Connection(server.url)
        names = keys.worker_keys("default", "w0")
        # As after a failover to a replica that had not heard of the last batch.
        await connection.all([("HINCRBY", names.meta, "s", -1), ("XTRIM", names.journal, "MAXLEN", 0)])
        await connection.close()
        before = publisher.num_snapshots
        await until(lambda: publisher.num_snapshots > before)
        publisher.publish(digests(2), (), Load())
        await until(lambda: agree(follower, publisher))


async def test_random_events_losses_and_restarts_end_equal(server: RunningRedis) -> None:
    rng = random.Random(20)
    connection = Connection(server.url)
    names = keys.worker_keys("default", "w0")
    async with following(server.url) as follower:
        for _ in range(3):  # restarts of the worker
            async with publishing(server.url, jitter=0.05) as publisher:
                await until(lambda: publisher.epoch)
                follower.add(epoch=publisher.epoch)
                for _ in range(12):
                    churn(publisher, rng, steps=rng.randrange(1, 30))
                    fault = rng.choice(["none", "none", "flush", "trim", "lose", "skip"])
                    if fault == "flush":
                        await connection.call("FLUSHALL")
                    elif fault == "trim":
                        await connection.call("XTRIM", names.journal, "MAXLEN", 0)
                        publisher._batches_since_snapshot = 1_000  # a log is never trimmed past the last snapshot
                    elif fault == "lose":
                        await connection.call("DEL", names.journal, names.snapshot, names.meta)
                    elif fault == "skip":
                        publisher._seq += 1
                    await until(lambda: publisher.is_flushed or not publisher.redis_up)
                publisher.publish(digests(1000), (), Load())
                await until(lambda: agree(follower, publisher))
    await connection.close()
    assert follower.fleet.snapshot().level is KnowledgeLevel.NO_INDEX
