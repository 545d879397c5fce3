"""What a step costs the host, part by part on a device that does nothing, and how long a device waits between steps.

The parts run in one process, one after another, so that each can be timed and their sum is all the work there is; a
worker does the engine's and the streams' parts in two processes. Figures are medians over steps. Run by
`make bench-host`.
"""

import argparse
import asyncio
import json
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar, cast
from unittest import mock

import numpy as np
import numpy.typing as npt

from ostrya.engine import wire
from ostrya.engine.backends.base import StepHandle
from ostrya.engine.batch import assemble
from ostrya.engine.buckets import Growth
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.plan import Bucket, StepPlan
from ostrya.engine.process import EngineProcess
from ostrya.engine.types import EngineInfo, EngineRequest, RequestId, Sampling
from ostrya.engine.world import ALONE, World

P = ParamSpec("P")
T = TypeVar("T")

GOALS_MS = {16: 0.3, 256: 1.0}
"""Host time a step, by rows."""
GOAL_IDLE_MS = 0.1
IDLE_ROWS = 64
DEVICE_STEP_S = 0.004
PROMPT_TOKENS, ANSWER_TOKENS, CONTEXT_TOKENS = 64, 700, 2048
NUM_WARM, NUM_MEASURED = 100, 400
TOKEN = 7


class NoStep:
    """A step that is done."""

    def __init__(self, plan: StepPlan) -> None:
        self._tokens = np.full(plan.bucket.rows, TOKEN, np.int32)

    def done(self) -> bool:
        return True

    def tokens(self) -> npt.NDArray[np.int32]:
        return self._tokens

    def scores(self) -> None:
        """No plan here asks for any."""


class NoDevice:
    """A Runner that computes nothing."""

    vocab_size = 50_000
    num_shapes = 1
    num_late_shapes = 0
    num_cached_shapes = 0
    growth = Growth()

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepHandle:
        return NoStep(plan)

    def close(self) -> None:
        pass


