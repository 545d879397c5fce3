"""What `ostrya capacity` tells of one model on one slice: calls the formulas and fills the classes of facts.py."""

from ostrya.capacity.chips import Dtype, Slice
from ostrya.capacity.facts import (
    Both,
    Bound,
    FitFacts,
    ModelFacts,
    PartFacts,
    Report,
    Setup,
    SliceFacts,
)
from ostrya.capacity.figures import Asked
from ostrya.capacity.fitted import fitted
from ostrya.capacity.memory import Placement, fit, kv_bytes_per_token, require_fit, state_bytes, window_bytes
from ostrya.capacity.spec import ModelSpec, Phase
from ostrya.capacity.speculation import draft_problems
from ostrya.capacity.step import PEAK, StepTime
from ostrya.capacity.weights import drafter_bytes, num_params, num_params_active, weight_bytes, weights
from ostrya.errors import ConfigError


def report(spec: ModelSpec, where: Slice, setup: Setup) -> Report:
    """All of it. DoesNotFit, or ConfigError for what makes no sense."""
    check(spec, setup)
    asked = Asked(spec=spec, where=where, setup=setup)
    limit, estimate = (asked.step(one, setup.num_requests) for one in (PEAK, asked.factors))
    found, behind = _fit(spec, where, setup), fitted(setup.engine, where.chip.name)
    return Report(
        model=model_facts(spec),
        slice=slice_facts(where),
        setup=setup,
        fitted_generations=(behind.generation,),
        fitted_num_chips=behind.num_chips,
        fitted_min_requests=behind.min_requests,
        fitted_max_requests=behind.max_requests,
        warning=behind.warning(where, setup.num_requests),
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
    problems += draft_problems(spec, setup.num_draft_tokens, setup.acceptance_length)
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
        window_bytes_per_request=window_bytes(spec),
        state_storage=spec.state_storage.name,
        state_bytes_per_request=state_bytes(spec),
    )


def slice_facts(where: Slice) -> SliceFacts:
    """What the slice is."""
    return SliceFacts(
        name=where.name,
        generation=where.chip.name,
        topology=where.topology_label,
        accelerator=where.chip.gke_accelerator,
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
        chunk_tokens=setup.chunk_tokens,
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
                chunk_tokens=setup.chunk_tokens,
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
        ("collectives", Both(limit=limit.exposed_s, estimate=estimate.exposed_s)),
        ("overhead", Both(limit=limit.overhead_s, estimate=estimate.overhead_s)),
    ):
        share = Both(limit=seconds.limit / limit.seconds, estimate=seconds.estimate / estimate.seconds)
        rows.append(Bound(name=name, num_bytes=0, num_flops=0, seconds=seconds, share_ratio=share, bound_by=name))
    return tuple(sorted(rows, key=lambda row: -row.seconds.estimate))
