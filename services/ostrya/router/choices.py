"""n answers to one prompt: their messages as they come. Called by servicer.py."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What any of them yields next, until all have ended; what one raises ends all. At its own end they are closed."""
    if len(streams) == 1:
        try:
            async for item in streams[0]:
                yield item
        finally:
            await streams[0].aclose()
        return
    reads = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                stream = reads.pop(read)
                try:
                    item = read.result()
                except StopAsyncIteration:
                    continue
                reads[asyncio.ensure_future(anext(stream))] = stream
                yield item
    finally:
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
