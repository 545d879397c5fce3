"""Qwen2 and 2.5 (biases at queries, keys and values) and Qwen3 (queries and keys normed), dense and without windows."""

from functools import partial
from types import MappingProxyType

from ostrya.engine.models.family import LLAMA_NAMES, Family, alike
from ostrya.engine.models.huggingface_config import JsonConfig
from ostrya.engine.models.spec import DecoderSpec


def _from_config(config: JsonConfig, *, qk_norm: bool = False, qkv_bias: bool = False) -> DecoderSpec:
    config.refuse_set("use_sliding_window")
    return alike(config, qk_norm=qk_norm, qkv_bias=qkv_bias)


QWEN2 = Family(
    gguf_architecture="qwen2",
    config_kinds=("qwen2",),
    from_gguf=partial(alike, qkv_bias=True),
    from_config=partial(_from_config, qkv_bias=True),
)
QWEN3 = Family(
    gguf_architecture="qwen3",
    config_kinds=("qwen3",),
    from_gguf=partial(alike, qk_norm=True),
    from_config=partial(_from_config, qk_norm=True),
    layer_names=MappingProxyType({**LLAMA_NAMES, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}),
)
