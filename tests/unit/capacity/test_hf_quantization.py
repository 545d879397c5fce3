"""A quantized checkpoint weighs what was released, or one line says what of its quantization_config is not known."""

from pathlib import Path

import pytest

from ostrya.capacity.hf_config import read_spec
from ostrya.capacity.layers import Part
from ostrya.capacity.memory import kv_bytes_per_token
from ostrya.capacity.models import find_model
from ostrya.capacity.spec import BF16, FP8, INT4, INT8, MXFP4, NVFP4, with_weights
from ostrya.capacity.weights import weight_bytes
from ostrya.errors import ConfigError
from tests.unit.capacity.hf_files import (
    DEEPSEEK_V4,
    GPT_OSS,
    KIMI_K3,
    KIMI_K25,
    LLAMA,
    QWEN3_MOE,
    quantized,
    written,
)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
LLAMA_405B = {
    **LLAMA,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
}
"""Llama 3.1 405B; its file lists these."""
KEPT_OF_405B = (
    "lm_head",
    *(f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(126) for name in "qkvo"),
    *(f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 125) for name in ("gate", "up", "down")),
)


def compressed(form: str, *weights: object, **others: object) -> dict[str, object]:
    groups = {f"group_{index}": {"targets": ["Linear"], "weights": one} for index, one in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **others}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8"}, FP8.bits),
        ({"quant_method": "fbgemm_fp8"}, FP8.bits),
        (AWQ, 4 + (16 + 4) / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 4 + (16 + 4) / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, INT8.bits),
        (compressed("float-quantized"), FP8.bits),
        (compressed("naive-quantized", {"num_bits": 8, "type": "float"}), FP8.bits),
        (compressed("int-quantized", {"num_bits": 8, "type": "int"}), INT8.bits),
        (compressed("pack-quantized", {"num_bits": 4, "group_size": 32}), INT4.bits),
        (compressed("pack-quantized", {"num_bits": 4, "group_size": 32, "symmetric": False}), 4 + (16 + 4) / 32),
        (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}), NVFP4.bits),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, FP8.bits),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, NVFP4.bits),
        (None, 16),
    ],
)
def test_the_format_is_read(tmp_path: Path, quantization: object, bits: float) -> None:
    spec = quantized(tmp_path, LLAMA, quantization)
    assert spec.storage_of(Part.DENSE_FFN).bits == spec.storage_of(Part.ATTENTION).bits == bits
    assert spec.storage_of(Part.HEAD).bits == spec.storage_of(Part.EMBEDDING).bits == 16


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ("fp8", "quantization_config is 'fp8'; it must be an object"),
        (["fp8"], "quantization_config is a list; it must be an object"),
        ({}, "quant_method is missing; known: awq, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt"),
        ({"quant_method": None}, "quant_method is missing"),
        ({"quant_method": ["fp8"]}, "quant_method is a list; it must be text"),
        ({"quant_method": "w4afp8"}, "quant_method 'w4afp8' is not known; known: awq, "),
        ({"quant_method": "fp8\nx"}, r"quant_method 'fp8\\nx' is not known"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "'MIXED_PRECISION'; known: FP8, NVFP4"),
        (compressed("marlin-24"), "format of compressed-tensors is 'marlin-24'; known: one of float-quantized"),
        ({"quant_method": "compressed-tensors"}, "format of compressed-tensors is None; known"),
        (compressed("pack-quantized"), "config_groups is missing"),
        (compressed("pack-quantized", {"num_bits": 4}, {"num_bits": 8}), "config_groups mixes formats"),
        (compressed("pack-quantized", {"num_bits": 4, "type": "float"}), "type 'float' of format pack-quantized"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config: bits is 3; 4 and 8 are known"),
        ({"quant_method": "awq"}, "quantization_config lacks num_bits or bits"),
        ({"quant_method": "gptq", "bits": "4"}, "bits is '4'; it must be a whole number from"),
        ({"quant_method": "gptq", "bits": [4]}, "bits is a list; it must be a whole number from"),
        ({**AWQ, "group_size": "128"}, "group_size is '128'; it must be a whole number from"),
        ({**AWQ, "group_size": 1}, "group_size is 1; it must be a whole number from 8"),
        ({**AWQ, "modules_to_not_convert": "gate"}, "modules_to_not_convert is 'gate'; it must be a list"),
        ({**AWQ, "modules_to_not_convert": [1]}, "an entry of modules_to_not_convert is 1; it must be text"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*mlp.*": {"bits": 8}}}, r"dynamic changes '\+:\.\*mlp"),
    ],
)
def test_what_is_not_known_is_named_with_what_is(tmp_path: Path, quantization: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        quantized(tmp_path, LLAMA, quantization)
    assert "\n" not in str(caught.value)


def test_llama_405b_keeps_its_attention_and_two_mlps_as_meta_released_it(tmp_path: Path) -> None:
    spec = quantized(tmp_path, LLAMA_405B, {"quant_method": "fbgemm_fp8", "modules_to_not_convert": KEPT_OF_405B})
    assert spec.storage_of(Part.ATTENTION) is BF16
    mlp = spec.storage_of(Part.DENSE_FFN)
    assert (mlp.name, mlp.multiplied_as) == ("fp8+bf16", FP8.multiplied_as)
    assert mlp.bits == pytest.approx(8 + 8 * 2 / 126)
    # 405.85 B in bf16 less the 124 quantized MLPs of three matrices of 16,384 x 53,248.
    assert weight_bytes(spec) == pytest.approx(2 * 405.85e9 - 124 * 3 * 16384 * 53248, rel=1e-4)
    assert weight_bytes(spec) == pytest.approx(487e9, rel=0.001)


def test_an_awq_file_that_keeps_its_routers_has_attention_of_four_bits(tmp_path: Path) -> None:
    spec = quantized(tmp_path, QWEN3_MOE, {**AWQ, "modules_to_not_convert": ["gate"]})
    bits = 4 + (16 + 4) / 128
    assert spec.storage_of(Part.ATTENTION).bits == spec.storage_of(Part.ROUTED_EXPERTS).bits == bits
    # 30.53 B, of which embedding, head and routers (151,936 x 2,048 twice, 48 of 128 x 2,048) have 16 bits.
    wide = 2 * 151936 * 2048 + 48 * 128 * 2048
    assert weight_bytes(spec) == pytest.approx(wide * 2 + (30.53e9 - wide) * bits / 8, rel=0.001)


def test_gptq_may_narrow_the_output_head_too(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    narrow, wide = (
        read_spec(written(tmp_path, {**LLAMA, "quantization_config": {**config, "lm_head": head}}))
        for head in (True, False)
    )
    saved_bits = 16 - (4 + (16 + 4) / 128)
    assert weight_bytes(wide) - weight_bytes(narrow) == pytest.approx(128_256 * 4096 * saved_bits / 8)


def test_kimi_k2_keeps_all_but_routed_experts(tmp_path: Path) -> None:
    spec = read_spec(written(tmp_path, KIMI_K25))
    assert spec.storage_of(Part.ROUTED_EXPERTS) == INT4
    for part in (Part.ATTENTION, Part.DENSE_FFN, Part.SHARED_EXPERTS, Part.HEAD):
        assert spec.storage_of(part) is BF16
    # 1.026e12 parameters; the 384 experts of 60 layers have 4.5 bits, three matrices of 7,168 x 2,048 each.
    experts = 60 * 384 * 3 * 7168 * 2048
    assert weight_bytes(spec) == pytest.approx(experts * 4.5 / 8 + (1.0264e12 - experts) * 2, rel=0.001)


def test_kimi_k3_keeps_its_latent_projections_though_its_list_leaves_them_out(tmp_path: Path) -> None:
    spec = read_spec(written(tmp_path, KIMI_K3))
    assert spec.storage_of(Part.ROUTED_EXPERTS) is MXFP4
    for part in (Part.LATENT, Part.ATTENTION, Part.DENSE_FFN, Part.SHARED_EXPERTS):
        assert spec.storage_of(part) is BF16


@pytest.mark.parametrize("quantization", [GPT_OSS["quantization_config"], {"quant_method": "mxfp4"}])
def test_gpt_oss_has_the_size_of_its_model_card(tmp_path: Path, quantization: object) -> None:
    spec = quantized(tmp_path, GPT_OSS, quantization)
    assert spec.storage_of(Part.ROUTED_EXPERTS) is MXFP4
    # 2508.10925, table 1: the checkpoint has 60.8 GiB.
    assert weight_bytes(spec) == pytest.approx(60.8 * 2**30, rel=0.005)


def test_gpt_oss_that_is_not_quantized_is_bf16(tmp_path: Path) -> None:
    # 116.83 B.
    assert weight_bytes(quantized(tmp_path, GPT_OSS, None)) == pytest.approx(2 * 116.83e9, rel=0.001)


def test_deepseek_v4_in_another_format_than_released_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization to nvfp4, which this kind's reader cannot express"):
        quantized(tmp_path, DEEPSEEK_V4, {"quant_method": "modelopt", "quant_algo": "NVFP4"})


@pytest.mark.parametrize(
    ("says", "num_bytes"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, 1),
        ({"kv_cache_quant_algo": "FP8"}, 1),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": None}, 2),
    ],
)
def test_the_cache_is_stored_as_the_file_says(tmp_path: Path, says: dict[str, object], num_bytes: int) -> None:
    spec = quantized(tmp_path, LLAMA, {"quant_method": "modelopt", "quant_algo": "FP8", **says})
    # Keys and values of eight heads of 128 in 32 layers.
    assert kv_bytes_per_token(spec) == 2 * 8 * 128 * 32 * num_bytes


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        (
            {"kv_cache_scheme": {"num_bits": 4, "type": "float"}},
            "kv_cache_scheme: 4 bits of type 'float' are not known",
        ),
        ({"kv_cache_scheme": {"num_bits": 8}}, "8 bits of type None are not known; known: float and int of 8 bits"),
        ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme is 'fp8'; it must be an object"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' is not known; known: FP8"),
    ],
)
def test_another_cache_is_refused_by_name(tmp_path: Path, scheme: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        quantized(tmp_path, LLAMA, {"quant_method": "fp8", **scheme})


def test_narrowing_a_ready_model_gives_the_weight_of_its_released_checkpoint(tmp_path: Path) -> None:
    narrow = with_weights(find_model("llama-3.1-8b"), FP8)
    # 8.03 B, of which embedding and head (128,256 x 4,096 each) have two bytes.
    assert weight_bytes(narrow) == pytest.approx(8.03e9 + 2 * 128256 * 4096, rel=0.001)
    assert weight_bytes(narrow) == weight_bytes(quantized(tmp_path, LLAMA, {"quant_method": "fp8"}))


def test_narrowing_fp32_to_bf16_halves_embedding_and_head_too(tmp_path: Path) -> None:
    wide = read_spec(written(tmp_path, {**LLAMA, "torch_dtype": "float32"}))
    assert weight_bytes(with_weights(wide, BF16)) == pytest.approx(2 * 8.03e9, rel=0.001)
