"""Llama 1 to 3.3, SmolLM2: grouped-query attention, rotary positions, SiLU-gated networks, no biases. Mixtral
(2401.04088) is the same with experts, and a GGUF file calls it so.
"""

from types import MappingProxyType

from ostrya.engine.models.family import LLAMA_NAMES, Family, alike, with_ffns
from ostrya.engine.models.gguf_metadata import GgufMetadata
from ostrya.engine.models.huggingface_config import JsonConfig
from ostrya.engine.models.spec import Activation, DecoderSpec


def _from_gguf(metadata: GgufMetadata) -> DecoderSpec:
    if not metadata.has_experts:
        return alike(metadata)
    return with_ffns(metadata, [metadata.experts(Activation.SILU, renormalized=True)] * metadata.num_layers)


def _from_config(config: JsonConfig) -> DecoderSpec:
    if config.kind != "mixtral":
        return alike(config)
    config.refuse_set("sliding_window")
    ffn = config.experts(Activation.SILU, count="num_local_experts", inner="intermediate_size", renormalized=True)
    return with_ffns(config, [ffn] * config.num_layers)


LLAMA = Family(
    gguf_architecture="llama",
    config_kinds=("llama", "mixtral"),
    from_gguf=_from_gguf,
    from_config=_from_config,
    layer_names=MappingProxyType(
        {
            **LLAMA_NAMES,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        }
    ),
    gguf_halves_apart=False,
)
