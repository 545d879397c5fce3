"""Parameters and bytes against checkpoints and announcements, and part by part against sums written out by hand."""

import math
import os
from pathlib import Path

import pytest

from ostrya.capacity.layers import Part, Phase
from ostrya.capacity.models import find_model, models
from ostrya.capacity.weights import drafter_bytes, drafter_params, num_params, num_params_active, weight_bytes, weights
from ostrya.errors import ModelLoadError
from ostrya.gguf_header import read_header
from ostrya.text.source import resolve_model


# general.parameter_count of the models' GGUF files, "total" of safetensors on Hugging Face; and what their cards say.
@pytest.mark.parametrize(
    ("name", "stated", "announced"),
    [
        ("llama-3.1-8b", 8_030_261_248, 8.03e9),
        ("llama-3.1-70b", 70_553_706_496, 70.6e9),
        ("qwen3-8b", 8_190_735_360, 8.19e9),
        ("qwen3-30b-a3b", 30_532_122_624, 30.5e9),
        ("gemma-3-270m", 268_098_176, 0.268e9),
        ("gpt-oss-120b", 116_829_156_672, 116.83e9),
        ("smollm2-135m", 134_515_008, 134.515008e6),
    ],
)
def test_the_total_is_exactly_that_of_the_checkpoint(name: str, stated: int, announced: float) -> None:
    spec = find_model(name)
    assert num_params(spec) == stated
    assert spec.announced is not None
    assert spec.announced.num_params == announced


