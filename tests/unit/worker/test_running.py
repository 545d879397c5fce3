"""A drain waits for open requests, refuses new ones, and cancels what is late; an uncordon calls it off."""

import asyncio
from collections.abc import Callable

import pytest

from ostrya.engine.types import RequestId
from ostrya.errors import Unavailable
from ostrya.worker.running import Running

A, B = RequestId("a"), RequestId("b")


def state(running: Running) -> str:
    """A call, so that no check is taken to hold for the next one."""
    return running.state


async def drain(
    running: Running, timeout_s: float = 60, cancel: Callable[[RequestId], None] = lambda request_id: None
) -> int:
    with running.drain():
        return await running.empty(timeout_s, cancel)


async def test_drain_of_an_idle_worker_ends_at_once() -> None:
    assert await drain(Running()) == 0


async def test_drain_ends_when_the_last_open_request_does() -> None:
    running = Running()
    with running.hold(A):
        with running.hold(B):
            waiting = asyncio.create_task(drain(running))
            await asyncio.sleep(0)
            assert state(running) == "draining"
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting == 0
    assert state(running) == "cordoned"


@pytest.mark.parametrize("close", [Running.cordon, Running.end])
def test_a_cordoned_or_ending_worker_refuses_new_requests_and_keeps_its_own(close: Callable[[Running], None]) -> None:
    running = Running()
    with running.hold(A):
        close(running)
        close(running)
        with pytest.raises(Unavailable, match="draining"), running.hold(B):
            pass


async def test_late_requests_are_cancelled_and_counted() -> None:
    running, cancelled = Running(), list[RequestId]()
    with running.hold(A), running.hold(B):
        assert await drain(running, 0, cancelled.append) == 2
    assert sorted(cancelled) == ["a", "b"]


async def test_an_uncordon_calls_off_every_drain_and_cancels_nothing() -> None:
    running, cancelled = Running(), list[RequestId]()
    with running.hold(A):
        waiting = [asyncio.create_task(drain(running, 60, cancelled.append)) for _ in range(2)]
        await asyncio.sleep(0)
        running.uncordon()
        assert state(running) == "ready"
        for one in waiting:
            with pytest.raises(Unavailable, match="called off by an uncordon; requests running here: 1"):
                await one
        with running.hold(B):
            pass
    assert (cancelled, state(running)) == ([], "ready")


@pytest.mark.parametrize("timeout_s", [0, 60])
async def test_an_uncordon_before_the_wait_or_with_its_end_cancels_nothing_either(timeout_s: float) -> None:
    running, cancelled = Running(), list[RequestId]()
    with running.hold(A):
        with running.drain():
            running.uncordon()  # as while health is told of the drain
            with pytest.raises(Unavailable, match="called off"):
                await running.empty(0.01, cancelled.append)
        waiting = asyncio.create_task(drain(running, timeout_s, cancelled.append))
        await asyncio.sleep(0)
        running.uncordon()
        with pytest.raises(Unavailable, match="called off"):
            await waiting
    assert (cancelled, state(running)) == ([], "ready")


def test_an_uncordon_undoes_a_cordon_and_a_drain_that_has_ended() -> None:
    running = Running()
    running.uncordon()
    running.cordon()
    assert state(running) == "cordoned"
    running.uncordon()
    with running.drain():
        pass
    assert state(running) == "cordoned"
    running.uncordon()
    assert state(running) == "ready"


async def test_the_end_of_the_process_cannot_be_called_off() -> None:
    running = Running()
    with running.hold(A):
        running.end()
        waiting = asyncio.create_task(drain(running))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="ending"):
            running.uncordon()
        assert state(running) == "draining"
    assert await waiting == 0
    assert state(running) == "draining"


async def test_a_drain_nobody_waits_for_any_more_leaves_the_worker_cordoned() -> None:
    running = Running()
    with running.hold(A):
        waiting = asyncio.create_task(drain(running))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert state(running) == "cordoned"
