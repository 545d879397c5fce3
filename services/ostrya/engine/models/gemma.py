"""Gemma 3 (2503.19786): most layers see a sliding window, every sixth sees everything and turns positions more slowly.

Queries and keys are normed, and so is what each half of a layer adds; embeddings are scaled by the root of their width.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from ostrya.capacity.mixers import GroupedAttention
from ostrya.engine.models.family import LLAMA_NAMES, Family
from ostrya.engine.models.gguf_metadata import GgufMetadata
from ostrya.engine.models.huggingface_config import JsonConfig
from ostrya.engine.models.spec import Activation, Attention, DecoderSpec, GatedFfn, LayerSpec, Rope

_INTERVAL = 6
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_WINDOW, _FULL = "sliding_attention", "full_attention"
_LAYERS_OF_27B = 62
"""A GGUF file does not say by what scores are scaled; only this model departs from its head dimension."""
_SOFTCAPS = "attn_logit_softcapping", "final_logit_softcapping"


def _from_gguf(metadata: GgufMetadata) -> DecoderSpec:
    metadata.refuse_set(*_SOFTCAPS)
    num_layers = metadata.num_layers
    sizes = metadata.attention(qk_norm=True)
    hidden = metadata.size("embedding_length")
    interval = metadata.size("attention.sliding_window_pattern", _INTERVAL)
    layers = _layers(
        kinds=_kinds(num_layers, interval),
        sizes=sizes,
        window_tokens=metadata.size("attention.sliding_window"),
        ropes={_FULL: metadata.rope(), _WINDOW: Rope(theta=metadata.number("rope.freq_base_swa", _LOCAL_THETA))},
        scale=(hidden / sizes.num_heads if num_layers == _LAYERS_OF_27B else sizes.head_dim) ** -0.5,
        ffn=metadata.ffn(Activation.GELU_TANH),
    )
    return metadata.decoder(layers, embedding_scale=hidden**0.5)


def _from_config(config: JsonConfig) -> DecoderSpec:
    config.refuse_set(*_SOFTCAPS, "use_bidirectional_attention")
    num_layers = config.num_layers
    interval = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", _INTERVAL))
    kinds = config.names("layer_types") or _kinds(num_layers, interval)
    if len(kinds) != num_layers or not {_WINDOW, _FULL}.issuperset(map(str, kinds)):
        raise config.error(f"layer_types must have {num_layers} entries, each {_WINDOW} or {_FULL}")
    # One object per kind of layer in transformers 5, spread over three keys before.
    nested = config.entry("rope_parameters") or {}
    before: dict[str, dict[str, object]] = {
        _FULL: {"rope_theta": config.number("rope_theta", _GLOBAL_THETA), **(config.entry("rope_scaling") or {})},
        _WINDOW: {"rope_theta": config.number("rope_local_base_freq", _LOCAL_THETA)},
    }
    ropes = {
        kind: config.rope_of(settings | (config.entry(kind, within=nested) or {})) for kind, settings in before.items()
    }
    sizes = config.attention(qk_norm=True)
    layers = _layers(
        kinds=[str(kind) for kind in kinds],
        sizes=sizes,
        window_tokens=config.size("sliding_window", 4096),
        ropes=ropes,
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        ffn=config.ffn(Activation.GELU_TANH),
    )
    return config.decoder(layers, embedding_scale=config.size("hidden_size") ** 0.5, tied_unless_said=True)


def _kinds(num_layers: int, interval: int) -> list[str]:
    return [_WINDOW if layer % interval else _FULL for layer in range(1, num_layers + 1)]


def _layers(
    *,
    kinds: Sequence[str],
    sizes: GroupedAttention,
    window_tokens: int,
    ropes: dict[str, Rope],
    scale: float,
    ffn: GatedFfn,
) -> tuple[LayerSpec, ...]:
    windows = {_FULL: None, _WINDOW: window_tokens}
    layers = {
        kind: LayerSpec(
            mixer=Attention(sizes=replace(sizes, window_tokens=window), rope=ropes[kind], scale=scale),
            ffn=ffn,
            post_norms=True,
        )
        for kind, window in windows.items()
    }
    return tuple(layers[kind] for kind in kinds)


GEMMA3 = Family(
    gguf_architecture="gemma3",
    config_kinds=("gemma3_text", "gemma3"),
    from_gguf=_from_gguf,
    from_config=_from_config,
    layer_names=MappingProxyType(
        {
            **LLAMA_NAMES,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    ),
    norm_offset=1.0,
)
