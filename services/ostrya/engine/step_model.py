"""What a plan takes on a slice, by capacity's arithmetic: the limit, or what to expect. Called by the engine for every
step, and by backend roofline, whose clock it is. No torch.

capacity/step.py says what a step takes in a hundred microseconds; here the same numbers take ten. All that it adds up
is a sum of so much for the step, each row and each request, with two exceptions: what routed experts move, and what a
request's cache moves and computes at its length. The sums' terms are asked of it once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ostrya.capacity.chips import Dtype, Slice
from ostrya.capacity.costs import expected_distinct_experts
from ostrya.capacity.layers import MoeFfn, Part, Phase
from ostrya.capacity.spec import ModelSpec
from ostrya.capacity.step import PEAK, Efficiency, StepTime, Work, mixed_step_time, step_time
from ostrya.engine.plan import I32, StepPlan
from ostrya.engine.types import Peaks, StepKind, StepLimit

F64 = npt.NDArray[np.float64]

# Shapes: P parts of a step; R rows.

_PARTS = tuple(Part)
_NUM_PARTS = len(_PARTS)
_CACHE, _EXPERTS = _PARTS.index(Part.CACHE), _PARTS.index(Part.ROUTED_EXPERTS)
_EXACT = 1e-9
"""By how much numbers that should be equal may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """What a step takes, by what it waits for."""

    memory_s: float
    """Parts that memory bounds."""
    compute_s: float
    """Parts that the matrix unit bounds."""
    other_s: float
    """Collectives and overhead: 0 at the limit."""

    @property
    def seconds(self) -> float:
        return self.memory_s + self.compute_s + self.other_s


