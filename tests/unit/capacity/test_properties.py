"""What must hold for every model, slice and load: more bandwidth never slows, more batch never lowers throughput."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypedDict

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ostrya.capacity.chips import SLICES, Chip, Dtype, Slice, find_slice
from ostrya.capacity.costs import Work, costs, expected_distinct_experts
from ostrya.capacity.estimate import FACTORS
from ostrya.capacity.facts import Setup
from ostrya.capacity.layers import Phase
from ostrya.capacity.memory import MAX_REQUESTS, Fit, Placement, fit, kv_bytes
from ostrya.capacity.models import models
from ostrya.capacity.published import Engine
from ostrya.capacity.queueing import Goal
from ostrya.capacity.render import as_text
from ostrya.capacity.report import report
from ostrya.capacity.search import Load, Market, search
from ostrya.capacity.serving import prefill, prefix_hit_saves_s, serving
from ostrya.capacity.spec import STORAGES, Drafter, ModelSpec, Storage, with_kv, with_weights
from ostrya.capacity.speculation import Drafting, best_draft, break_even_length, round_time
from ostrya.capacity.step import PEAK, Efficiency, mixed_step_time, step_time
from ostrya.capacity.weights import weight_bytes


class How(TypedDict):
    """What every question about time takes."""

    efficiency: Efficiency
    placement: Placement


class Kind(Enum):
    """What is timed."""

    DECODE = auto()
    VERIFY = auto()
    PREFILL = auto()
    MIXED = auto()
    """A decode and a chunk of a prompt."""
    ROUND = auto()
    SERVING = auto()
    """All of a load, drafting; per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a model is stored, where it runs and how well."""

    weights: Storage | None
    """None: as released."""
    keys_and_values: Storage | None
    where: Slice
    efficiency: Efficiency
    placement: Placement

    def of(self, spec: ModelSpec) -> ModelSpec:
        spec = spec if self.weights is None else with_weights(spec, self.weights)
        return spec if self.keys_and_values is None else with_kv(spec, self.keys_and_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked of it, in all kinds alike."""

    batch: int
    share: float
    """Of the longest context the model allows."""
    num_draft_tokens: int
    chunk_tokens: int


def seconds(spec: ModelSpec, setting: Setting, job: Job, kinds: Sequence[Kind]) -> dict[Kind, float]:
    spec = setting.of(spec)
    # Room for the largest chunk and a token more, so that neighbouring jobs have the same context.
    context = job.share * (spec.max_context_tokens - LONGEST_CHUNK - 1)
    return {kind: _seconds(spec, setting, job, kind, context) for kind in kinds}


def _seconds(spec: ModelSpec, setting: Setting, job: Job, kind: Kind, context: float) -> float:
    where, how = setting.where, How(efficiency=setting.efficiency, placement=setting.placement)
    decode = Work(num_requests=job.batch, context_tokens=context)
    chunk = Work(num_requests=1, rows_per_request=job.chunk_tokens, context_tokens=context, phase=Phase.PREFILL)
    match kind:
        case Kind.DECODE:
            return step_time(spec, where, decode, **how).seconds
        case Kind.VERIFY:
            verify = replace(decode, rows_per_request=job.num_draft_tokens + 1)
            return step_time(spec, where, verify, **how).seconds
        case Kind.PREFILL:
            prompts = replace(chunk, num_requests=job.batch)
            return step_time(spec, where, prompts, **how).seconds
        case Kind.MIXED:
            return mixed_step_time(spec, where, decode, chunk, **how).seconds
        case Kind.ROUND:
            return round_time(
                spec,
                where,
                num_draft_tokens=job.num_draft_tokens,
                num_requests=job.batch,
                context_tokens=context,
                **how,
            ).seconds
        case Kind.SERVING:
            load = serving(
                spec,
                where,
                num_requests=job.batch,
                prompt_tokens=1 + round(context),
                output_tokens=LONGEST_CHUNK,
                drafting=drafting(job.num_draft_tokens),
                chunk_tokens=job.chunk_tokens,
                **how,
            )
            return job.batch / load.output_tokens_per_s


def drafting(num_draft_tokens: int) -> Drafting:
    """Half of what is drafted is accepted."""
    return Drafting(num_draft_tokens=num_draft_tokens, acceptance_length=1 + num_draft_tokens / 2)


