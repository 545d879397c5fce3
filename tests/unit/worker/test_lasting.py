"""An engine that outlives its processes: what is told in which order, how often it tries, and when it gives up."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ostrya.engine.process import EngineProcess
from ostrya.engine.types import EngineInfo, Load, StepReport
from ostrya.errors import ModelLoadError
from ostrya.worker import lasting
from ostrya.worker.lasting import MAX_RESTARTS, RESTARTS_S, Cause, LastingEngine, Restarts
from ostrya.worker.starvation import Starvation
from tests.fakes import engine_info

INFO = replace(engine_info.INFO, load_s=100.0, warmup_s=200.0)


class Process:
    """Stands for an EngineProcess: beats when told, dies when told."""

    def __init__(self) -> None:
        self.info, self.load, self.pid = INFO, Load(num_running=1), os.getpid()
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_gone = True
        self.killed = ""
        self.listeners: list[Callable[[StepReport], None]] = []

    def listen(self, listener: Callable[[StepReport], None]) -> None:
        self.listeners.append(listener)

    def kill(self, why: str) -> None:
        self.killed = why
        if self.is_gone:
            self.dead.set_result(f"{why} (signal 9)")


class Worker:
    """What happens to a worker, in order; `ends` fail to start."""

    def __init__(self, *, failing: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.events: list[str] = []
        self.limits_s: list[float] = []
        self.processes = [Process()]
        self.reports: list[StepReport] = []
        self._failing = failing
        self.engine = LastingEngine(
            cast("EngineProcess", self.processes[0]), start=self._start, lost=self._lost, back=self._back, clock=clock
        )
        self.engine.listen(self.reports.append)

    async def _start(self, *, timeout_s: float) -> EngineProcess:
        self.limits_s.append(timeout_s)
        self.events.append("start")
        if self._failing:
            self._failing -= 1
            raise ModelLoadError("no memory")
        self.processes.append(Process())
        return cast("EngineProcess", self.processes[-1])

    async def _lost(self, cause: Cause) -> None:
        assert self.engine.load == Load()
        assert self.engine.report_age_s == 0
        self.events.append(f"lost: {cause}")

    async def _back(self, info: EngineInfo) -> None:
        assert info is INFO
        self.events.append("back")


async def happens(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - many small steps of other tasks
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "_PAUSES_S", (0.0,) * MAX_RESTARTS)


async def ended(running: Awaitable[str]) -> str:
    async with asyncio.timeout(10):
        return await running


async def test_the_worker_is_told_before_another_process_starts_and_listeners_follow() -> None:
    worker = Worker()
    running = asyncio.create_task(worker.engine.run())
    worker.processes[0].dead.set_result("engine process ended (signal 9)")
    await happens(lambda: "back" in worker.events)
    assert worker.events == ["lost: died", "start", "back"]
    assert worker.limits_s == [4 * 300.0]  # of the first start's time
    for listener in worker.processes[1].listeners:
        listener(StepReport())
    assert len(worker.reports) == 1
    assert worker.engine.load == Load(num_running=1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_engine_that_hangs_is_killed_and_replaced() -> None:
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 1.0  # each look sees its two intervals pass
        return now_s[0]

    worker = Worker(clock=clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lasting, "LOOK_S", 0.0)
        running = asyncio.create_task(worker.engine.run())
        await happens(lambda: worker.events[:3] == ["lost: hung", "start", "back"])
    assert "silent for 5" in worker.processes[0].killed
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_cancel_while_a_killed_process_ends_leaves_it_to_say_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "LOOK_S", 0.0)
    worker = Worker(clock=iter(range(10**6)).__next__)
    (process,) = worker.processes
    process.is_gone = False
    running = asyncio.create_task(worker.engine.run())
    await happens(lambda: worker.events == ["lost: hung"])
    running.cancel()
    await asyncio.wait({running})
    assert not process.dead.done()


async def test_an_engine_that_does_not_start_again_is_tried_some_times_and_given_up_in_words() -> None:
    worker = Worker(failing=100)
    worker.processes[0].dead.set_result("engine process ended (signal 9)")
    assert await ended(worker.engine.run()) == "4 ends of the engine within 10 min, the last: no memory"
    assert worker.events == ["lost: died", *["start"] * MAX_RESTARTS]


async def test_a_process_that_no_signal_ends_gets_no_successor() -> None:
    worker = Worker()
    worker.processes[0].is_gone = False
    worker.processes[0].dead.set_result("engine process ended (still there 10 s after SIGKILL)")
    assert "still there 10 s after SIGKILL); its device and memory are not free" in await ended(worker.engine.run())
    assert worker.events == ["lost: died"]


@settings(deadline=None)
@given(st.lists(st.floats(0, 2 * RESTARTS_S), max_size=40))
def test_no_more_restarts_than_allowed_in_any_window(gaps_s: list[float]) -> None:
    restarts, now, granted = Restarts(), 0.0, list[float]()
    for gap_s in gaps_s:
        now += gap_s
        if restarts.pause_s(now) is not None:
            granted.append(now)
            assert sum(now - at <= RESTARTS_S for at in granted) <= MAX_RESTARTS
        else:
            assert sum(now - at <= RESTARTS_S for at in granted) == MAX_RESTARTS


@contextmanager
def spinning(number: int) -> Iterator[list[int]]:
    """Processes that compute, all on one CPU."""
    pinned = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(flush=True)\nwhile True: pass"
    made = [subprocess.Popen([sys.executable, "-c", pinned], stdout=subprocess.PIPE) for _ in range(number)]
    try:
        for one in made:
            assert one.stdout is not None
            one.stdout.readline()
        yield [one.pid for one in made]
    finally:
        for one in made:
            one.kill()
            one.communicate()


def test_a_process_that_waits_for_a_cpu_is_known_and_a_stopped_or_vanished_one_waits_for_none() -> None:
    with spinning(2) as (pid, _):
        starvation = Starvation(pid)
        assert starvation.waited_s() == 0
        began, waited_s = time.monotonic(), 0.0
        while time.monotonic() - began < 0.5:
            waited_s += starvation.waited_s()
        assert waited_s > 0.1
        os.kill(pid, signal.SIGSTOP)
        while " T " not in Path(f"/proc/{pid}/stat").read_text():
            pass
        starvation.waited_s()
        began = time.monotonic()
        while time.monotonic() - began < 0.1:
            pass
        assert starvation.waited_s() == 0
    assert Starvation(pid).waited_s() == 0