class StepModel:
    """One model on one slice; with PEAK, the limit. Caches are spread over the devices (Placement.SPREAD)."""

    def __init__(self, spec: ModelSpec, where: Slice, *, efficiency: Efficiency = PEAK) -> None:
        flops_per_s = where.peak_flops_per_s(Dtype.BF16)
        self.peaks = Peaks(where.hbm_bytes_per_s, flops_per_s, f"published for {where.name}")
        self._spec, self._where, self._efficiency = spec, where, efficiency
        self._terms = {phases: self._terms_of(*phases) for phases in ((True, False), (False, True), (True, True))}
        self._experts = self._expert_groups()
        longest = spec.max_context_tokens
        self._decode_bytes_s = _Bent(lambda n: self._cache(Phase.DECODE, n)[0], longest)
        self._decode_flops_s = _Bent(lambda n: self._cache(Phase.DECODE, n)[1], longest)
        self._chunk_flops_s = _Bent(lambda n: self._cache(Phase.PREFILL, n)[1], longest)
        self._chunk_bytes_s = _Bent(lambda n: self._cache(Phase.PREFILL, n)[0], longest)
        self._written_s = self._cache(Phase.PREFILL, 0, 2)[0] - self._cache(Phase.PREFILL, 0, 1)[0]
        self._is_separable = self._reads_whole_context(longest // 2)
        """What a chunk reads of its cache does not depend on how long it is."""

    def seconds(self, plan: StepPlan) -> StepSeconds:
        """Of the plan as it is, padding not counted."""
        rows, decode = plan.num_rows, plan.num_decode_rows
        chunks = rows - decode
        terms = self._terms[decode > 0, chunks > 0]
        took = terms @ np.array((1, decode, plan.num_tokens - decode, chunks), np.float64)
        memory_P, compute_P = took[:_NUM_PARTS], took[_NUM_PARTS:-1]
        memory_P[_EXPERTS] += self._experts_s(decode, plan.num_tokens - decode)
        if decode:
            context_R = plan.kv_lens[:decode] - 1
            num_tokens = float(np.add.reduce(context_R))
            memory_P[_CACHE] += self._decode_bytes_s.total(context_R, num_tokens)
            compute_P[_CACHE] += self._decode_flops_s.total(context_R, num_tokens)
        if chunks:
            read_s, computed_s = self._chunks(plan, decode)
            memory_P[_CACHE] += read_s
            compute_P[_CACHE] += computed_s
        is_memory_P = memory_P >= compute_P
        memory_s, compute_s = float(memory_P @ is_memory_P), float(compute_P @ ~is_memory_P)
        return StepSeconds(memory_s=memory_s, compute_s=compute_s, other_s=float(took[-1]))

    def limit(self, plan: StepPlan) -> StepLimit:
        """The same for a report, if it is one."""
        found = self.seconds(plan)
        return StepLimit(kind_of(plan), found.memory_s, found.compute_s)

    def _terms_of(self, decodes: bool, prefills: bool) -> F64:
        """[2 P + 1, 4] seconds of a step that decodes, or has chunks, or both: memory's by part, the matrix unit's, the
        rest; of each what it takes anyway, for each decode row, each prompt token and each chunk.

        By differences: a step that has twice of one thing.
        """

        def took(num_decoding: int, tokens_per_chunk: int, num_chunks: int) -> F64:
            decode, chunk = Work(num_requests=num_decoding), _chunk(0, tokens_per_chunk, num_chunks)
            spec, where = self._spec, self._where
            if decodes and prefills:
                return _columns(mixed_step_time(spec, where, decode, chunk, efficiency=self._efficiency))
            return _columns(step_time(spec, where, decode if decodes else chunk, efficiency=self._efficiency))

        one = took(1, 1, 1)
        row, token = took(2, 1, 1) - one, took(1, 2, 1) - one
        chunk = took(1, 1, 2) - one - token
        base = one - decodes * row - prefills * (token + chunk)
        terms = np.stack([base, row, token, chunk], axis=-1)
        # These are added by their own formulas.
        terms[[_EXPERTS, _CACHE, _NUM_PARTS + _CACHE]] = 0
        return terms

    def _expert_groups(self) -> list[tuple[bool, bool, MoeFfn, float]]:
        """In which phases they run, and what reading one expert of each layer takes."""
        part = Part.ROUTED_EXPERTS
        bytes_per_s = self._where.hbm_bytes_per_s * self._efficiency.bandwidth_ratio(part)
        one_s = self._spec.storage_of(part).num_bytes / bytes_per_s
        return [
            (
                Phase.DECODE in group.phases,
                Phase.PREFILL in group.phases,
                group.ffn,
                group.count * group.ffn.num_params_per_expert(self._spec.hidden) * one_s,
            )
            for group in self._spec.layers
            if isinstance(group.ffn, MoeFfn)
        ]

    def _experts_s(self, decode: int, prefill: int) -> float:
        seconds = 0.0
        for decodes, prefills, ffn, one_s in self._experts:
            num_tokens = decodes * decode + prefills * prefill
            seconds += expected_distinct_experts(ffn.num_experts, ffn.top_k, num_tokens) * one_s
        return seconds

    def _chunks(self, plan: StepPlan, first: int) -> tuple[float, float]:
        """What the rows from `first` on read and write of their caches, and attention over them."""
        rows, num_new = plan.num_rows, plan.num_tokens - first
        ends_R = plan.kv_lens[first:rows].astype(np.float64)
        tokens_R = (plan.query_start[first + 1 : rows + 1] - plan.query_start[first:rows]).astype(np.float64)
        before_R = ends_R - tokens_R
        # The mean of what its tokens see, less the token itself: as capacity counts a context.
        computed_s = self._chunk_flops_s.weighted(ends_R - 0.5 * (tokens_R + 1), tokens_R, num_new)
        if self._is_separable:
            read_s = self._chunk_bytes_s.total(before_R, float(np.add.reduce(before_R)))
            return read_s + self._written_s * (num_new - len(tokens_R)), computed_s
        pairs = zip(before_R.tolist(), tokens_R.tolist(), strict=True)
        return sum(self._read_s(before, tokens) for before, tokens in pairs) + self._written_s * num_new, computed_s

    def _read_s(self, context_tokens: float, rows: float) -> float:
        """By one chunk: slower by far, for models where tokens choose what they read."""
        value_s = self._spec.kv_storage.num_bytes / (
            self._where.hbm_bytes_per_s * self._efficiency.bandwidth_ratio(Part.CACHE)
        )
        return value_s * sum(
            group.count * group.mixer.num_read_values(context_tokens, rows)
            for group in self._spec.layers
            if Phase.PREFILL in group.phases
        )

    def _reads_whole_context(self, tokens: int) -> bool:
        short, long = (self._cache(Phase.PREFILL, tokens, rows)[0] for rows in (1, tokens))
        return abs(long - short - (tokens - 1) * self._written_s) <= _EXACT * long

    def _cache(self, phase: Phase, context_tokens: float, rows: int = 1) -> tuple[float, float]:
        """Memory's and the matrix unit's seconds for the cache of one request."""
        context_tokens = min(max(context_tokens, 0), self._spec.max_context_tokens + 1 - rows)
        work = Work(num_requests=1, rows_per_request=rows, context_tokens=context_tokens, phase=phase)
        parts = step_time(self._spec, self._where, work, efficiency=self._efficiency).parts
        return next(((one.memory_s, one.compute_s) for one in parts if one.part is Part.CACHE), (0.0, 0.0))


def kind_of(plan: StepPlan) -> StepKind:
    """Of which rows the step is."""
    if plan.num_decode_rows == plan.num_rows:
        return "decode"
    return "mixed" if plan.num_decode_rows else "prefill"


class _Bent:
    """A function of a number of tokens that is straight but for a few bends, such as a sliding window's end."""

    def __init__(self, of: Callable[[float], float], longest: int) -> None:
        self._at = np.array(_bends(of, 0, longest), np.float64)
        self._value = np.array([of(at) for at in self._at.tolist()])
        self._slope = float((self._value[-1] - self._value[0]) / (self._at[-1] or 1))

    def total(self, tokens_R: I32 | F64, their_sum: float) -> float:
        """Sum of its values."""
        if len(self._at) == 2:
            return float(self._value[0]) * len(tokens_R) + self._slope * their_sum
        return float(np.add.reduce(np.interp(tokens_R, self._at, self._value)))

    def weighted(self, tokens_R: F64, weight_R: F64, sum_of_weights: float) -> float:
        """Sum of its values, each times its weight."""
        if len(self._at) == 2:
            return float(self._value[0]) * sum_of_weights + self._slope * float(tokens_R @ weight_R)
        return float(np.interp(tokens_R, self._at, self._value) @ weight_R)


def _bends(of: Callable[[float], float], low: int, high: int) -> Sequence[int]:
    """Both ends, and between them every whole number around which the function turns."""
    points = [low, high]
    parts = [(low, high)]
    while parts:
        begin, end = parts.pop()
        if end - begin < 2:
            continue
        # A third too: one bend in the very middle of another would hide it.
        middle, third = (begin + end) // 2, begin + (end - begin) // 3
        first, last = of(begin), of(end)
        straight = (first + (last - first) * (at - begin) / (end - begin) - of(at) for at in (middle, third))
        if max(map(abs, straight)) > _EXACT * max(abs(first), abs(last)):
            points.append(middle)
            parts += [(begin, middle), (middle, end)]
    return sorted(points)


def _chunk(context_tokens: float, rows: int, num_requests: int = 1) -> Work:
    return Work(num_requests=num_requests, rows_per_request=rows, context_tokens=context_tokens, phase=Phase.PREFILL)


def _columns(step: StepTime) -> F64:
    """Memory's seconds by part, the matrix unit's, and the rest."""
    memory = {one.part: one.memory_s for one in step.parts}
    compute = {one.part: one.compute_s for one in step.parts}
    by_part = [of.get(part, 0.0) for of in (memory, compute) for part in _PARTS]
    return np.array([*by_part, step.exposed_s + step.overhead_s])
