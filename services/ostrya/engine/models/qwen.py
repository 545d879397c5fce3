"""Qwen2 and 2.5 (biases at queries, keys and values) and Qwen3 (queries and keys normed), without windows. Dense, and
with experts; beside Qwen2's stands a shared one with a gate."""

from functools import partial
from types import MappingProxyType

from ostrya.engine.models.family import LLAMA_NAMES, Family, alike, with_ffns
from ostrya.engine.models.gguf_metadata import GgufMetadata
from ostrya.engine.models.huggingface_config import JsonConfig
from ostrya.engine.models.spec import Activation, DecoderSpec

_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def _from_config(config: JsonConfig, *, qk_norm: bool = False, qkv_bias: bool = False) -> DecoderSpec:
    config.refuse_set("use_sliding_window")
    return alike(config, qk_norm=qk_norm, qkv_bias=qkv_bias)


def _moe_from_config(
    config: JsonConfig, *, has_shared: bool = False, qk_norm: bool = False, qkv_bias: bool = False
) -> DecoderSpec:
    config.refuse_set("use_sliding_window")
    experts = config.experts(
        Activation.SILU,
        count="num_experts",
        inner="moe_intermediate_size",
        renormalized=config.flag("norm_topk_prob"),
        shared_inner=config.size("shared_expert_intermediate_size") if has_shared else None,
    )
    step, dense = config.size("decoder_sparse_step", 1), config.names("mlp_only_layers") or []
    layers = range(config.num_layers)
    is_dense = [layer in dense or (layer + 1) % step != 0 for layer in layers]
    # Most files have dense layers' width and no dense layer.
    usual = config.ffn(Activation.SILU) if any(is_dense) else experts
    ffns = [usual if is_dense[layer] else experts for layer in layers]
    return with_ffns(config, ffns, qk_norm=qk_norm, qkv_bias=qkv_bias)


def _moe_from_gguf(
    metadata: GgufMetadata, *, has_shared: bool = False, qk_norm: bool = False, qkv_bias: bool = False
) -> DecoderSpec:
    # The format has no field for what norm_topk_prob says: it is as in the released models.
    experts = metadata.experts(
        Activation.SILU,
        renormalized=not has_shared,
        shared_inner=metadata.size("expert_shared_feed_forward_length") if has_shared else None,
    )
    return with_ffns(metadata, [experts] * metadata.num_layers, qk_norm=qk_norm, qkv_bias=qkv_bias)


QWEN2 = Family(
    gguf_architecture="qwen2",
    config_kinds=("qwen2",),
    from_gguf=partial(alike, qkv_bias=True),
    from_config=partial(_from_config, qkv_bias=True),
)
QWEN2_MOE = Family(
    gguf_architecture="qwen2moe",
    config_kinds=("qwen2_moe",),
    from_gguf=partial(_moe_from_gguf, has_shared=True, qkv_bias=True),
    from_config=partial(_moe_from_config, has_shared=True, qkv_bias=True),
    layer_names=MappingProxyType({**LLAMA_NAMES, **_EXPERT_NAMES, **_SHARED_NAMES}),
)
QWEN3 = Family(
    gguf_architecture="qwen3",
    config_kinds=("qwen3",),
    from_gguf=partial(alike, qk_norm=True),
    from_config=partial(_from_config, qk_norm=True),
    layer_names=MappingProxyType({**LLAMA_NAMES, **_NORM_NAMES}),
)
QWEN3_MOE = Family(
    gguf_architecture="qwen3moe",
    config_kinds=("qwen3_moe",),
    from_gguf=partial(_moe_from_gguf, qk_norm=True),
    from_config=partial(_moe_from_config, qk_norm=True),
    layer_names=MappingProxyType({**LLAMA_NAMES, **_NORM_NAMES, **_EXPERT_NAMES}),
)