# By part, as (layers) x (one layer); matrices first, then norms, biases and the like. models/ cites the sources.
_BY_HAND = {
    "kimi-k3": {
        # 69 KDA: q, k, v, output and gate; decay through one head, its bias; beta and A; three convolutions; a norm.
        "attention": 69 * (5 * 7168 * 12288 + 128 * (7168 + 12288) + 12288 + 96 * 7168 + 96 + 3 * 4 * 12288 + 128)
        # 24 MLA: queries through 1536, keys and values through 512 + 64, output and gate.
        + 24 * (7168 * 1536 + 1536 + 1536 * 96 * 192 + 7168 * 576 + 512 + 512 * 96 * 256 + 2 * 7168 * 96 * 128),
        "dense ffn": 3 * 7168 * 33792,
        "routed experts": 92 * 896 * 3 * 3584 * 3072,
        "shared experts": 92 * 2 * 3 * 7168 * 3072,
        "latent projections": 92 * (2 * 7168 * 3584 + 3584),
        "router": 92 * 896 * (7168 + 1),
        "norms": 93 * 4 * 7168 + 7168,
        "embedding": 163840 * 7168,
        "head": 163840 * 7168,
        "vision": 400_000_000,
    },
    "kimi-k2.5": {
        "attention": 61 * (7168 * 1536 + 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 + 512 * 64 * 256 + 7168 * 64 * 128),
        "dense ffn": 3 * 7168 * 18432,
        "routed experts": 60 * 384 * 3 * 7168 * 2048,
        "shared experts": 60 * 3 * 7168 * 2048,
        "router": 60 * 384 * (7168 + 1),
        "norms": 61 * 2 * 7168 + 7168,
        "embedding": 163840 * 7168,
        "head": 163840 * 7168,
        "vision": 400_000_000,
    },
    "qwen3.8-27b": {
        # 16 full: queries, their gate and the output of 24 x 256, keys and values of 4 x 256. 48 GDN: q and k of
        # 16 x 128, v, its gate and the output of 48 x 128, beta and decay; a convolution; decay's two vectors; a norm.
        "attention": 16 * (5120 * (3 * 6144 + 2 * 1024) + 2 * 256)
        + 48 * (5120 * (2 * 2048 + 3 * 6144 + 2 * 48) + 4 * (2 * 2048 + 6144) + 2 * 48 + 128),
        "dense ffn": 64 * 3 * 5120 * 17408,
        "norms": 64 * 2 * 5120 + 5120,
        "embedding": 248320 * 5120,
        "head": 248320 * 5120,
        "vision": 460_000_000,
    },
    "qwen3.5-397b-a17b": {
        "attention": 15 * (4096 * (3 * 8192 + 2 * 512) + 2 * 256)
        + 45 * (4096 * (2 * 2048 + 3 * 8192 + 2 * 64) + 4 * (2 * 2048 + 8192) + 2 * 64 + 128),
        "routed experts": 60 * 512 * 3 * 4096 * 1024,
        # With the gate that weighs the shared expert. Softmax routing balances by no value (transformers qwen3_5_moe).
        "shared experts": 60 * (3 * 4096 * 1024 + 4096),
        "router": 60 * 512 * 4096,
        "norms": 60 * 2 * 4096 + 4096,
        "embedding": 248320 * 4096,
        "head": 248320 * 4096,
        "vision": 460_000_000,
    },
    "deepseek-v4-flash": {
        # All 43: queries through 1024, one KV head of 512, output in 8 groups through 1024, a sink per head.
        "attention": 43 * (4096 * 1024 + 1024 + 1024 * 32768 + 4096 * 512 + 512 + 32768 * 1024 + 8 * 1024 * 4096 + 64)
        # 21 CSA: 64 index queries of 128 and their weights; two compressors of doubled width (values and gates,
        # positions of the ratio, a norm). 20 HCA: one compressor.
        + 21 * (64 * (1024 * 128 + 4096) + 2 * 4096 * 256 + 4 * 256 + 128 + 2 * 4096 * 1024 + 4 * 1024 + 512)
        + 20 * (2 * 4096 * 512 + 128 * 512 + 512),
        "routed experts": 43 * 256 * 3 * 4096 * 2048,
        "shared experts": 43 * 3 * 4096 * 2048,
        # Two norms, and a mixing matrix of four streams (2 + 4 rows) around each half of a layer.
        "norms": 43 * (2 * 4096 + 2 * 6 * 4 * 4096) + 4096,
        "embedding": 129280 * 4096,
        "head": 129280 * 4096,
    },
    "deepseek-v4.1-flash": {
        "attention": 40 * (5120 * 1280 + 1280 + 1280 * 32768 + 5120 * 512 + 512 + 32768 * 1024 + 8 * 1024 * 5120 + 64)
        # Eight choosers; four layers compress (ratios 2, 2, 2 and 1).
        + 8 * 32 * (1280 * 128 + 5120)
        + 4 * (2 * 5120 * 256 + 128 + 2 * 5120 * 1024 + 512)
        + (2 + 2 + 2 + 1) * (256 + 1024),
        "routed experts": 40 * 384 * 3 * 5120 * 2304,
        "shared experts": 40 * 3 * 5120 * 2304,
        "router": 40 * 384 * (5120 + 1),
        "norms": 40 * (2 * 5120 + 2 * 6 * 4 * 5120) + 5120,
        "embedding": 129280 * 5120,
        "head": 129280 * 5120,
        "tables": 256 * (384_006_168 + 384_016_682),
        "vision": 32 * (4 * 1024 * 1024 + 3 * 1024 * 2816),
    },
    "beam-1.0-501b": {
        "attention": 52 * (5120 * (3 * 6144 + 2 * 1024) + 2 * 128),
        "dense ffn": 3 * 3 * 5120 * 20480,
        "routed experts": 49 * 256 * 3 * 5120 * 2560,
        "norms": 52 * 4 * 5120 + 5120,
        "embedding": 151936 * 5120,
        "head": 151936 * 5120,
    },
    "muse-spark-1.2": {
        "attention": 62 * (8192 * (3 * 8192 + 2 * 1024) + 2 * 64),
        "routed experts": 62 * 256 * 3 * 4096 * 4096,
        "latent projections": 62 * (2 * 8192 * 4096 + 4096),
        "norms": 62 * 7 * 8192 + 8192,
        "embedding": 202048 * 8192,
        "head": 202048 * 8192,
    },
}


@pytest.mark.parametrize("name", list(_BY_HAND))
def test_every_part_has_the_parameters_of_its_shapes(name: str) -> None:
    counted = {part.part.value: part.num_params for part in weights(find_model(name))}
    by_hand: dict[str, int] = _BY_HAND[name]
    assert {part: count for part, count in counted.items() if part != "router" or part in by_hand} == by_hand


