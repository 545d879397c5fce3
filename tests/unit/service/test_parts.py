"""A part that fails is started again, later each time, and says so; the others never notice."""

import asyncio
import logging

import pytest

from ostrya.service.parts import Failing, Parts, pause_s
from tests.fakes.pool import running
from tests.fakes.waiting import until


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Flaky:
    """Work that fails a number of times, then goes on for ever."""

    def __init__(self, num_failures: int, error: BaseException | None = None) -> None:
        self.num_starts = 0
        self._num_failures, self._error = num_failures, error

    async def run(self) -> None:
        self.num_starts += 1
        if self.num_starts <= self._num_failures:
            if self._error is not None:
                raise self._error
            return
        await asyncio.Event().wait()


async def test_a_part_that_fails_is_started_again_and_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    clock, bad, good = Clock(), Flaky(1, ValueError("a secret")), Flaky(0)
    parts = Parts({"bad": bad.run, "good": good.run}, clock=clock)
    with caplog.at_level(logging.ERROR):
        async with running(parts.run):
            await until(lambda: bad.num_starts == 2)
            assert good.num_starts == 1
            assert parts.failing() == {"bad": Failing("ValueError", 1)}
            clock.now += 11
            assert parts.failing() == {}
            assert parts.num_restarts == {"bad": 1, "good": 0}
    assert [record.message for record in caplog.records] == ["a part broke; starting it again"]


async def test_a_part_that_ends_has_failed_too() -> None:
    ended = Flaky(1)
    parts = Parts({"ended": ended.run}, clock=Clock())
    async with running(parts.run):
        await until(lambda: ended.num_starts == 2)
        assert parts.failing()["ended"].error == "it ended"


async def test_a_cancel_that_was_not_meant_for_the_part_is_a_failure() -> None:
    stray = Flaky(1, asyncio.CancelledError())
    parts = Parts({"stray": stray.run}, clock=Clock())
    async with running(parts.run):
        await until(lambda: stray.num_starts == 2)
        assert parts.failing()["stray"].error == "CancelledError"


def test_the_pause_grows_to_a_bound() -> None:
    assert [pause_s(number) for number in range(1, 9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert pause_s(10**6) == 5.0
