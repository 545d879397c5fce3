"""Where requests wait while no replica can take them: bounded, in order of arrival, and let out a few at a time.

After an outage hundreds may wait; the first replica that returns must not meet them all at once. So one is called in
while this router has less in flight than CROWD batches of every routable replica, the next when that one has begun.
The room knows no fleet and no request; proxy.py sends them here, app.py tells it of changes.
"""

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count

from ostrya.errors import Overloaded
from ostrya.router.types import FleetSnapshot

CROWD = 2
"""Batches of a replica that may be in flight there: one runs, one is there when places get free."""

RETRY_AFTER_S = 1.0
"""A full room empties at the pace at which requests end."""

MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
"""A replica that was full says when to come back; it may be wrong, and others may have returned."""


def num_free(snapshot: FleetSnapshot) -> int:
    """Requests that may be sent before those in flight end."""
    return sum(max(0, CROWD * view.max_running - view.own_requests) for view in snapshot.replicas)


@dataclass(slots=True, eq=False)
class _Place:
    arrival: int
    called: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WaitingRoom:
    """For one event loop. `waited` is told the seconds of every wait, however it ends."""

    def __init__(
        self,
        *,
        max_waiting: int,
        num_free: Callable[[], int],
        clock: Callable[[], float],
        waited: Callable[[float], None],
    ) -> None:
        self._max_waiting, self._num_free, self._clock, self._waited = max_waiting, num_free, clock, waited
        self._places: list[_Place] = []
        self._calling: _Place | None = None
        """Called in, and not yet on its way to a replica."""
        self._pause: asyncio.TimerHandle | None = None
        self._is_looking = False
        self._arrivals = count()

    @property
    def num_waiting(self) -> int:
        """Requests inside."""
        return len(self._places)

    def arrival(self) -> int:
        """A number for one that arrives; who comes back later stands where that number belongs."""
        return next(self._arrivals)

    async def wait(self, arrival: int, *, until: float, is_new: bool) -> bool:
        """True when called in, False at `until`. Leaves no place behind, also when cancelled.

        Overloaded at once if it `is_new` and the room is full. Whoever was let in before is always let in.
        """
        if is_new and len(self._places) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._places)} requests wait for a replica; the limit is {self._max_waiting}; try later",
                retry_after_s=RETRY_AFTER_S,
            )
        place, started = _Place(arrival), self._clock()
        insort(self._places, place, key=lambda one: one.arrival)
        self.look()
        try:
            await asyncio.wait([place.called], timeout=max(0.0, until - started))
            return place.called.done()
        finally:
            if self._calling is place:
                self._calling = None
            else:
                self._places.remove(place)
            self._waited(self._clock() - started)
            self.look()

    def pause(self, seconds: float) -> None:
        """Calls nobody in for so long, or until something gets free: every replica was asked and took nothing."""
        if self._pause is not None:
            self._pause.cancel()
        seconds = min(max(seconds, MIN_PAUSE_S), MAX_PAUSE_S)
        self._pause = asyncio.get_running_loop().call_later(seconds, self.freed)

    def freed(self) -> None:
        """A request has ended at a replica, or other replicas are routable."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self.look()

    def look(self) -> None:
        """Calls in who stands first, if there is room; after what runs now, so that whoever was called has begun."""
        if self._places and not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._call_in)

    async def follow(self, changed: Callable[[], Awaitable[object]]) -> None:
        """Heeds every change of the fleet. Until cancelled."""
        while True:
            await changed()
            self.freed()

    def _call_in(self) -> None:
        self._is_looking = False
        if self._places and self._calling is None and self._pause is None and self._num_free() > 0:
            self._calling = self._places.pop(0)
            self._calling.called.set_result(None)
