"""How fast connections begin. Each is most of a millisecond of the event loop, and anybody who writes to Redis can make
a thousand due at once; requests must not wait for them all."""

import asyncio

BETWEEN_S = 0.002
"""At most five hundred a second; a large fleet's turn comes within two."""


class Pace:
    """For one kind of connection and one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Lock()

    async def turn(self) -> None:
        """Returns when the caller may begin: one at a time, in order of arrival. A cancel leaves the queue."""
        async with self._next:
            await asyncio.sleep(BETWEEN_S)