# Layers, experts, width; whether each expert has a balancing value is not published of Beam and Muse Spark.
@pytest.mark.parametrize(
    ("name", "at_least", "at_most"),
    [
        # The gate of the three hashed layers only weighs the experts; it balances nothing.
        ("deepseek-v4-flash", *[40 * 256 * (4096 + 1) + 3 * 256 * 4096] * 2),
        ("beam-1.0-501b", 49 * 256 * 5120, 49 * 256 * (5120 + 1)),
        ("muse-spark-1.2", 62 * 256 * 8192, 62 * 256 * (8192 + 1)),
        ("gpt-oss-120b", 36 * 128 * (2880 + 1), 36 * 128 * (2880 + 1)),
        ("qwen3-30b-a3b", 48 * 128 * 2048, 48 * 128 * 2048),
    ],
)
def test_routers_have_a_row_per_expert(name: str, at_least: int, at_most: int) -> None:
    counted = {part.part: part.num_params for part in weights(find_model(name))}
    assert at_least <= counted[Part.ROUTER] <= at_most


# Layers, experts of a token, parameters of one. The other parts are multiplied whole, but for what is looked up.
@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("kimi-k3", 92 * 16 * 3 * 3584 * 3072),
        ("kimi-k2.5", 60 * 8 * 3 * 7168 * 2048),
        ("qwen3.5-397b-a17b", 60 * 10 * 3 * 4096 * 1024),
        ("deepseek-v4-flash", 43 * 6 * 3 * 4096 * 2048),
        ("deepseek-v4.1-flash", 40 * 6 * 3 * 5120 * 2304),
        ("beam-1.0-501b", 49 * 8 * 3 * 5120 * 2560),
        ("qwen3-30b-a3b", 48 * 8 * 3 * 2048 * 768),
        ("gpt-oss-120b", 36 * 4 * (3 * 2880 * 2880 + 3 * 2880)),
        ("muse-spark-1.2", 62 * 8 * 3 * 4096 * 4096),
        ("smollm2-135m", 0),
    ],
)
def test_a_token_is_multiplied_with_its_experts_and_with_all_that_is_not_looked_up(name: str, experts: int) -> None:
    for part in weights(find_model(name)):
        looked_up = part.part in {Part.EMBEDDING, Part.TABLES, Part.VISION}
        whole = 0 if looked_up else part.num_params
        assert part.num_params_active == (experts if part.part is Part.ROUTED_EXPERTS else whole)


@pytest.mark.parametrize(
    ("name", "announced"),
    [
        ("kimi-k3", 2.78e12),
        ("kimi-k2.5", 1.03e12),
        ("qwen3.8-27b", 26.9e9),
        ("deepseek-v4-flash", 284e9),
        ("deepseek-v4.1-flash", 552e9),
        ("beam-1.0-501b", 501e9),
        ("qwen3.5-397b-a17b", 397e9),
        ("muse-spark-1.2", 816e9),
    ],
)
def test_the_total_is_within_one_percent_of_the_announced(name: str, announced: float) -> None:
    spec = find_model(name)
    assert spec.announced is not None
    assert spec.announced.num_params == announced
    assert num_params(spec) == pytest.approx(announced, rel=0.01)


# As others count checkpoints; Gemma's embedding is its head, which is multiplied.
@pytest.mark.parametrize(
    ("name", "count_embedding", "counted"),
    [
        ("qwen3-30b-a3b", True, 3_353_032_704),
        ("gpt-oss-120b", False, 5_132_849_472),
        ("gemma-3-270m", True, 268_098_176),
    ],
)
def test_the_active_parameters_are_exactly_those_counted(name: str, count_embedding: bool, counted: int) -> None:
    assert num_params_active(find_model(name), count_embedding=count_embedding) == counted


