"""Lists of modules that a quantized checkpoint keeps, as released files write them, or what of one is not clear."""

from pathlib import Path

import pytest

from ostrya.capacity.layers import Part
from ostrya.capacity.spec import BF16, FP8, NVFP4
from ostrya.errors import ConfigError
from tests.unit.capacity.hf_files import KIMI_K3_TEXT, LLAMA, QWEN3_5_MOE, QWEN3_MOE, quantized


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        # As Qwen's own FP8 files list them: small projections, gates, the drafter, the tower.
        (["lm_head", "model.language_model.embed_tokens", "model.visual.blocks.0.attn.qkv"], set()),
        (["model.language_model.layers.0.linear_attn.in_proj_a", "x.layers.0.linear_attn.conv1d", "mtp.fc"], set()),
        (["model.language_model.layers.3.mlp.gate", "model.layers.3.mlp.shared_expert_gate", "mtp*"], set()),
        (["model.layers.60.mlp.experts", "model.layers.60*"], set()),
        (["re:.*norm$", "re:.*mm_projector.*", "*router*", "eagle.layers.0.self_attn"], set()),
        (["attn"], {Part.ATTENTION}),
        (["re:.*self_attn.*", "model.layers.*.linear_attn*"], {Part.ATTENTION}),
        (["shared_expert"], {Part.SHARED_EXPERTS}),
        (["re:.*mlp[.]shared_expert[.].*"], {Part.SHARED_EXPERTS}),
        ([r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"], {Part.ROUTED_EXPERTS}),
        (["mlp"], {Part.SHARED_EXPERTS, Part.ROUTED_EXPERTS}),
        ([r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"], set()),
        ([r"re:.*(self_attn|linear_attn|shared_expert)\..*"], {Part.ATTENTION, Part.SHARED_EXPERTS}),
    ],
)
@pytest.mark.parametrize("name", ["modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"])
def test_entries_of_a_list_are_understood(tmp_path: Path, name: str, entries: list[str], kept: set[Part]) -> None:
    spec = quantized(tmp_path, QWEN3_5_MOE, {"quant_method": "fp8", name: entries})
    parts = (Part.ATTENTION, Part.SHARED_EXPERTS, Part.ROUTED_EXPERTS)
    assert {part for part in parts if spec.storage_of(part) is BF16} == kept
    assert all(spec.storage_of(part) in {BF16, FP8} for part in parts)


@pytest.mark.parametrize(
    "entry",
    ["re:.*", "", "Linear", "re:^(?!.*experts).*", r"re:.*layers\.1[0-9]\..*", "model.layers", "((", "model.layers.3"],
)
def test_an_entry_that_is_not_understood_is_named(tmp_path: Path, entry: str) -> None:
    # The last names a whole layer, of which a hybrid does not say what attention it has.
    with pytest.raises(ConfigError, match=r"which modules '.*' means is not clear") as caught:
        quantized(tmp_path, QWEN3_5_MOE, {"quant_method": "fp8", "ignore": [entry]})
    assert repr(entry) in str(caught.value)


def test_a_pattern_of_many_alternatives_is_refused_without_spelling_them_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not clear"):
        quantized(tmp_path, LLAMA, {"quant_method": "fp8", "ignore": ["re:" + "(a|b|c|d)" * 50]})


def test_layers_named_by_number_make_a_mean_of_what_is_in_them(tmp_path: Path) -> None:
    ignore = [r"re:.*layers\.(0|1)\.mlp.*", "model.layers.2.self_attn.q_proj", "model.layers.2.self_attn.k_proj"]
    one_expert = [f"model.layers.5.mlp.experts.{expert}.{name}_proj" for expert in range(64) for name in ("up", "down")]
    spec = quantized(tmp_path, QWEN3_MOE, {"quant_method": "fp8", "ignore": [*ignore, *one_expert]})
    # Two whole layers of 48, and 64 of the 128 experts of another.
    assert spec.storage_of(Part.ROUTED_EXPERTS).bits == pytest.approx(8 + 8 * 2.5 / 48)
    assert spec.storage_of(Part.ATTENTION).bits == pytest.approx(8 + 8 / 48)


def test_attention_of_a_hybrid_is_weighed_by_its_parameters(tmp_path: Path) -> None:
    spec = quantized(tmp_path, QWEN3_5_MOE, {"quant_method": "fp8", "ignore": ["re:.*linear_attn.*"]})
    # 45 gated delta nets (q, k, v, gate, output, and beta and decay), 15 attentions (q, gate, output, and k and v).
    delta = 45 * 4096 * (2 * 16 * 128 + 3 * 64 * 128 + 2 * 64)
    full = 15 * 4096 * (3 * 32 * 256 + 2 * 2 * 256)
    assert spec.storage_of(Part.ATTENTION).bits == pytest.approx(8 + 8 * delta / (delta + full), rel=0.001)


def test_targets_other_than_every_matrix_are_what_is_narrowed(tmp_path: Path) -> None:
    groups = {"a": {"targets": ["re:.*block_sparse_moe.*"], "weights": {"num_bits": 4, "type": "float"}}}
    # As RedHatAI/Kimi-K3-NVFP4 was made.
    ignore = [r"re:.*block_sparse_moe\.gate", "re:.*routed_expert.*", "re:.*mlp_res_proj$", "re:.*shared_experts.*"]
    form = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    spec = quantized(tmp_path, KIMI_K3_TEXT, {**form, "ignore": ignore})
    assert spec.storage_of(Part.ROUTED_EXPERTS) is NVFP4
    assert spec.storage_of(Part.ATTENTION) is spec.storage_of(Part.SHARED_EXPERTS) is BF16


def test_what_gptq_leaves_out_by_pattern_is_kept(tmp_path: Path) -> None:
    # As Qwen3.5's GPTQ files say it.
    dynamic: dict[str, object] = {
        "lm_head": {},
        "-:.*attn.*": {},
        "-:.*shared_expert.*": {},
        "-:.*mtp.*": {},
        "-:.*visual.*": {},
    }
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic}
    spec = quantized(tmp_path, QWEN3_5_MOE, gptq)
    assert spec.storage_of(Part.ATTENTION) is spec.storage_of(Part.SHARED_EXPERTS) is BF16
    assert spec.storage_of(Part.ROUTED_EXPERTS).bits < 5
