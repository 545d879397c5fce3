"""Fails the test that leaves something behind: an asyncio task, a thread, a process or a socket.

A pytest plugin, loaded for every test by tests/conftest.py. What a fixture of a wider scope starts may live as long as
that fixture, and must be gone with it. What ends by itself a moment later is waited for. A clean test pays well under
a millisecond; who waits or looks closer is on the way to a failure.
"""

import asyncio
import gc
import inspect
import os
import resource
import threading
import time
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

GRACE_S = 10.0
"""For what ends on its own after a test: a closed connection, a thread told to stop, the engine of a killed worker.
Most take milliseconds; on a busy machine a process takes seconds."""
_POLL_S = 0.02
_RUN = "PYTEST_RUN"
"""In the environment of every process that a test starts: so the orphans of killed processes are found too."""


@dataclass(frozen=True, slots=True)
class Alive:
    """What this process and those it started hold at one moment."""

    threads: frozenset[threading.Thread] = frozenset()
    processes: frozenset[int] = frozenset()
    sockets: frozenset[str] = frozenset()

    def __sub__(self, other: "Alive") -> "Alive":
        return Alive(self.threads - other.threads, self.processes - other.processes, self.sockets - other.sockets)

    def __or__(self, other: "Alive") -> "Alive":
        return Alive(self.threads | other.threads, self.processes | other.processes, self.sockets | other.sockets)

    def __and__(self, other: "Alive") -> "Alive":
        return Alive(self.threads & other.threads, self.processes & other.processes, self.sockets & other.sockets)

    def __bool__(self) -> bool:
        return bool(self.threads or self.processes or self.sockets)

    def __str__(self) -> str:
        return "; ".join(
            [
                *(f"thread {one.name}" for one in self.threads),
                *(f"process {_command(one)}" for one in self.processes),
                *(f"socket {_address(one)}" for one in self.sockets),
            ]
        )


def alive() -> Alive:
    """Right now."""
    return Alive(threads=frozenset(threading.enumerate()), processes=_processes() | _ORPHANS.now(), sockets=_sockets())


_BEFORE = pytest.StashKey[Alive]()


class Ledger:
    """What may stay, and what should not have."""

    def __init__(self) -> None:
        self.kept: dict[object, Alive] = {}
        """By the fixture of a wider scope that started it."""
        self.abandoned: list[str] = []
        """Tasks of event loops that were closed over them, in any thread."""

    def left(self, before: Alive) -> Alive:
        """What is neither from before nor kept, once what ends by itself has ended."""
        found = alive() - before
        for kept in self.kept.values():
            found -= kept
        if not found:
            return found
        gc.collect()
        deadline = time.monotonic() + GRACE_S
        while found and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found &= alive()
            if found.threads:
                gc.collect()  # a thread holds what it ran, and so the pool that it waits for, until it runs again
        return found


_LEDGER = Ledger()


def replaces(old: int, new: int) -> None:
    """Process `new` came for `old`: if that belonged to a fixture of a wider scope, so does this."""
    for fixture, kept in _LEDGER.kept.items():
        if old in kept.processes:
            _LEDGER.kept[fixture] = kept | Alive(processes=frozenset({new}))


def pytest_configure(config: pytest.Config) -> None:
    os.environ[_RUN] = str(os.getpid())
    # gRPC serves all asyncio channels and servers of a process from one thread with one pair of sockets, which stay.
    grpc.aio.init_grpc_aio()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """What a fixture wider than a test starts is kept until the fixture's end, and is to be gone after it."""
    if fixturedef.scope == "function":
        return (yield)
    before = alive()

    def check() -> None:
        started = _LEDGER.kept.pop(fixturedef, Alive())
        if left := _LEDGER.left(alive() - started):
            pytest.fail(f"fixture {fixturedef.argname} left behind: {left}", pytrace=False)

    fixturedef.addfinalizer(check)  # the first to be added runs last
    try:
        return (yield)
    finally:
        _LEDGER.kept[fixturedef] = alive() - before


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Before any fixture of the test."""
    item.stash[_BEFORE] = alive()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """After all fixtures of the test, and after those of wider scopes that end with it."""
    result = yield
    before = item.stash.get(_BEFORE, None)
    left = _LEDGER.left(before) if before is not None else Alive()
    tasks, _LEDGER.abandoned = _LEDGER.abandoned, []
    if left or tasks:
        pytest.fail(f"left behind: {'; '.join(filter(None, (*tasks, str(left))))}", pytrace=False)
    return result


@pytest.fixture(autouse=True)
def tasks_end(request: pytest.FixtureRequest) -> None:
    """An asynchronous test has `no_task_is_left_behind` before all its other fixtures."""
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("no_task_is_left_behind")


@pytest.fixture
async def no_task_is_left_behind() -> AsyncIterator[None]:
    """The first fixture in the test's event loop: the others, and what they started, end before it."""
    before = asyncio.all_tasks()
    yield
    mine = asyncio.current_task()
    deadline = time.monotonic() + GRACE_S
    while left := asyncio.all_tasks() - before - {mine}:
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(map(_task, left))}", pytrace=False)
        await asyncio.sleep(_POLL_S)


_close = asyncio.BaseEventLoop.close


def _closing(loop: asyncio.BaseEventLoop) -> None:
    if not loop.is_closed():
        _LEDGER.abandoned.extend(map(_task, asyncio.all_tasks(loop)))
    _close(loop)


asyncio.BaseEventLoop.close = _closing  # type: ignore[method-assign, assignment]


def _task(task: "asyncio.Task[object]") -> str:
    return f"task {getattr(task.get_coro(), '__qualname__', task.get_coro())}"


def _processes() -> frozenset[int]:
    """Children, also those that have ended and were not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()
    found = set[int]()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it ends meanwhile, and hands its children on
            found.update(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
    return frozenset(found)


class _Orphans:
    """Processes of ours whose parent is gone, as a killed worker leaves its engine. Looked for when a child ended."""

    def __init__(self) -> None:
        self._seen: frozenset[int] = frozenset()
        self._ended = 0

    def now(self) -> frozenset[int]:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
        if ended != self._ended or self._seen:
            self._seen, self._ended = self._look(), ended
        return self._seen

    @staticmethod
    def _look() -> frozenset[int]:
        mark, ours = f"{_RUN}={os.getpid()}".encode(), set[int]()
        for process in filter(str.isdigit, os.listdir("/proc")):
            # One that ends meanwhile, or that is another user's.
            with suppress(OSError):
                if mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                    ours.add(int(process))
        return frozenset(one for one in ours if _parent(one) not in {*ours, os.getpid()})


_ORPHANS = _Orphans()


def _parent(process: int) -> int:
    """Of one that has ended it is this process, which makes it no orphan."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return os.getpid()


def _sockets() -> frozenset[str]:
    """By inode."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
        if target.startswith("socket:"):
            found.add(target)
    return frozenset(found)


def _command(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return str(process)
    return f"{process} {words.strip()[:200] or 'that ended and was not waited for'}"


def _address(link: str) -> str:
    """What an inode is connected to, if it is TCP."""
    inode = link.removeprefix("socket:[").removesuffix("]")
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            columns = row.split()
            if columns[9] == inode:
                ports = [int(columns[where].rpartition(":")[2], 16) for where in (1, 2)]
                return f"of port {ports[0]} to {ports[1] or 'nobody: it listens'}"
    return "that is no TCP"
