"""The requests a worker has open, and whether it takes new ones: what a drain waits for. No gRPC, no engine.

ready ──cordon──▶ cordoned ◀──empty or time is up── draining
  ▲                 │  └──────────drain────────────▶   │
  └────uncordon─────┴─────────────uncordon─────────────┘      end(): draining for good, from any of them
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from ostrya.engine.types import RequestId
from ostrya.errors import Unavailable

RETRY_ELSEWHERE_S = 0.1
"""Another replica may be free at once; this one does not come back soon."""


class Running:
    """Open requests by id."""

    def __init__(self) -> None:
        self._open: set[RequestId] = set()
        self._is_cordoned = self._is_ending = False
        self._num_drains = 0
        self._changed = asyncio.Event()

    @property
    def state(self) -> Literal["ready", "cordoned", "draining"]:
        """Ready takes new requests, the others refuse them."""
        if not self._is_cordoned:
            return "ready"
        return "draining" if self._is_ending or self._num_drains else "cordoned"

    @contextmanager
    def hold(self, request_id: RequestId) -> Iterator[None]:
        """Counts a request as open. Unavailable while new ones are refused."""
        if self._is_cordoned:
            raise draining()
        self._open.add(request_id)
        try:
            yield
        finally:
            self._open.discard(request_id)
            self._changed.set()

    def cordon(self) -> None:
        """Refuses new requests; open ones go on."""
        self._is_cordoned = True

    def uncordon(self) -> None:
        """Takes new requests again; a drain that waits ends there. Unavailable once the process is ending."""
        if self._is_ending:
            raise Unavailable("this worker is ending; another takes its place", retry_after_s=RETRY_ELSEWHERE_S)
        self._is_cordoned = False
        self._changed.set()

    def end(self) -> None:
        """Cordons for good."""
        self._is_cordoned = self._is_ending = True

    @contextmanager
    def drain(self) -> Iterator[None]:
        """Cordons; inside, the state is draining. Wait there with `empty`."""
        self._is_cordoned = True
        self._num_drains += 1
        try:
            yield
        finally:
            self._num_drains -= 1

    async def empty(self, timeout_s: float, cancel: Callable[[RequestId], None]) -> int:
        """Waits for the open requests and cancels what is left at the timeout. How many those were.

        Unavailable if an uncordon comes first, also before this call; nothing is cancelled then. A cancel of this call
        cancels nothing else.
        """
        self._check_not_called_off()
        try:
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._changed.clear()
                    await self._changed.wait()
                    self._check_not_called_off()
        except TimeoutError:
            self._check_not_called_off()
            late = list(self._open)
            for request_id in late:
                cancel(request_id)
            return len(late)
        return 0

    def _check_not_called_off(self) -> None:
        if not self._is_cordoned:
            raise Unavailable(f"the drain was called off by an uncordon; requests running here: {len(self._open)}")


def draining() -> Unavailable:
    """What a request is told that a draining or cordoned worker will not serve."""
    return Unavailable("this worker is draining; send the request to another", retry_after_s=RETRY_ELSEWHERE_S)
