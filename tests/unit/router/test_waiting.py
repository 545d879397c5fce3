"""The waiting room: in order, bounded, a few at a time, and nothing stays behind."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from ostrya.errors import Overloaded
from ostrya.router.waiting import CROWD, WaitingRoom, num_free
from tests.unit.router.fleets import snapshot, view

FOR_EVER_S = 60.0


@dataclass
class Scene:
    """A room whose replicas have `free` places; who is called in takes one."""

    free: int = 0
    max_waiting: int = 100
    called: list[int] = field(default_factory=list)
    gave_up: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.room = WaitingRoom(
            max_waiting=self.max_waiting,
            num_free=lambda: self.free,
            clock=self.loop.time,
            waited=self.waits.append,
        )

    def enter(
        self, arrival: int | None = None, *, wait_s: float = FOR_EVER_S, is_new: bool = True
    ) -> asyncio.Task[None]:
        return asyncio.create_task(
            self.visit(self.room.arrival() if arrival is None else arrival, wait_s=wait_s, is_new=is_new)
        )

    async def visit(self, arrival: int, *, wait_s: float, is_new: bool) -> None:
        if await self.room.wait(arrival, until=self.loop.time() + wait_s, is_new=is_new):
            self.free -= 1
            self.called.append(arrival)
        else:
            self.gave_up.append(arrival)

    async def settle(self) -> None:
        """Lets everything happen that can happen now."""
        for _ in range(10 * (self.room.num_waiting + 2)):
            await asyncio.sleep(0)


async def test_waiters_are_called_in_by_arrival_and_only_as_many_as_fit() -> None:
    scene = Scene()
    visits = [scene.enter() for _ in range(10)]
    await scene.settle()
    assert (scene.room.num_waiting, scene.called) == (10, [])
    scene.free = 3
    scene.room.freed()
    await scene.settle()
    assert (scene.room.num_waiting, scene.called) == (7, [0, 1, 2])
    scene.free += 1
    scene.room.freed()
    await scene.settle()
    assert scene.called == [0, 1, 2, 3]
    scene.free = 100
    scene.room.freed()
    await asyncio.gather(*visits)
    assert scene.called == list(range(10))
    assert scene.room.num_waiting == 0


async def test_who_comes_back_stands_where_it_arrived() -> None:
    scene = Scene()
    first, second = scene.room.arrival(), scene.room.arrival()
    visits = [scene.enter(), scene.enter(), scene.enter(second, is_new=False), scene.enter(first, is_new=False)]
    await scene.settle()
    scene.free = 100
    scene.room.freed()
    await asyncio.gather(*visits)
    assert scene.called == [0, 1, 2, 3]


async def test_a_full_room_refuses_newcomers_at_once_and_takes_back_who_was_inside() -> None:
    scene = Scene(max_waiting=1)
    old = scene.room.arrival()
    inside = scene.enter()
    await scene.settle()
    with pytest.raises(Overloaded, match="the limit is 1") as refused:
        await scene.enter()
    assert refused.value.retry_after_s > 0
    back = scene.enter(old, is_new=False)
    await scene.settle()
    assert scene.room.num_waiting == 2
    scene.free = 2
    scene.room.freed()
    await asyncio.gather(inside, back)
    assert scene.called == [0, 1]
    assert len(scene.waits) == 2, "who was refused did not wait"


async def test_nobody_waits_longer_than_its_time() -> None:
    scene = Scene()
    hopeless, short, long = scene.enter(wait_s=-1.0), scene.enter(wait_s=0.02), scene.enter()
    await asyncio.gather(hopeless, short)
    assert (scene.gave_up, scene.room.num_waiting) == ([0, 1], 1)
    assert scene.waits[0] < 0.02 <= scene.waits[1]
    scene.free = 1
    scene.room.freed()
    await long
    assert scene.called == [2]


async def test_a_cancel_leaves_no_place_behind() -> None:
    scene = Scene()
    visits = [scene.enter() for _ in range(3)]
    await scene.settle()
    visits[0].cancel()
    await scene.settle()
    assert scene.room.num_waiting == 2
    scene.free = 1
    scene.room.freed()
    await scene.settle()
    assert scene.called == [1]
    visits[2].cancel()
    await asyncio.gather(*visits, return_exceptions=True)
    assert scene.room.num_waiting == 0


async def test_a_cancel_of_whoever_was_called_calls_in_the_next() -> None:
    scene = Scene(free=0)
    first, second = scene.enter(), scene.enter()
    await scene.settle()
    scene.free = 1
    scene.room._call_in()
    first.cancel()
    await second
    assert scene.called == [1]
    assert first.cancelled()


async def test_a_pause_holds_back_until_its_end_or_until_something_gets_free() -> None:
    scene = Scene(free=5)
    scene.room.pause(0.05)
    waiting = scene.enter()
    await scene.settle()
    assert scene.called == []
    await waiting
    assert scene.called == [0]
    scene.room.pause(FOR_EVER_S)
    waiting = scene.enter()
    await scene.settle()
    assert scene.called == [0]
    scene.room.freed()
    await waiting
    assert scene.called == [0, 1]


async def test_every_change_of_the_fleet_is_heeded() -> None:
    scene = Scene()
    changes: asyncio.Queue[None] = asyncio.Queue()
    following = asyncio.create_task(scene.room.follow(changes.get))
    for _ in range(2):
        waiting = scene.enter()
        await scene.settle()
        scene.free = 1
        changes.put_nowait(None)
        await waiting
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_places_are_two_batches_of_each_routable_replica() -> None:
    idle, busy = view(0), view(1, own_requests=30)
    crowded = replace(view(2), own_requests=1_000)
    assert num_free(snapshot()) == 0
    assert num_free(snapshot(idle)) == CROWD * 16
    assert num_free(snapshot(idle, busy, crowded)) == CROWD * 16 + 2
