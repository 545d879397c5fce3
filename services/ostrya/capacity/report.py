"""What `ostrya capacity` tells of one model on one slice: calls the formulas and fills the classes of facts.py."""

from collections.abc import Callable
from dataclasses import dataclass

from ostrya.capacity.chips import Dtype, Slice
from ostrya.capacity.estimate import FACTORS
from ostrya.capacity.facts import (
    Both,
    Bound,
    Decoding,
    FitFacts,
    ModelFacts,
    PartFacts,
    PrefixHit,
    Prompt,
    Report,
    Setup,
    SliceFacts,
    Speculation,
)
from ostrya.capacity.fitted import fitted_generations, fitted_max_requests, fitted_num_chips
from ostrya.capacity.memory import Placement, fit, kv_bytes_per_token, require_fit, state_bytes
from ostrya.capacity.serving import Prefill, prefill, prefix_hit_saves_s
from ostrya.capacity.spec import ModelSpec, Phase
from ostrya.capacity.speculation import DraftChoice, acceptance_length, best_draft, round_time
from ostrya.capacity.step import PEAK, Efficiency, StepTime, Work, step_time
from ostrya.capacity.weights import drafter_bytes, num_params, num_params_active, weight_bytes, weights
from ostrya.errors import ConfigError

_HIT_RATIOS = (0.25, 0.5, 0.9)
"""Of a prompt, for the value of a prefix hit."""


def report(spec: ModelSpec, where: Slice, setup: Setup) -> Report:
    """All of it. DoesNotFit, or ConfigError for what makes no sense."""
    check(spec, setup)
    asked = Asked(spec=spec, where=where, setup=setup)
    limit, estimate = (asked.step(one, setup.num_requests) for one in (PEAK, asked.factors))
    found = _fit(spec, where, setup)
    return Report(
        model=model_facts(spec),
        slice=slice_facts(where),
        setup=setup,
        fitted_generations=fitted_generations(setup.engine),
        fitted_num_chips=fitted_num_chips(setup.engine),
        fitted_max_requests=fitted_max_requests(setup.engine),
        fit=found,
        decoding=asked.decoding(setup.num_requests),
        prompt=asked.prompt(),
        bounds=_bounds(limit, estimate),
        bound_by=estimate.bound_by,
        batches=tuple(map(asked.decoding, batch_ladder(found.max_requests))),
        speculation=asked.speculation() if setup.num_draft_tokens else None,
        prefix_hits=asked.prefix_hits(),
    )


def check(spec: ModelSpec, setup: Setup) -> None:
    """ConfigError with all that makes no sense, whatever the slice."""
    problems = [
        f"{name} is {tokens:,} tokens; {spec.name}'s limit is {spec.max_context_tokens:,}"
        for name, tokens in (("the context", setup.context_tokens), ("the prompt", setup.prompt_tokens))
        if tokens > spec.max_context_tokens
    ]
    drafts, length = setup.num_draft_tokens, setup.acceptance_length
    if spec.drafter and drafts > spec.drafter.max_draft_tokens:
        most = spec.drafter.max_draft_tokens
        problems.append(f"{drafts} tokens to draft are too many; {spec.drafter.name} drafts at most {most}")
    if length is not None and not 1 <= length <= drafts + 1:
        problems.append(f"acceptance length is {length:g}; with {drafts} drafted tokens it is from 1 to {drafts + 1}")
    if problems:
        raise ConfigError(problems)


def model_facts(spec: ModelSpec) -> ModelFacts:
    """What the model is, wherever it runs."""
    parts = tuple(
        PartFacts(
            part=one.part.value,
            num_params=one.num_params,
            num_params_active=one.num_params_active,
            storage=one.storage.name,
            num_bytes=one.num_bytes,
        )
        for one in sorted(weights(spec), key=lambda one: -one.num_bytes)
    )
    return ModelFacts(
        name=spec.name,
        num_layers=spec.num_layers,
        max_context_tokens=spec.max_context_tokens,
        num_params=num_params(spec),
        num_params_active_decode=num_params_active(spec, Phase.DECODE),
        num_params_active_prefill=num_params_active(spec, Phase.PREFILL),
        num_params_active_with_embedding=num_params_active(spec, count_embedding=True)
        if spec.announced and spec.announced.active_counts_embedding
        else None,
        parts=parts,
        weights_bytes=weight_bytes(spec),
        drafter=spec.drafter.name if spec.drafter else None,
        drafter_bytes=drafter_bytes(spec),
        kv_storage=spec.kv_storage.name,
        kv_bytes_per_token=kv_bytes_per_token(spec),
        state_storage=spec.state_storage.name,
        state_bytes_per_request=state_bytes(spec),
    )