@pytest.mark.parametrize(("name", "announced"), [("kimi-k3", 104e9), ("deepseek-v4-flash", 13.9e9)])
def test_the_active_parameters_are_within_one_percent_of_the_announced(name: str, announced: float) -> None:
    spec = find_model(name)
    assert spec.announced is not None
    counted = num_params_active(spec, count_embedding=spec.announced.active_counts_embedding)
    assert spec.announced.num_params_active == announced
    assert counted == pytest.approx(announced, rel=0.01)


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        # "23B" is 22.65 e9 by its shapes, rounded.
        ("beam-1.0-501b", 22.5e9, 23e9),
        # "3.3B" is 3.353e9 by its shapes with the embedding, cut off.
        ("qwen3-30b-a3b", 3.3e9, 3.4e9),
        ("kimi-k2.5", 31.5e9, 32.5e9),
        ("qwen3.5-397b-a17b", 16.5e9, 17.5e9),
        ("gpt-oss-120b", 5.125e9, 5.135e9),
    ],
)
def test_active_parameters_announced_in_two_digits_are_those_digits(name: str, lowest: float, highest: float) -> None:
    spec = find_model(name)
    assert spec.announced is not None
    assert lowest <= num_params_active(spec, count_embedding=spec.announced.active_counts_embedding) < highest
    assert spec.announced.num_params_active is not None
    assert lowest <= spec.announced.num_params_active <= highest


def test_deepseek_v4_1_reads_a_prompt_with_half_of_what_it_answers_with() -> None:
    spec = find_model("deepseek-v4.1-flash")
    assert spec.announced is not None
    assert spec.announced.num_params_active == 16e9
    assert num_params_active(spec, Phase.PREFILL) == pytest.approx(8e9, rel=0.05)
    assert num_params_active(spec, Phase.DECODE) == pytest.approx(16e9, rel=0.05)
    active = {part.part: part.num_params_active for part in weights(spec, Phase.PREFILL)}
    # The 20 layers of the encoder, and the whole head.
    assert active[Part.ROUTED_EXPERTS] == 20 * 6 * 3 * 5120 * 2304
    assert active[Part.SHARED_EXPERTS] == 20 * 3 * 5120 * 2304
    assert active[Part.HEAD] == 129280 * 5120


def test_tables_and_vision_take_memory_and_are_not_counted_as_the_model() -> None:
    spec, by_hand = find_model("deepseek-v4.1-flash"), _BY_HAND["deepseek-v4.1-flash"]
    assert [table.num_params_read for table in spec.tables] == [24 * 256, 24 * 256]
    assert num_params(spec) == sum(by_hand.values()) - by_hand["tables"] - by_hand["vision"]
    # Embedding, head, norms, router and vision in 16 bits, experts in 4.25, the rest and the tables in 8.
    in_bf16 = sum(by_hand[part] for part in ("embedding", "head", "norms", "router", "vision"))
    in_fp8 = sum(by_hand[part] for part in ("attention", "shared experts", "tables"))
    assert weight_bytes(spec) == 2 * in_bf16 + in_fp8 + by_hand["routed experts"] * 4.25 / 8


def test_smollm2_is_exactly_its_file() -> None:
    header = read_header(_smollm2_file())
    assert num_params(find_model("smollm2-135m")) == sum(math.prod(entry.shape) for entry in header.tensors)


def test_smollm2_has_the_bytes_of_its_file() -> None:
    path = _smollm2_file()
    stored = path.stat().st_size - min(entry.start for entry in read_header(path).tensors)
    # The file pads each tensor to 32 bytes.
    assert weight_bytes(find_model("smollm2-135m")) == pytest.approx(stored, rel=0.001)


def test_kimi_k3_weighs_one_and_a_half_terabytes() -> None:
    # Experts in 4.25 bits, all else in 16.
    experts = 92 * 896 * 3 * 3584 * 3072
    total = sum(_BY_HAND["kimi-k3"].values())
    assert weight_bytes(find_model("kimi-k3")) == experts * 4.25 / 8 + (total - experts) * 2
    assert weight_bytes(find_model("kimi-k3")) == pytest.approx(1.56e12, rel=0.01)


def test_gpt_oss_weighs_what_its_checkpoint_does() -> None:
    # total_size of its index; it keeps 36 x 128 experts' 3 x 2880 biases in 16 bits instead of 4.25.
    assert weight_bytes(find_model("gpt-oss-120b")) == 65_248_815_744 - 36 * 128 * 3 * 2880 * (2 - 4.25 / 8)


