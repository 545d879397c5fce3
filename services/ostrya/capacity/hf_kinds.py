"""The kinds of config.json that are understood: from its fields to a spec, with the builders of models/.

Drafters and vision towers are not in these files' language part, so specs made here have none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ostrya.capacity import hf_latent
from ostrya.capacity.hf_checks import require_sensible
from ostrya.capacity.hf_fields import Fields
from ostrya.capacity.hf_storage import stored
from ostrya.capacity.layers import DenseFfn, Ffn, MoeFfn
from ostrya.capacity.mixers import GatedDeltaNet, GroupedAttention
from ostrya.capacity.models.dense import gemma_3, llama_like
from ostrya.capacity.models.qwen import FULL_ATTENTION_INTERVAL, moe_like, qwen3_hybrid
from ostrya.capacity.models.sparse import gpt_oss
from ostrya.capacity.spec import ModelSpec


def _grouped(fields: Fields, **extras: bool) -> GroupedAttention:
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    if not fields.has("head_dim") and hidden % heads:
        raise fields.refuse(f"num_attention_heads is {heads}; without head_dim it must divide hidden_size {hidden}")
    return GroupedAttention(
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", default=heads),
        head_dim=fields.size("head_dim", default=max(1, hidden // heads)),
        **{"qkv_bias": fields.flag("attention_bias"), **extras},
    )


def _llama(fields: Fields, name: str) -> ModelSpec:
    return _dense(fields, name, _grouped(fields))


def _mistral(fields: Fields, name: str) -> ModelSpec:
    window = fields.count("sliding_window")
    # Ministral's file names a window as long as its context, which hides nothing.
    hides = 0 < window < fields.size("max_position_embeddings")
    return _dense(fields, name, replace(_grouped(fields), window_tokens=window if hides else None))


def _qwen2(fields: Fields, name: str) -> ModelSpec:
    _require_full_attention(fields)
    return _dense(fields, name, _grouped(fields, qkv_bias=True))


def _qwen3(fields: Fields, name: str) -> ModelSpec:
    _require_full_attention(fields)
    return _dense(fields, name, _grouped(fields, qk_norm=True))


def _require_full_attention(fields: Fields) -> None:
    # Their files name a window even where it is switched off.
    fields.built_in("sliding_window")
    if fields.flag("use_sliding_window"):
        raise fields.refuse("use_sliding_window is true, which this kind's reader cannot express")


def _dense_layers(fields: Fields) -> list[bool]:
    """Of each layer of a Qwen with experts, whether it has none."""
    step, named = fields.size("decoder_sparse_step", default=1), fields.entries("mlp_only_layers") or []
    return [layer in named or (layer + 1) % step != 0 for layer in range(fields.num_layers())]


def _dense(fields: Fields, name: str, attention: GroupedAttention) -> ModelSpec:
    return llama_like(
        name=name,
        num_layers=fields.num_layers(),
        hidden=fields.size("hidden_size"),
        inner=fields.size("intermediate_size"),
        attention=attention,
        vocab_size=fields.size("vocab_size"),
        max_context_tokens=fields.size("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
    )


def _mixtral(fields: Fields, name: str) -> ModelSpec:
    experts = MoeFfn(
        num_experts=fields.size("num_local_experts"),
        top_k=fields.size("num_experts_per_tok"),
        inner=fields.size("intermediate_size"),
        router_bias=False,
    )
    return _with_experts(fields, name, _grouped(fields), [experts] * fields.num_layers())


def _qwen2_moe(fields: Fields, name: str) -> ModelSpec:
    _require_full_attention(fields)
    fields.built_in("qkv_bias")
    return _with_experts(fields, name, _grouped(fields, qkv_bias=True), _qwen_ffns(fields))


def _qwen3_moe(fields: Fields, name: str) -> ModelSpec:
    _require_full_attention(fields)
    return _with_experts(fields, name, _grouped(fields, qk_norm=True), _qwen_ffns(fields))


def _qwen_ffns(fields: Fields) -> list[Ffn]:
    is_dense = _dense_layers(fields)
    experts = _qwen_experts(fields)
    usual: Ffn = DenseFfn(inner=fields.size("intermediate_size")) if any(is_dense) else experts
    # Which of the layers are quantized is read for models whose dense layers come first.
    if is_dense != sorted(is_dense, reverse=True) and fields.anywhere("quantization_config") is not None:
        raise fields.refuse(
            "dense layers between those with experts, which this kind's reader cannot express quantized"
        )
    return [usual if dense else experts for dense in is_dense]


def _with_experts(fields: Fields, name: str, attention: GroupedAttention, ffns: Sequence[Ffn]) -> ModelSpec:
    return moe_like(
        name=name,
        hidden=fields.size("hidden_size"),
        attention=attention,
        ffns=ffns,
        vocab_size=fields.size("vocab_size"),
        max_context_tokens=fields.size("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
    )


def _qwen_experts(fields: Fields) -> MoeFfn:
    # Of dense layers, of which there are none as a rule.
    fields.built_in("intermediate_size")
    shared = fields.count("shared_expert_intermediate_size")
    return MoeFfn(
        num_experts=fields.size("num_experts"),
        top_k=fields.size("num_experts_per_tok"),
        inner=fields.size("moe_intermediate_size"),
        num_shared=1 if shared else 0,
        shared_inner=shared or None,
        shared_gate=bool(shared),
        router_bias=False,
    )


def _qwen3_hybrid(fields: Fields, name: str) -> ModelSpec:
    fields.built_in("attn_output_gate")
    if any(_dense_layers(fields)):
        raise fields.refuse("dense layers between those with experts, which this kind's reader cannot express")
    ffn: Ffn = (
        _qwen_experts(fields) if fields.count("num_experts") else DenseFfn(inner=fields.size("intermediate_size"))
    )
    return qwen3_hybrid(
        name=name,
        num_layers=fields.num_layers(),
        hidden=fields.size("hidden_size"),
        attention=_grouped(fields, output_gate=True, qk_norm=True),
        delta_net=GatedDeltaNet(
            num_key_heads=fields.size("linear_num_key_heads"),
            num_value_heads=fields.size("linear_num_value_heads"),
            key_dim=fields.size("linear_key_head_dim"),
            value_dim=fields.size("linear_value_head_dim"),
            conv_width=fields.size("linear_conv_kernel_dim"),
        ),
        ffn=ffn,
        vocab_size=fields.size("vocab_size"),
        max_context_tokens=fields.size("max_position_embeddings"),
        interval=fields.size("full_attention_interval", default=FULL_ATTENTION_INTERVAL),
        tied_embeddings=fields.flag("tie_word_embeddings"),
    )


def _gemma_3(fields: Fields, name: str) -> ModelSpec:
    return gemma_3(
        name=name,
        num_layers=fields.num_layers(),
        hidden=fields.size("hidden_size"),
        inner=fields.size("intermediate_size"),
        # Files of the larger ones leave out what equals the defaults of transformers' Gemma3TextConfig.
        num_heads=fields.size("num_attention_heads", default=8),
        num_kv_heads=fields.size("num_key_value_heads", default=4),
        head_dim=fields.size("head_dim", default=256),
        window_tokens=fields.size("sliding_window", default=4096),
        # Newer files list the layers and leave the interval out; it is six in every Gemma 3.
        interval=fields.size("sliding_window_pattern", "_sliding_window_pattern", default=6),
        vocab_size=fields.size("vocab_size", default=262208),
        max_context_tokens=fields.size("max_position_embeddings", default=131072),
        tied_embeddings=fields.flag("tie_word_embeddings", default=True),
    )


def _gpt_oss(fields: Fields, name: str) -> ModelSpec:
    fields.built_in("attention_bias", "experts_per_token")
    return gpt_oss(
        name=name,
        num_layers=fields.num_layers(),
        hidden=fields.size("hidden_size"),
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=fields.size("num_key_value_heads"),
        head_dim=fields.size("head_dim"),
        window_tokens=fields.size("sliding_window"),
        experts=MoeFfn(
            num_experts=fields.size("num_local_experts"),
            top_k=fields.size("num_experts_per_tok", "experts_per_token"),
            inner=fields.size("intermediate_size"),
            biases=True,
        ),
        vocab_size=fields.size("vocab_size"),
        max_context_tokens=fields.size("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
    )


Reader = Callable[[Fields, str], ModelSpec]


def _checked(reader: Reader) -> Reader:
    def read(fields: Fields, name: str) -> ModelSpec:
        spec = reader(fields, name)
        require_sensible(spec, fields)
        fields.require_all_read()
        return spec

    return read


def _with_storage(reader: Reader) -> Reader:
    return lambda fields, name: stored(_checked(reader)(fields, name), fields)


KINDS: Mapping[str, Reader] = MappingProxyType(
    {
        "llama": _with_storage(_llama),
        "mistral": _with_storage(_mistral),
        "mixtral": _with_storage(_mixtral),
        "qwen2": _with_storage(_qwen2),
        "qwen3": _with_storage(_qwen3),
        "qwen2_moe": _with_storage(_qwen2_moe),
        "qwen3_moe": _with_storage(_qwen3_moe),
        "qwen3_next": _with_storage(_qwen3_hybrid),
        "qwen3_5": _with_storage(_qwen3_hybrid),
        "qwen3_5_text": _with_storage(_qwen3_hybrid),
        "qwen3_5_moe": _with_storage(_qwen3_hybrid),
        "qwen3_5_moe_text": _with_storage(_qwen3_hybrid),
        "gemma3": _with_storage(_gemma_3),
        "gemma3_text": _with_storage(_gemma_3),
        "gpt_oss": _with_storage(_gpt_oss),
        "deepseek_v3": _with_storage(hf_latent.deepseek_v3),
        "kimi_k2": _with_storage(hf_latent.deepseek_v3),
        "kimi_k25": _with_storage(hf_latent.deepseek_v3),
        "kimi_linear": _with_storage(hf_latent.kimi_linear),
        "kimi_k3": _with_storage(hf_latent.kimi_linear),
        # Mixed formats are part of this kind.
        "deepseek_v4": _checked(hf_latent.deepseek_v4_kind),
    }
)

READY_ONLY: Mapping[str, str] = MappingProxyType({"beam": "beam-1.0-501b", "deepseek_v41": "deepseek-v4.1-flash"})
"""Kinds of which a file does not say enough to read it, and the ready spec to use."""
