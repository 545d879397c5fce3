"""Files as released, cut down to the fields that are read; for the tests of hf_config.py and what it calls."""

import json
from pathlib import Path

from ostrya.capacity.hf_config import read_spec
from ostrya.capacity.spec import ModelSpec

KIMI_KEPT = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
"""Of Kimi K2 Thinking, K2.5 and K3."""
GPT_OSS_KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_MOE: dict[str, object] = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
QWEN3_5: dict[str, object] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
        "mtp_num_hidden_layers": 1,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "vocab_size": 248320,
    },
    "vision_config": {"depth": 27},
}
QWEN3_5_MOE: dict[str, object] = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "head_dim": 256,
        "hidden_size": 4096,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 60,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 1024,
        "vocab_size": 248320,
    },
}
GEMMA: dict[str, object] = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "vocab_size": 262144,
}
GPT_OSS: dict[str, object] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": GPT_OSS_KEPT},
    "sliding_window": 128,
    "vocab_size": 201088,
}
KIMI_K25_TEXT: dict[str, object] = {
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        "ignore": [*KIMI_KEPT, "lm_head"],
    },
    "v_head_dim": 128,
    "vocab_size": 163840,
}
KIMI_K25: dict[str, object] = {"model_type": "kimi_k25", "text_config": KIMI_K25_TEXT}
KIMI_LINEAR: dict[str, object] = {
    "model_type": "kimi_linear",
    "head_dim": 72,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
KIMI_K3_TEXT: dict[str, object] = {
    "model_type": "kimi_linear",
    "attn_res_block_size": 12,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "kv_lora_rank": 512,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": [*range(4, 93, 4), 93],
        "gate_lower_bound": -5.0,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 93) if layer % 4],
        "num_heads": 96,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": 1048576,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_intermediate_size": 3072,
    "moe_layer_freq": 1,
    "num_attention_heads": 96,
    "num_expert_group": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_hidden_layers": 93,
    "num_key_value_heads": 96,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        "ignore": [*KIMI_KEPT, "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"],
    },
    "routed_expert_hidden_size": 3584,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
KIMI_K3: dict[str, object] = {
    "model_type": "kimi_k3",
    "text_config": KIMI_K3_TEXT,
    "vision_config": {"vt_hidden_size": 1024},
}
GEMMA_4B: dict[str, object] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}
DEEPSEEK_V4: dict[str, object] = {
    "model_type": "deepseek_v4",
    "dspark_markov_rank": 256,
    "hc_mult": 4,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "quantization_config": {"quant_method": "fp8"},
    "sliding_window": 128,
    "vocab_size": 129280,
}


def written(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def quantized(folder: Path, config: dict[str, object], quantization: object) -> ModelSpec:
    return read_spec(written(folder, {**config, "quantization_config": quantization}))
