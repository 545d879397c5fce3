import logging
from collections.abc import Iterator

import pytest

from ostrya.service.logs import JsonFormatter
from tests.fakes.router import FakeRouter


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with FakeRouter() as fake:
        yield fake


@pytest.fixture(autouse=True)
def no_stale_logs() -> Iterator[None]:
    """A command run in process sends all logs to a stderr that is gone after it; a later record would fail there."""
    _drop_ours()
    yield
    _drop_ours()


def _drop_ours() -> None:
    root = logging.getLogger()
    root.handlers[:] = [one for one in root.handlers if not isinstance(one.formatter, JsonFormatter)]
