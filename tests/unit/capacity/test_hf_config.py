"""A config.json becomes the same model as the ready spec, or one line says why not."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from ostrya.capacity.hf_config import read_spec
from ostrya.capacity.hf_kinds import KINDS
from ostrya.capacity.layers import Part
from ostrya.capacity.memory import kv_bytes_per_token, state_bytes
from ostrya.capacity.mixers import GroupedAttention
from ostrya.capacity.models import find_model
from ostrya.capacity.spec import FP8, INT4, INT8, MXFP4
from ostrya.capacity.weights import num_params, num_params_active, weights
from ostrya.errors import ConfigError

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
    "quantization_config": {"quant_method": "mxfp4"},
    "sliding_window": 128,
    "vocab_size": 201088,
}
KIMI_K25: dict[str, object] = {
    "model_type": "kimi_k25",
    "text_config": {
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
        },
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
}
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
KIMI_K3: dict[str, object] = {
    "model_type": "kimi_k3",
    "text_config": {
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
        },
        "routed_expert_hidden_size": 3584,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
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


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama-3.1-8b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (QWEN3_5, "qwen3.8-27b"),
        (QWEN3_5_MOE, "qwen3.5-397b-a17b"),
        (GEMMA, "gemma-3-270m"),
        (GPT_OSS, "gpt-oss-120b"),
        (KIMI_K25, "kimi-k2.5"),
        (DEEPSEEK_V4, "deepseek-v4-flash"),
    ],
)
def test_a_config_gives_the_same_model_as_the_ready_spec(tmp_path: Path, config: object, name: str) -> None:
    spec, ready = read_spec(written(tmp_path, config)), find_model(name)
    assert num_params(spec) == num_params(ready)
    assert num_params_active(spec) == num_params_active(ready)
    assert kv_bytes_per_token(spec) == kv_bytes_per_token(ready)
    assert state_bytes(spec) == state_bytes(ready)
    assert spec.max_context_tokens == ready.max_context_tokens
    assert spec.storage_of(Part.ROUTED_EXPERTS).bits in {ready.storage_of(Part.ROUTED_EXPERTS).bits, 16}


@pytest.mark.parametrize("kind", ["kimi_k3", "kimi_linear"])
def test_the_config_of_kimi_k3_equals_the_ready_spec_part_by_part(tmp_path: Path, kind: str) -> None:
    spec, ready = read_spec(written(tmp_path, {**KIMI_K3, "model_type": kind})), find_model("kimi-k3")
    # The file's language part has no vision tower.
    assert weights(spec) == tuple(part for part in weights(ready) if part.part is not Part.VISION)
    assert spec.layers == ready.layers
    assert spec.max_context_tokens == ready.max_context_tokens


def test_gemma_3_leaves_out_what_equals_the_defaults(tmp_path: Path) -> None:
    spec = read_spec(written(tmp_path, GEMMA_4B))
    # 4.3 B on the card, of which the vision tower and its projection are 0.42 B.
    assert num_params(spec) == pytest.approx(3.88e9, rel=0.005)
    assert spec.max_context_tokens == 131072


def test_kimi_linear_has_its_announced_48_billion(tmp_path: Path) -> None:
    spec = read_spec(written(tmp_path, KIMI_LINEAR))
    assert num_params(spec) == pytest.approx(48e9, rel=0.03)
    assert num_params_active(spec) == pytest.approx(3e9, rel=0.1)


def test_the_name_is_the_folders(tmp_path: Path) -> None:
    assert read_spec(written(tmp_path, LLAMA)).name == tmp_path.name


def _packed(weights: object) -> dict[str, object]:
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8"}, FP8.bits),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, FP8.bits),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, 4 + (16 + 4) / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + (16 + 4) / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, INT8.bits),
        (_packed({"num_bits": 8}), INT8.bits),
        (_packed({"num_bits": 4, "group_size": 32}), INT4.bits),
        (_packed({"num_bits": 4, "group_size": 32, "symmetric": False}), 4 + (16 + 4) / 32),
        ({"quant_method": "mxfp4"}, MXFP4.bits),
    ],
)
def test_quantization_is_read(tmp_path: Path, quantization: object, bits: float) -> None:
    spec = read_spec(written(tmp_path, {**LLAMA, "quantization_config": quantization}))
    assert spec.storage_of(Part.DENSE_FFN).bits == bits
    assert spec.storage_of(Part.HEAD).bits == 16


def test_an_unknown_quantization_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization 'bitnet' is not known"):
        read_spec(written(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "bitnet"}}))


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "gptq", "bits": 3}, "quantization 'gptq' has 3 bits a weight; 4 and 8 are known"),
        ({"quant_method": "awq"}, "'awq' has None bits"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"\(pack-quantized\) has None bits"),
        ({"quant_method": "gptq", "bits": [4]}, "bits a weight"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size is x"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
            },
            "mixes formats",
        ),
    ],
)
def test_other_numbers_of_bits_are_refused(tmp_path: Path, quantization: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_spec(written(tmp_path, {**LLAMA, "quantization_config": quantization}))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**LLAMA, "num_key_value_heads": 5}, "num_key_value_heads is 5; it must divide the 32 attention heads"),
        ({**LLAMA, "num_attention_heads": 24}, "must divide hidden_size 4096"),
        ({**LLAMA, "tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({**LLAMA, "torch_dtype": "float8"}, "torch_dtype is 'float8'; it must be one of bfloat16"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias is True, which this kind's reader cannot express"),
        ({**LLAMA, "routed_expert_hidden_size": 64}, "routed_expert_hidden_size is 64, which"),
        ({**LLAMA, "model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window"),
        ({**LLAMA, "layer_types": ["full_attention"] * 8}, "layer_types has 8 layers of full attention"),
        ({**QWEN3_MOE, "mlp_only_layers": [0, 1]}, "mlp_only_layers is not empty"),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step is not 1"),
        ({**QWEN3_MOE, "num_experts_per_tok": 200}, "200 experts per token are more than the 128 it has"),
        ({**LLAMA, "model_type": "deepseek_v41"}, "use --model deepseek-v4.1-flash"),
        ({**LLAMA, "model_type": "beam"}, "use --model beam-1.0-501b"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(tmp_path: Path, config: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_spec(written(tmp_path, config))


def test_what_is_usual_and_changes_nothing_is_read(tmp_path: Path) -> None:
    more = {"mlp_only_layers": [], "decoder_sparse_step": 1, "intermediate_size": 6144, "max_window_layers": 48}
    off = {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 48}
    assert read_spec(written(tmp_path, {**QWEN3_MOE, **more, **off})).layers == find_model("qwen3-30b-a3b").layers


def test_a_window_of_mistral_and_biases_of_qwen2_are_read(tmp_path: Path) -> None:
    windowed = read_spec(written(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": 4096}))
    mixer = windowed.layers[0].mixer
    assert isinstance(mixer, GroupedAttention)
    assert mixer.window_tokens == 4096
    plain = read_spec(written(tmp_path, LLAMA))
    biased = read_spec(written(tmp_path, {**LLAMA, "model_type": "qwen2"}))
    assert num_params(biased) - num_params(plain) == 32 * (4096 + 2 * 1024)


def test_float32_is_four_bytes(tmp_path: Path) -> None:
    assert read_spec(written(tmp_path, {**LLAMA, "torch_dtype": "float32"})).storage.bits == 32


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json lacks {missing}$"):
        read_spec(written(tmp_path, {key: value for key, value in LLAMA.items() if key != missing}))


@pytest.mark.parametrize("config", [QWEN3_5, KIMI_LINEAR, DEEPSEEK_V4, GPT_OSS, GEMMA, KIMI_K25, QWEN3_MOE])
def test_any_missing_field_is_a_config_error_or_has_a_default(tmp_path: Path, config: dict[str, object]) -> None:
    inner = config.get("text_config", config)
    assert isinstance(inner, dict)
    for missing in inner:
        fields = {key: value for key, value in inner.items() if key != missing}
        path = written(tmp_path, {**config, "text_config": fields} if "text_config" in config else fields)
        # Some fields have a default; no other error may escape.
        with suppress(ConfigError):
            read_spec(path)


@pytest.mark.parametrize("value", [-1, 0, 1.5, "many", True, 10**12])
def test_a_field_that_makes_no_sense_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=f"hidden_size is {value}; it must be 1 to 1000000000"):
        read_spec(written(tmp_path, {**LLAMA, "hidden_size": value}))


def test_an_unknown_kind_lists_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is of kind 'mamba2', which is not known; known kinds: deepseek_v3, "):
        read_spec(written(tmp_path, {**LLAMA, "model_type": "mamba2"}))
    with pytest.raises(ConfigError, match="has no model_type"):
        read_spec(written(tmp_path, {}))
    with pytest.raises(ConfigError, match="which is not known"):
        read_spec(written(tmp_path, {"model_type": ["llama"]}))
    assert "llama" in KINDS


@pytest.mark.parametrize("text", ["", "{", json.dumps(LLAMA)[:100], "[]", "null"])
def test_a_truncated_file_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is not a whole JSON object") as caught:
        read_spec(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"model_type": "\xff\xfe"}')
    with pytest.raises(ConfigError, match="is not a whole JSON object"):
        read_spec(path)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_spec(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_spec(tmp_path)


def test_a_file_of_weights_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(5 * 1024**2)
    with pytest.raises(ConfigError, match=r"has 5242880 bytes; the limit for a config\.json is 4194304"):
        read_spec(path)


def test_too_few_compression_ratios_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compress_ratios has 2 entries for 43 layers"):
        read_spec(written(tmp_path, {**DEEPSEEK_V4, "compress_ratios": [0, 4]}))
