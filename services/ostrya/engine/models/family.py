"""What a family of models is: how its checkpoints describe it, and what they call their tensors. No torch.

Each family has a file of its own beside this one; families.py lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from ostrya.capacity.mixers import GroupedAttention
from ostrya.engine.models.spec import Activation, Attention, DecoderSpec, GatedFfn, LayerSpec, Rope, RoutedFfn

if TYPE_CHECKING:
    from ostrya.engine.models.gguf_metadata import GgufMetadata
    from ostrya.engine.models.huggingface_config import JsonConfig

LLAMA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that differ in numbers only."""

    gguf_architecture: str
    """general.architecture."""
    config_kinds: tuple[str, ...]
    """model_type."""
    from_gguf: "Callable[[GgufMetadata], DecoderSpec]"
    from_config: "Callable[[JsonConfig], DecoderSpec]"
    layer_names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    """Of tensors within a layer: GGUF's name -> Hugging Face's, where {} is the number of an expert."""
    gguf_halves_apart: bool = True
    """Whether a GGUF file pairs rotary element i with i + H/2, as Hugging Face directories always do."""
    norm_offset: float = 0.0
    """What a Hugging Face directory leaves out of its norms' weights; a GGUF file has it in."""


class Description(Protocol):
    """What both containers say of every model, in the same words."""

    @property
    def num_layers(self) -> int: ...

    def attention(self, *, qk_norm: bool = False, qkv_bias: bool = False) -> GroupedAttention: ...

    def ffn(self, activation: Activation) -> GatedFfn:
        """ModelLoadError where the checkpoint names another activation."""
        ...

    def rope(self) -> Rope: ...

    def decoder(self, layers: tuple[LayerSpec, ...]) -> DecoderSpec: ...


def alike(description: Description, *, qk_norm: bool = False, qkv_bias: bool = False) -> DecoderSpec:
    """A model of equal Llama layers, which may norm queries and keys or add biases to them."""
    ffns = [description.ffn(Activation.SILU)] * description.num_layers
    return with_ffns(description, ffns, qk_norm=qk_norm, qkv_bias=qkv_bias)


def with_ffns(
    description: Description,
    ffns: Sequence[GatedFfn | RoutedFfn],
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
) -> DecoderSpec:
    """The same with a feed-forward network for each layer."""
    sizes = description.attention(qk_norm=qk_norm, qkv_bias=qkv_bias)
    mixer = Attention(sizes=sizes, rope=description.rope(), scale=sizes.head_dim**-0.5)
    layers = {ffn: LayerSpec(mixer=mixer, ffn=ffn, post_norms=False) for ffn in dict.fromkeys(ffns)}
    return description.decoder(tuple(layers[ffn] for ffn in ffns))
