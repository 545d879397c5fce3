"""The limit of a step on CPU: capacity's, of weights as they are kept, against what was measured."""

from types import MappingProxyType

import pytest
import torch

from ostrya.capacity.chips import Chip, Dtype, Slice
from ostrya.capacity.layers import DenseFfn
from ostrya.capacity.mixers import GroupedAttention
from ostrya.capacity.spec import BF16, FP32, Layers, ModelSpec, Part, Storage
from ostrya.capacity.step import Work, step_time
from ostrya.engine.backends import cpu_limit
from ostrya.engine.backends.cpu_limit import CpuLimit, measured
from ostrya.engine.backends.cpu_weights import Kept, Width
from ostrya.engine.types import Peaks
from tests.unit.engine.plans import sized_plan

SPEC = ModelSpec(
    name="small",
    hidden=256,
    layers=(
        Layers(
            count=3,
            mixer=GroupedAttention(num_heads=4, num_kv_heads=2, head_dim=64),
            ffn=DenseFfn(inner=512),
            num_norm_params=512,
        ),
    ),
    vocab_size=4096,
    tied_embeddings=True,
    max_context_tokens=2048,
    num_final_norm_params=256,
)
KEPT = Kept(layers=Width(4, 5.0, 16.0), head=Width(2, 10.0, 16.0), layer_rows=4, head_rows=2, description="")
PEAKS = Peaks(10e9, 1e12, "told")
CHIP = Chip(
    name="cpu",
    hbm_bytes=0,
    hbm_bytes_per_s=10e9,
    peaks=MappingProxyType({Dtype.BF16: 1e12}),
    ici_bytes_per_s=1.0,
    devices_per_chip=1,
    gke_accelerator="",
)
MACHINE = Slice(name="machine", chip=CHIP, topology=(1,), num_hosts=1, machine_type="")


@pytest.mark.parametrize(("rows", "layer_bits", "head_bits"), [(1, 5, 10), (2, 5, 10), (4, 5, 16), (8, 16, 16)])
def test_weights_count_as_wide_as_so_many_rows_read_them(rows: int, layer_bits: float, head_bits: float) -> None:
    limit = CpuLimit(SPEC, KEPT, dtype=torch.bfloat16, peaks=PEAKS)
    by_part = {
        Part.ATTENTION: Storage("", layer_bits, Dtype.BF16),
        Part.DENSE_FFN: Storage("", layer_bits, Dtype.BF16),
        Part.HEAD: Storage("", head_bits, Dtype.BF16),
        Part.NORMS: FP32,
    }
    stored = ModelSpec(**{name: getattr(SPEC, name) for name in SPEC.__slots__} | {"storage_by_part": by_part})
    expected = step_time(stored, MACHINE, Work(num_requests=rows, context_tokens=99))
    assert limit.limit(sized_plan([100] * rows)).seconds == pytest.approx(expected.seconds)
    assert stored.kv_storage == BF16


def test_keys_and_values_are_as_wide_as_the_dtype() -> None:
    both = [CpuLimit(SPEC, KEPT, dtype=dtype, peaks=PEAKS) for dtype in (torch.bfloat16, torch.float32)]
    narrow, wide = (of.limit(sized_plan([1001])).memory_s - of.limit(sized_plan([1])).memory_s for of in both)
    assert narrow == pytest.approx(1000 * 3 * 2 * 2 * 64 * 2 / 10e9)
    assert wide == pytest.approx(2 * narrow)


def test_a_measurement_is_of_this_machine_and_says_how() -> None:
    found = measured(torch.bfloat16, weight_bytes=16 << 20)
    # From a machine at its worst to the best there are.
    assert 1e8 < found.bytes_per_s < 1e13
    assert 1e7 < found.flops_per_s < 1e15
    assert found.source == "measured: 16 MiB read, products of 512 x 512 in bfloat16"


def test_processes_that_share_a_model_are_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def told(dtype: torch.dtype, *, weight_bytes: float) -> Peaks:
        asked.append(weight_bytes)
        return PEAKS

    monkeypatch.setattr(cpu_limit, "measured", told)
    alone, shared = (CpuLimit.measured(SPEC, KEPT, dtype=torch.bfloat16, num_processes=number) for number in (1, 4))
    assert asked[0] == 4 * asked[1]
    assert shared.peaks == Peaks(40e9, 4e12, "4 times told")
    plan = sized_plan([100], [(50, 400)])
    assert shared.limit(plan).seconds == pytest.approx(alone.limit(plan).seconds / 4)
