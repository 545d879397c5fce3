"""Units are consistent: by another unit of time, by hand for one small model, and by the names of fields."""

import re
from dataclasses import fields, is_dataclass, replace
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.capacity import chips, costs, memory, serving, speculation, step
from ostrya.capacity.chips import SLICES, Slice, find_slice
from ostrya.capacity.costs import Work
from ostrya.capacity.estimate import FACTORS
from ostrya.capacity.layers import Part
from ostrya.capacity.models import models
from ostrya.capacity.spec import ModelSpec
from ostrya.capacity.step import PEAK, Efficiency, step_time

UNIT = re.compile(r"^num_\w+$|^acceptance_length$|_(s|bytes|flops|tokens|ratio|per_s|per_request|per_chip|per_user)$")


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(list(models().values())),
    where=st.sampled_from(SLICES),
    batch=st.integers(1, 4096),
    factor=st.floats(0.01, 100),
    efficiency=st.sampled_from([PEAK, *FACTORS.values()]),
)
def test_times_are_in_the_unit_of_time_of_rates_and_overheads(
    spec: ModelSpec, where: Slice, batch: int, factor: float, efficiency: Efficiency
) -> None:
    """Counting time in another unit changes every rate and every overhead, and then all times alike."""
    chip = where.chip
    counted = replace(
        chip,
        hbm_bytes_per_s=chip.hbm_bytes_per_s / factor,
        ici_bytes_per_s=chip.ici_bytes_per_s / factor,
        peaks={dtype: peak / factor for dtype, peak in chip.peaks.items()},
    )
    other = replace(efficiency, layer_overhead_s=efficiency.layer_overhead_s * factor)
    work = Work(num_requests=batch, context_tokens=100)
    before = step_time(spec, where, work, efficiency=efficiency).seconds
    after = step_time(spec, replace(where, chip=counted), work, efficiency=other).seconds
    assert abs(after - before * factor) <= 1e-9 * after


def test_a_dense_models_step_is_its_bytes_over_bandwidth_and_its_operations_over_the_peak() -> None:
    """By hand: Llama 3.1 8B in bf16 on one v5e, 819 GB/s and 197 TFLOP/s; its embedding is read by row."""
    spec, where = models()["llama-3.1-8b"], find_slice("v5e-1")
    parts = step_time(spec, where, Work(num_requests=1)).parts
    weights = [part for part in parts if part.part not in {Part.CACHE, Part.STATE, Part.EMBEDDING}]
    read_params = 8_030_261_248 - 128_256 * 4096
    assert sum(part.memory_s for part in weights) == pytest.approx(read_params * 2 / 819e9, rel=1e-9)
    # Two operations per parameter; norms are not multiplied, or hardly.
    assert sum(part.compute_s for part in weights) == pytest.approx(read_params * 2 / 197e12, rel=1e-4)


@pytest.mark.parametrize("module", [chips, costs, memory, serving, speculation, step], ids=str)
def test_every_fraction_has_its_unit_in_its_name(module: ModuleType) -> None:
    """Fields and properties that are float: seconds, bytes, FLOPs, ratios, tokens or a count, and rates of them."""
    for owner in vars(module).values():
        if not (isinstance(owner, type) and is_dataclass(owner) and owner.__module__ == module.__name__):
            continue
        typed = {field.name: field.type for field in fields(owner)}
        typed |= {
            name: found.fget.__annotations__["return"]
            for name, found in vars(owner).items()
            if isinstance(found, property) and found.fget is not None
        }
        for name in (name for name, kind in typed.items() if kind in {float, "float"}):
            assert UNIT.search(name) or name == "seconds", f"{owner.__name__}.{name}"