class PacedStep:
    """A step of the paced device."""

    def __init__(self, future: "Future[npt.NDArray[np.int32]]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def tokens(self) -> npt.NDArray[np.int32]:
        return self._future.result()

    def scores(self) -> None:
        """No plan here asks for any."""


class PacedDevice(NoDevice):
    """Every step takes DEVICE_STEP_S on a thread of its own; how long the thread had nothing to do stands in a file."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._device = ThreadPoolExecutor(1, "device")
        self._idle_s: list[float] = []
        self._ended_s = 0.0

    def execute(self, plan: StepPlan) -> StepHandle:
        return PacedStep(self._device.submit(self._step, plan.bucket.rows))

    def _step(self, num_rows: int) -> npt.NDArray[np.int32]:
        self._idle_s.append(time.perf_counter() - self._ended_s)
        time.sleep(DEVICE_STEP_S)
        tokens = np.full(num_rows, TOKEN, np.int32)
        if len(self._idle_s) == NUM_WARM + NUM_MEASURED:
            self._report.write_text(json.dumps(self._idle_s[NUM_WARM:]))
        self._ended_s = time.perf_counter()
        return tokens


@dataclass(frozen=True, slots=True)
class Model:
    """What the factory says of its model."""

    context_tokens: int = CONTEXT_TOKENS
    vocab_size: int = NoDevice.vocab_size
    load_s: float = 0.0


def load_paced_device(config: EngineConfig, world: World = ALONE) -> tuple[PacedDevice, Model]:
    return PacedDevice(Path(config.model_path) / "idle.json"), Model()


def config(num_rows: int, *, model_path: str = "/") -> EngineConfig:
    pages_per_row = (PROMPT_TOKENS + ANSWER_TOKENS) // 16 + 1
    return EngineConfig(
        model_path=model_path,
        model_name="none",
        tokenizer_fingerprint="",
        num_pages=1 + num_rows * pages_per_row,
        max_running=num_rows,
        max_context_tokens=CONTEXT_TOKENS,
    )


def request(index: int) -> EngineRequest:
    sampling = Sampling(temperature=1.0, top_k=0, top_p=0.95, seed=index, max_tokens=ANSWER_TOKENS)
    token_ids = list(range(100 * index, 100 * index + PROMPT_TOKENS))
    return EngineRequest(
        request_id=RequestId(f"0123456789abcdef0123456789abcdef#{index}"), token_ids=token_ids, sampling=sampling
    )


class Parts:
    """Seconds of each step, by part."""

    def __init__(self) -> None:
        self._taken: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._taken[name].append(time.perf_counter() - started)

    def timed(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.part(name):
                return function(*args, **kwargs)

        return call

    def medians_ms(self) -> dict[str, float]:
        return {name: 1e3 * statistics.median(taken[-NUM_MEASURED:]) for name, taken in self._taken.items()}


class NoProcess:
    """In the place of a child: the engine runs in this process."""

    pid = 0
    returncode = 0

    async def wait(self) -> int:
        return 0


@asynccontextmanager
async def streams(info: EngineInfo) -> AsyncIterator[tuple[EngineProcess, asyncio.StreamReader, socket.socket]]:
    """The parent's side of an engine, its reader, which is read by hand, and the child's end of the socket."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    nothing = asyncio.StreamReader()
    process = EngineProcess(cast("asyncio.subprocess.Process", NoProcess()), nothing, writer, info, max_waiting=1)
    try:
        yield process, reader, theirs
    finally:
        nothing.feed_eof()
        await process.close()
        theirs.close()


class Host:
    """The whole host path of `num_rows` open streams, driven step by step."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._num_heard = 0
        self.parts = Parts()
        self._engine = Engine(NoDevice(), config(num_rows), context_tokens=CONTEXT_TOKENS, eos_token_ids=(2,))
        scheduler = self._engine.scheduler
        scheduler.plan = self.parts.timed("plan + build", scheduler.plan)  # type: ignore[method-assign]
        scheduler.commit = self.parts.timed("commit", scheduler.commit)  # type: ignore[method-assign]

    def info(self) -> EngineInfo:
        return EngineInfo(
            model="none",
            backend="none",
            dtype="none",
            context_tokens=CONTEXT_TOKENS,
            vocab_size=NoDevice.vocab_size,
            page_size=16,
            num_pages=1,
            routing_stride=2,
            eos_token_ids=(),
            max_running=self._num_rows,
            load_s=0.0,
            weights="bf16",
            warmup_s=0.0,
        )

    async def run(self) -> dict[str, float]:
        """Milliseconds a step, by part."""
        async with streams(self.info()) as (process, reader, child):
            requests = [request(index) for index in range(self._num_rows)]
            consumers = [asyncio.create_task(self._consume(process, one)) for one in requests]
            await asyncio.sleep(0)
            for one in requests:
                self._engine.submit(one)
            with mock.patch("ostrya.engine.scheduler.assemble", self.parts.timed("build", assemble)):
                num_full = 0
                while num_full < NUM_WARM + NUM_MEASURED:
                    num_full += await self._step(process, reader, child)
            for consumer in consumers:
                consumer.cancel()
            await asyncio.gather(*consumers, return_exceptions=True)
        return self._by_part()

    async def _step(self, process: EngineProcess, reader: asyncio.StreamReader, child: socket.socket) -> bool:
        """Whether all streams got a token."""
        with self.parts.part("step"):
            report = self._engine.step()
        assert report is not None
        with self.parts.part("pipe: encode"):
            frame = wire.frame(wire.Report(report))
        with self.parts.part("pipe: write"):
            child.sendall(frame)
        with self.parts.part("pipe: read, decode"):
            message = await wire.read(reader)
        num_due = self._num_heard + len(report.outputs)
        with self.parts.part("fan-out"):
            with self.parts.part("fan-out: hand over"):
                process._take(message)
            while self._num_heard < num_due:  # noqa: ASYNC110 - a turn of the loop is what is measured
                await asyncio.sleep(0)
        return len(report.outputs) == self._num_rows

    async def _consume(self, process: EngineProcess, asked: EngineRequest) -> None:
        async for _ in process.submit(asked):
            self._num_heard += 1

    def _by_part(self) -> dict[str, float]:
        """Parts that do not overlap, in the order of their time; together they are a step."""
        taken = self.parts.medians_ms()
        both, build, commit = taken.pop("plan + build"), taken.pop("build"), taken.pop("commit")
        rest = {"plan": both - build, "build": build, "commit": commit, "report": taken.pop("step") - both - commit}
        taken["fan-out: wake up"] = taken.pop("fan-out") - taken["fan-out: hand over"]
        return rest | taken


async def idle_ms() -> list[float]:
    """How long the paced device had nothing to do before each step, in a real engine process, with open streams."""
    with tempfile.TemporaryDirectory() as directory:
        process = await EngineProcess.start(
            config(IDLE_ROWS, model_path=directory), factory="tests.bench.host:load_paced_device"
        )
        report = Path(directory, "idle.json")

        def is_there() -> bool:
            return report.exists()

        async def consume(asked: EngineRequest) -> None:
            async for _ in process.submit(asked):
                pass

        consumers = [asyncio.create_task(consume(request(index))) for index in range(IDLE_ROWS)]
        try:
            async with asyncio.timeout(60):
                while not is_there():  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.05)
        finally:
            for consumer in consumers:
                consumer.cancel()
            await asyncio.gather(*consumers, return_exceptions=True)
            await process.close()
        return [1e3 * idle for idle in json.loads(await asyncio.to_thread(report.read_text))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=list(GOALS_MS))
    held = True
    for num_rows in parser.parse_args().rows:
        taken = asyncio.run(Host(num_rows).run())
        total, goal = sum(taken.values()), GOALS_MS.get(num_rows)
        for name, part in taken.items():
            print(f"{num_rows:4} rows  {name:20} {part:7.3f} ms")
        print(f"{num_rows:4} rows  {'all of it':20} {total:7.3f} ms{f'  (goal {goal})' if goal else ''}", flush=True)
        held &= goal is None or total <= goal
    idle = asyncio.run(idle_ms())
    median, late = statistics.median(idle), statistics.quantiles(idle, n=20)[-1]
    print(
        f"{IDLE_ROWS:4} rows  a {1e3 * DEVICE_STEP_S:.0f} ms device waits {median:.3f} ms between steps, "
        f"95th percentile {late:.3f} ms  (goal {GOAL_IDLE_MS})"
    )
    if not held or median > GOAL_IDLE_MS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
