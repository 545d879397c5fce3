"""Specs hold what their models' makers publish, and can be narrowed to other dtypes."""

from dataclasses import replace

import pytest

from ostrya.capacity.layers import MoeFfn, Part, Phase
from ostrya.capacity.mixers import CompressedAttention, GatedDeltaNet, GroupedAttention, KimiDeltaAttention
from ostrya.capacity.models import find_model, models
from ostrya.capacity.spec import BF16, FP8, FP32, INT8, MXFP4, Q4_1, STORAGES, Storage, with_kv, with_weights
from ostrya.capacity.weights import weight_bytes
from ostrya.errors import ConfigError


def test_every_ready_model_is_found_by_name() -> None:
    for name, spec in models().items():
        assert find_model(name) is spec
        assert spec.name == name


def test_an_unknown_model_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'gpt-2' is not known; models: kimi-k3, .*smollm2-135m"):
        find_model("gpt-2")
    with pytest.raises(ConfigError, match=r"'Kimi-K33' is not known \(nearest: kimi-k3\); models: "):
        find_model("Kimi-K33")


def test_kimi_k3_has_69_delta_and_24_latent_layers_and_one_dense_ffn() -> None:
    layers = find_model("kimi-k3").layers
    assert sum(group.count for group in layers if isinstance(group.mixer, KimiDeltaAttention)) == 69
    assert sum(group.count for group in layers) == 93
    assert sum(group.count for group in layers if not isinstance(group.ffn, MoeFfn)) == 1


def test_qwen_hybrids_have_one_attention_in_four_layers() -> None:
    for name, attentions in (("qwen3.8-27b", 16), ("qwen3.5-397b-a17b", 15)):
        layers = find_model(name).layers
        assert sum(group.count for group in layers if isinstance(group.mixer, GroupedAttention)) == attentions
        assert sum(group.count for group in layers if isinstance(group.mixer, GatedDeltaNet)) == 3 * attentions


def test_deepseek_v4_flash_has_windows_then_compressed_layers_and_hashes_the_first_three() -> None:
    layers = find_model("deepseek-v4-flash").layers
    ratios: dict[int, int] = {}
    for group in layers:
        assert isinstance(group.mixer, CompressedAttention)
        ratios[group.mixer.ratio] = ratios.get(group.mixer.ratio, 0) + group.count
    assert ratios == {0: 2, 4: 21, 128: 20}
    assert sum(g.count for g in layers if isinstance(g.ffn, MoeFfn) and g.ffn.hash_routed) == 3


def test_deepseek_v4_1_runs_half_its_layers_over_a_prompt() -> None:
    layers = find_model("deepseek-v4.1-flash").layers
    assert sum(group.count for group in layers if Phase.PREFILL in group.phases) == 20
    assert sum(group.count for group in layers if Phase.DECODE in group.phases) == 40


# Bits with their scales (OCP Microscaling 1.0: 4 + 8/32; NVFP4: 4 + 8/16; compressed-tensors' groups of 32 with a bf16
# scale: 4 + 16/32; GGUF's blocks of 32: 4 + (16 + 16)/32 and 8 + 16/32) and the narrowest dtype that holds every value.
@pytest.mark.parametrize(
    ("name", "bits", "multiplied_as"),
    [
        ("fp32", 32, "bf16"),
        ("bf16", 16, "bf16"),
        ("fp8", 8, "fp8"),
        ("int8", 8, "int8"),
        ("mxfp4", 4.25, "fp8"),
        ("int4", 4.5, "bf16"),
        ("nvfp4", 4.5, "fp8"),
        ("q4_1", 5, "bf16"),
        ("q8_0", 8.5, "bf16"),
    ],
)
def test_a_storage_has_its_bits_and_the_dtype_it_is_multiplied_in(name: str, bits: float, multiplied_as: str) -> None:
    storage = STORAGES[name]
    assert (storage.name, storage.bits, storage.num_bytes) == (name, bits, bits / 8)
    assert storage.multiplied_as == multiplied_as


_FP8_RELEASE = {"embedding": "bf16", "head": "bf16", "norms": "bf16", "router": "bf16", "vision": "bf16"}


