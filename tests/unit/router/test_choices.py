"""n streams as one: everything comes, in each stream's order, and no stream outlives the merge."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from ostrya.errors import Unavailable
from ostrya.router.choices import merged


class Source:
    """A stream that waits at a gate before each item."""

    def __init__(self, *items: str, error: Exception | None = None) -> None:
        self._items, self._error = items, error
        self.gate = asyncio.Semaphore(0)
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[str, None]:
        try:
            for item in self._items:
                await self.gate.acquire()
                yield item
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


@pytest.mark.parametrize("number", [1, 3])
async def test_everything_comes_in_each_streams_own_order(number: int) -> None:
    sources = [Source(*(f"{name}{at}" for at in range(4))) for name in "abc"[:number]]
    for source in sources:
        for _ in range(4):
            source.gate.release()
    items = [item async for item in merged([source.stream() for source in sources])]
    assert sorted(items) == sorted(f"{name}{at}" for name in "abc"[:number] for at in range(4))
    for name in "abc"[:number]:
        own = [item for item in items if item.startswith(name)]
        assert own == sorted(own)


async def test_one_stream_waits_for_no_other() -> None:
    slow, quick = Source("a"), Source("b", "c")
    async with aclosing(merged([slow.stream(), quick.stream()])) as items:
        quick.gate.release()
        assert await anext(items) == "b"
        quick.gate.release()
        assert await anext(items) == "c"
        slow.gate.release()
        assert await anext(items) == "a"


@pytest.mark.parametrize("number", [1, 2])
async def test_a_failure_ends_all_and_is_told(number: int) -> None:
    bad, other = Source(error=Unavailable("gone")), Source("never")
    with pytest.raises(Unavailable, match="gone"):
        async for _ in merged([bad.stream(), other.stream()][:number]):
            pass
    assert bad.is_closed
    assert other.is_closed or number == 1


async def test_a_reader_that_leaves_closes_all() -> None:
    sources = [Source("a", "b"), Source("c", "d")]
    async with aclosing(merged([source.stream() for source in sources])) as items:
        sources[0].gate.release()
        assert await anext(items) == "a"
    assert all(source.is_closed for source in sources)


async def test_a_cancelled_reader_closes_all() -> None:
    sources = [Source("a"), Source("b")]
    items = merged([source.stream() for source in sources])
    reader = asyncio.ensure_future(anext(items))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await items.aclose()
    assert all(source.is_closed for source in sources)
