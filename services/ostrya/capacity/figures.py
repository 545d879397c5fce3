"""The figures of a model on a slice that have a limit and an estimate, for one setup; report.py and compare.py ask."""

from collections.abc import Callable
from dataclasses import dataclass

from ostrya.capacity.chips import Slice
from ostrya.capacity.estimate import efficiency
from ostrya.capacity.facts import Both, Decoding, PrefixHit, Prompt, Setup, Speculation
from ostrya.capacity.serving import Prefill, prefill, prefix_hit_saves_s
from ostrya.capacity.spec import ModelSpec
from ostrya.capacity.speculation import DraftChoice, best_draft, break_even_length, round_time
from ostrya.capacity.step import PEAK, Efficiency, StepTime, Work, step_time

_HIT_RATIOS = (0.25, 0.5, 0.9)
"""Of a prompt, for the value of a prefix hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One model, slice and setup; every method is a figure."""

    spec: ModelSpec
    where: Slice
    setup: Setup

    @property
    def factors(self) -> Efficiency:
        return efficiency(self.setup.engine, self.where.chip.name)

    def both(self, figure: Callable[[Efficiency], float]) -> Both:
        return Both(limit=figure(PEAK), estimate=figure(self.factors))

    def step(self, efficiency: Efficiency, num_requests: int) -> StepTime:
        work = Work(num_requests=num_requests, context_tokens=self.setup.context_tokens)
        return step_time(self.spec, self.where, work, efficiency=efficiency, placement=self.setup.placement)

    def chunk_tokens(self, efficiency: Efficiency) -> int:
        """At the limit a prompt is one step: cutting it reads the weights more often."""
        return self.setup.prompt_tokens if efficiency == PEAK else self.setup.chunk_tokens

    def decoding(self, num_requests: int) -> Decoding:
        tpot_s = self.both(lambda one: self.step(one, num_requests).seconds)

        def rate(count: float) -> Both:
            return Both(limit=count / tpot_s.limit, estimate=count / tpot_s.estimate)

        return Decoding(
            num_requests=num_requests,
            tpot_s=tpot_s,
            tokens_per_s=rate(num_requests),
            tokens_per_s_per_user=rate(1),
            tokens_per_s_per_chip=rate(num_requests / self.where.num_chips),
        )

    def prompt(self) -> Prompt:
        tokens = self.setup.prompt_tokens

        limit, estimate = (
            prefill(
                self.spec,
                self.where,
                tokens,
                chunk_tokens=self.chunk_tokens(one),
                efficiency=one,
                placement=self.setup.placement,
            )
            for one in (PEAK, self.factors)
        )
        ttft_s = Both(limit=limit.seconds, estimate=estimate.seconds)
        rate = Both(limit=tokens / ttft_s.limit, estimate=tokens / ttft_s.estimate)
        return Prompt(
            prompt_tokens=tokens,
            ttft_s=ttft_s,
            prefill_tokens_per_s=rate,
            limit_bound_by=_bound_by(limit),
            bound_by=_bound_by(estimate),
        )

    def round_s(self, efficiency: Efficiency) -> float:
        return round_time(
            self.spec,
            self.where,
            num_draft_tokens=self.setup.num_draft_tokens,
            num_requests=self.setup.num_requests,
            context_tokens=self.setup.context_tokens,
            efficiency=efficiency,
            placement=self.setup.placement,
        ).seconds

    def break_even_length(self, efficiency: Efficiency) -> float:
        return break_even_length(
            self.spec,
            self.where,
            num_draft_tokens=self.setup.num_draft_tokens,
            num_requests=self.setup.num_requests,
            context_tokens=self.setup.context_tokens,
            efficiency=efficiency,
            placement=self.setup.placement,
        )

    def best_draft(self, efficiency: Efficiency) -> DraftChoice:
        return best_draft(
            self.spec,
            self.where,
            self.setup.acceptance_rates,
            num_requests=self.setup.num_requests,
            context_tokens=self.setup.context_tokens,
            efficiency=efficiency,
            placement=self.setup.placement,
        )

    def speculation(self) -> Speculation:
        setup = self.setup
        rates, length = setup.acceptance_rates, setup.length
        round_s = self.both(self.round_s)
        ratio = self.both(self.break_even_length)
        tokens_per_s = speedup = best = None
        if length is not None:
            emitted = setup.num_requests * length
            tokens_per_s = Both(limit=emitted / round_s.limit, estimate=emitted / round_s.estimate)
            speedup = Both(limit=length / ratio.limit, estimate=length / ratio.estimate)
        by_draft: tuple[Both, ...] = ()
        if rates:
            limit, best = self.best_draft(PEAK), self.best_draft(self.factors)
            pairs = zip(limit.tokens_per_s_by_draft, best.tokens_per_s_by_draft, strict=True)
            by_draft = tuple(Both(limit=one, estimate=other) for one, other in pairs)
        return Speculation(
            num_draft_tokens=setup.num_draft_tokens,
            drafter=self.spec.drafter.name if self.spec.drafter else None,
            acceptance_length=length,
            round_s=round_s,
            break_even_length=ratio,
            tokens_per_s=tokens_per_s,
            speedup_ratio=speedup,
            tokens_per_s_by_draft=by_draft,
            best_num_draft_tokens=best.num_draft_tokens if best else None,
        )

    def prefix_hits(self) -> tuple[PrefixHit, ...]:
        tokens = self.setup.prompt_tokens

        def saves_s(hit_tokens: int) -> Both:
            return self.both(
                lambda one: prefix_hit_saves_s(
                    self.spec,
                    self.where,
                    tokens,
                    hit_tokens,
                    chunk_tokens=self.chunk_tokens(one),
                    efficiency=one,
                    placement=self.setup.placement,
                )
            )

        hits = sorted({int(tokens * ratio) for ratio in _HIT_RATIOS} - {0})
        return tuple(PrefixHit(hit_tokens=hit, saves_s=saves_s(hit)) for hit in hits)


def _bound_by(one: Prefill) -> str:
    """What bounds the chunks that take most of the time."""
    seconds: dict[str, float] = {}
    for step in one.steps:
        seconds[step.bound_by] = seconds.get(step.bound_by, 0.0) + step.seconds
    return max(seconds, key=lambda name: seconds[name])
