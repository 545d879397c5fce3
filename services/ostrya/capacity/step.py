"""The time of one step: bytes against bandwidth and FLOPs against peak, part by part, then collectives and overhead.

One formula serves the limit and the estimate: the limit uses PEAK, which is HBM and matrix unit at their peaks, links
and launches free, so more chips never slow it; estimate.py has factors fitted to published points. Parts run one after
another, so their times add; within a part memory and matrix unit overlap, so the slower one counts.
"""

from dataclasses import dataclass

from ostrya.capacity.chips import Slice
from ostrya.capacity.costs import PartCost, Work, costs
from ostrya.capacity.memory import ACTIVATION_BYTES, Placement
from ostrya.capacity.spec import ModelSpec, Part, Phase

__all__ = [
    "PEAK",
    "Efficiency",
    "PartTime",
    "StepTime",
    "Work",
    "costs",
    "mixed_step_time",
    "step_time",
]

_COLLECTIVES_PER_LAYER = 2
"""Tensor parallelism sums once after the mixer and once after the feed-forward network (1909.08053, section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How much of each peak is reached, and what a step costs beside. Ratios are in (0, 1]."""

    name: str
    dense_bandwidth_ratio: float = 1.0
    """Of HBM bandwidth, for weights that every token needs."""
    expert_bandwidth_ratio: float = 1.0
    """Of HBM bandwidth, for routed experts: many small matrices, loaded unevenly over the devices."""
    cache_bandwidth_ratio: float = 1.0
    """Of HBM bandwidth, for keys, values and recurrent states: pages here and there, a few rows at a time."""
    flops_ratio: float = 1.0
    exposed_ici_ratio: float = 0.0
    """Share of the links' transfer time that nothing hides. At the limit none counts: how much is sent depends on how
    the model is cut, and a limit must hold for every way of cutting it."""
    layer_overhead_s: float = 0.0
    """Per layer of a step: the latency of its collectives, and what launches it."""

    def bandwidth_ratio(self, part: Part) -> float:
        """Of HBM bandwidth, for what this part moves."""
        if part is Part.ROUTED_EXPERTS:
            return self.expert_bandwidth_ratio
        return self.cache_bandwidth_ratio if part in (Part.CACHE, Part.STATE) else self.dense_bandwidth_ratio


PEAK = Efficiency(name="limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """One part of a step, in seconds."""

    part: Part
    num_bytes: float
    num_flops: float
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step of the whole slice."""

    works: tuple[Work, ...]
    """One, or a decode and a chunk of a prompt together."""
    parts: tuple[PartTime, ...]
    collectives_s: float
    """Transfer time on the links."""
    exposed_ici_ratio: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts) + self.exposed_s + self.overhead_s

    @property
    def exposed_s(self) -> float:
        """Of the collectives, what the step is longer for: 0 at the limit."""
        return self.exposed_ici_ratio * self.collectives_s

    @property
    def num_bytes(self) -> float:
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_flops(self) -> float:
        return sum(part.num_flops for part in self.parts)

    @property
    def memory_s(self) -> float:
        """Of the parts that memory bounds."""
        return sum(part.seconds for part in self.parts if part.memory_s >= part.compute_s)

    @property
    def compute_s(self) -> float:
        """Of the parts that the matrix unit bounds."""
        return sum(part.seconds for part in self.parts if part.memory_s < part.compute_s)

    @property
    def bound_by(self) -> str:
        """The largest term, such as "memory: routed experts", "compute: attention", "collectives" or "overhead"."""
        terms = {
            f"{'memory' if part.memory_s >= part.compute_s else 'compute'}: {part.part}": part.seconds
            for part in self.parts
        }
        terms["collectives"] = self.exposed_s
        terms["overhead"] = self.overhead_s
        return max(terms, key=lambda term: terms[term])


def step_time(
    spec: ModelSpec,
    where: Slice,
    work: Work,
    *,
    efficiency: Efficiency = PEAK,
    placement: Placement = Placement.SPREAD,
) -> StepTime:
    """The time of one step; with PEAK, the limit. Whether the work fits is memory.py's question."""
    return _timed(spec, where, (work,), efficiency, placement)


def mixed_step_time(
    spec: ModelSpec,
    where: Slice,
    decode: Work,
    chunk: Work,
    *,
    efficiency: Efficiency = PEAK,
    placement: Placement = Placement.SPREAD,
) -> StepTime:
    """Chunked prefill: one step that decodes some requests and computes a chunk of another's prompt.

    Weights are read once for both (Sarathi-Serve, 2403.02310).
    """
    return _timed(spec, where, (decode, chunk), efficiency, placement)


def _timed(
    spec: ModelSpec, where: Slice, works: tuple[Work, ...], efficiency: Efficiency, placement: Placement
) -> StepTime:
    parts = costs(spec, works, num_devices=where.num_devices, placement=placement)
    return StepTime(
        works=works,
        parts=tuple(_part_time(part, where, efficiency) for part in parts),
        collectives_s=_collectives_s(spec, where, works),
        exposed_ici_ratio=efficiency.exposed_ici_ratio,
        overhead_s=efficiency.layer_overhead_s * max(_num_layers(spec, work.phase) for work in works),
    )


def _part_time(cost: PartCost, where: Slice, efficiency: Efficiency) -> PartTime:
    return PartTime(
        part=cost.part,
        num_bytes=cost.num_bytes,
        num_flops=cost.num_flops,
        memory_s=cost.num_bytes / (where.hbm_bytes_per_s * efficiency.bandwidth_ratio(cost.part)),
        compute_s=cost.num_flops / (where.peak_flops_per_s(cost.dtype) * efficiency.flops_ratio),
    )


def _num_layers(spec: ModelSpec, phase: Phase) -> int:
    return sum(group.count for group in spec.layers if phase in group.phases)


def _collectives_s(spec: ModelSpec, where: Slice, works: tuple[Work, ...]) -> float:
    """Transfers of ring all-reduces over the chips: each chip sends and receives 2 (n - 1) / n of the summed vectors.

    Half of ICI's figure is one direction. Between the devices of one chip the link is far faster and is not counted.
    """
    rows = sum(work.num_rows * _num_layers(spec, work.phase) for work in works)
    sent_bytes = 2 * (where.num_chips - 1) / where.num_chips * rows * _COLLECTIVES_PER_LAYER * spec.hidden
    return sent_bytes * ACTIVATION_BYTES / (where.chip.ici_bytes_per_s / 2)
