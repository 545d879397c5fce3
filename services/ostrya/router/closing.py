"""The end of a drain for requests that are still open: UNAVAILABLE in our words, where gRPC would only cancel them.

The servicer enters each request, app.py says when the time is over.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ostrya.errors import Unavailable


class Closing:
    """For one event loop."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether the time of the drain is."""
        self._open: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Around a request; its block, and what it awaits, ends with Unavailable when the drain does."""
        limit = asyncio.timeout(0 if self.is_over else None)
        try:
            async with limit:
                self._open.add(limit)
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise Unavailable("this router has shut down before the answer was complete; ask again") from error
        finally:
            self._open.discard(limit)

    def end(self) -> None:
        """Ends every open request."""
        self.is_over = True
        now = asyncio.get_running_loop().time()
        for limit in self._open:
            if not limit.expired():
                limit.reschedule(now)
