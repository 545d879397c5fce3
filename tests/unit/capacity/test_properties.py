"""What must hold for every model, slice and load: more bandwidth never slows, more batch never lowers throughput."""

import time
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ostrya.capacity.chips import SLICES, Slice, find_slice
from ostrya.capacity.costs import Work, expected_distinct_experts
from ostrya.capacity.estimate import FACTORS
from ostrya.capacity.facts import Setup
from ostrya.capacity.layers import Phase
from ostrya.capacity.memory import Placement, fit, kv_bytes
from ostrya.capacity.models import models
from ostrya.capacity.published import Engine
from ostrya.capacity.queueing import Goal
from ostrya.capacity.render import as_text
from ostrya.capacity.report import report
from ostrya.capacity.search import Load, Market, search
from ostrya.capacity.serving import serving
from ostrya.capacity.spec import ModelSpec
from ostrya.capacity.speculation import best_draft, round_time
from ostrya.capacity.step import PEAK, Efficiency, step_time

SPECS = st.sampled_from(list(models().values()))
PLACES = st.sampled_from(SLICES)
PLACEMENTS = st.sampled_from(list(Placement))
EFFICIENCIES = st.sampled_from([PEAK, *FACTORS.values()])
BATCHES = st.integers(1, 4096)
SHARES = st.floats(0, 1)
FEW = settings(max_examples=60, deadline=None, derandomize=True)


def seconds(
    spec: ModelSpec,
    where: Slice,
    *,
    batch: int = 1,
    rows: int = 1,
    share: float = 0.0,
    efficiency: Efficiency = PEAK,
    placement: Placement = Placement.SPREAD,
    phase: Phase = Phase.DECODE,
) -> float:
    context = share * (spec.max_context_tokens - rows)
    work = Work(num_requests=batch, rows_per_request=rows, context_tokens=context, phase=phase)
    return step_time(spec, where, work, efficiency=efficiency, placement=placement).seconds


@FEW
@given(spec=SPECS, where=PLACES, batch=BATCHES, share=SHARES, factor=st.floats(1, 10), efficiency=EFFICIENCIES)
def test_more_bandwidth_or_flops_never_slow(
    spec: ModelSpec, where: Slice, batch: int, share: float, factor: float, efficiency: Efficiency
) -> None:
    chip = where.chip
    before = seconds(spec, where, batch=batch, share=share, efficiency=efficiency)
    for better in (
        replace(chip, hbm_bytes_per_s=chip.hbm_bytes_per_s * factor),
        replace(chip, peaks={dtype: peak * factor for dtype, peak in chip.peaks.items()}),
        replace(chip, ici_bytes_per_s=chip.ici_bytes_per_s * factor),
    ):
        faster = seconds(spec, replace(where, chip=better), batch=batch, share=share, efficiency=efficiency)
        assert faster <= before * (1 + 1e-9)


@FEW
@given(spec=SPECS, where=PLACES, batch=BATCHES, share=SHARES, efficiency=EFFICIENCIES, placement=PLACEMENTS)
def test_more_batch_never_lowers_throughput(
    spec: ModelSpec, where: Slice, batch: int, share: float, efficiency: Efficiency, placement: Placement
) -> None:
    one, more = (
        size / seconds(spec, where, batch=size, share=share, efficiency=efficiency, placement=placement)
        for size in (batch, batch + 1)
    )
    assert more >= one * (1 - 1e-9)


@FEW
@given(spec=SPECS, where=PLACES, batch=BATCHES, shares=st.tuples(SHARES, SHARES), phase=st.sampled_from(list(Phase)))
def test_more_context_never_speeds_a_step(
    spec: ModelSpec, where: Slice, batch: int, shares: tuple[float, float], phase: Phase
) -> None:
    short, long = (seconds(spec, where, batch=batch, rows=16, share=share, phase=phase) for share in sorted(shares))
    assert long >= short * (1 - 1e-9)


@FEW
@given(spec=SPECS, where=PLACES, batch=BATCHES, rows=st.integers(1, 16), share=SHARES)
def test_more_rows_never_speed_a_step(spec: ModelSpec, where: Slice, batch: int, rows: int, share: float) -> None:
    context = share * (spec.max_context_tokens - 20)
    fewer, more = (
        step_time(spec, where, Work(num_requests=batch, rows_per_request=count, context_tokens=context)).seconds
        for count in (rows, rows + 1)
    )
    assert more >= fewer * (1 - 1e-9)


@FEW
@given(spec=SPECS, where=PLACES, batch=BATCHES, share=SHARES, efficiency=st.sampled_from(list(FACTORS.values())))
def test_no_estimate_beats_the_limit(
    spec: ModelSpec, where: Slice, batch: int, share: float, efficiency: Efficiency
) -> None:
    limit = seconds(spec, where, batch=batch, share=share)
    assert seconds(spec, where, batch=batch, share=share, efficiency=efficiency) >= limit


