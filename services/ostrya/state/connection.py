"""Redis with short deadlines and no retries of its own: whoever calls knows what a failure means and when to try again.

Commands are those of Redis 7.0, so Redis, Valkey and managed services all serve. Every failure is a StateUnavailable.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import cast

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from ostrya.errors import StateUnavailable

Command = tuple[str | int | bytes, ...]

_CONNECT_TIMEOUT_S = 0.5
_TIMEOUT_S = 1.0
"""For a call and its reply; above any BLOCK that is asked for."""


@functools.cache
def script(name: str) -> str:
    """The text of `name`.lua; a worker's scripts have the fence before them."""
    folder = resources.files("ostrya.state")
    body = (folder / f"{name}.lua").read_text()
    return body if name == "forget" else (folder / "fence.lua").read_text() + body


class Connection:
    """One client with its own pool. Close it. A cancelled call leaves no reply behind for the next one."""

    def __init__(self, url: str) -> None:
        self._redis = aioredis.Redis.from_url(
            url,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            # The deadline is ours: the client's own uses asyncio.wait_for, which in Python 3.11 can swallow a cancel.
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    async def call(self, *command: str | int | bytes) -> object:
        """One command's reply."""
        async with _in_time():
            reply: object = await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        return reply

    async def all(self, commands: Sequence[Command]) -> list[object]:
        """The replies to several commands in one round trip; not a transaction."""
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        async with _in_time():
            replies: list[object] = await pipeline.execute()
        return replies

    async def run(self, name: str, keys: Sequence[str], arguments: Sequence[str | int | bytes]) -> object:
        """A script's reply. It is sent whole when the server does not know it, as after a restart."""
        loaded = self._redis.register_script(script(name))
        async with _in_time():
            try:
                reply: object = await self._redis.evalsha(loaded.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                reply = await self._redis.eval(script(name), len(keys), *keys, *arguments)
        return reply

    async def rows(self, key: str) -> dict[str, bytes]:
        """A hash, whole."""
        reply = cast("dict[bytes, bytes]", await self.call("HGETALL", key))
        return {field.decode(): value for field, value in reply.items()}

    async def close(self) -> None:
        """Closes every connection of the pool."""
        await self._redis.aclose()


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            yield
    except (RedisError, OSError, TimeoutError) as error:
        raise StateUnavailable(f"Redis: {type(error).__name__}: {error}") from error
