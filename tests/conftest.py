"""For every test: it ends, leaves nothing behind, and shares a process with those that share a fixture with it."""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tests.leaks"]

# torch's threads wait for each other by spinning. Beside other tests that takes the very processor that they wait for:
# an engine with two threads needs 3.5 times the CPU. Read when torch is loaded, here and in every process of a test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).parents[1]
_BY_ITSELF = "test_a_tpu_image_installs"
"""Gigabytes each, and nothing of it shared."""
# Long: they go first, so that no process is left with one of them at the end. Discovery's wait for leases.
_FIRST = (
    *("tests/integration/rollout", "tests/unit/router/test_discovery", "tests/integration"),
    *("tests/numerics", "tests/unit/capacity"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((n for n, name in enumerate(_FIRST) if item.nodeid.startswith(name)), len(_FIRST)))


_LIMIT_S = 300
"""Several times what the longest takes on a busy machine; whatever waits so long waits for ever."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _limited(item.obj)


def _limited(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The test; if it hangs it fails, and the traceback ends where it waited."""

    @wraps(test)
    async def limited(*fixtures: object, **named: object) -> None:
        async with asyncio.timeout(_LIMIT_S):
            await test(*fixtures, **named)

    return limited


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> "ByFile":
    return ByFile(config, log)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist tells no types
    """The tests of a file run in one process, and all files that ask the session's one stack in the same."""

    def _split_scope(self, nodeid: str) -> str:
        name, _, test = nodeid.partition("::")
        if test.startswith(_BY_ITSELF):
            return nodeid
        return "stack" if "stack: RunningStack" in (ROOT / name).read_text() else name
