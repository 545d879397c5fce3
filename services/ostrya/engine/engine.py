"""The engine: schedule, run, commit. No process, no socket, no torch; the clock is passed in."""

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from ostrya.engine import scoring
from ostrya.engine.backends.base import Runner, StepHandle
from ostrya.engine.config import EngineConfig
from ostrya.engine.plan import StepPlan
from ostrya.engine.scheduler import NO_SCORES, Scheduler
from ostrya.engine.types import EngineRequest, Load, RequestId, Shape, StepReport

if TYPE_CHECKING:
    from ostrya.engine.grammar import Matcher

MIN_RATED_TOKENS = 16
"""Steps that prefill fewer tokens are bound by latency and say nothing about the prefill rate."""
RATE_MEMORY = 0.9
"""Weight of the past in the moving average at each rated step: about the last ten count."""


def _block_in_tokens(handle: StepHandle) -> None:
    """Waits by not waiting: handle.tokens() blocks."""


class Engine:
    """A runner and its scheduler. Owned by one thread."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        context_tokens: int,
        eos_token_ids: Collection[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limit = min(context_tokens, config.max_context_tokens or context_tokens)
        self.scheduler = Scheduler(config, context_tokens=limit, eos_token_ids=eos_token_ids)
        self._runner = runner
        self._clock = clock
        self.running: Shape | None = None
        """Of the step that was launched and has not been committed."""
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_padded_tokens = 0
        self._rated_tokens = 0.0
        self._rated_s = 0.0

    def warm_up(self) -> None:
        """Compiles every shape a step can have."""
        self._runner.warm_up(self.scheduler.ladder.buckets)

    def submit(self, request: EngineRequest, matcher: "Matcher | None" = None) -> None:
        """Queues a request, with its compiled grammar if it has one. InvalidRequest when it could never finish here."""
        self.scheduler.submit(request, now=self._clock(), matcher=matcher)

    def abort(self, request_id: RequestId) -> None:
        """Frees the request's place and pages at once, also from within step()'s `wait`."""
        self.scheduler.abort(request_id)

    def step(self, wait: Callable[[StepHandle], None] = _block_in_tokens) -> StepReport | None:
        """One step, or None when there is nothing to do. `wait` may submit and abort until the handle is done."""
        started_s = self._clock()
        plan = self.scheduler.plan(now=started_s)
        if plan is None:
            return None
        shape = self.running = Shape(plan.bucket.tokens, plan.bucket.rows, plan.bucket.pages)
        handle = self._runner.execute(plan)
        wait(handle)
        tokens = handle.tokens()
        self.running = None
        ended_s = self._clock()
        scores = handle.scores()
        outputs = self.scheduler.commit(
            tokens, now=ended_s, scores=NO_SCORES if scores is None else scoring.by_row(plan, scores)
        )
        self._measure(plan, step_s=ended_s - started_s)
        events = self.scheduler.take_events()
        return StepReport(
            outputs=tuple(outputs),
            stored=events.stored,
            removed=events.removed,
            load=self.load(),
            step_s=ended_s - started_s,
            batch_size=plan.num_rows,
            shape=shape,
        )

    def load(self) -> Load:
        """What the engine is busy with now."""
        return msgspec.structs.replace(
            self.scheduler.load(),
            prefill_tokens_per_s=self._rated_tokens / self._rated_s if self._rated_s else 0.0,
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_padded_tokens=self._num_padded_tokens,
            num_shapes=self._runner.num_shapes,
            num_late_shapes=self._runner.num_late_shapes,
        )

    def close(self) -> None:
        """Waits for the device and frees it."""
        self._runner.close()

    def _measure(self, plan: StepPlan, *, step_s: float) -> None:
        self._num_steps += 1
        self._num_scheduled_tokens += plan.num_tokens
        self._num_padded_tokens += plan.bucket.tokens
        num_prefilled = plan.num_tokens - plan.num_decode_rows
        if num_prefilled >= MIN_RATED_TOKENS:
            self._rated_tokens = RATE_MEMORY * self._rated_tokens + num_prefilled
            self._rated_s = RATE_MEMORY * self._rated_s + step_s
