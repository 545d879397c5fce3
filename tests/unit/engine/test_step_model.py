"""A plan's limit is capacity's own, row by row, for every model that capacity knows."""

import random
from dataclasses import replace

import pytest

from ostrya.capacity.chips import Dtype, Slice, find_slice
from ostrya.capacity.costs import PartCost, Work, costs
from ostrya.capacity.estimate import efficiency
from ostrya.capacity.layers import Phase
from ostrya.capacity.models import find_model, models
from ostrya.capacity.published import Engine
from ostrya.capacity.step import PEAK, Efficiency, mixed_step_time, step_time
from ostrya.engine.step_model import StepModel
from tests.unit.engine.plans import sized_plan

WHERE = find_slice("tpu7x-16")
ESTIMATE = efficiency(Engine.SERVING, "tpu7x")
ROUNDING = 1e-9
# Hardware on which nothing is hidden behind the other.
NO_MEMORY_LIMIT = replace(WHERE, chip=replace(WHERE.chip, hbm_bytes_per_s=1e30))
NO_COMPUTE_LIMIT = replace(WHERE, chip=replace(WHERE.chip, peaks={Dtype.BF16: 1e30}))


def seconds(part: PartCost, where: Slice) -> tuple[float, float]:
    """Memory's, and the matrix unit's."""
    return part.num_bytes / where.hbm_bytes_per_s, part.num_flops / where.peak_flops_per_s(part.dtype)


@pytest.mark.parametrize("where", [WHERE, NO_MEMORY_LIMIT, NO_COMPUTE_LIMIT], ids=["tpu7x", "compute", "memory"])
@pytest.mark.parametrize("name", models())
def test_rows_of_any_length_cost_what_capacity_says_of_each(name: str, where: Slice) -> None:
    spec, draw = find_model(name), random.Random(name)
    model = StepModel(spec, where)
    longest = spec.max_context_tokens - 2000
    for num_decoding, num_chunks in ((3, 0), (0, 1), (9, 2), (0, 3)):
        # Short ones too, within windows.
        decode = [draw.randint(1, draw.choice((300, longest))) for _ in range(num_decoding)]
        chunks = [(draw.choice((0, 100, draw.randint(0, longest))), draw.randint(2, 1500)) for _ in range(num_chunks)]
        works = [Work(num_requests=1, context_tokens=seen - 1) for seen in decode] + [
            Work(num_requests=1, rows_per_request=tokens, context_tokens=before, phase=Phase.PREFILL)
            for before, tokens in chunks
        ]
        parts = [seconds(part, where) for part in costs(spec, works)]
        found = model.limit(sized_plan(decode, chunks))
        assert found.memory_s == pytest.approx(sum(one for one, two in parts if one >= two), rel=ROUNDING)
        assert found.compute_s == pytest.approx(sum(two for one, two in parts if one < two), rel=ROUNDING)


@pytest.mark.parametrize("factors", [PEAK, ESTIMATE], ids=lambda factors: factors.name)
@pytest.mark.parametrize("name", ["kimi-k3", "deepseek-v4.1-flash", "gpt-oss-120b"])
def test_a_step_takes_what_capacity_reports_collectives_and_overhead_included(name: str, factors: Efficiency) -> None:
    spec = find_model(name)
    model = StepModel(spec, WHERE, efficiency=factors)
    decode = Work(num_requests=24, context_tokens=5000)
    chunk = Work(num_requests=1, rows_per_request=700, context_tokens=1300, phase=Phase.PREFILL)
    rows, part = [5001] * 24, [(1300, 700)]
    alone = step_time(spec, WHERE, decode, efficiency=factors)
    both = mixed_step_time(spec, WHERE, decode, chunk, efficiency=factors)
    assert model.seconds(sized_plan(rows)).seconds == pytest.approx(alone.seconds, rel=ROUNDING)
    assert model.seconds(sized_plan(rows, part)).seconds == pytest.approx(both.seconds, rel=ROUNDING)
    other_s = alone.exposed_s + alone.overhead_s
    assert model.seconds(sized_plan(rows)).other_s == pytest.approx(other_s, rel=ROUNDING)


def test_a_limit_says_of_which_rows_the_step_is() -> None:
    model = StepModel(find_model("llama-3.1-8b"), WHERE)
    plans = (sized_plan([7]), sized_plan(chunks=[(0, 9)]), sized_plan([7], [(0, 9)]))
    assert [model.limit(plan).kind for plan in plans] == ["decode", "prefill", "mixed"]


def test_the_peaks_are_the_slices() -> None:
    peaks = StepModel(find_model("llama-3.1-8b"), WHERE).peaks
    assert (peaks.bytes_per_s, peaks.flops_per_s) == (16 * 7.40e12, 16 * 2307e12)
    assert peaks.source == "published for tpu7x-16"
