from collections.abc import Iterator

import pytest

from tests.fakes.router import FakeRouter


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with FakeRouter() as fake:
        yield fake
