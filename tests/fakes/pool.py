"""The parts of a pool that talk through Redis, running in the test's event loop: publishers and a following router."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import grpc

from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.index import PrefixIndex
from ostrya.router.fleet import Fleet
from ostrya.router.replica import ReplicaInfo
from ostrya.router.settings import RouterSettings
from ostrya.router.tracker import Tracker
from ostrya.router.types import WorkerId
from ostrya.state.members import Member
from ostrya.worker.publisher import Publisher
from ostrya.worker.settings import WorkerSettings


def member(worker_id: str = "w0", address: str = "127.0.0.1:1") -> Member:
    """A plausible row."""
    return Member(
        worker_id=worker_id,
        address=address,
        model="tiny",
        page_size=16,
        routing_stride=1,
        chain_self_test=b"",
        max_running=8,
        context_tokens=2048,
        vocab_size=1000,
    )


def replica(worker_id: str = "w0", address: str = "127.0.0.1:1", *, epoch: int = 0, num_pages: int = 0) -> ReplicaInfo:
    """What the same worker says when it is dialled."""
    return ReplicaInfo(
        worker_id=WorkerId(worker_id),
        address=address,
        epoch=epoch,
        model="tiny",
        page_size=16,
        routing_stride=1,
        max_running=8,
        context_tokens=2048,
        vocab_size=1000,
        prefix_credit=True,
        num_pages=num_pages,
    )


@asynccontextmanager
async def running(work: Callable[[], Coroutine[object, object, None]]) -> AsyncIterator[asyncio.Task[None]]:
    """Runs it as a task; cancels and awaits it at the end, and passes on what it raised."""
    task = asyncio.create_task(work())
    try:
        yield task
    finally:
        task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]


@asynccontextmanager
async def publishing(
    url: str,
    worker_id: str = "w0",
    *,
    address: str = "127.0.0.1:1",
    jitter: float = 0.0,
    refused: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Publisher]:
    """A publisher at work; it vanishes without leaving, as a killed worker does."""
    settings = WorkerSettings(worker_id=worker_id, redis_url=url)
    publisher = Publisher(settings, member=member(worker_id, address), jitter=lambda: jitter, refused=refused)
    try:
        async with running(publisher.run):
            yield publisher
    finally:
        await publisher._connection.close()  # close() would leave


class Follower:
    """A router's index, fleet and tracker, without discovery: `add` tells it who there is."""

    def __init__(self, url: str) -> None:
        self.index = PrefixIndex()
        self.fleet = Fleet(index=self.index)
        self.tracker = Tracker(RouterSettings(redis_url=url), fleet=self.fleet, index=self.index)

    def add(self, worker_id: str = "w0", *, epoch: int = 0, address: str = "127.0.0.1:1") -> None:
        """As discovery does when it has dialled a replica."""
        self.fleet.add(replica(worker_id, address, epoch=epoch), grpc.aio.insecure_channel(address))

    def holds(self, worker_id: str = "w0") -> set[RoutingDigest]:
        """What the index says this worker could reuse."""
        return self.index.holds(self.fleet.followed()[WorkerId(worker_id)].slot)


@asynccontextmanager
async def following(url: str) -> AsyncIterator[Follower]:
    """A follower at work."""
    follower = Follower(url)
    try:
        async with running(follower.tracker.run):
            yield follower
    finally:
        await follower.tracker.close()
        await follower.fleet.close()
