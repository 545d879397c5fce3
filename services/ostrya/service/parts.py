"""The parts of a process that run beside its requests: each is started again when it fails, and none ends the process.

What a part was to tell (who is there, what is cached where) goes stale meanwhile; requests go on with what is known.
Router and worker run theirs so; an engine is no such part (worker/lasting.py).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from ostrya.service.cancelling import is_cancelled

log = logging.getLogger(__name__)

_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_STEADY_S = 10.0
"""A part that has run for so long since its last start does not fail any more."""

Work = Callable[[], Coroutine[object, object, None]]


@dataclass(frozen=True, slots=True)
class Failing:
    """A part that fails, or did a moment ago."""

    error: str
    """Its kind alone: a message may hold anything."""
    num_restarts: int


class Parts:
    """`run` in a task: all parts at once, each for ever. One that failed is run again as it is."""

    def __init__(self, parts: Mapping[str, Work], *, clock: Callable[[], float]) -> None:
        self.num_restarts: Counter[str] = Counter(dict.fromkeys(parts, 0))
        self._parts, self._clock = parts, clock
        self._failed: dict[str, tuple[str, float]] = {}
        """By part: its last error, and when it started again."""

    def failing(self) -> dict[str, Failing]:
        """By name."""
        now = self._clock()
        return {
            name: Failing(error, self.num_restarts[name])
            for name, (error, since) in dict(self._failed).items()  # a scrape asks from its own thread
            if now - since < _STEADY_S
        }

    async def run(self) -> None:
        """Until cancelled; then every part has ended."""
        async with asyncio.TaskGroup() as tasks:
            for name, work in self._parts.items():
                tasks.create_task(self._keep(name, work), name=f"part {name}")

    async def _keep(self, name: str, work: Work) -> None:
        num_failed = 0
        while True:
            started = self._clock()
            try:
                await work()
                error = "it ended"
                log.error("a part ended; starting it again", extra={"fields": {"part": name}})
            except (Exception, asyncio.CancelledError) as failure:
                if is_cancelled():
                    raise
                error = type(failure).__name__
                log.exception("a part broke; starting it again", extra={"fields": {"part": name}})
            if self._clock() - started >= _STEADY_S:
                num_failed = 0
            num_failed += 1
            pause = pause_s(num_failed)
            self._failed[name] = (error, self._clock() + pause)
            await asyncio.sleep(pause)
            self.num_restarts[name] += 1


def pause_s(num_failed: int) -> float:
    """Before a part that failed so often in a row starts again."""
    return min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2.0 ** min(num_failed - 1, 10))
