"""The requests a worker has open, and whether it takes new ones: what a drain waits for. No gRPC, no engine."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ostrya.engine.types import RequestId
from ostrya.errors import Unavailable

RETRY_ELSEWHERE_S = 0.1
"""Another replica may be free at once; this one does not come back."""


class Running:
    """Open requests by id."""

    def __init__(self) -> None:
        self.is_draining = False
        self._open: set[RequestId] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def hold(self, request_id: RequestId) -> Iterator[None]:
        """Counts a request as open. Unavailable while draining."""
        if self.is_draining:
            raise draining()
        self._open.add(request_id)
        self._empty.clear()
        try:
            yield
        finally:
            self._open.discard(request_id)
            if not self._open:
                self._empty.set()

    async def drain(self, timeout_s: float, cancel: Callable[[RequestId], None]) -> int:
        """Refuses new requests, waits for the open ones, and cancels what is left at the timeout. How many those were.

        A cancel of this call leaves the worker draining.
        """
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            late = list(self._open)
            for request_id in late:
                cancel(request_id)
            return len(late)
        return 0


def draining() -> Unavailable:
    """What a request is told that a draining worker will not serve."""
    return Unavailable("this worker is draining; send the request to another", retry_after_s=RETRY_ELSEWHERE_S)
