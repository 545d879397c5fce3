"""Waiting for what other tasks or processes bring about: looks again until it holds or a deadline passes.

Times are told by a Stopwatch: what a busy machine takes away does not count, so a limit may be as tight as the promise.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path


class Stopwatch:
    """Seconds since it was made, less those that this process, and others that are named, waited for a processor."""

    def __init__(self, *others: int) -> None:
        self._processes = (os.getpid(), *others)
        self._start_s, self._queued_s = time.monotonic(), self._queued()

    def seconds(self) -> float:
        """Never negative, whoever has ended meanwhile."""
        return max(0.0, time.monotonic() - self._start_s - max(0.0, self._queued() - self._queued_s))

    def _queued(self) -> float:
        return sum(_queued_s(process) for process in self._processes)


def _queued_s(process: int) -> float:
    """How long the threads of a process were ready to run and did not; 0 for one that has ended."""
    total_ns = 0
    for row in Path(f"/proc/{process}/task").glob("*/schedstat"):
        try:
            total_ns += int(row.read_text().split()[1])
        except (OSError, IndexError):  # a thread that ends meanwhile
            continue
    return total_ns / 1e9


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
