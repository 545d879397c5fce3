"""What a step moves and computes, by part: bytes of HBM and FLOPs over the whole slice. No chip and no time yet.

Weights are read once per step, whatever the number of tokens; routed experts as far as some token needs them. Keys and
values are read once per request and written once per token. A recurrent state is read once, and written once per token
that a verification may stop at (vLLM on TPU keeps K + 1 slots: vllm-torchtpu 0.29, num_speculative_tokens + 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from ostrya.capacity.chips import Dtype
from ostrya.capacity.layers import MoeFfn
from ostrya.capacity.memory import MAX_REQUESTS, Placement, layer_state_bytes, num_copies
from ostrya.capacity.spec import Layers, ModelSpec, Part, Phase
from ostrya.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step computes: `rows_per_request` new tokens of each of `num_requests` requests.

    ConfigError for numbers that make no sense.
    """

    num_requests: int
    rows_per_request: float = 1
    """1 decodes, K + 1 verifies K drafted tokens, more is a chunk of a prompt (an average, so it need not be whole)."""
    context_tokens: float = 0.0
    """Already in the cache of each request, on average."""
    phase: Phase = Phase.DECODE

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            problems.append(f"number of requests is {self.num_requests}; it must be 1 to {MAX_REQUESTS}")
        if not (isfinite(self.rows_per_request) and self.rows_per_request >= 1):
            problems.append(f"tokens per request and step are {self.rows_per_request}; they must be at least 1")
        if not (isfinite(self.context_tokens) and self.context_tokens >= 0):
            problems.append(f"context is {self.context_tokens} tokens; it must not be negative")
        if problems:
            raise ConfigError(problems)

    @property
    def num_rows(self) -> float:
        return self.num_requests * self.rows_per_request

    @property
    def num_logits(self) -> float:
        """Rows that go through the head: of a prompt only the last."""
        return self.num_requests if self.phase is Phase.PREFILL else self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """What one part of a step moves and computes, over the whole slice."""

    part: Part
    num_bytes: float
    num_flops: float
    dtype: Dtype


def expected_distinct_experts(num_experts: int, top_k: int, num_tokens: float) -> float:
    """E(1 - (1 - k/E)^n): how many of E experts n tokens need, if each draws k at random.

    An upper bound in practice: neighbouring tokens share experts, and routing is skewed.
    """
    if not 0 < top_k <= num_experts or num_tokens < 0:
        raise ConfigError([f"{num_tokens} tokens cannot draw {top_k} of {num_experts} experts each"])
    drawn_by_none = (1 - top_k / num_experts) ** num_tokens
    return num_experts * float(1 - drawn_by_none)


def costs(
    spec: ModelSpec, works: Sequence[Work], *, num_devices: int = 1, placement: Placement = Placement.SPREAD
) -> tuple[PartCost, ...]:
    """Of one step that does all of `works`; they share the reading of weights. ConfigError: a context is too long."""
    for work in works:
        check_context(spec, work)
    totals = _Totals()
    for group in spec.layers:
        running = [work for work in works if work.phase in group.phases]
        if running:
            _add_weights(spec, group, sum(work.num_rows for work in running), totals)
        copies = num_copies(group.mixer, num_devices=num_devices, placement=placement)
        state = layer_state_bytes(spec, group, num_devices=num_devices, placement=placement)
        for work in running:
            _add_cache(spec, group, work, copies, state, totals)
    _add_ends(spec, works, totals)
    return tuple(
        PartCost(
            part=part, num_bytes=totals.num_bytes[part], num_flops=totals.num_flops[part], dtype=_dtype(spec, part)
        )
        for part in Part
        if totals.num_bytes[part] or totals.num_flops[part]
    )


def check_context(spec: ModelSpec, work: Work) -> None:
    """ConfigError if the request would be longer than the model allows."""
    # One row more than the context is the token being decoded, which nobody counts.
    if work.context_tokens + work.rows_per_request > spec.max_context_tokens + 1:
        asked = f"context is {work.context_tokens:,.0f} tokens and {work.rows_per_request:,.0f} of the step"
        raise ConfigError([f"{asked}; the limit of {spec.name} is {spec.max_context_tokens:,}; ask for less"])


def _add_weights(spec: ModelSpec, group: Layers, num_rows: float, totals: "_Totals") -> None:
    parts = dict(group.ffn.num_params_active(spec.hidden))
    parts[Part.ATTENTION] = group.mixer.num_params(spec.hidden)
    parts[Part.NORMS] = group.num_norm_params
    for part, active in parts.items():
        read: float = active
        if part is Part.ROUTED_EXPERTS and isinstance(group.ffn, MoeFfn):
            experts = expected_distinct_experts(group.ffn.num_experts, group.ffn.top_k, num_rows)
            read = experts * group.ffn.num_params_per_expert(spec.hidden)
        totals.add(part, group.count * read * spec.storage_of(part).num_bytes, group.count * active * 2 * num_rows)


def _add_cache(
    spec: ModelSpec, group: Layers, work: Work, copies: float, state_bytes: float, totals: "_Totals"
) -> None:
    mixer, rows = group.mixer, work.rows_per_request
    # Causal: the first new token sees the context, the last one all the others too.
    seen_tokens = work.context_tokens + (rows + 1) / 2
    num_flops = group.count * work.num_rows * mixer.num_flops(seen_tokens, work.phase)
    if mixer.num_state_values:
        moves = 2.0 if work.phase is Phase.PREFILL else rows + 1
        totals.add(Part.STATE, work.num_requests * state_bytes * moves, num_flops)
        return
    read = mixer.num_read_values(work.context_tokens, rows)
    written = rows * mixer.num_written_values
    num_bytes = (read + written) * spec.kv_storage.num_bytes
    totals.add(Part.CACHE, group.count * work.num_requests * copies * num_bytes, num_flops)


def _add_ends(spec: ModelSpec, works: Sequence[Work], totals: "_Totals") -> None:
    num_rows = sum(work.num_rows for work in works)
    num_logits = sum(work.num_logits for work in works)
    row, head = spec.storage_of(Part.EMBEDDING).num_bytes, spec.storage_of(Part.HEAD).num_bytes
    table = spec.vocab_size * spec.hidden
    totals.add(Part.EMBEDDING, num_rows * spec.hidden * row, 0)
    totals.add(Part.HEAD, table * head, 2 * table * num_logits)
    totals.add(Part.NORMS, spec.num_final_norm_params * spec.storage_of(Part.NORMS).num_bytes, 0)
    looked_up = sum(table.num_params_read for table in spec.tables)
    totals.add(Part.TABLES, num_rows * looked_up * spec.storage_of(Part.TABLES).num_bytes, 0)


def _dtype(spec: ModelSpec, part: Part) -> Dtype:
    if part is Part.CACHE:
        return spec.kv_storage.multiplied_as
    return spec.state_storage.multiplied_as if part is Part.STATE else spec.storage_of(part).multiplied_as


class _Totals:
    """Bytes and FLOPs by part, while they are gathered."""

    def __init__(self) -> None:
        self.num_bytes: dict[Part, float] = dict.fromkeys(Part, 0.0)
        self.num_flops: dict[Part, float] = dict.fromkeys(Part, 0.0)

    def add(self, part: Part, num_bytes: float, num_flops: float) -> None:
        self.num_bytes[part] += num_bytes
        self.num_flops[part] += num_flops
