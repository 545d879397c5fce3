"""A worker that is not host 0 of its slice: runs this host's ranks, and starts them again whenever they end, for ever.

They end with host 0, or because of it; whichever it was, a new start dials host 0 and joins when that is there. No
router knows of this process, and it needs no Redis; it has health for probes, and metrics.
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from prometheus_client import CollectorRegistry

from ostrya.engine.config import EngineConfig
from ostrya.engine.local_ranks import COMMAND, Status, first_line
from ostrya.engine.process import KILL_LIMIT_S, factory_name
from ostrya.engine.world import Slice, ranks_per_host
from ostrya.errors import ModelLoadError
from ostrya.service import logs
from ostrya.service.metrics import MetricsEndpoint
from ostrya.service.parts import pause_s
from ostrya.service.server import GrpcServer, stop_signal
from ostrya.worker.families import Families
from ostrya.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

SERVICE = "follower"
"""The health service that says whether this host's ranks follow host 0."""
PHASES = ("dialling", "joined", "loading", "warming", "following")
"""The slowest rank's."""
LOOK_S = 0.25
SILENCE_S = 5.0
"""10 lines of a rank that follows."""
START_SILENCE_S = 60.0
FLUSH_S = 1.0


class FollowerMetrics:
    """What a following host shows, on the registry it is given."""

    def __init__(self, registry: CollectorRegistry, *, model: str) -> None:
        make = Families(registry, model)
        self._phases = make.gauges(
            "follower_phase", "1 for what the slowest rank of a following host does.", "phase", PHASES
        )
        self._steps = make.counter("follower_steps", "Steps that a following host has done.")
        self.restarts = make.counter("follower_restarts", "Starts of a following host's ranks after the first.")
        self._last_step = 0

    def saw(self, phase: str, step: int) -> None:
        for name, gauge in self._phases.items():
            gauge.set(name == phase)
        self._steps.inc(step - self._last_step if step >= self._last_step else step)
        self._last_step = step


