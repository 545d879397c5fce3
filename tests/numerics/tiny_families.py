"""A small random model of each family: its config.json, and weights made from a seed, so that none are committed.

Used by the tests and, in the peer venv, by generate_golden_families.py: numpy and safetensors only.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

F32 = npt.NDArray[np.float32]

PROMPTS = tuple(
    [(5 * at + at * at // 3 + 7 * row) % 120 + 3 for at in range(length)] for row, length in enumerate((3, 21, 70))
)
NUM_NEW = 24
EPS = 2.0**-17


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyFamily:
    """One case of the golden file."""

    config: Mapping[str, object]
    biases: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    seed: int = 0

    def size(self, key: str) -> int:
        value = self.config[key]
        assert isinstance(value, int)
        return value

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape."""
        hidden = self.size("hidden_size")
        vocab_shape = (self.size("vocab_size"), hidden)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocab_shape, "model.norm.weight": (hidden,)}
        for i in range(self.size("num_hidden_layers")):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in self._layer_shapes(i).items()}
        return shapes if self.config["tie_word_embeddings"] else shapes | {"lm_head.weight": vocab_shape}

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, head_dim = self.size("hidden_size"), self.size("head_dim")
        q_size, kv_size = self.size("num_attention_heads") * head_dim, self.size("num_key_value_heads") * head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "post_attention_layernorm.weight": (hidden,),
            **self._ffn_shapes(layer),
        }
        if self.biases:
            shapes |= {f"self_attn.{name}_proj.bias": shapes[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
        if self.qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        if self.post_norms:
            shapes |= {f"{name}_feedforward_layernorm.weight": (hidden,) for name in ("pre", "post")}
        return shapes

    def _ffn_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, dense = self.size("hidden_size"), self.config.get("mlp_only_layers")
        if "num_local_experts" in self.config:
            sizes = self.size("num_local_experts"), hidden, self.size("intermediate_size")
            return _expert_shapes("block_sparse_moe", *sizes, names=("w1", "w3", "w2"))
        is_between = self.config.get("decoder_sparse_step") == 2 and layer % 2 == 0
        if "num_experts" not in self.config or is_between or (isinstance(dense, list) and layer in dense):
            return _gated_shapes("mlp", hidden, self.size("intermediate_size"))
        shapes = _expert_shapes("mlp", self.size("num_experts"), hidden, self.size("moe_intermediate_size"))
        if "shared_expert_intermediate_size" in self.config:
            shapes |= _gated_shapes("mlp.shared_expert", hidden, self.size("shared_expert_intermediate_size"))
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
        return shapes

    def weights(self) -> dict[str, F32]:
        """Matrices that keep a vector's length about as it is; biases and norms that cannot be overlooked."""
        generator = np.random.default_rng(self.seed)
        weights = {}
        for name, shape in self.shapes().items():
            if len(shape) == 2:
                values = generator.normal(size=shape) / shape[-1] ** 0.5
            elif name.endswith("norm.weight"):
                # Gemma's files leave out the 1.
                values = generator.uniform(0.5, 1.5, shape) - self.post_norms
            else:
                values = generator.normal(size=shape)
            weights[name] = values.astype(np.float32)
        return weights

    def write(self, directory: Path) -> Path:
        """As a Hugging Face directory."""
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(dict(self.config)))
        save_file(self.weights(), directory / "model.safetensors", metadata={"format": "pt"})
        return directory


_GATED = ("gate_proj", "up_proj", "down_proj")


def _gated_shapes(stem: str, hidden: int, inner: int, *, names: Sequence[str] = _GATED) -> dict[str, tuple[int, ...]]:
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    return {f"{stem}.{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


def _expert_shapes(
    stem: str, num_experts: int, hidden: int, inner: int, *, names: Sequence[str] = _GATED
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{stem}.gate.weight": (num_experts, hidden)}
    for i in range(num_experts):
        shapes |= _gated_shapes(f"{stem}.experts.{i}", hidden, inner, names=names)
    return shapes


_SIZES: Mapping[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": True,
}
_GEMMA: Mapping[str, object] = {
    **_SIZES,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_QWEN3_MOE: Mapping[str, object] = {
    **_SIZES,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_act": "silu",
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
}

FAMILIES: Mapping[str, TinyFamily] = {
    "qwen2": TinyFamily(
        config={
            **_SIZES,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_act": "silu",
            "rope_theta": 1_000_000.0,
            "sliding_window": 32,
            "use_sliding_window": False,
            "max_window_layers": 1,
            "tie_word_embeddings": False,
        },
        biases=True,
    ),
    "qwen3": TinyFamily(
        config={
            **_SIZES,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_act": "silu",
            "head_dim": 32,
            "rope_theta": 1_000_000.0,
            "attention_bias": False,
        },
        qk_norm=True,
    ),
    "mixtral": TinyFamily(
        config={
            **_SIZES,
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "hidden_act": "silu",
            "intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        seed=5,
    ),
    # Weights as the softmax has them, and an expert for every token.
    "qwen2-moe": TinyFamily(
        config={
            **_SIZES,
            "model_type": "qwen2_moe",
            "architectures": ["Qwen2MoeForCausalLM"],
            "hidden_act": "silu",
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 80,
            "norm_topk_prob": False,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False,
        },
        biases=True,
    ),
    "qwen3-moe": TinyFamily(config=_QWEN3_MOE, qk_norm=True, seed=5),
    "qwen3-moe-mixed": TinyFamily(
        config={
            **_QWEN3_MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
        },
        qk_norm=True,
        seed=3,
    ),
    "gemma3": TinyFamily(config=_GEMMA, qk_norm=True, post_norms=True),
    # As the larger ones: another scale of scores, and global layers that stretch their positions.
    "gemma3-large": TinyFamily(
        config={
            **_GEMMA,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        qk_norm=True,
        post_norms=True,
    ),
}
