"""An engine that outlives its processes: one that dies or hangs is ended and started again, in place. Used by app.py.

The worker stays: its port, its pod and the model's files in the page cache. What the old process held is gone, which
`lost` tells the worker before anything else happens. An engine that keeps ending is broken; then the worker gives up
and its supervisor takes over.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Literal, Protocol

from ostrya.engine.process import START_LIMIT_S, EngineProcess
from ostrya.engine.types import EngineInfo, EngineRequest, Load, RequestId, SequenceOutput, StepReport
from ostrya.errors import ModelLoadError, OstryaError
from ostrya.worker.pulse import LOOK_S, Pulse
from ostrya.worker.starvation import Starvation

log = logging.getLogger(__name__)

Cause = Literal["died", "hung"]
CAUSES: tuple[Cause, ...] = ("died", "hung")

MAX_RESTARTS = 3
"""Within RESTARTS_S; one more and the worker exits."""
RESTARTS_S = 600.0
_PAUSES_S = (0.0, 1.0, 5.0)
"""Before each of them: the first costs nothing, the later ones give a device or a full machine a moment."""
_MIN_START_S = 120.0
_START_RATIO = 4.0
"""A restart may take so much longer than the first start did; it has the files and the compiled programs at hand."""


class Restarts:
    """How often the engine may be started again."""

    def __init__(self) -> None:
        self._at: deque[float] = deque()

    def pause_s(self, now: float) -> float | None:
        """One more, at `now`: how long to wait before it. None: it was one too many."""
        while self._at and now - self._at[0] > RESTARTS_S:
            self._at.popleft()
        if len(self._at) >= MAX_RESTARTS:
            return None
        self._at.append(now)
        return _PAUSES_S[len(self._at) - 1]


class Start(Protocol):
    """Starts an engine process; ModelLoadError or OSError."""

    def __call__(self, *, timeout_s: float) -> Awaitable[EngineProcess]: ...


class LastingEngine:
    """Looks like the engine process that is there now. `run` in a task; `close` when that has ended."""

    def __init__(
        self,
        first: EngineProcess,
        *,
        start: Start,
        lost: Callable[[Cause], Awaitable[None]],
        back: Callable[[EngineInfo], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first` is warm. `lost` is awaited as soon as a process is given up, `back` when another one is warm."""
        self._process = first
        self._start, self._lost, self._back, self._clock = start, lost, back, clock
        self._listeners: list[Callable[[StepReport], None]] = []
        self._restarts = Restarts()
        self._start_limit_s = _start_limit_s(first.info)
        self._is_up = True
        self._attach(first)

    @property
    def info(self) -> EngineInfo:
        return self._process.info

    @property
    def pid(self) -> int:
        """Of the process that is there now, or of the last that was."""
        return self._process.pid

    @property
    def load(self) -> Load:
        """Nothing while no process is there."""
        return self._process.load if self._is_up else Load()

    @property
    def report_age_s(self) -> float:
        """Since the engine last spoke; 0 while no process is there."""
        return self._pulse.age_s if self._is_up else 0.0

    def listen(self, listener: Callable[[StepReport], None]) -> None:
        """As EngineProcess.listen, for every process."""
        self._listeners.append(listener)
        self._process.listen(listener)

    def submit(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        """As EngineProcess.submit; EngineDied while no process is there."""
        return self._process.submit(request)

    def abort(self, request_id: RequestId, error: OstryaError | None = None) -> None:
        """As EngineProcess.abort."""
        self._process.abort(request_id, error)

    async def run(self) -> str:
        """Watches and restarts until it gives up; says why. A cancel leaves the process as it is."""
        while True:
            cause, why = await self._until_lost()
            began, self._is_up = self._clock(), False
            fields = {"cause": cause, "reason": why, "pid": self._process.pid}
            log.error("the engine is lost; its requests go elsewhere", extra={"fields": fields})
            await self._lost(cause)
            why = await asyncio.shield(self._process.dead)  # a cancel of ours would cancel the future itself
            if not self._process.is_gone:
                return f"{why}; its device and memory are not free for another"
            process = await self._started_again(why)
            if isinstance(process, str):
                return process
            self._attach(process)
            self._is_up = True
            log.info("the engine serves again", extra={"fields": {"seconds": round(self._clock() - began, 1)}})
            await self._back(process.info)

    async def close(self) -> None:
        """Ends the process that is there."""
        await self._process.close()

    async def _until_lost(self) -> tuple[Cause, str]:
        process, pulse, starvation = self._process, self._pulse, Starvation(self._process.pid)
        while not process.dead.done():
            await asyncio.wait({process.dead}, timeout=LOOK_S)
            pulse.look(waited_s=starvation.waited_s() if pulse.is_quiet else 0.0)
            if pulse.hang and not process.dead.done():
                why = pulse.hang
                process.kill(why)
                return "hung", why
        return "died", process.dead.result()

    async def _started_again(self, why: str) -> EngineProcess | str:
        """The next process, or why there is none."""
        while (pause_s := self._restarts.pause_s(self._clock())) is not None:
            await asyncio.sleep(pause_s)
            try:
                return await self._start(timeout_s=self._start_limit_s)
            except (ModelLoadError, OSError) as error:
                why = str(error)
                log.error("the engine does not start again", extra={"fields": {"reason": why}})
        return f"{MAX_RESTARTS + 1} ends of the engine within {RESTARTS_S / 60:.0f} min, the last: {why}"

    def _attach(self, process: EngineProcess) -> None:
        self._process, self._pulse = process, Pulse(self._clock)
        process.listen(self._pulse.beat)
        for listener in self._listeners:
            process.listen(listener)


def _start_limit_s(info: EngineInfo) -> float:
    return min(START_LIMIT_S, max(_MIN_START_S, _START_RATIO * (info.load_s + info.warmup_s)))