@FEW
@given(
    spec=SPECS,
    where=PLACES,
    requests=st.tuples(BATCHES, BATCHES),
    shares=st.tuples(SHARES, SHARES),
    placement=PLACEMENTS,
)
def test_what_fits_still_fits_with_less(
    spec: ModelSpec,
    where: Slice,
    requests: tuple[int, int],
    shares: tuple[float, float],
    placement: Placement,
) -> None:
    few, many = sorted(requests)
    short, long = sorted(round(share * spec.max_context_tokens) for share in shares)
    more = fit(spec, where, context_tokens=long, num_requests=many, placement=placement)
    less = fit(spec, where, context_tokens=short, num_requests=few, placement=placement)
    assert less.needed_bytes <= more.needed_bytes
    assert less.fits or not more.fits
    assert less.max_requests >= more.max_requests
    assert less.max_context_tokens >= more.max_context_tokens


@FEW
@given(spec=SPECS, where=PLACES, share=SHARES, placement=PLACEMENTS)
def test_the_largest_batch_is_the_last_that_fits(
    spec: ModelSpec, where: Slice, share: float, placement: Placement
) -> None:
    context = round(share * spec.max_context_tokens)
    largest = fit(spec, where, context_tokens=context, placement=placement).max_requests
    assume(0 < largest < 1_000_000)
    assert fit(spec, where, context_tokens=context, num_requests=largest, placement=placement).fits
    assert not fit(spec, where, context_tokens=context, num_requests=largest + 1, placement=placement).fits


@FEW
@given(spec=SPECS, shares=st.tuples(SHARES, SHARES))
def test_a_longer_context_never_keeps_less(spec: ModelSpec, shares: tuple[float, float]) -> None:
    short, long = (share * spec.max_context_tokens for share in sorted(shares))
    assert kv_bytes(spec, short) <= kv_bytes(spec, long)


@FEW
@given(
    spec=SPECS,
    where=PLACES,
    more=PLACES,
    batch=BATCHES,
    share=SHARES,
    placement=PLACEMENTS,
    phase=st.sampled_from(list(Phase)),
)
def test_more_chips_never_slow_the_limit(
    spec: ModelSpec,
    where: Slice,
    more: Slice,
    batch: int,
    share: float,
    placement: Placement,
    phase: Phase,
) -> None:
    few, many = sorted((where, replace(more, chip=where.chip)), key=lambda one: one.num_chips)
    slow, fast = (seconds(spec, one, batch=batch, share=share, placement=placement, phase=phase) for one in (few, many))
    assert fast <= slow * (1 + 1e-9)


@given(experts=st.integers(1, 1024), tokens=st.integers(1, 10_000), data=st.data())
def test_distinct_experts_are_at_least_one_tokens_and_at_most_all(
    experts: int, tokens: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    distinct = expected_distinct_experts(experts, top_k, tokens)
    assert top_k * (1 - 1e-9) <= distinct <= min(experts, top_k * tokens) * (1 + 1e-9)


@FEW
@given(
    spec=SPECS,
    where=PLACES,
    batch=st.integers(1, 64),
    rates=st.lists(SHARES, max_size=7).map(lambda found: tuple(sorted(found, reverse=True))),
)
def test_the_best_draft_is_never_slower_than_none(
    spec: ModelSpec, where: Slice, batch: int, rates: tuple[float, ...]
) -> None:
    choice = best_draft(spec, where, rates, num_requests=batch)
    plain = round_time(spec, where, num_draft_tokens=0, num_requests=batch)
    assert choice.tokens_per_s >= plain.tokens_per_s(1.0)


@FEW
@given(
    spec=SPECS,
    where=PLACES,
    batches=st.tuples(st.integers(1, 512), st.integers(1, 512)),
    prompt=st.integers(1, 16_000),
    output=st.integers(1, 4000),
    efficiency=EFFICIENCIES,
)
def test_more_requests_never_shorten_the_wait_and_hardly_lower_what_is_served(
    spec: ModelSpec,
    where: Slice,
    batches: tuple[int, int],
    prompt: int,
    output: int,
    efficiency: Efficiency,
) -> None:
    assume(prompt + output <= spec.max_context_tokens)
    few, many = (
        serving(spec, where, num_requests=batch, prompt_tokens=prompt, output_tokens=output, efficiency=efficiency)
        for batch in sorted(batches)
    )
    assert many.wait_s + many.ttft_s >= (few.wait_s + few.ttft_s) * (1 - 1e-9)
    # At the edge of what prompts take, steps grow a little while the share of chunks has stopped growing.
    assert many.output_tokens_per_s >= few.output_tokens_per_s * 0.98


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
    before = time.process_time()
    assert as_text(report(spec, find_slice("tpu7x-16"), setup))
    assert time.process_time() - before <= 0.3
    load = Load(requests_per_s=5.0, prompt_tokens=8000, output_tokens=500, hit_ratio=0.5)
    before = time.process_time()
    assert search(spec, Goal(ttft_s=1.0, tpot_s=0.02), load, Market(engine=Engine.SERVING, slices=SLICES))
    assert time.process_time() - before <= 2.0


def test_a_thousand_steps_take_less_than_a_second_of_this_process() -> None:
    spec, where = models()["deepseek-v4.1-flash"], SLICES[-1]
    before = time.process_time()
    for batch in range(1, 1001):
        seconds(spec, where, batch=batch, share=0.1)
    assert time.process_time() - before < 1.0