class _Rank:
    """One process and the last it said."""

    def __init__(self, process: asyncio.subprocess.Process, clock: Callable[[], float]) -> None:
        self.process = process
        self.status = Status(phase=PHASES[0])
        self._clock = clock
        self._looked_at, self._silent_s = clock(), 0.0

    async def read(self) -> None:
        """Until it ends."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            with contextlib.suppress(msgspec.DecodeError):
                self.status = msgspec.json.decode(line, type=Status)
            self._silent_s = 0.0

    def hangs(self) -> bool:
        """Counts the time since the last look; what takes longer than two looks was our own pause."""
        now = self._clock()
        self._silent_s += min(now - self._looked_at, 2 * LOOK_S)
        self._looked_at = now
        return self._silent_s >= (SILENCE_S if self.status.phase == PHASES[-1] else START_SILENCE_S)

    def how_it_ended(self) -> str:
        code = self.process.returncode or 0
        return self.status.detail or (f"signal {-code}" if code < 0 else f"exit code {code}")


class Following:
    """This host's ranks. `run` in a task, from the process's main thread; a cancel ends them."""

    def __init__(
        self,
        config: EngineConfig,
        slice_: Slice,
        *,
        factory: str,
        saw: Callable[[str, int], None] = lambda phase, step: None,
        restarting: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`saw` is told phase and step after each look, `restarting` of each start but the first."""
        self._config, self._slice, self._factory = config, slice_, factory
        self._saw, self._restarting, self._clock = saw, restarting, clock
        self.phase = ""

    async def run(self, *, stop: asyncio.Event) -> None:
        """Until `stop`, and then until the ranks that follow host 0 have ended with it."""
        num_failed = 0
        self._enter(PHASES[0], 0)
        while not stop.is_set():
            why = await self._once(stop)
            num_failed = 1 if self.phase == PHASES[-1] else num_failed + 1
            if stop.is_set():
                break
            log.warning("the ranks of this host ended; starting them again", extra={"fields": {"reason": why}})
            self._enter(PHASES[0], 0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s(num_failed))
            self._restarting()

    async def _once(self, stop: asyncio.Event) -> str:
        """Starts the ranks; why one ended, after which none is left. ModelLoadError when one cannot be ended."""
        ranks: list[_Rank] = []
        reading: list[asyncio.Task[None]] = []
        try:
            for local_rank in range(ranks_per_host(self._config, self._slice.num_hosts)):
                ranks.append(await self._start(local_rank))
                reading.append(asyncio.create_task(ranks[-1].read()))
            while not any(task.done() for task in reading):
                await asyncio.wait(reading, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                self._look(ranks)
                if any(rank.hangs() for rank in ranks):
                    return "a rank of this host hangs"
                if stop.is_set() and self.phase in ("dialling", "joined"):
                    return "nobody is followed"
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.kill() if not _ends(rank) else None
            await _gone([*(rank.process.wait() for rank in ranks), *reading])
        return next(rank for rank, task in zip(ranks, reading, strict=True) if task.done()).how_it_ended()

    async def _start(self, local_rank: int) -> _Rank:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(first_line(self._config, self._factory, self._slice, local_rank))
        return _Rank(process, self._clock)

    def _look(self, ranks: list[_Rank]) -> None:
        known = [rank.status for rank in ranks if rank.status.phase in PHASES]
        if known:
            slowest = min(known, key=lambda status: (PHASES.index(status.phase), status.step))
            self._enter(slowest.phase, slowest.step)

    def _enter(self, phase: str, step: int) -> None:
        if phase != self.phase:
            self.phase = phase
            host_0 = f"{self._slice.leader}:{self._slice.port}"
            log.info(f"follower: {phase}", extra={"fields": {"host_0": host_0}})
        self._saw(phase, step)


async def _gone(ends: Sequence[Awaitable[object]]) -> None:
    """Waits for what was killed. A device driver can hold a process for ever, and its device with it."""
    try:
        async with asyncio.timeout(KILL_LIMIT_S):
            await asyncio.gather(*ends)
    except TimeoutError as error:
        raise ModelLoadError(f"a rank of this host is still there {KILL_LIMIT_S:.0f} s after SIGKILL") from error


def _ends(rank: _Rank) -> bool:
    """It has said so, and is about to."""
    return rank.status.phase == "ended"


async def follow(settings: WorkerSettings, config: EngineConfig, slice_: Slice, *, factory: str | None = None) -> int:
    """Runs a following host until SIGTERM or SIGINT: then until host 0 is done with it, a drain long at most; one more
    signal ends that too. Exit code 1 when it cannot begin."""
    logs.setup("worker", settings.log_level)
    stop, over = stop_signal(), asyncio.Event()
    registry = CollectorRegistry()
    metrics = FollowerMetrics(registry, model=config.model_name)
    endpoint = MetricsEndpoint(registry, settings.host, settings.metrics_port)
    server = GrpcServer(settings.host, settings.port, max_message_bytes=settings.max_message_bytes, services=[SERVICE])
    try:
        name = factory or factory_name(config)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(endpoint.close)
            metrics_port = endpoint.start()
            port = await server.start()
            stack.push_async_callback(server.stop, FLUSH_S)
            await server.set_alive(True)
            following = Following(config, slice_, factory=name, saw=metrics.saw, restarting=metrics.restarts.inc)
            fields = {
                "host": slice_.named(slice_.host),
                "host_0": slice_.leader,
                "port": port,
                "metrics_port": metrics_port,
            }
            log.info("listening", extra={"fields": fields})
            await _until_stopped(following, server, stop, over, drain_timeout_s=settings.drain_timeout_s)
            return 0
    except (ModelLoadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _until_stopped(
    following: Following, server: GrpcServer, stop: asyncio.Event, over: asyncio.Event, *, drain_timeout_s: float
) -> None:
    running = asyncio.create_task(following.run(stop=over))
    try:
        is_serving = False
        while not stop.is_set() and not running.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)
            if is_serving is not (following.phase == PHASES[-1]):
                is_serving = not is_serving
                await server.set_serving(is_serving)
        over.set()
        stop.clear()
        hurry = asyncio.create_task(stop.wait())
        await asyncio.wait({running, hurry}, timeout=drain_timeout_s + FLUSH_S, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hurry
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
