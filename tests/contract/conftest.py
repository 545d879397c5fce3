"""A real Redis and a real Valkey, each test against both."""

from collections.abc import Iterator
from typing import cast

import pytest

from tests.fakes.redis_server import KINDS, Kind, RunningRedis, start_redis


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[RunningRedis]:
    """An empty server of this kind; stopped afterwards."""
    running = start_redis(cast("Kind", request.param))
    yield running
    running.stop()