LONGEST_CHUNK = 4096
STEPS = tuple(kind for kind in Kind if kind is not Kind.SERVING)
PLACES = st.sampled_from(SLICES)
PLACEMENTS = st.sampled_from(list(Placement))
RATIOS = st.floats(0.01, 1)
EFFICIENCIES = st.sampled_from([PEAK, *FACTORS.values()]) | st.builds(
    Efficiency,
    name=st.just("drawn"),
    dense_bandwidth_ratio=RATIOS,
    expert_bandwidth_ratio=RATIOS,
    cache_bandwidth_ratio=RATIOS,
    flops_ratio=RATIOS,
    exposed_ici_ratio=st.floats(0, 1),
    layer_overhead_s=st.floats(0, 1e-3),
)
BATCHES = st.integers(1, 4096)
SHARES = st.floats(0, 1)
SETTINGS = st.builds(
    Setting,
    weights=st.sampled_from([None, *STORAGES.values()]),
    keys_and_values=st.sampled_from([None, *STORAGES.values()]),
    where=PLACES,
    efficiency=EFFICIENCIES,
    placement=PLACEMENTS,
)
DRAFTS, CHUNKS = st.integers(0, 15), st.integers(256, LONGEST_CHUNK)
JOBS = st.builds(Job, batch=BATCHES, share=SHARES, num_draft_tokens=DRAFTS, chunk_tokens=CHUNKS)
FEW = settings(max_examples=10, deadline=None, derandomize=True)
"""Of every model."""
every_model = pytest.mark.parametrize("spec", [pytest.param(spec, id=name) for name, spec in models().items()])


def faster_memory(chip: Chip, factor: float) -> Chip:
    return replace(chip, hbm_bytes_per_s=chip.hbm_bytes_per_s * factor)


def faster_matrix_unit(chip: Chip, factor: float) -> Chip:
    return replace(chip, peaks={dtype: peak * factor for dtype, peak in chip.peaks.items()})


def faster_links(chip: Chip, factor: float) -> Chip:
    return replace(chip, ici_bytes_per_s=chip.ici_bytes_per_s * factor)


@every_model
@FEW
@given(
    setting=SETTINGS,
    job=JOBS,
    factor=st.floats(1, 10),
    better=st.sampled_from([faster_memory, faster_matrix_unit, faster_links]),
)
def test_more_bandwidth_or_flops_never_slow(
    spec: ModelSpec, setting: Setting, job: Job, factor: float, better: Callable[[Chip, float], Chip]
) -> None:
    improved = replace(setting, where=replace(setting.where, chip=better(setting.where.chip, factor)))
    before, after = (seconds(spec, one, job, tuple(Kind)) for one in (setting, improved))
    assert not [kind for kind in Kind if after[kind] > before[kind] * (1 + 1e-9)]


@every_model
@FEW
@given(setting=SETTINGS, job=JOBS)
def test_more_batch_never_lowers_throughput(spec: ModelSpec, setting: Setting, job: Job) -> None:
    larger = replace(job, batch=job.batch + 1)
    one, more = (seconds(spec, setting, asked, STEPS) for asked in (job, larger))
    assert not [kind for kind in STEPS if larger.batch / more[kind] < job.batch / one[kind] * (1 - 1e-9)]


@every_model
@FEW
@given(setting=SETTINGS, job=JOBS, share=SHARES)
def test_more_context_never_speeds_a_step(spec: ModelSpec, setting: Setting, job: Job, share: float) -> None:
    short, long = (seconds(spec, setting, replace(job, share=one), STEPS) for one in sorted((job.share, share)))
    assert not [kind for kind in STEPS if long[kind] < short[kind] * (1 - 1e-9)]


@every_model
@FEW
@given(setting=SETTINGS, job=JOBS)
def test_more_rows_never_speed_a_step(spec: ModelSpec, setting: Setting, job: Job) -> None:
    longer = replace(job, num_draft_tokens=job.num_draft_tokens + 1, chunk_tokens=job.chunk_tokens + 1)
    fewer, more = (seconds(spec, setting, asked, STEPS) for asked in (job, longer))
    assert not [kind for kind in STEPS if more[kind] < fewer[kind] * (1 - 1e-9)]


