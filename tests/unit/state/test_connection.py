"""Redis refuses in many words: what each means, and that the next call goes to whoever has the name then."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from ostrya.errors import StateUnavailable
from ostrya.state import members
from ostrya.state.connection import Connection, Refusal
from ostrya.state.journal import JournalWriter
from tests.fakes.pool import member
from tests.fakes.redis_server import RunningRedis, start_redis
from tests.fakes.switch import Switch

KEYS = ("{w}:lease", "{w}:meta", "{w}:journal", "{w}:snapshot")


@pytest.fixture(scope="module")
def redis() -> Iterator[RunningRedis]:
    server = start_redis()
    yield server
    server.stop()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    connection = Connection(url)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def refusing(redis: RunningRedis, to_refuse: tuple[str, ...], to_heal: tuple[str, ...]) -> AsyncIterator[None]:
    async with connected(redis.url) as connection:
        await connection.call(*to_refuse)
        try:
            yield
        finally:
            await connection.call(*to_heal)


@pytest.mark.parametrize(
    ("to_refuse", "to_heal", "refusal"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), Refusal.OOM),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), Refusal.READONLY),
        (
            ("CONFIG", "SET", "min-replicas-to-write", "1"),
            ("CONFIG", "SET", "min-replicas-to-write", "0"),
            Refusal.NOREPLICAS,
        ),
    ],
)
async def test_what_a_server_refuses_is_known_by_its_kind_in_commands_and_in_scripts(
    redis: RunningRedis, to_refuse: tuple[str, ...], to_heal: tuple[str, ...], refusal: Refusal
) -> None:
    async with connected(redis.url) as connection:
        writer = JournalWriter(connection, pool="p", worker_id="w")
        async with refusing(redis, to_refuse, to_heal):
            with pytest.raises(StateUnavailable) as alone:
                await connection.call("SET", "k", "v")
            with pytest.raises(StateUnavailable) as among_others:
                await connection.all(members.put("p", member()))
            with pytest.raises(StateUnavailable) as in_a_script:
                await writer.register()
            assert await connection.call("EXISTS", "ostrya:{p/w}:meta") == 0, "a script that is refused leaves nothing"
            assert {one.value.refusal for one in (alone, among_others, in_a_script)} == {refusal}
            assert "tiny" not in str(among_others.value), "what was to be written is nobody's business"
        assert await writer.register()
        await connection.call("FLUSHALL")


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        ("-LOADING Redis is loading the dataset in memory", Refusal.LOADING),
        ("-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", Refusal.MASTERDOWN),
        ("-CLUSTERDOWN Hash slot not served", Refusal.CLUSTERDOWN),
        ("-MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.", Refusal.MISCONF),
        ("-UNBLOCKED force unblock from blocking operation, instance state changed", Refusal.READONLY),
        ("-BUSY Redis is busy running a script.", Refusal.BUSY),
        ("-NOPERM this user has no permissions to run the 'set' command", Refusal.DENIED),
        ("-ERR unknown command", Refusal.OTHER),
        # As servers before 7.0 say it of a script.
        ("-ERR Error running script (call to f_1): @user_script:1: -OOM command not allowed when used", Refusal.OOM),
        ("+OK", ""),
    ],
)
async def test_other_refusals_are_known_too_and_the_connection_is_not_used_again(answer: str, refusal: str) -> None:
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while head := await reader.readline():
            words = [[await reader.readline(), await reader.readline()][1].strip() for _ in range(int(head[1:]))]
            writer.write(f"{answer}\r\n".encode() if words[0] == b"SET" else b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, connected(f"redis://127.0.0.1:{port}/0") as connection:
        assert [await refusal_of(connection), await refusal_of(connection)] == [refusal, refusal]
        assert num_connections == (2 if refusal else 1)


async def refusal_of(connection: Connection) -> str:
    """Of a write; empty = it is done."""
    try:
        await connection.call("SET", "k", "v")
    except StateUnavailable as error:
        return error.refusal
    return ""


async def test_the_call_after_a_refusal_goes_to_whoever_has_the_name_then(redis: RunningRedis) -> None:
    other = start_redis()
    try:
        async with Switch(other.port) as name, connected(name.url) as connection, connected(other.url) as there:
            await there.call("REPLICAOF", "127.0.0.1", redis.port)
            await connection.call("PING")
            name.target = redis.port  # the connection stays where it is
            assert await refusal_of(connection) == Refusal.READONLY
            assert await refusal_of(connection) == ""
            name.target = other.port
            assert await refusal_of(connection) == ""
            await connection.drop()
            assert await refusal_of(connection) == Refusal.READONLY
    finally:
        other.stop()
