"""A decoder described as data: a list of layers, each a mixer and a feed-forward network. No torch.

Sizes are capacity's own dataclasses, so that what `ostrya capacity` counts is what runs here; beside them stands what
the mathematics needs beyond sizes. A family (llama.py and its neighbours) makes a spec, decoder.py computes it.
"""

from dataclasses import dataclass
from enum import StrEnum

from ostrya.capacity.layers import DenseFfn, MoeFfn
from ostrya.capacity.mixers import GroupedAttention
from ostrya.capacity.models.families import stacked
from ostrya.capacity.spec import ModelSpec

# A table of rotary angles is kept for every position; beyond this the number is more likely damage than meant.
_MAX_CONTEXT_TOKENS = 1 << 24
MAX_LAYERS = 4096
"""Far above the deepest released model (126 layers); a spec has an entry for each."""


class Activation(StrEnum):
    """What the gate of a feed-forward network goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions: pair i of a head turns by position * theta^(-2i / head_dim) / divisors[i]."""

    theta: float
    divisors: tuple[float, ...] | None = None
    """[head_dim / 2], how a context is stretched: equal ones (linear), growing ones (Llama 3.1); None = all 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal grouped-query attention with rotary positions."""

    sizes: GroupedAttention
    rope: Rope
    scale: float
    """Of the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedFfn:
    """down(activation(gate(x)) * up(x))."""

    sizes: DenseFfn
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedFfn:
    """A mixture of experts, each as GatedFfn: the sum over a token's top_k of weight * expert(x), plus the shared
    experts, which are one wider network, times sigmoid of its gate's product with x where it has a gate.

    Weights are the softmax of the router's products over all experts, in float32.
    """

    sizes: MoeFfn
    activation: Activation
    renormalized: bool
    """Whether the weights of a token's experts are divided by their sum."""

    @property
    def shared_inner(self) -> int:
        """Of all shared experts together; 0 if there are none."""
        return self.sizes.num_shared * (self.sizes.shared_inner or self.sizes.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: x += mixer(norm(x)), then x += ffn(norm(x))."""

    mixer: Attention
    ffn: GatedFfn | RoutedFfn
    post_norms: bool
    """Whether what mixer and ffn add is normed too (Gemma)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A whole model. Equal layers are equal objects, so a backend can compute runs of them as one."""

    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    embedding_scale: float
    tied_embeddings: bool

    def problem(self) -> str | None:
        """The first thing that cannot work, in words; None when all is well."""
        if self.context_tokens > _MAX_CONTEXT_TOKENS:
            return f"context length is {self.context_tokens}; supported: at most {_MAX_CONTEXT_TOKENS}"
        kinds = dict.fromkeys(self.layers)
        problems = (problem for layer in kinds for problem in (_mixer_problem(layer.mixer), _ffn_problem(layer.ffn)))
        return next((problem for problem in problems if problem), None)

    def model_spec(self, name: str) -> ModelSpec:
        """The same model as `ostrya capacity` counts it."""
        num_norms = 4 if self.layers[0].post_norms else 2
        return ModelSpec(
            name=name,
            hidden=self.hidden,
            layers=stacked(
                [(layer.mixer.sizes, layer.ffn.sizes) for layer in self.layers], num_norm_params=num_norms * self.hidden
            ),
            vocab_size=self.vocab_size,
            tied_embeddings=self.tied_embeddings,
            max_context_tokens=self.context_tokens,
            num_final_norm_params=self.hidden,
        )


def _mixer_problem(mixer: Attention) -> str | None:
    sizes = mixer.sizes
    if sizes.num_heads % sizes.num_kv_heads:
        return f"{sizes.num_heads} heads do not divide among {sizes.num_kv_heads} KV heads"
    if sizes.head_dim % 2:
        return f"head dimension is {sizes.head_dim}; rotary positions need an even one"
    if mixer.rope.divisors is not None and len(mixer.rope.divisors) != sizes.head_dim // 2:
        return f"{len(mixer.rope.divisors)} rope frequencies; expected {sizes.head_dim // 2}"
    return None


def _ffn_problem(ffn: GatedFfn | RoutedFfn) -> str | None:
    if isinstance(ffn, RoutedFfn) and ffn.sizes.top_k > ffn.sizes.num_experts:
        return f"{ffn.sizes.top_k} experts per token are more than the {ffn.sizes.num_experts} it has"
    return None
