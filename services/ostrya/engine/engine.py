"""The engine: schedule, run, commit. No process, no socket, no torch; the clock is passed in.

With overlap, a step is planned and launched while the one before runs, and committed one step later. It is planned as
late as the device allows: what arrives until then is in it.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ostrya.engine import scoring
from ostrya.engine.backends.base import Limit, Runner, StepHandle
from ostrya.engine.config import EngineConfig
from ostrya.engine.pacing import Pacing
from ostrya.engine.plan import StepPlan
from ostrya.engine.scheduler import NO_SCORES, NOMINAL_TOKENS_PER_S, Scheduler
from ostrya.engine.step_time import StepTimeFit, work
from ostrya.engine.types import EngineRequest, Load, RequestId, Shape, StepReport, Work

if TYPE_CHECKING:
    from ostrya.engine.grammar import Matcher

PLAN_AT_RATIO, PLAN_AHEAD_S = 0.75, 0.002
"""The next step is planned when so much of the running one has passed, and this much earlier: ten times what planning
costs, for a machine whose cores are busy."""
CHECK_EVERY_S = 60.0
"""Between two looks at the pages of an idle engine."""
Wait = Callable[[StepHandle, float | None], None]
"""Returns when the step is done, or when the clock says the time given; until then it may submit and abort."""


def _block_in_tokens(handle: StepHandle, until_s: float | None) -> None:
    """Waits by not waiting: handle.tokens() blocks."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight."""

    plan: StepPlan
    handle: StepHandle
    started_s: float
    num_shapes: int
    num_late_shapes: int
    compiles: bool
    """Its time says nothing about the next one's."""

    @property
    def shape(self) -> Shape:
        bucket = self.plan.bucket
        return Shape(bucket.tokens, bucket.rows, bucket.pages)


class Engine:
    """A runner and its scheduler. Owned by one thread."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        context_tokens: int,
        eos_token_ids: Collection[int],
        limit: Limit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        longest = min(context_tokens, config.max_context_tokens or context_tokens)
        self.scheduler = Scheduler(config, context_tokens=longest, eos_token_ids=eos_token_ids, growth=runner.growth)
        self._overlap = config.overlap
        self._runner = runner
        self._limit = limit
        self._clock = clock
        self._in_flight: deque[_Launched] = deque()
        self._ended_s = float("-inf")
        """When the last step that was committed ended."""
        self._pacing = Pacing(max_inter_token_s=config.max_inter_token_s)
        self._step_time = StepTimeFit()
        self._checked_s = float("-inf")
        self._num_page_leaks = 0
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_padded_tokens = 0

    @property
    def running(self) -> Shape | None:
        """Of the oldest step that was launched and has not been committed."""
        return self._in_flight[0].shape if self._in_flight else None

    def warm_up(self) -> None:
        """Compiles every shape a step can have."""
        self._runner.warm_up(self.scheduler.ladder.buckets)

    def submit(self, request: EngineRequest, matcher: "Matcher | None" = None) -> None:
        """Queues a request, with its compiled grammar if it has one. InvalidRequest when it could never finish here."""
        self.scheduler.submit(request, now=self._clock(), matcher=matcher)

    def abort(self, request_id: RequestId) -> None:
        """Frees the request's place and pages at once, also from within step()'s `wait`."""
        self.scheduler.abort(request_id)

    def step(self, wait: Wait = _block_in_tokens) -> StepReport | None:
        """Ends one step, the oldest, and with overlap launches the next beside it; None when there is nothing to do."""
        if not self._in_flight and not self._launch():
            self._check_pages()
            return None
        step = self._in_flight[0]
        if self._overlap:
            self._wait_to_plan(step, wait)
            self._launch()
        wait(step.handle, None)
        tokens = step.handle.tokens()
        ended_s = self._clock()
        # The device was busy with the step before until that ended.
        step_s = ended_s - max(step.started_s, self._ended_s)
        self._ended_s = ended_s
        scores = step.handle.scores()
        outputs = self.scheduler.commit(
            tokens, now=ended_s, scores=NO_SCORES if scores is None else scoring.by_row(step.plan, scores)
        )
        done = work(step.plan)
        expected_s = 0.0 if step.compiles else self._step_time.expected_s(done)
        self._measure(step, done, step_s=step_s)
        events = self.scheduler.take_events()
        load = self.load()
        self._in_flight.popleft()
        return StepReport(
            outputs=tuple(outputs),
            stored=events.stored,
            removed=events.removed,
            load=load,
            step_s=step_s,
            batch_size=step.plan.num_rows,
            shape=step.shape,
            work=done,
            expected_s=expected_s,
            limit=None if self._limit is None or step.compiles else self._limit.limit(step.plan),
        )

    def load(self) -> Load:
        """What the engine is busy with now. Shapes count from when the device comes to them: a step that was launched
        behind another compiles later."""
        shapes = self._in_flight[0] if self._in_flight else self._runner
        return msgspec.structs.replace(
            self.scheduler.load(),
            prefill_tokens_per_s=self._pacing.prefill_tokens_per_s,
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_padded_tokens=self._num_padded_tokens,
            num_shapes=shapes.num_shapes,
            num_late_shapes=shapes.num_late_shapes,
            num_cached_shapes=self._runner.num_cached_shapes,
            num_page_leaks=self._num_page_leaks,
            step_time=self._step_time.step_time,
        )

    def close(self) -> None:
        """Waits for the device and frees it."""
        self._runner.close()

    def _launch(self) -> bool:
        started_s = self._clock()
        plan = self.scheduler.plan(
            now=started_s,
            prefill_limit=self._pacing.prefill_limit,
            tokens_per_s=self._pacing.prefill_tokens_per_s or NOMINAL_TOKENS_PER_S,
        )
        if plan is None:
            return False
        runner = self._runner
        num_late = runner.num_late_shapes
        handle = runner.execute(plan)
        compiles = runner.num_late_shapes > num_late
        self._in_flight.append(_Launched(plan, handle, started_s, runner.num_shapes, runner.num_late_shapes, compiles))
        return True

    def _wait_to_plan(self, step: _Launched, wait: Wait) -> None:
        """Until it is time to plan the step after `step`; at once while nobody knows how long such a step takes."""
        began_s = max(step.started_s, self._ended_s)
        expected_s = self._pacing.shortest_s(step.plan.bucket)
        plan_at_s = began_s + PLAN_AT_RATIO * expected_s - PLAN_AHEAD_S
        if plan_at_s > self._clock():
            wait(step.handle, plan_at_s)

    def _measure(self, step: _Launched, done: Work, *, step_s: float) -> None:
        plan = step.plan
        self._pacing.learn(plan, step_s)
        if not step.compiles:
            self._step_time.learn(done, step_s)
        self._num_steps += 1
        self._num_scheduled_tokens += plan.num_tokens
        self._num_padded_tokens += plan.bucket.tokens

    def _check_pages(self) -> None:
        now = self._clock()
        if self.scheduler.is_idle and now - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now
            self._num_page_leaks += not self.scheduler.pool.is_unused
