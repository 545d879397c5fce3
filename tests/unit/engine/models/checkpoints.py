"""Writes tiny Llama checkpoints with random weights: one set of values as a GGUF file in any quantization, or as a
directory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file

F32 = npt.NDArray[np.float32]
Json = dict[str, object]
MetadataValue = int | float | str | Sequence[int] | Sequence[str] | None

NORM_EPS = 2.0**-17
"""Near the usual 1e-5, and the same number in float32."""

LAYER_NAMES = {
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
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """Sizes; rows are multiples of 256, as K-quants need."""

    num_layers: int = 2
    hidden_size: int = 256
    mlp_size: int = 512
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = 96
    context_tokens: int = 128
    tied: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """GGUF stem -> shape."""
        hidden, mlp, kv_size = self.hidden_size, self.mlp_size, self.num_kv_heads * self.head_dim
        layer = {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (kv_size, hidden),
            "attn_v": (kv_size, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (mlp, hidden),
            "ffn_up": (mlp, hidden),
            "ffn_down": (hidden, mlp),
        }
        shapes: dict[str, tuple[int, ...]] = {"token_embd": (self.vocab_size, hidden), "output_norm": (hidden,)}
        for i in range(self.num_layers):
            shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        return shapes if self.tied else shapes | {"output": (self.vocab_size, hidden)}

    def weights(self, seed: int = 0) -> dict[str, F32]:
        """GGUF stem -> values, q and k rows in GGUF's order; norms near 1."""
        generator = np.random.default_rng(seed)
        return {
            stem: (generator.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)
            if len(shape) == 2
            else generator.uniform(0.5, 1.5, shape).astype(np.float32)
            for stem, shape in self.shapes().items()
        }


def write_gguf(
    path: Path,
    tiny: Tiny,
    weights: Mapping[str, F32],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    changed: Mapping[str, MetadataValue] | None = None,
    max_tensors: int = 0,
) -> Path:
    """Matrices in `kind`, norms in F32. `changed` replaces metadata, None leaves a key out. With `max_tensors` as parts
    of at most so many; the first part's path then."""
    metadata: dict[str, MetadataValue] = {
        "general.architecture": "llama",
        "llama.block_count": tiny.num_layers,
        "llama.context_length": tiny.context_tokens,
        "llama.embedding_length": tiny.hidden_size,
        "llama.feed_forward_length": tiny.mlp_size,
        "llama.attention.head_count": tiny.num_heads,
        "llama.attention.head_count_kv": tiny.num_kv_heads,
        "llama.rope.freq_base": 5000.0,
        "llama.attention.layer_norm_rms_epsilon": NORM_EPS,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": [f"word{i}" for i in range(tiny.vocab_size)],
        "tokenizer.ggml.token_type": [1] * tiny.vocab_size,
    }
    metadata.update(changed or {})
    writer = GGUFWriter(path, str(metadata.pop("general.architecture")), split_max_tensors=max_tensors)
    for key, value in metadata.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for stem, values in weights.items():
        if values.ndim == 1:
            writer.add_tensor(f"{stem}.weight", values)
        else:
            writer.add_tensor(f"{stem}.weight", encode(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if max_tensors else path


def encode(values: F32, kind: GGMLQuantizationType) -> npt.NDArray[np.generic]:
    """The bytes of a matrix in `kind`; for those that the package cannot write, random blocks with small scales."""
    scales_at = {
        GGMLQuantizationType.Q2_K: (80, 82),
        GGMLQuantizationType.Q3_K: (108,),
        GGMLQuantizationType.Q4_K: (0, 2),
        GGMLQuantizationType.Q5_K: (0, 2),
        GGMLQuantizationType.Q6_K: (208,),
        GGMLQuantizationType.IQ4_NL: (0,),
        GGMLQuantizationType.IQ4_XS: (0,),
    }
    if kind not in scales_at:
        encoded: npt.NDArray[np.generic] = quantize(values, kind)
        return encoded
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(values.size)
    blocks = generator.integers(0, 256, (values.size // block_elements, block_bytes), dtype=np.uint8)
    for at in scales_at[kind]:
        blocks[:, at : at + 2] = np.full((len(blocks), 1), 1e-4, np.float16).view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


def write_directory(
    path: Path, tiny: Tiny, weights: Mapping[str, F32], *, shards: int = 1, changed: Mapping[str, object] | None = None
) -> Path:
    """config.json and safetensors; more than one shard come with an index."""
    path.mkdir(exist_ok=True)
    config: Json = {
        "model_type": "llama",
        "num_hidden_layers": tiny.num_layers,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.mlp_size,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "vocab_size": tiny.vocab_size,
        "max_position_embeddings": tiny.context_tokens,
        "rope_theta": 5000.0,
        "rms_norm_eps": NORM_EPS,
        "tie_word_embeddings": tiny.tied,
        "eos_token_id": 2,
    } | dict(changed or {})
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    tensors = [(stored_name(stem), _halves_apart(stem, values, tiny)) for stem, values in weights.items()]
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors")
        return path
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(dict(tensors[shard::shards]), path / name)
        weight_map |= dict.fromkeys((stored for stored, _ in tensors[shard::shards]), name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def stored_name(stem: str) -> str:
    """GGUF stem -> the name in a Hugging Face file."""
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    _, layer, name = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[name]}.weight"


def _halves_apart(stem: str, values: F32, tiny: Tiny) -> F32:
    """Undoes what llama.cpp's converter does to q and k: pairs (2i, 2i + 1) of a head -> (i, i + H/2)."""
    if not stem.endswith(("attn_q", "attn_k")):
        return values
    pairs = values.reshape(-1, tiny.head_dim // 2, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