def test_deepseek_v4_1_weighs_what_its_release_does() -> None:
    spec = find_model("deepseek-v4.1-flash")
    # 510 GB on disk (sqliteai docs/DS41.md), scales of the FP8 parts included, which are not counted here.
    assert weight_bytes(spec) + drafter_bytes(spec) == pytest.approx(510e9, rel=0.02)


# Parameters outside routed experts, those of the experts, and their bytes each; tokens it drafts, and whether at once.
_DRAFTERS = {
    # Five layers (a dense network of 14336), five taps, a Markov head of rank 256 (lookup and projection).
    "kimi-k3": (
        5 * (7168 * (2 * 96 * 64 + 2 * 16 * 64) + 2 * 64 + 3 * 7168 * 14336 + 2 * 7168)
        + 5 * 7168 * 7168
        + 2 * 163840 * 256,
        0,
        (2, 2),
        (7, True),
    ),
    "qwen3.8-27b": (2_000_000_000, 0, (2, 2), (7, True)),
    "beam-1.0-501b": (2_000_000_000, 0, (2, 2), (7, True)),
    # One more layer of the model, and a projection of two hidden states onto one.
    "qwen3.5-397b-a17b": (
        4096 * (3 * 8192 + 2 * 512) + 2 * 256 + 3 * 4096 * 1024 + 4096 + 512 * 4096 + 2 * 4096 + 2 * 4096 * 4096,
        512 * 3 * 4096 * 1024,
        (1, 1),
        (3, False),
    ),
    "deepseek-v4-flash": (
        (4096 * 1024 + 1024 + 1024 * 32768 + 4096 * 512 + 512 + 32768 * 1024 + 8 * 1024 * 4096 + 64)
        + (3 * 4096 * 2048 + 256 * (4096 + 1) + 2 * 4096 + 2 * 6 * 4 * 4096 + 2 * 4096 * 4096),
        256 * 3 * 4096 * 2048,
        (1, 4.25 / 8),
        (3, False),
    ),
    # Three layers of windows and 128 experts, three taps, a Markov head.
    "deepseek-v4.1-flash": (
        3 * (5120 * 1280 + 1280 + 1280 * 32768 + 5120 * 512 + 512 + 32768 * 1024 + 8 * 1024 * 5120 + 64)
        + 3 * (3 * 5120 * 2304 + 128 * (5120 + 1) + 2 * 5120 + 2 * 6 * 4 * 5120)
        + 3 * 5120 * 5120
        + 2 * 129280 * 256,
        3 * 128 * 3 * 5120 * 2304,
        (1, 4.25 / 8),
        (5, True),
    ),
}


@pytest.mark.parametrize("name", list(models()))
def test_a_drafter_has_the_parameters_and_bytes_of_its_shapes(name: str) -> None:
    spec = find_model(name)
    if name not in _DRAFTERS:
        assert spec.drafter is None
        assert drafter_bytes(spec) == 0
        return
    rest, experts, (rest_bytes, expert_bytes), drafts = _DRAFTERS[name]
    assert spec.drafter is not None
    assert drafter_params(spec.drafter) == rest + experts
    assert drafter_bytes(spec) == rest * rest_bytes + experts * expert_bytes
    assert (spec.drafter.max_draft_tokens, spec.drafter.one_pass) == drafts


def test_drafters_have_the_announced_size() -> None:
    for name, announced in (("deepseek-v4.1-flash", 14.2e9), ("deepseek-v4-flash", 6.61e9), ("qwen3.8-27b", 2e9)):
        drafter = find_model(name).drafter
        assert drafter is not None
        assert drafter_params(drafter) == pytest.approx(announced, rel=0.01)


def test_no_part_has_more_active_parameters_than_parameters() -> None:
    for spec in models().values():
        for phase in Phase:
            for part in weights(spec, phase):
                assert 0 <= part.num_params_active <= part.num_params


def _smollm2_file() -> Path:
    try:
        return resolve_model("smollm2-135m-instruct").path
    except ModelLoadError as error:
        if os.environ.get("OSTRYA_REQUIRE_ALL") == "1":
            raise
        pytest.skip(str(error))
