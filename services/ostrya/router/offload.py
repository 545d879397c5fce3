"""Where work of a request's size runs. The event loop carries every stream, so only what is small runs there.

What is middling has some threads; what is large has a few of its own, so that giants wait for each other and for
nobody else, and memory is bounded by their number. The loop's own threads are left alone: in them names are resolved,
and Redis may move while a flood of requests is tokenized. Work given here holds the interpreter lock for a
millisecond at most at a time: loops over slices, or code that releases it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SMALL_BYTES = 16 << 10
"""Half a millisecond of checking, packing or hashing."""

_LARGE_BYTES = 256 << 10
"""Tens of milliseconds of tokenizing."""

_MIDDLING_THREADS = 8
"""They compute, so more would only be more switching; tens of milliseconds each at most."""
_LARGE_THREADS = 2


class Offload:
    """The threads of one router. A cancelled caller's work ends by itself, or never begins."""

    def __init__(self) -> None:
        self._middling = ThreadPoolExecutor(_MIDDLING_THREADS, thread_name_prefix="request")
        self._large = ThreadPoolExecutor(_LARGE_THREADS, thread_name_prefix="large-request")

    async def run(self, work: Callable[[], T], *, num_bytes: int) -> T:
        """What `work` returns or raises; `num_bytes` is the size of what it goes through. At once if that is small."""
        return work() if num_bytes <= SMALL_BYTES else await self.in_thread(work, num_bytes=num_bytes)

    async def in_thread(self, work: Callable[[], T], *, num_bytes: int) -> T:
        """The same, never on the event loop."""
        threads = self._middling if num_bytes <= _LARGE_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """Waits for what runs; what has not begun never will."""
        for threads in (self._middling, self._large):
            threads.shutdown(cancel_futures=True)
