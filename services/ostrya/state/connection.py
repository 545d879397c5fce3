"""Redis with short deadlines and no retries of its own: whoever calls knows what a failure means and when to try again.

Commands are those of Redis 7.0, so Redis, Valkey and managed services all serve. Every failure is a StateUnavailable,
and ends the connections it may have come from: the next call resolves the name again, and finds who is master by then.
But for a key that holds something else than the command is for: that is Unreadable.
"""

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from importlib import resources
from itertools import islice

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from ostrya.errors import StateUnavailable, Unreadable

Command = tuple[str | int | bytes, ...]

_CONNECT_TIMEOUT_S = 0.5
_TIMEOUT_S = 1.0
"""For a call and its reply; above any BLOCK that is asked for."""
_AT_ONCE = 64
"""Commands in one round trip: packing and parsing them takes a millisecond of the event loop."""
_NOT_OURS = ("WRONGTYPE", "The ID specified in XADD", "The stream has exhausted the last possible ID")
"""Redis' words for what somebody else has put under a key."""
_PLAIN = ("forget", "put", "rows")
"""Scripts that are not a worker's own."""


class Refusal(StrEnum):
    """What a Redis that answers has against it."""

    READONLY = "readonly"
    """It is a replica, since a failover perhaps."""
    OOM = "oom"
    """Its memory is full, and it may not evict."""
    LOADING = "loading"
    MASTERDOWN = "masterdown"
    """It is a replica without its master, and may not serve stale data."""
    NOREPLICAS = "noreplicas"
    """It is a master with too few replicas to accept writes."""
    CLUSTERDOWN = "clusterdown"
    MISCONF = "misconf"
    """It cannot write to its disk."""
    BUSY = "busy"
    """A script of somebody runs on and on."""
    DENIED = "denied"
    """User, password or ACL."""
    OTHER = "other"


# The client takes the code from the text for these, and leaves it there for others.
_BY_CLASS: dict[type[RedisError], Refusal] = {
    ReadOnlyError: Refusal.READONLY,
    OutOfMemoryError: Refusal.OOM,
    BusyLoadingError: Refusal.LOADING,
    MasterDownError: Refusal.MASTERDOWN,
    ClusterDownError: Refusal.CLUSTERDOWN,
    AuthenticationError: Refusal.DENIED,
    NoPermissionError: Refusal.DENIED,
}
_BY_CODE = {refusal.value.upper(): refusal for refusal in Refusal if refusal is not Refusal.OTHER} | {
    "UNBLOCKED": Refusal.READONLY,  # a blocking read, at the moment in which its master becomes a replica
    "UNKILLABLE": Refusal.BUSY,
}
# Not only at the start: what a script met is somewhere in what older servers say of the script.
_CODE = re.compile(rf"\b({'|'.join(_BY_CODE)})\b")


@functools.cache
def script(name: str) -> str:
    """The text of `name`.lua; a worker's scripts have the fence before them."""
    folder = resources.files("ostrya.state")
    body = (folder / f"{name}.lua").read_text()
    return body if name in _PLAIN else (folder / "fence.lua").read_text() + body


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
        async with self._in_time():
            reply: object = await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        return reply

    async def all(self, commands: Iterable[Command]) -> list[object]:
        """The replies to several commands in few round trips; not a transaction. An Unreadable stands in its place."""
        replies: list[object] = []
        waiting = iter(commands)
        while some := list(islice(waiting, _AT_ONCE)):
            pipeline = self._redis.pipeline(transaction=False)
            for command in some:
                pipeline.execute_command(*command)
            async with self._in_time():
                # Its own words for a failure would quote the command, values included.
                for reply in await pipeline.execute(raise_on_error=False):
                    if isinstance(reply, RedisError) and not _is_not_ours(reply):
                        raise reply
                    replies.append(Unreadable(str(reply)) if isinstance(reply, RedisError) else reply)
        return replies

    async def run(self, name: str, keys: Sequence[str], arguments: Sequence[str | int | bytes]) -> object:
        """A script's reply. It is sent whole when the server does not know it, as after a restart."""
        loaded = self._redis.register_script(script(name))
        async with self._in_time():
            try:
                reply: object = await self._redis.evalsha(loaded.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                reply = await self._redis.eval(script(name), len(keys), *keys, *arguments)
        return reply

    async def drop(self) -> None:
        """Ends the connections that nobody uses now, so that the next call resolves the name again."""
        with suppress(RedisError, OSError, TimeoutError):
            await self._redis.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """Closes every connection of the pool."""
        await self._redis.aclose()

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            if _is_not_ours(error):
                raise Unreadable(str(error)) from error
            await self.drop()
            raise StateUnavailable(f"Redis: {type(error).__name__}: {error}", refusal=_refusal(error)) from error


def _refusal(error: Exception) -> str:
    """Empty = it did not answer."""
    for kind, refusal in _BY_CLASS.items():
        if isinstance(error, kind):
            return refusal
    if not isinstance(error, ResponseError):
        return ""
    found = _CODE.search(str(error))
    return _BY_CODE[found[1]] if found else Refusal.OTHER


def _is_not_ours(error: Exception) -> bool:
    """A key of another type, or a stream with ids that no worker makes."""
    return isinstance(error, ResponseError) and any(words in str(error) for words in _NOT_OURS)
