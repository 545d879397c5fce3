"""A real Redis and a real Valkey, each test against both."""

from collections.abc import AsyncIterator, Iterator
from typing import cast

import pytest

from ostrya.state.connection import Connection
from ostrya.state.journal import JournalWriter
from tests.fakes.redis_server import KINDS, Kind, RunningRedis, start_redis


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[RunningRedis]:
    """An empty server of this kind; stopped afterwards."""
    running = start_redis(cast("Kind", request.param))
    yield running
    running.stop()


@pytest.fixture
async def connection(server: RunningRedis) -> AsyncIterator[Connection]:
    connection = Connection(server.url)
    yield connection
    await connection.close()


@pytest.fixture
def writer(connection: Connection) -> JournalWriter:
    return JournalWriter(connection, pool="p", worker_id="w0")
