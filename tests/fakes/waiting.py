"""Waiting for what other tasks or processes bring about: looks again until it holds or a deadline passes.

Times are told by a Stopwatch: what a busy machine takes away does not count, so a limit may be as tight as the promise.
"""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Stopwatch:
    """Seconds since it was made, less those that this process, and others that are named, waited for a processor."""

    def __init__(self, *others: int) -> None:
        self._processes = (os.getpid(), *others)
        self._queued_ns: dict[Path, int] = {}
        self._start_s, self._queued_before_s = time.monotonic(), self._queued_s()

    def seconds(self) -> float:
        """Never negative."""
        return max(0.0, time.monotonic() - self._start_s - (self._queued_s() - self._queued_before_s))

    def until_ended(self, process: int, *, timeout_s: float = 30.0) -> float:
        """Seconds until this child has ended, which is still to be waited for. AssertionError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < deadline, f"process {process} did not end within {timeout_s} s"
            self._queued_s()
            time.sleep(0.005)
        return self.seconds()

    def _queued_s(self) -> float:
        """How long all their threads were ready to run and did not; what those that end had is remembered."""
        for process in self._processes:
            for thread in Path(f"/proc/{process}/task").glob("*/schedstat"):
                with suppress(OSError, IndexError):
                    self._queued_ns[thread] = int(thread.read_text().split()[1])
        return sum(self._queued_ns.values()) / 1e9


async def until(condition: Callable[[], object], *, timeout_s: float = 30.0) -> float:
    """Seconds until `condition()` held. AssertionError after `timeout_s`."""
    watch, deadline = Stopwatch(), time.monotonic() + timeout_s
    while not condition():
        # A look at the watch costs more than one at the clock.
        if time.monotonic() > deadline:
            waited_s = watch.seconds()
            assert waited_s < timeout_s, f"did not hold within {timeout_s} s"
            deadline += timeout_s - waited_s
        await asyncio.sleep(0.005)
    return watch.seconds()