@every_model
@FEW
@given(setting=SETTINGS, job=JOBS)
def test_no_estimate_beats_the_limit(spec: ModelSpec, setting: Setting, job: Job) -> None:
    limit, estimate = (seconds(spec, one, job, tuple(Kind)) for one in (replace(setting, efficiency=PEAK), setting))
    assert not [kind for kind in Kind if estimate[kind] < limit[kind] * (1 - 1e-9)]


@every_model
@FEW
@given(setting=SETTINGS, job=JOBS)
def test_what_runs_together_takes_no_less_than_each_and_no_more_than_both(
    spec: ModelSpec, setting: Setting, job: Job
) -> None:
    took = seconds(spec, setting, job, STEPS)
    chunk_s = seconds(spec, setting, replace(job, batch=1), (Kind.PREFILL,))[Kind.PREFILL]
    apart = (took[Kind.DECODE], chunk_s)
    assert max(apart) * (1 - 1e-9) <= took[Kind.MIXED] <= sum(apart) * (1 + 1e-9)
    drafts = bool(spec.drafter and job.num_draft_tokens)
    assert took[Kind.ROUND] > took[Kind.VERIFY] if drafts else took[Kind.ROUND] == took[Kind.VERIFY]


@every_model
@FEW
@given(setting=SETTINGS, job=JOBS, more=PLACES)
def test_more_chips_never_slow_the_limit(spec: ModelSpec, setting: Setting, job: Job, more: Slice) -> None:
    places = sorted((setting.where, replace(more, chip=setting.where.chip)), key=lambda one: one.num_chips)
    slow, fast = (seconds(spec, replace(setting, where=where, efficiency=PEAK), job, tuple(Kind)) for where in places)
    assert not [kind for kind in Kind if fast[kind] > slow[kind] * (1 + 1e-9)]


@every_model
@FEW
@given(weights=st.sampled_from(list(STORAGES.values())), keys_and_values=st.sampled_from(list(STORAGES.values())))
def test_narrowing_never_moves_or_takes_more(spec: ModelSpec, weights: Storage, keys_and_values: Storage) -> None:
    work = Work(num_requests=8, context_tokens=4096)
    changed = with_weights(spec, weights)
    assert sum(part.num_bytes for part in costs(changed, [work])) <= sum(part.num_bytes for part in costs(spec, [work]))
    assert weight_bytes(changed) <= weight_bytes(spec)
    # Keys and values take what they are stored as, and nothing else does.
    assert weight_bytes(with_kv(spec, keys_and_values)) == weight_bytes(spec)
    as_bits = kv_bytes(with_kv(spec, keys_and_values), 4096) / keys_and_values.bits
    assert as_bits == pytest.approx(kv_bytes(spec, 4096) / spec.kv_storage.bits)


@every_model
@FEW
@given(
    setting=SETTINGS,
    requests=st.tuples(BATCHES, BATCHES),
    shares=st.tuples(SHARES, SHARES),
    drafts=st.tuples(DRAFTS, DRAFTS),
    chunks=st.tuples(CHUNKS, CHUNKS),
)
def test_what_fits_still_fits_with_less(
    spec: ModelSpec,
    setting: Setting,
    requests: tuple[int, int],
    shares: tuple[float, float],
    drafts: tuple[int, int],
    chunks: tuple[int, int],
) -> None:
    spec = setting.of(spec)
    less, more = (
        fit(
            spec,
            setting.where,
            context_tokens=round(pick(shares) * spec.max_context_tokens),
            num_requests=pick(requests),
            num_draft_tokens=pick(drafts),
            chunk_tokens=pick(chunks),
            placement=setting.placement,
        )
        for pick in (min, max)
    )
    assert less.needed_bytes <= more.needed_bytes
    assert less.fits or not more.fits
    assert less.max_requests >= more.max_requests
    assert less.max_context_tokens >= more.max_context_tokens


@every_model
@FEW
@given(setting=SETTINGS, share=SHARES, num_draft_tokens=DRAFTS)
def test_the_largest_batch_is_the_last_that_fits(
    spec: ModelSpec, setting: Setting, share: float, num_draft_tokens: int
) -> None:
    def room(num_requests: int) -> Fit:
        return fit(
            setting.of(spec),
            setting.where,
            context_tokens=round(share * spec.max_context_tokens),
            num_requests=num_requests,
            num_draft_tokens=num_draft_tokens,
            placement=setting.placement,
        )

    largest = room(1).max_requests
    if largest:
        assert room(largest).fits
    if largest < MAX_REQUESTS:
        assert not room(largest + 1).fits


