"""The small models of tiny_families.py as GGUF files."""

import re
from pathlib import Path
from typing import cast

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from ostrya.engine.models.families import BY_KIND
from ostrya.engine.models.family import Family
from tests.numerics.tiny_families import EPS, F32, TinyFamily

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf_family(
    path: Path, family: TinyFamily, *, quantization: GGMLQuantizationType = GGMLQuantizationType.F32
) -> Path:
    """What llama.cpp's converter makes of the family's directory; matrices quantized."""
    kind = BY_KIND[str(family.config["model_type"])]
    writer = GGUFWriter(path, kind.gguf_architecture)
    writer.add_block_count(family.size("num_hidden_layers"))
    writer.add_context_length(family.size("max_position_embeddings"))
    writer.add_embedding_length(family.size("hidden_size"))
    writer.add_feed_forward_length(family.size("intermediate_size"))
    writer.add_head_count(family.size("num_attention_heads"))
    writer.add_head_count_kv(family.size("num_key_value_heads"))
    writer.add_key_length(family.size("head_dim"))
    writer.add_value_length(family.size("head_dim"))
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(cast("float", family.config["rope_theta"]))
    for key, add in {
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
    }.items():
        if key in family.config:
            add(family.size(key))
    if family.post_norms:
        writer.add_sliding_window(family.size("sliding_window"))
    for name, values in _tensors(family, kind).items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(family: TinyFamily, kind: Family) -> dict[str, F32]:
    """By GGUF's names; the experts of a layer in one."""
    stems = {stored: stem for stem, stored in kind.layer_names.items()}
    tensors: dict[str, F32] = {}
    experts: dict[str, list[F32]] = {}
    for name, values in family.weights().items():
        stored, suffix = name.rsplit(".", 1)
        if stored in _TOP:
            tensors[f"{_TOP[stored]}.{suffix}"] = values + np.float32(family.post_norms and stored == "model.norm")
            continue
        _, _, layer, part = stored.split(".", 3)
        stem = stems[re.sub(r"\.[0-9]+\.", ".{}.", part)]
        if stem.endswith("_exps"):
            experts.setdefault(f"blk.{layer}.{stem}.{suffix}", []).append(values)
        else:
            tensors[f"blk.{layer}.{stem}.{suffix}"] = _converted(stem, values, family, kind)
    return tensors | {name: np.stack(of_layer) for name, of_layer in experts.items()}


def _converted(stem: str, values: F32, family: TinyFamily, kind: Family) -> F32:
    if not kind.gguf_halves_apart and stem in ("attn_q", "attn_k"):
        # (i, i + H/2) -> (2i, 2i + 1).
        pairs = values.reshape(-1, 2, family.size("head_dim") // 2, values.shape[1]).swapaxes(1, 2)
        return np.ascontiguousarray(pairs.reshape(values.shape))
    if stem == "ffn_gate_inp_shexp":
        return values.reshape(-1)
    return values + np.float32(family.post_norms and stem.endswith("_norm"))
