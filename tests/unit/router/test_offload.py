"""Giants wait for each other and for nobody else."""

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest

from ostrya.router.offload import SMALL_BYTES, Offload

LARGE = 1 << 20
WAIT_S = 30.0


@pytest.fixture
async def offload() -> AsyncIterator[Offload]:
    made = Offload()
    yield made
    await asyncio.to_thread(made.close)


async def test_what_is_small_is_done_at_once_and_nothing_else_on_the_event_loop(offload: Offload) -> None:
    here = threading.get_ident()
    ran = [await offload.run(threading.get_ident, num_bytes=size) for size in (SMALL_BYTES, SMALL_BYTES + 1, LARGE)]
    assert [one == here for one in ran] == [True, False, False]
    assert await offload.in_thread(threading.get_ident, num_bytes=1) != here


async def test_giants_wait_for_each_other_and_the_rest_does_not_wait_for_them(offload: Offload) -> None:
    may_end, begun = threading.Event(), threading.Semaphore(0)

    def giant() -> bool:
        begun.release()
        return may_end.wait(WAIT_S)

    giants = [asyncio.create_task(offload.run(giant, num_bytes=LARGE)) for _ in range(5)]
    for _ in range(2):
        assert await asyncio.to_thread(begun.acquire, timeout=WAIT_S)
    assert await offload.in_thread(lambda: "through", num_bytes=SMALL_BYTES + 1) == "through"
    assert not begun.acquire(blocking=False), "two at a time"
    giants[4].cancel()
    await asyncio.wait({giants[4]})
    may_end.set()
    assert await asyncio.gather(*giants[:4]) == [True] * 4
    assert sum(begun.acquire(blocking=False) for _ in range(3)) == 2, "what was cancelled never began"


async def test_names_are_resolved_while_a_flood_of_requests_has_every_thread(offload: Offload) -> None:
    may_end = threading.Event()
    work = partial(may_end.wait, WAIT_S)
    flood = [asyncio.create_task(offload.run(work, num_bytes=SMALL_BYTES + 1)) for _ in range(100)]
    await asyncio.sleep(0)  # each of them has asked for a thread
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(WAIT_S / 3):
            assert await loop.getaddrinfo("localhost", 6379)
        assert not any(one.done() for one in flood)
    finally:
        may_end.set()
    assert all(await asyncio.gather(*flood))


async def test_what_the_work_raises_comes_to_its_caller(offload: Offload) -> None:
    for size in (1, SMALL_BYTES + 1, LARGE):
        with pytest.raises(ValueError, match="no"):
            await offload.run(lambda: int("no"), num_bytes=size)