# As the docstrings in models/ say of the releases: most weights, parts that differ, keys and values, longest context.
@pytest.mark.parametrize(
    ("name", "most", "others", "kv", "max_context_tokens"),
    [
        ("kimi-k3", "bf16", {"routed experts": "mxfp4"}, "fp8", 1_048_576),
        ("kimi-k2.5", "bf16", {"routed experts": "int4"}, "bf16", 262_144),
        ("qwen3.8-27b", "bf16", {}, "bf16", 262_144),
        ("qwen3.5-397b-a17b", "fp8", _FP8_RELEASE, "bf16", 262_144),
        ("deepseek-v4-flash", "fp8", _FP8_RELEASE | {"routed experts": "mxfp4"}, "fp8", 1_048_576),
        ("deepseek-v4.1-flash", "fp8", _FP8_RELEASE | {"routed experts": "mxfp4"}, "fp4", 1_048_576),
        ("beam-1.0-501b", "bf16", {}, "bf16", 262_144),
        ("llama-3.1-8b", "bf16", {}, "bf16", 131_072),
        ("llama-3.1-70b", "bf16", {}, "bf16", 131_072),
        ("qwen3-8b", "bf16", {}, "bf16", 40_960),
        ("qwen3-30b-a3b", "bf16", {}, "bf16", 40_960),
        ("gemma-3-270m", "bf16", {}, "bf16", 32_768),
        ("gpt-oss-120b", "bf16", {"routed experts": "mxfp4"}, "bf16", 131_072),
        ("smollm2-135m", "q4_1", {"embedding": "q8_0", "head": "q8_0", "norms": "fp32"}, "bf16", 8192),
        ("muse-spark-1.2", "bf16", {"routed experts": "nvfp4"}, "bf16", 262_144),
    ],
)
def test_a_model_is_stored_as_it_was_released(
    name: str, most: str, others: dict[str, str], kv: str, max_context_tokens: int
) -> None:
    spec = find_model(name)
    weights = [part for part in Part if part not in {Part.CACHE, Part.STATE, Part.DRAFTER}]
    assert {part: spec.storage_of(part).name for part in weights} == {part: others.get(part, most) for part in weights}
    assert (spec.kv_storage.name, spec.state_storage) == (kv, FP32)
    assert spec.max_context_tokens == max_context_tokens


# What is multiplied is narrowed; norms, routers, vision, tables never; embedding and head to 16 bits; nothing widens.
@pytest.mark.parametrize(
    ("name", "stored", "wanted", "by_part"),
    [
        (
            "deepseek-v4.1-flash",
            FP8,
            MXFP4,
            "mxfp4: attention, dense ffn, routed experts, shared experts, latent projections; "
            "bf16: embedding, head, router, norms, vision; fp8: tables",
        ),
        (
            "kimi-k3",
            BF16,
            FP8,
            "fp8: attention, dense ffn, shared experts, latent projections; mxfp4: routed experts; "
            "bf16: embedding, head, router, norms, vision, tables",
        ),
        (
            "llama-3.1-8b",
            FP32,
            BF16,
            "bf16: embedding, head, attention, dense ffn, routed experts, shared experts, latent projections; "
            "fp32: router, norms, vision, tables",
        ),
        (
            "smollm2-135m",
            Q4_1,
            INT8,
            "q4_1: attention, dense ffn, routed experts, shared experts, latent projections, router, vision, tables; "
            "q8_0: embedding, head; fp32: norms",
        ),
    ],
)
def test_narrowing_weights_leaves_what_checkpoints_leave_and_what_is_narrower_already(
    name: str, stored: Storage, wanted: Storage, by_part: str
) -> None:
    spec = with_weights(replace(find_model(name), storage=stored), wanted)
    expected = {part: kind.split(": ")[0] for kind in by_part.split("; ") for part in kind.split(": ")[1].split(", ")}
    assert {part: spec.storage_of(Part(part)).name for part in expected} == expected


def test_a_storage_as_narrow_as_another_does_not_replace_it() -> None:
    assert with_weights(find_model("qwen3.5-397b-a17b"), INT8).storage_of(Part.ATTENTION) is FP8


def test_narrowing_weights_makes_them_smaller_and_never_larger() -> None:
    for spec in models().values():
        for storage in (FP32, FP8, INT8, MXFP4):
            assert weight_bytes(with_weights(spec, storage)) <= weight_bytes(spec)


def test_narrowing_the_cache_leaves_the_state() -> None:
    spec = with_kv(find_model("qwen3.8-27b"), FP8)
    assert (spec.kv_storage, spec.state_storage) == (FP8, FP32)
