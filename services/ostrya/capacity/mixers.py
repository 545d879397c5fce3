"""The ways in which the tokens of a layer see each other: attention of several kinds, and linear recurrences.

Each is a Mixer (layers.py): it counts its parameters, what a request keeps, what a token reads, and FLOPs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf

from ostrya.capacity.layers import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Grouped-query attention (2305.13245), over everything or over a sliding window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    output_gate: bool = False
    """A sigmoid gate as wide as the heads together, before the output projection."""
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    """One learned logit per head that takes attention away (gpt-oss)."""

    @property
    def num_cache_shards(self) -> int:
        return self.num_kv_heads

    @property
    def num_state_values(self) -> int:
        return 0

    @property
    def num_written_values(self) -> float:
        return 2 * self.num_kv_heads * self.head_dim

    def num_params(self, hidden: int) -> int:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = hidden * (queries * (3 if self.output_gate else 2) + 2 * keys)
        biases = self.qkv_bias * (queries + 2 * keys) + self.output_bias * hidden
        return weights + biases + self.qk_norm * 2 * self.head_dim + self.sinks * self.num_heads

    def num_cached_values(self, context_tokens: float) -> float:
        return 2 * self.num_kv_heads * self.head_dim * min(context_tokens, self.window_tokens or inf)

    def num_read_values(self, context_tokens: float, num_rows: float) -> float:
        return self.num_cached_values(context_tokens)

    def num_flops(self, context_tokens: float, phase: Phase) -> float:
        return 4 * self.num_heads * self.head_dim * min(context_tokens, self.window_tokens or inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434); without rotation (NoPE) its sizes are the same."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    output_gate: bool = False

    @property
    def num_cache_shards(self) -> int:
        return 1

    @property
    def num_state_values(self) -> int:
        return 0

    @property
    def num_written_values(self) -> float:
        return self.latent_dim

    @property
    def latent_dim(self) -> int:
        """Cached per token."""
        return self.kv_rank + self.rope_dim

    def num_params(self, hidden: int) -> int:
        queries, values = self.num_heads * (self.nope_dim + self.rope_dim), self.num_heads * self.value_dim
        q = hidden * queries if self.q_rank is None else self.q_rank * (hidden + queries + 1)
        kv = hidden * self.latent_dim + self.kv_rank * (1 + self.num_heads * (self.nope_dim + self.value_dim))
        return q + kv + hidden * values * (2 if self.output_gate else 1)

    def num_cached_values(self, context_tokens: float) -> float:
        return self.latent_dim * context_tokens

    def num_read_values(self, context_tokens: float, num_rows: float) -> float:
        return self.num_cached_values(context_tokens)

    def num_flops(self, context_tokens: float, phase: Phase) -> float:
        # Decoding works on the latent as it lies there ("absorbed"); a prompt is cheaper with keys and values expanded.
        absorbed = self.latent_dim + self.kv_rank
        expanded = self.nope_dim + self.rope_dim + self.value_dim
        return 2 * self.num_heads * context_tokens * (absorbed if phase is Phase.DECODE else expanded)


_RECURRENCE_FLOPS_PER_STATE_VALUE = 7
"""Delta rule per token: decay 1, prediction from the key 2, rank-one update 2, reading with the query 2."""


class _DeltaRule(ABC):
    """A linear recurrence: a state instead of a cache, and work by its size."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_state_values(self) -> int: ...

    @property
    def num_written_values(self) -> float:
        return 0.0

    def num_cached_values(self, context_tokens: float) -> float:
        return 0.0

    def num_read_values(self, context_tokens: float, num_rows: float) -> float:
        return 0.0

    def num_flops(self, context_tokens: float, phase: Phase) -> float:
        return _RECURRENCE_FLOPS_PER_STATE_VALUE * self.num_state_values


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaAttention(_DeltaRule):
    """KDA: a delta rule with a decay per channel (Kimi Linear, 2510.26692)."""

    num_heads: int
    head_dim: int
    conv_width: int
    full_rank_gate: bool
    """Kimi K3's output gate is a whole matrix; Kimi Linear's goes through one head's width."""

    @property
    def num_cache_shards(self) -> int:
        return self.num_heads

    @property
    def num_state_values(self) -> int:
        return self.num_heads * self.head_dim**2

    def num_params(self, hidden: int) -> int:
        wide = self.num_heads * self.head_dim
        low_rank = self.head_dim * (hidden + wide)
        gate = hidden * wide if self.full_rank_gate else low_rank
        # q, k, v and output; gate; decay with its bias and scale; beta; three convolutions; the output's norm.
        return (
            4 * hidden * wide
            + gate
            + low_rank
            + wide
            + self.num_heads * (hidden + 1)
            + (3 * wide * self.conv_width + self.head_dim)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet(_DeltaRule):
    """GDN: a delta rule with one decay per head (2412.06464), as in Qwen3-Next, 3.5 and 3.8."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def num_cache_shards(self) -> int:
        return self.num_value_heads

    @property
    def num_state_values(self) -> int:
        return self.num_value_heads * self.key_dim * self.value_dim

    def num_params(self, hidden: int) -> int:
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        # q and k, v and its gate, output; beta and decay; one convolution; decay's bias and scale; the norm.
        projections = hidden * (2 * keys + 3 * values + 2 * self.num_value_heads)
        return projections + (2 * keys + values) * self.conv_width + 2 * self.num_value_heads + self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Small heads that choose which compressed entries a token attends to."""

    num_heads: int
    head_dim: int
    top_k: int
    candidates: int | None = None
    """Entries it looks at where an earlier layer chose candidates; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """DeepSeek V4: a raw window of one wide KV head, and beyond it one entry per `ratio` tokens.

    With an indexer (CSA) a token attends to the top k entries, without (HCA) to all; ratio 0 is the window alone.
    V4.1 (CSA2) lets layers use the entries, or the choice, of an earlier layer.
    """

    num_heads: int
    head_dim: int
    q_rank: int
    output_groups: int
    output_rank: int
    window_tokens: int
    ratio: int = 0
    top_k: int | None = None
    indexer: Indexer | None = None
    """None also where the choice of an earlier layer is used; `top_k` then still bounds what is read."""
    keeps_entries: bool = True
    """False where an earlier layer's entries are used."""

    @property
    def num_cache_shards(self) -> int:
        return 1

    @property
    def num_state_values(self) -> int:
        return 0

    @property
    def num_written_values(self) -> float:
        # The raw window, and a share of the compressed entry that these tokens become.
        return self.head_dim + self.num_entry_values_per_token

    @property
    def num_entry_values_per_token(self) -> float:
        """Kept for good, per token: compressed entries and their index keys."""
        if not self.ratio or not self.keeps_entries:
            return 0.0
        return (self.head_dim + (0 if self.indexer is None else self.indexer.head_dim)) / self.ratio

    def num_params(self, hidden: int) -> int:
        queries = self.num_heads * self.head_dim
        q = self.q_rank * (hidden + queries + 1)
        kv = self.head_dim * (hidden + 1)
        output = queries * self.output_rank + self.output_groups * self.output_rank * hidden
        index = self.indexer
        chooser = 0 if index is None else index.num_heads * (self.q_rank * index.head_dim + hidden)
        if index is not None and self.keeps_entries:
            chooser += self._compressor_params(hidden, index.head_dim)
        entries = self._compressor_params(hidden, self.head_dim) if self.ratio and self.keeps_entries else 0
        return q + kv + output + self.num_heads + chooser + entries

    def _compressor_params(self, hidden: int, width: int) -> int:
        # Small ratios overlap their blocks, which doubles the width (V4: ratio 4); values and gates, positions, norm.
        wide = width * (2 if self.indexer is not None else 1)
        return 2 * hidden * wide + self.ratio * wide + width

    def num_cached_values(self, context_tokens: float) -> float:
        raw = self.head_dim * min(context_tokens, self.window_tokens)
        return raw + self.num_entry_values_per_token * context_tokens

    def num_read_values(self, context_tokens: float, num_rows: float) -> float:
        raw = self.head_dim * min(context_tokens, self.window_tokens)
        # Each row chooses for itself; rows of one request overlap, at most every entry is read once.
        attended = min(self._num_entries(context_tokens), self._num_attended(context_tokens) * num_rows)
        return raw + self.head_dim * attended + self._num_index_values(context_tokens)

    def num_flops(self, context_tokens: float, phase: Phase) -> float:
        attended = min(context_tokens, self.window_tokens) + self._num_attended(context_tokens)
        index_heads = 0 if self.indexer is None else self.indexer.num_heads
        return 4 * self.num_heads * self.head_dim * attended + 2 * index_heads * self._num_index_values(context_tokens)

    def _num_entries(self, context_tokens: float) -> float:
        return context_tokens / self.ratio if self.ratio else 0.0

    def _num_attended(self, context_tokens: float) -> float:
        return min(self._num_entries(context_tokens), self.top_k or inf)

    def _num_index_values(self, context_tokens: float) -> float:
        if self.indexer is None:
            return 0.0
        return self.indexer.head_dim * min(self._num_entries(context_tokens), self.indexer.candidates or inf)
