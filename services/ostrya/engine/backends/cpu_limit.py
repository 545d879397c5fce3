"""How fast this machine could do a step: its memory bandwidth and rate of products, measured, against the weights as
they are kept. Called by cpu.py when a model is loaded.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Self

import torch

from ostrya.capacity.chips import Chip, Dtype, Slice
from ostrya.capacity.layers import Part
from ostrya.capacity.spec import FP32, ModelSpec, Storage
from ostrya.capacity.weights import weight_bytes
from ostrya.engine.backends.cpu_weights import Kept
from ostrya.engine.plan import StepPlan
from ostrya.engine.step_model import StepModel
from ostrya.engine.types import Peaks, StepLimit

_STREAMED_BYTES = 128 << 20
"""Of memory read at most. No more than there are weights: what fits in caches is as fast as this for them too."""
_STREAMED_COLUMNS = 8192
_SIDE = 1024
"""Of the matrices that are multiplied: from there on more is not faster. Less for a small model, which then loads
quickly."""
_MEASURED_S = 0.06
"""For each of the two: the machine is not ours alone, so the best of several is what it can do."""
_MIN_ROUNDS, _MAX_ROUNDS = 3, 20


class CpuLimit:
    """A Limit. How wide the matrices are that a step reads may depend on its number of rows (cpu_weights.py)."""

    def __init__(self, spec: ModelSpec, kept: Kept, *, dtype: torch.dtype, peaks: Peaks) -> None:
        """`spec`: sizes; how it is stored is `kept`'s to say."""
        self.peaks = peaks
        self._layers, self._head = kept.layers, kept.head
        self._models = {
            (few_layers, few_head): StepModel(
                _stored(spec, self._layers.bits(few_layers), self._head.bits(few_head), dtype), _machine(peaks)
            )
            for few_layers in (True, False)
            for few_head in (True, False)
        }

    @classmethod
    def measured(cls, spec: ModelSpec, kept: Kept, *, dtype: torch.dtype, num_processes: int = 1) -> Self:
        """Against what this machine does now, with as many threads as torch has. `spec` is of the whole model, which
        the processes share; that they measure at the same time is as it is when they compute."""
        stored = _stored(spec, kept.layers.many_bits, kept.head.many_bits, dtype)
        own = measured(dtype, weight_bytes=weight_bytes(stored) / num_processes)
        source = own.source if num_processes == 1 else f"{num_processes} times {own.source}"
        peaks = Peaks(num_processes * own.bytes_per_s, num_processes * own.flops_per_s, source)
        return cls(spec, kept, dtype=dtype, peaks=peaks)

    def limit(self, plan: StepPlan) -> StepLimit:
        few = plan.num_tokens <= self._layers.few_rows, plan.num_rows <= self._head.few_rows
        return self._models[few].limit(plan)


def measured(dtype: torch.dtype, *, weight_bytes: float) -> Peaks:
    """Of this machine, with as many threads as torch has now; takes a fifth of a second, less for a small model."""
    num_bytes = int(min(weight_bytes, _STREAMED_BYTES))
    matrix = torch.ones(max(1, num_bytes // (4 * _STREAMED_COLUMNS)), _STREAMED_COLUMNS)
    vector = torch.ones(_STREAMED_COLUMNS)
    # A float32 matrix times a vector: of all that torch can do it reads the fastest.
    bytes_per_s = matrix.nbytes / _shortest_s(lambda: matrix @ vector)
    side = min(_SIDE, max(1, math.isqrt(num_bytes // 64)))
    one, other = (torch.ones(side, side, dtype=dtype) for _ in range(2))
    flops_per_s = 2 * side**3 / _shortest_s(lambda: one @ other.T)
    name = str(dtype).removeprefix("torch.")
    source = f"measured: {matrix.nbytes >> 20} MiB read, products of {side} x {side} in {name}"
    return Peaks(bytes_per_s, flops_per_s, source)


def _shortest_s(work: Callable[[], object]) -> float:
    shortest_s, num_rounds, began = float("inf"), 0, time.perf_counter()
    while num_rounds < _MIN_ROUNDS or (num_rounds < _MAX_ROUNDS and time.perf_counter() - began < _MEASURED_S):
        before = time.perf_counter()
        work()
        shortest_s = min(shortest_s, time.perf_counter() - before)
        num_rounds += 1
    return shortest_s


def _stored(spec: ModelSpec, layer_bits: float, head_bits: float, dtype: torch.dtype) -> ModelSpec:
    plain = Storage(str(dtype), 8 * dtype.itemsize, Dtype.BF16)
    by_part = {
        Part.NORMS: FP32,
        Part.ROUTER: FP32,
        Part.EMBEDDING: plain,
        Part.HEAD: Storage("kept", head_bits, Dtype.BF16),
    }
    return replace(
        spec,
        storage=Storage("kept", layer_bits, Dtype.BF16),
        storage_by_part=MappingProxyType(by_part),
        kv_storage=plain,
    )


def _machine(peaks: Peaks) -> Slice:
    """As capacity knows hardware: one device of one chip; products in whatever dtype were measured."""
    chip = Chip(
        name="cpu",
        hbm_bytes=0,
        hbm_bytes_per_s=peaks.bytes_per_s,
        peaks=MappingProxyType({Dtype.BF16: peaks.flops_per_s}),
        ici_bytes_per_s=1.0,
        devices_per_chip=1,
        gke_accelerator="",
    )
    return Slice(name="this machine", chip=chip, topology=(1,), num_hosts=1, machine_type="")
