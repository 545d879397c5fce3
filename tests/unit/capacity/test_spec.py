"""Specs hold what their models' makers publish, and can be narrowed to other dtypes."""

import pytest

from ostrya.capacity.layers import MoeFfn, Part, Phase
from ostrya.capacity.mixers import CompressedAttention, GatedDeltaNet, GroupedAttention, KimiDeltaAttention
from ostrya.capacity.models import find_model, models
from ostrya.capacity.spec import FP8, FP32, INT8, MXFP4, with_kv, with_weights
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


def test_narrowing_weights_leaves_what_is_narrower_already() -> None:
    spec = with_weights(find_model("kimi-k3"), FP8)
    assert spec.storage_of(Part.ROUTED_EXPERTS) is MXFP4
    assert spec.storage_of(Part.ATTENTION) is FP8
    assert spec.storage_of(Part.NORMS).bits == 16


def test_narrowing_weights_makes_them_smaller_and_never_larger() -> None:
    for spec in models().values():
        for storage in (FP32, FP8, INT8, MXFP4):
            assert weight_bytes(with_weights(spec, storage)) <= weight_bytes(spec)


def test_narrowing_the_cache_leaves_the_state() -> None:
    spec = with_kv(find_model("qwen3.8-27b"), FP8)
    assert (spec.kv_storage, spec.state_storage) == (FP8, FP32)
