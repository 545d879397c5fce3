"""What a layer is asked, and its feed-forward network; the ways in which tokens see each other are in mixers.py.

Each kind answers in parameters, cached values and FLOPs of one layer. spec.py puts them together into a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Phase(StrEnum):
    """A model may run different layers over a prompt than over its answer (DeepSeek V4.1)."""

    PREFILL = "prefill"
    DECODE = "decode"


class Part(StrEnum):
    """What weights and time are counted by."""

    EMBEDDING = "embedding"
    HEAD = "head"
    ATTENTION = "attention"
    """Projections of every mixer, linear ones too."""
    DENSE_FFN = "dense ffn"
    ROUTED_EXPERTS = "routed experts"
    SHARED_EXPERTS = "shared experts"
    LATENT = "latent projections"
    """Into and out of the narrower space where K3's routed experts live."""
    ROUTER = "router"
    NORMS = "norms"
    TABLES = "tables"
    VISION = "vision"
    DRAFTER = "drafter"
    CACHE = "kv cache"
    """Not a weight: keys and values read and written, and attention over them."""
    STATE = "recurrent state"
    """Not a weight: the state of linear-attention layers, and its update."""


class Mixer(Protocol):
    """How tokens of a layer see each other."""

    @property
    def num_cache_shards(self) -> int:
        """Parts into which tensor parallelism can cut the cache without copies; 1 if every device needs all of it."""
        ...

    @property
    def num_state_values(self) -> int:
        """Of the recurrence, per request; 0 for attention."""
        ...

    def num_params(self, hidden: int) -> int: ...

    def num_cached_values(self, context_tokens: float) -> float:
        """What one request keeps after so many tokens."""
        ...

    def num_read_values(self, context_tokens: float, num_rows: float) -> float:
        """What `num_rows` new tokens of one request together read of its cache."""
        ...

    @property
    def num_written_values(self) -> float:
        """Into the cache, per new token."""
        ...

    def num_flops(self, context_tokens: float, phase: Phase) -> float:
        """Per new token, beyond its products with weights: scores, sums of values, the recurrence."""
        ...


class Ffn(Protocol):
    """What follows the mixer in a layer."""

    def num_params(self, hidden: int) -> Mapping[Part, int]: ...

    def num_params_active(self, hidden: int) -> Mapping[Part, int]:
        """Per token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFfn:
    """Gate, up and down projection."""

    inner: int

    def num_params(self, hidden: int) -> Mapping[Part, int]:
        return {Part.DENSE_FFN: 3 * hidden * self.inner}

    def num_params_active(self, hidden: int) -> Mapping[Part, int]:
        return self.num_params(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFfn:
    """Routed experts, and shared ones that every token uses."""

    num_experts: int
    top_k: int
    inner: int
    num_shared: int = 0
    shared_inner: int | None = None
    """Width of one shared expert; None: as the routed ones."""
    shared_gate: bool = False
    latent: int | None = None
    """Width in which routed experts work, if it is not the model's (Kimi K3)."""
    hash_routed: bool = False
    """The token's id chooses its experts, and a router without balancing values only scores them (DeepSeek V4's first
    layers, as in transformers' DeepseekV4HashRouter)."""
    router_bias: bool = True
    """A value per expert beside the router's matrix, which balances it or is its bias."""
    biases: bool = False
    """In experts and router (gpt-oss)."""

    def num_params_per_expert(self, hidden: int) -> int:
        width = self.latent or hidden
        return 3 * width * self.inner + self.biases * (2 * self.inner + width)

    def num_params(self, hidden: int) -> Mapping[Part, int]:
        return self._common(hidden) | {Part.ROUTED_EXPERTS: self.num_experts * self.num_params_per_expert(hidden)}

    def num_params_active(self, hidden: int) -> Mapping[Part, int]:
        return self._common(hidden) | {Part.ROUTED_EXPERTS: self.top_k * self.num_params_per_expert(hidden)}

    def _common(self, hidden: int) -> dict[Part, int]:
        shared = self.num_shared * 3 * hidden * (self.shared_inner or self.inner) + self.shared_gate * hidden
        latent = 0 if self.latent is None else 2 * hidden * self.latent + self.latent
        router = (hidden + (self.router_bias and not self.hash_routed)) * self.num_experts
        return {Part.SHARED_EXPERTS: shared, Part.LATENT: latent, Part.ROUTER: router}
