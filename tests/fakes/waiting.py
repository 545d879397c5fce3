"""Waiting for what other tasks or processes bring about: looks again until it holds or a deadline passes."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], *, timeout_s: float = 5.0) -> float:
    """Seconds until `condition()` held. AssertionError after `timeout_s`."""
    start = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start
        assert waited_s < timeout_s, f"did not hold within {timeout_s} s"
        await asyncio.sleep(0.005)
    return time.monotonic() - start