def slice_facts(where: Slice) -> SliceFacts:
    """What the slice is."""
    return SliceFacts(
        name=where.name,
        generation=where.chip.name,
        topology=where.topology_label,
        machine_type=where.machine_type,
        num_chips=where.num_chips,
        num_hosts=where.num_hosts,
        hbm_bytes=where.hbm_bytes,
        hbm_bytes_per_s=where.hbm_bytes_per_s,
        peak_flops_per_s={dtype.value: where.peak_flops_per_s(dtype) for dtype in Dtype if dtype in where.chip.peaks},
    )


def batch_ladder(largest: int) -> tuple[int, ...]:
    """1, 2, 4, … and the largest itself."""
    doubled = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    return (*doubled, largest)


def _fit(spec: ModelSpec, where: Slice, setup: Setup) -> FitFacts:
    room = require_fit(
        spec,
        where,
        context_tokens=setup.context_tokens,
        num_requests=setup.num_requests,
        num_draft_tokens=setup.num_draft_tokens,
        placement=setup.placement,
    )
    return FitFacts(
        hbm_bytes=where.hbm_bytes,
        usable_bytes=room.usable_bytes,
        weights_bytes=room.weights_bytes,
        drafter_bytes=room.drafter_bytes,
        scratch_bytes=room.scratch_bytes,
        cache_bytes=room.cache_bytes_per_request * setup.num_requests,
        state_bytes=room.state_bytes_per_request * setup.num_requests,
        free_bytes=room.free_bytes,
        max_requests=room.max_requests,
        max_context_tokens=room.max_context_tokens,
        max_requests_by_placement={
            placement.value: fit(
                spec,
                where,
                context_tokens=setup.context_tokens,
                num_draft_tokens=setup.num_draft_tokens,
                placement=placement,
            ).max_requests
            for placement in Placement
        },
    )


def _bounds(limit: StepTime, estimate: StepTime) -> tuple[Bound, ...]:
    rows = [
        Bound(
            name=part.part.value,
            num_bytes=part.num_bytes,
            num_flops=part.num_flops,
            seconds=Both(limit=part.seconds, estimate=estimated.seconds),
            share_ratio=Both(limit=part.seconds / limit.seconds, estimate=estimated.seconds / estimate.seconds),
            bound_by="memory" if estimated.memory_s >= estimated.compute_s else "compute",
        )
        for part, estimated in zip(limit.parts, estimate.parts, strict=True)
    ]
    for name, seconds in (
        ("collectives", Both(limit=_exposed_s(limit), estimate=_exposed_s(estimate))),
        ("overhead", Both(limit=limit.overhead_s, estimate=estimate.overhead_s)),
    ):
        share = Both(limit=seconds.limit / limit.seconds, estimate=seconds.estimate / estimate.seconds)
        rows.append(Bound(name=name, num_bytes=0, num_flops=0, seconds=seconds, share_ratio=share, bound_by=name))
    return tuple(sorted(rows, key=lambda row: -row.seconds.estimate))


def _bound_by(one: Prefill) -> str:
    """What bounds the chunks that take most of the time."""
    seconds: dict[str, float] = {}
    for step in one.steps:
        seconds[step.bound_by] = seconds.get(step.bound_by, 0.0) + step.seconds
    return max(seconds, key=lambda name: seconds[name])


def _exposed_s(step: StepTime) -> float:
    """Of the collectives, what the step is longer for."""
    return max(0.0, step.seconds - step.memory_s - step.compute_s - step.overhead_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Figures that have a limit and an estimate."""

    spec: ModelSpec
    where: Slice
    setup: Setup

    @property
    def factors(self) -> Efficiency:
        return FACTORS[self.setup.engine]

    def both(self, figure: Callable[[Efficiency], float]) -> Both:
        return Both(limit=figure(PEAK), estimate=figure(self.factors))

    def step(self, efficiency: Efficiency, num_requests: int) -> StepTime:
        work = Work(num_requests=num_requests, context_tokens=self.setup.context_tokens)
        return step_time(self.spec, self.where, work, efficiency=efficiency, placement=self.setup.placement)

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
            prefill(self.spec, self.where, tokens, efficiency=one, placement=self.setup.placement)
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
        rates = setup.acceptance_rates
        length = acceptance_length(rates[: setup.num_draft_tokens]) if rates else setup.acceptance_length
        plain_s = self.both(lambda one: self.step(one, setup.num_requests).seconds)
        round_s = self.both(self.round_s)
        ratio = Both(limit=round_s.limit / plain_s.limit, estimate=round_s.estimate / plain_s.estimate)
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
                    self.spec, self.where, tokens, hit_tokens, efficiency=one, placement=self.setup.placement
                )
            )

        hits = sorted({int(tokens * ratio) for ratio in _HIT_RATIOS} - {0})
        return tuple(PrefixHit(hit_tokens=hit, saves_s=saves_s(hit)) for hit in hits)
