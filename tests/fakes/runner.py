"""A deterministic Runner without a model: its next token depends on everything it can read through the page table.

Each KV slot holds a hash of the token, its position and all slots before it, as they were read through the row's own
page table when the token was computed. So a wrong page, a page that was overwritten, or one that was not written yet
changes every token after it. The same goes for all that the plan's processors say of a row; what they forbid is never
chosen. `load_runner` and its relatives are factories for the engine process ("tests.fakes.runner:load_runner").
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from ostrya.engine.buckets import Growth
from ostrya.engine.config import EngineConfig
from ostrya.engine.plan import Bucket, Processors, Scores, Scoring, StepPlan, fed_forward
from ostrya.engine.types import Memory
from ostrya.engine.world import ALONE, World
from ostrya.errors import ModelLoadError

VOCAB_SIZE = 1000
CONTEXT_TOKENS = 2048
EOS = 2
UNWRITTEN = -1
MASK = (1 << 61) - 1

StepResult = tuple[npt.NDArray[np.int32], Scores | None]


def _mix(state: int, value: int) -> int:
    return (state * 6_364_136_223_846_793_005 + value * 1_442_695_040_888_963_407 + 12_345) & MASK


class FakeHandle:
    """Done at `done_s`; what the step computes is computed when somebody asks."""

    def __init__(self, compute: Callable[[], StepResult], *, done_s: float) -> None:
        self.compute = compute
        self._done_s = done_s

    def done(self) -> bool:
        return time.monotonic() >= self._done_s

    def tokens(self) -> npt.NDArray[np.int32]:
        time.sleep(max(0.0, self._done_s - time.monotonic()))
        return self.compute()[0]

    def scores(self) -> Scores | None:
        return self.compute()[1]


class FakeRunner:
    """Steps take at least `step_s`, one after another. Each is computed as late as possible and in order, so that what
    the host changes meanwhile would be seen."""

    vocab_size = VOCAB_SIZE
    growth = Growth()
    num_cached_shapes = 0

    def __init__(self, *, num_pages: int, page_size: int, step_s: float = 0.0) -> None:
        self._page_size = page_size
        self._step_s = step_s
        self._slots = [UNWRITTEN] * (num_pages * page_size)
        self._warm: set[Bucket] = set()
        self._seen: set[Bucket] = set()
        self._results: list[StepResult] = []
        self._done_s = 0.0
        self.plans: list[StepPlan] = []
        self.closed = False

    @property
    def num_shapes(self) -> int:
        return len(self._warm | self._seen)

    @property
    def num_late_shapes(self) -> int:
        return len(self._seen - self._warm)

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        self._warm = set(buckets)

    def execute(self, plan: StepPlan) -> FakeHandle:
        self._seen.add(plan.bucket)
        self.plans.append(plan)
        self._done_s = max(time.monotonic(), self._done_s) + self._step_s
        return FakeHandle(partial(self._compute, len(self.plans) - 1), done_s=self._done_s)

    def _compute(self, number: int) -> StepResult:
        while len(self._results) <= number:
            self._results.append(self._run(self.plans[len(self._results)]))
        return self._results[number]

    def _run(self, plan: StepPlan) -> StepResult:
        if self._results:
            plan = fed_forward(plan, self._results[-1][0])
        for slot in plan.slot_mapping[plan.num_tokens :].tolist():
            assert slot < self._page_size, "padding writes outside the scratch page"
        states = [state for row in range(plan.num_rows) for state in self._run_row(plan, row)]
        tokens = np.full(plan.bucket.rows, -7, np.int32)
        for row in range(plan.num_rows):
            tokens[row] = _choose(plan, row, states[plan.logits_index[row]])
        return tokens, None if plan.scoring is None else _scores(plan.scoring, plan.logits_index, states, tokens)

    def close(self) -> None:
        self.closed = True

    def _run_row(self, plan: StepPlan, row: int) -> list[int]:
        """The state after each token."""
        state, states = 0, []
        first, end = int(plan.query_start[row]), int(plan.query_start[row + 1])
        num_before = int(plan.kv_lens[row]) - (end - first)
        for position in range(num_before):
            content = self._slots[self._slot(plan, row, position)]
            assert content != UNWRITTEN, f"row {row} reads position {position}, which nobody wrote"
            state = _mix(state, content)
        for index in range(first, end):
            position = int(plan.positions[index])
            slot = int(plan.slot_mapping[index])
            assert position == num_before + index - first
            assert slot == self._slot(plan, row, position) >= self._page_size
            self._slots[slot] = _mix(_mix(state, int(plan.token_ids[index])), position)
            state = _mix(state, self._slots[slot])
            states.append(state)
        return states

    def _slot(self, plan: StepPlan, row: int, position: int) -> int:
        return int(plan.page_table[row, position // self._page_size]) * self._page_size + position % self._page_size


def _choose(plan: StepPlan, row: int, state: int) -> int:
    noise = int(plan.uniform[row] * 2**24) if plan.temperature[row] > 0 else 0
    allowed = np.ones(VOCAB_SIZE, np.bool_)
    if plan.processors is not None:
        state = _wishes(plan.processors, row, state)
        _forbid(plan.processors, row, allowed)
    candidates = allowed.nonzero()[0]
    return int(candidates[(_mix(state, noise) >> 20) % len(candidates)]) if len(candidates) else 0


def _wishes(processors: Processors, row: int, state: int) -> int:
    """The state and all numbers about the row; a row without any keeps its state, whatever the others want."""
    for number, entries in enumerate((processors.bias, processors.seen)):
        here = entries.row == row
        for token, value in sorted(zip(entries.token[here].tolist(), _bits(entries.value[here]), strict=True)):
            state = _mix(_mix(_mix(state, number), token), value)
    penalties = (processors.repetition_penalty, processors.presence_penalty, processors.frequency_penalty)
    for of_rows, none in zip((*penalties, processors.min_p, processors.typical_p), (1, 0, 0, 0, 1), strict=True):
        if of_rows[row] != none:
            state = _mix(state, _bits(of_rows[row : row + 1])[0])
    return state


def _bits(values: npt.NDArray[np.float32]) -> list[int]:
    bits: list[int] = values.view(np.uint32).tolist()
    return bits


def _forbid(processors: Processors, row: int, allowed: npt.NDArray[np.bool_]) -> None:
    bias = processors.bias
    allowed[bias.token[(bias.row == row) & (bias.value == -np.inf)]] = False
    if processors.mask is not None:
        for words in processors.mask.words[processors.mask.row == row]:
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(allowed)]
            allowed[: len(bits)] &= bits != 0
            allowed[len(bits) :] = False


def _scores(
    scoring: Scoring, logits_index: npt.NDArray[np.int32], states: list[int], tokens: npt.NDArray[np.int32]
) -> Scores:
    """Numbers that depend on all before the token, and on the token."""
    after = [states[index] for index in (*logits_index[scoring.row], *scoring.index)]
    targets = (*tokens[scoring.row].tolist(), *scoring.target.tolist())
    top = np.arange(int(scoring.num_top.max()))
    return Scores(
        logprob=np.array([-(_mix(state, at) % 999) for state, at in zip(after, targets, strict=True)], np.float32),
        top_ids=np.array([(state % VOCAB_SIZE + top) % VOCAB_SIZE for state in after], np.int32),
        top_logprobs=np.tile(-top.astype(np.float32), (len(after), 1)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """What a factory says of its model."""

    context_tokens: int = CONTEXT_TOKENS
    vocab_size: int = VOCAB_SIZE
    load_s: float = 0.25
    weights: str = "none"
    load_bytes: int = 0
    memory: Memory | None = None
    limit: None = None
    num_pages: int | None = None
    is_simulated: bool = False


def load_runner(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    return FakeRunner(num_pages=config.num_pages, page_size=config.page_size), FakeModel()


def load_slow_runner(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    """Every step takes 0.5 s: longer than two heartbeats."""
    return FakeRunner(num_pages=config.num_pages, page_size=config.page_size, step_s=0.5), FakeModel()


def load_paced_runner(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    """Every step takes 10 ms, so that a request is seen running."""
    return FakeRunner(num_pages=config.num_pages, page_size=config.page_size, step_s=0.01), FakeModel()


def refuse_to_load(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    raise ModelLoadError(f"{config.model_path} is cut short:\n 12 of 40 bytes; fetch it again")


def refuse_as_follower(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    return refuse_to_load(config) if world.rank else load_runner(config)


def exit_while_loading(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    os._exit(3)


def never_load(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    print("loading", file=sys.stderr, flush=True)
    time.sleep(600)
    raise AssertionError("nobody waits this long")


class BreakingRunner(FakeRunner):
    """Fails at its third step."""

    def execute(self, plan: StepPlan) -> FakeHandle:
        if len(self.plans) == 2:
            raise RuntimeError("device lost")
        return super().execute(plan)


def load_breaking_runner(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    return BreakingRunner(num_pages=config.num_pages, page_size=config.page_size), FakeModel()


class HangingHandle(FakeHandle):
    """Never done."""

    def done(self) -> bool:
        return False

    def tokens(self) -> npt.NDArray[np.int32]:
        time.sleep(600)
        raise AssertionError("nobody waits this long")


class HangingRunner(FakeRunner):
    """Its 30th step never ends."""

    def execute(self, plan: StepPlan) -> FakeHandle:
        handle = super().execute(plan)
        return handle if len(self.plans) < 30 else HangingHandle(handle.compute, done_s=0)


def load_hanging_runner(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    return HangingRunner(num_pages=config.num_pages, page_size=config.page_size, step_s=0.01), FakeModel()


class ColdRunner(FakeRunner):
    """Warms nothing up, so every shape is late."""

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        pass


def load_cold_runner(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    return ColdRunner(num_pages=config.num_pages, page_size=config.page_size), FakeModel()


def load_slow_follower(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    """Steps of 10 ms on rank 0, which others take 50 times as long for."""
    step_s = 0.5 if world.rank else 0.01
    return FakeRunner(num_pages=config.num_pages, page_size=config.page_size, step_s=step_s), FakeModel()


def load_breaking_follower(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    """Rank 1 fails at its third step."""
    kind = BreakingRunner if world.rank else FakeRunner
    return kind(num_pages=config.num_pages, page_size=config.page_size, step_s=0.01), FakeModel()


class DivergingRunner(FakeRunner):
    """From its 20th step on its tokens are its own."""

    def _run(self, plan: StepPlan) -> StepResult:
        tokens, scores = super()._run(plan)
        return (tokens + 1 if len(self._results) >= 20 else tokens), scores


def load_diverging_follower(config: EngineConfig, world: World = ALONE) -> tuple[FakeRunner, FakeModel]:
    kind = DivergingRunner if world.rank else FakeRunner
    return kind(num_pages=config.num_pages, page_size=config.page_size, step_s=0.01), FakeModel()
