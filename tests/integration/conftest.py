"""One real stack for all tests of a session that only ask questions of it; who breaks things starts its own."""

from collections.abc import Iterator

import pytest

from tests.integration.stack import RunningStack, start_stack


@pytest.fixture(scope="session")
def stack() -> Iterator[RunningStack]:
    running = start_stack()
    yield running
    running.close()
