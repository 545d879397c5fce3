"""A drain waits for open requests, refuses new ones, and cancels what is late."""

import asyncio

import pytest

from ostrya.engine.types import RequestId
from ostrya.errors import Unavailable
from ostrya.worker.running import Running


async def test_drain_of_an_idle_worker_ends_at_once() -> None:
    assert await Running().drain(60, lambda _: None) == 0


async def test_drain_ends_when_the_last_open_request_does() -> None:
    running = Running()
    with running.hold(RequestId("a")):
        draining = asyncio.create_task(running.drain(60, lambda _: None))
        await asyncio.sleep(0)
        assert not draining.done()
    assert await draining == 0


async def test_draining_worker_refuses_new_requests() -> None:
    running = Running()
    await running.drain(0, lambda _: None)
    with pytest.raises(Unavailable, match="draining"), running.hold(RequestId("a")):
        pass


async def test_late_requests_are_cancelled_and_counted() -> None:
    running, cancelled = Running(), list[RequestId]()
    with running.hold(RequestId("a")), running.hold(RequestId("b")):
        assert await running.drain(0, cancelled.append) == 2
    assert sorted(cancelled) == ["a", "b"]