@every_model
@FEW
@given(setting=SETTINGS, shares=st.tuples(SHARES, SHARES))
def test_a_longer_context_never_keeps_less(spec: ModelSpec, setting: Setting, shares: tuple[float, float]) -> None:
    short, long = (
        kv_bytes(
            setting.of(spec),
            share * spec.max_context_tokens,
            num_devices=setting.where.num_devices,
            placement=setting.placement,
        )
        for share in sorted(shares)
    )
    assert short <= long


@given(experts=st.integers(1, 1024), tokens=st.integers(1, 10_000), data=st.data())
def test_distinct_experts_are_at_least_one_tokens_and_at_most_all(
    experts: int, tokens: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    distinct = expected_distinct_experts(experts, top_k, tokens)
    assert top_k * (1 - 1e-9) <= distinct <= min(experts, top_k * tokens) * (1 + 1e-9)


@every_model
@FEW
@given(
    setting=SETTINGS,
    batch=st.integers(1, 64),
    rates=st.lists(SHARES, max_size=7).map(lambda found: tuple(sorted(found, reverse=True))),
)
def test_the_best_draft_is_never_slower_than_none(
    spec: ModelSpec, setting: Setting, batch: int, rates: tuple[float, ...]
) -> None:
    spec, where = setting.of(spec), setting.where
    choice = best_draft(
        spec, where, rates, num_requests=batch, efficiency=setting.efficiency, placement=setting.placement
    )
    plain = step_time(spec, where, Work(num_requests=batch), efficiency=setting.efficiency, placement=setting.placement)
    assert choice.tokens_per_s >= batch / plain.seconds * (1 - 1e-9)


@every_model
@FEW
@given(
    setting=SETTINGS,
    batches=st.tuples(st.integers(1, 512), st.integers(1, 512)),
    prompt=st.integers(1, 16_000),
    output=st.integers(1, 4000),
    hit_ratio=SHARES,
    num_draft_tokens=DRAFTS,
    chunk_tokens=CHUNKS,
)
def test_more_requests_never_shorten_the_wait_and_hardly_lower_what_is_served(
    spec: ModelSpec,
    setting: Setting,
    batches: tuple[int, int],
    prompt: int,
    output: int,
    hit_ratio: float,
    num_draft_tokens: int,
    chunk_tokens: int,
) -> None:
    assume(prompt + output <= spec.max_context_tokens)
    few, many = (
        serving(
            setting.of(spec),
            setting.where,
            num_requests=batch,
            prompt_tokens=prompt,
            output_tokens=output,
            hit_ratio=hit_ratio,
            drafting=drafting(num_draft_tokens),
            chunk_tokens=chunk_tokens,
            efficiency=setting.efficiency,
            placement=setting.placement,
        )
        for batch in sorted(batches)
    )
    assert many.wait_s + many.ttft_s >= (few.wait_s + few.ttft_s) * (1 - 1e-9)
    # At the edge of what prompts take, steps grow a little while the share of chunks has stopped growing.
    assert many.output_tokens_per_s >= few.output_tokens_per_s * 0.98


LLAMA = models()["llama-3.1-8b"]
LLAMA_WITH_DRAFTER = replace(
    LLAMA,
    drafter=Drafter(
        name="one of its layers",
        hidden=LLAMA.hidden,
        layers=(replace(LLAMA.layers[0], count=1),),
        max_draft_tokens=3,
        one_pass=False,
    ),
)
THIRTY_TWO = find_slice("v5p-32")


def everything_timed(
    spec: ModelSpec, where: Slice, efficiency: Efficiency, placement: Placement
) -> dict[str, float | tuple[float, ...]]:
    """What every public question about time answers, at sizes where bytes of caches and FLOPs both matter."""
    how = How(efficiency=efficiency, placement=placement)
    decode = Work(num_requests=256, context_tokens=4000)
    chunk = Work(num_requests=1, rows_per_request=64, context_tokens=4000, phase=Phase.PREFILL)
    round_ = round_time(spec, where, num_draft_tokens=3, num_requests=256, context_tokens=4000, **how)
    one, many = (
        serving(
            spec,
            where,
            num_requests=batch,
            prompt_tokens=4000,
            output_tokens=1000,
            drafting=drafting(3),
            chunk_tokens=64,
            **how,
        )
        for batch in (1, 4)
    )
    return {
        "step": step_time(spec, where, decode, **how).seconds,
        "mixed step": mixed_step_time(spec, where, decode, chunk, **how).seconds,
        "draft": round_.draft_s,
        "verification": round_.verify.seconds,
        "break-even": break_even_length(spec, where, num_draft_tokens=3, num_requests=256, context_tokens=4000, **how),
        "best draft": best_draft(
            spec, where, (0.8, 0.5), num_requests=256, context_tokens=4000, **how
        ).tokens_per_s_by_draft,
        "prompt": prefill(spec, where, 8000, chunk_tokens=64, **how).seconds,
        "prefix hit": prefix_hit_saves_s(spec, where, 8000, 4000, chunk_tokens=64, **how),
        "load of one": (one.ttft_s, one.tpot_s),
        "load": (many.ttft_s, many.tpot_s),
    }


def test_a_share_of_the_peaks_takes_as_long_as_a_chip_that_has_no_more() -> None:
    chip = THIRTY_TWO.chip
    lesser = replace(
        chip,
        hbm_bytes_per_s=chip.hbm_bytes_per_s / 2,
        peaks={dtype: peak / 4 for dtype, peak in chip.peaks.items()},
    )
    shares = Efficiency(
        name="shares",
        dense_bandwidth_ratio=1 / 2,
        expert_bandwidth_ratio=1 / 2,
        cache_bandwidth_ratio=1 / 2,
        flops_ratio=1 / 4,
    )
    reached = everything_timed(LLAMA_WITH_DRAFTER, THIRTY_TWO, shares, Placement.SPREAD)
    there_is = everything_timed(LLAMA_WITH_DRAFTER, replace(THIRTY_TWO, chip=lesser), PEAK, Placement.SPREAD)
    assert reached == {what: pytest.approx(took) for what, took in there_is.items()}


def test_four_copies_take_as_long_as_keys_and_values_four_times_as_wide() -> None:
    # 8 KV heads over 32 devices, in model and drafter alike.
    copied = everything_timed(LLAMA_WITH_DRAFTER, THIRTY_TWO, PEAK, Placement.TENSOR_PARALLEL)
    wide = with_kv(LLAMA_WITH_DRAFTER, Storage("four bf16", 4 * 16, Dtype.BF16))
    assert copied == {
        what: pytest.approx(took) for what, took in everything_timed(wide, THIRTY_TWO, PEAK, Placement.SPREAD).items()
    }


def cpu_s(ask: Callable[[], object]) -> float:
    """Of this process, the quickest of three: a core that is shared makes the same work take longer."""
    taken_s = []
    for _ in range(3):
        before = time.process_time()
        assert ask()
        taken_s.append(time.process_time() - before)
    return min(taken_s)


def test_a_report_takes_at_most_three_tenths_of_a_second_and_a_search_over_all_slices_two() -> None:
    spec = models()["kimi-k3"]
    setup = Setup(
        context_tokens=8192,
        num_requests=8,
        prompt_tokens=8192,
        engine=Engine.SERVING,
        num_draft_tokens=7,
        acceptance_rates=(0.86, 0.71, 0.59, 0.48, 0.39, 0.32, 0.26),
    )
    assert cpu_s(lambda: as_text(report(spec, find_slice("tpu7x-16"), setup))) <= 0.3
    load = Load(requests_per_s=5.0, prompt_tokens=8000, output_tokens=500, hit_ratio=0.5)
    market = Market(engine=Engine.SERVING, slices=SLICES)
    assert cpu_s(lambda: search(spec, Goal(ttft_s=1.0, tpot_s=0.02), load, market)) <= 2.0


def test_a_thousand_steps_take_less_than_a_second_of_this_process() -> None:
    spec, where = models()["deepseek-v4.1-flash"], SLICES[-1]
    steps = [Work(num_requests=batch, context_tokens=100_000) for batch in range(1, 1001)]
    assert cpu_s(lambda: [step_time(spec, where, work) for work in steps]) < 1.0
