"""A config.json becomes the same model as the ready spec, or one line says why not."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from ostrya.capacity.hf_config import read_spec
from ostrya.capacity.hf_kinds import KINDS
from ostrya.capacity.layers import DenseFfn, MoeFfn, Part
from ostrya.capacity.memory import kv_bytes_per_token, state_bytes
from ostrya.capacity.mixers import GroupedAttention
from ostrya.capacity.models import find_model
from ostrya.capacity.weights import num_params, num_params_active, weights
from ostrya.errors import ConfigError
from tests.unit.capacity.hf_files import (
    DEEPSEEK_V4,
    GEMMA,
    GEMMA_4B,
    GPT_OSS,
    KIMI_K3,
    KIMI_K25,
    KIMI_K25_TEXT,
    KIMI_LINEAR,
    LLAMA,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    written,
)

KIMI_K2 = {**KIMI_K25_TEXT, "model_type": "kimi_k2"}


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


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**LLAMA, "num_key_value_heads": 5}, "num_key_value_heads is 5; it must divide the 32 attention heads"),
        ({**LLAMA, "num_attention_heads": 24}, "must divide hidden_size 4096"),
        ({**LLAMA, "tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({**LLAMA, "torch_dtype": "float8"}, "torch_dtype is 'float8'; it must be one of bfloat16"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias is True, which this kind's reader cannot express"),
        ({**LLAMA, "a\n_size": 1}, r"a\\n_size is 1, which this kind's reader"),
        ({**LLAMA, "routed_expert_hidden_size": 64}, "routed_expert_hidden_size is 64, which"),
        ({**LLAMA, "model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window"),
        ({**LLAMA, "layer_types": ["full_attention"] * 8}, "layer_types has 8 entries for 32 layers"),
        ({**LLAMA, "layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list"),
        ({**LLAMA, "layer_types": [1] * 32}, "an entry of layer_types is 1; it must be text"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "has 32 layers of 'sliding_attention'; .* make 0"),
        ({**GEMMA, "layer_types": ["sliding_attention"] * 18}, "has 18 layers of 'sliding_attention'; .* make 15"),
        ({**QWEN3_MOE, "mlp_only_layers": "x"}, "mlp_only_layers is 'x'; it must be a list"),
        ({**QWEN3_5, "text_config": [1]}, "text_config is a list; it must be an object"),
        ({**KIMI_K2, "first_k_dense_replace": 62}, "first_k_dense_replace is 62; .* from 0 to 61"),
        ({**KIMI_LINEAR, "first_k_dense_replace": 28}, "first_k_dense_replace is 28; .* from 0 to 27"),
        ({**DEEPSEEK_V4, "num_hash_layers": 44}, "num_hash_layers is 44; it must be a whole number from 0 to 43"),
        ({**KIMI_LINEAR, "linear_attn_config": [1]}, "linear_attn_config is a list; it must be an object"),
        ({**QWEN3_MOE, "mlp_only_layers": [0, 1]}, "lacks intermediate_size"),
        (
            {**QWEN3_MOE, "intermediate_size": 6144, "mlp_only_layers": [1], "quantization_config": {}},
            "dense layers between those with experts, which this kind's reader cannot express quantized",
        ),
        ({**QWEN3_MOE, "num_experts_per_tok": 200}, "200 experts per token are more than the 128 it has"),
        ({**LLAMA, "model_type": "deepseek_v41"}, "use --model deepseek-v4.1-flash"),
        ({**LLAMA, "model_type": "beam"}, "use --model beam-1.0-501b"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(tmp_path: Path, config: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_spec(written(tmp_path, config))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"full_attn_layers": []}, "full_attn_layers is empty"),
        ({"full_attn_layers": [99]}, "an entry of full_attn_layers is 99; it must be a whole number from 1 to 27"),
        ({"full_attn_layers": [0]}, "an entry of full_attn_layers is 0; it must be"),
        ({"full_attn_layers": ["4"]}, "an entry of full_attn_layers is '4'; it must be"),
        ({"kda_layers": [1, 2, 3, 4]}, "layer 4 is in both of full_attn_layers and kda_layers, or in none"),
        ({"kda_layers": [1, 2, 3]}, "layer 5 is in both of full_attn_layers and kda_layers, or in none"),
    ],
)
def test_layers_of_kimi_linear_that_contradict_each_other_are_refused(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    linear = KIMI_LINEAR["linear_attn_config"]
    assert isinstance(linear, dict)
    with pytest.raises(ConfigError, match=says):
        read_spec(written(tmp_path, {**KIMI_LINEAR, "linear_attn_config": {**linear, **changes}}))


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE, GEMMA, GPT_OSS, KIMI_K2, KIMI_LINEAR, DEEPSEEK_V4])
def test_more_layers_than_any_model_has_are_refused_before_they_are_made(
    tmp_path: Path, config: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is 100000000; it must be a whole number from 1 to 4096"):
        read_spec(written(tmp_path, {**config, "num_hidden_layers": 10**8}))


@pytest.mark.parametrize(
    ("config", "table"),
    [(KIMI_K2, 163840 * 7168), (GPT_OSS, 201088 * 2880), (GEMMA, 262144 * 640), (DEEPSEEK_V4, 129280 * 4096)],
)
def test_whether_embedding_and_head_are_one_is_read(tmp_path: Path, config: dict[str, object], table: int) -> None:
    tied = num_params(read_spec(written(tmp_path, {**config, "tie_word_embeddings": True})))
    apart = num_params(read_spec(written(tmp_path, {**config, "tie_word_embeddings": False})))
    assert apart - tied == table
    # Only Gemma's default is one table.
    assert num_params(read_spec(written(tmp_path, config))) == (tied if config is GEMMA else apart)


def test_what_is_usual_and_changes_nothing_is_read(tmp_path: Path) -> None:
    more = {"mlp_only_layers": [], "decoder_sparse_step": 1, "intermediate_size": 6144, "max_window_layers": 48}
    off = {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 48}
    assert read_spec(written(tmp_path, {**QWEN3_MOE, **more, **off})).layers == find_model("qwen3-30b-a3b").layers


def test_dense_layers_between_those_with_experts_are_read(tmp_path: Path) -> None:
    changes: dict[str, object] = {"mlp_only_layers": [3, 5], "decoder_sparse_step": 2, "intermediate_size": 6144}
    spec = read_spec(written(tmp_path, {**QWEN3_MOE, **changes}))
    assert {type(layers.ffn): layers.count for layers in spec.layers} == {DenseFfn: 26, MoeFfn: 22}
    hybrid = QWEN3_5_MOE["text_config"]
    assert isinstance(hybrid, dict)
    with pytest.raises(ConfigError, match="dense layers between those with experts, which this"):
        read_spec(written(tmp_path, {**QWEN3_5_MOE, "text_config": {**hybrid, "decoder_sparse_step": 2}}))


def test_mixtral_8x7b_has_as_many_parameters_as_announced(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "sliding_window": None}
    spec = read_spec(written(tmp_path, {**LLAMA, "model_type": "mixtral", **sizes}))
    # mistral.ai/news/mixtral-of-experts: 46.7 B, 12.9 B active.
    assert num_params(spec) == pytest.approx(46.7e9, rel=2e-3)


def test_a_window_of_mistral_and_biases_of_qwen2_are_read(tmp_path: Path) -> None:
    windowed = read_spec(written(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": 4096}))
    mixer = windowed.layers[0].mixer
    assert isinstance(mixer, GroupedAttention)
    assert mixer.window_tokens == 4096
    plain = read_spec(written(tmp_path, LLAMA))
    biased = read_spec(written(tmp_path, {**LLAMA, "model_type": "qwen2"}))
    assert num_params(biased) - num_params(plain) == 32 * (4096 + 2 * 1024)


@pytest.mark.parametrize("extra", [{}, {"layer_types": ["sliding_attention"] * 32}])
def test_a_window_as_long_as_the_context_is_none(tmp_path: Path, extra: dict[str, object]) -> None:
    # Ministral-8B: 32,768 of both.
    same = {"model_type": "mistral", "sliding_window": 32768, "max_position_embeddings": 32768}
    spec = read_spec(written(tmp_path, {**LLAMA, **same, **extra}))
    assert kv_bytes_per_token(spec) == kv_bytes_per_token(read_spec(written(tmp_path, LLAMA)))


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


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((-1, "-1"), (0, "0"), (1.5, "1.5"), (True, "True"), (10**12, "1000000000000")),
        *(("4096", "'4096'"), ("4\n5", r"'4\\n5'"), ("x" * 99, f"'{'x' * 64}'"), ([1], "a list"), ({}, "an object")),
    ],
)
def test_a_field_that_makes_no_sense_is_named(tmp_path: Path, value: object, shown: str) -> None:
    says = f"hidden_size is {shown}; it must be a whole number from 1 to 1000000000$"
    with pytest.raises(ConfigError, match=says) as caught:
        read_spec(written(tmp_path, {**LLAMA, "hidden_size": value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["1e400", "9" * 5000])
def test_a_number_that_does_not_fit_is_named_by_its_field(tmp_path: Path, number: str) -> None:
    text = json.dumps(LLAMA).replace('"hidden_size": 4096', f'"hidden_size": {number}')
    with pytest.raises(ConfigError, match=r"'hidden_size': .*out of range$"):
        read_spec(written(tmp_path, text))


@pytest.mark.parametrize("text", ['{"a": ' + "[" * 100_000, '{"a":' * 100_000])
def test_a_file_nested_too_deeply_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: .*nested too deeply"):
        read_spec(written(tmp_path, text))


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
