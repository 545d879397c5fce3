"""The table of published points is complete and says what its sources say."""

import pytest

from ostrya.capacity.chips import find_slice
from ostrya.capacity.models import models
from ostrya.capacity.published import POINTS, Engine, Point, Use

MEGAKERNELS = "Inferact/tpu-megakernels README, assets/figures, scripts"
MUSE = "Inferact/tpu-megakernels README and musespark/README.md"
QWEN_397B = "vllm-project/tpu-inference#3050"
QWEN3_V6E = "sgl-project/sglang-jax qwen3_benchmark.md"
COOKBOOK = "sgl-project/sglang-jax cookbook"

PUBLISHED: dict[tuple[str, str, str], dict[str, float]] = {
    (MEGAKERNELS, "tpu7x-16", "tok/s"): {
        "Kimi K3, batch 1": 249,
        "Kimi K3, batch 2": 392,
        "Kimi K3, batch 4": 515,
        "Kimi K3, batch 8": 865,
        "Kimi K3 with DSpark, length 3 forced": 350,
        "Kimi K3 with DSpark, length 6 forced": 709,
    },
    (MEGAKERNELS, "tpu7x-4", "tok/s"): {"Qwen3.8-27B with DFlash2, length 6 forced": 1515},
    (MEGAKERNELS, "16x GB200", "tok/s"): {"Kimi K3, length 6 forced": 452},
    (MUSE, "tpu7x-4", "tok/s"): {
        "Muse Spark 1.2 NVFP4 + int8, batch 1": 307,
        "Muse Spark 1.2 NVFP4 + int8, batch 2": 547,
        "Muse Spark 1.2 NVFP4 + int8, batch 4": 942,
        "Muse Spark 1.2 NVFP4 + int8, batch 8": 1793,
        "Muse Spark 1.2 NVFP4, batch 1": 281,
        "Muse Spark 1.2 NVFP4, batch 2": 491,
        "Muse Spark 1.2 NVFP4, batch 4": 865,
        "Muse Spark 1.2 NVFP4, batch 8": 1646,
        "Muse Spark 1.2 int4, batch 1": 278,
        "Muse Spark 1.2 int4, batch 2": 540,
        "Muse Spark 1.2 int4, batch 4": 1022,
        "Muse Spark 1.2 int4, batch 8": 1864,
    },
    (QWEN_397B, "tpu7x-4", "ms TPOT"): {
        "Qwen3.5-397B, 8k/1k, 4 at once": 15.1,
        "Qwen3.5-397B, 8k/1k, 8 at once": 14.2,
        "Qwen3.5-397B, 8k/1k, 16 at once": 17.1,
        "Qwen3.5-397B, 8k/1k, 32 at once": 23.9,
        "Qwen3.5-397B, 8k/1k, 64 at once": 33.6,
        "Qwen3.5-397B, 8k/1k, 128 at once": 51.5,
        "Qwen3.5-397B, 8k/1k, 256 at once": 75.4,
        "Qwen3.5-397B, 1k/1k, 4 at once": 13.1,
        "Qwen3.5-397B, 1k/1k, 8 at once": 13.5,
        "Qwen3.5-397B, 1k/1k, 16 at once": 14.9,
    },
    (QWEN_397B, "tpu7x-4", "served tok/s"): {
        "Qwen3.5-397B, 8k/1k, 4 at once": 246,
        "Qwen3.5-397B, 8k/1k, 8 at once": 495,
        "Qwen3.5-397B, 8k/1k, 16 at once": 773,
        "Qwen3.5-397B, 8k/1k, 32 at once": 1162,
        "Qwen3.5-397B, 8k/1k, 64 at once": 1643,
        "Qwen3.5-397B, 8k/1k, 128 at once": 2308,
        "Qwen3.5-397B, 8k/1k, 256 at once": 3161,
        "Qwen3.5-397B, 1k/1k, 4 at once": 291,
        "Qwen3.5-397B, 1k/1k, 8 at once": 509,
        "Qwen3.5-397B, 1k/1k, 16 at once": 983,
    },
    # Published with the prompts: of 8,192 + 1,024 tokens one in nine is the answer's, of 1,024 + 1,024 every other one.
    ("vllm-project/tpu-inference#3079", "tpu7x-4", "served tok/s"): {
        "Qwen3.5-397B in #3079, 8k/1k, 4 at once": 2717.4 / 9,
        "Qwen3.5-397B in #3079, 8k/1k, 8 at once": 4860.2 / 9,
        "Qwen3.5-397B in #3079, 8k/1k, 16 at once": 8348.7 / 9,
        "Qwen3.5-397B in #3079, 8k/1k, 32 at once": 12_504.3 / 9,
        "Qwen3.5-397B in #3079, 8k/1k, 64 at once": 17_825.2 / 9,
        "Qwen3.5-397B in #3079, 8k/1k, 128 at once": 24_904.6 / 9,
        "Qwen3.5-397B in #3079, 8k/1k, 256 at once": 32_584.8 / 9,
        "Qwen3.5-397B in #3079, 1k/1k, 4 at once": 666.3 / 2,
        "Qwen3.5-397B in #3079, 1k/1k, 8 at once": 1213.1 / 2,
        "Qwen3.5-397B in #3079, 1k/1k, 16 at once": 2229.0 / 2,
        "Qwen3.5-397B in #3079, 1k/1k, 32 at once": 3659.5 / 2,
        "Qwen3.5-397B in #3079, 1k/1k, 64 at once": 5988.5 / 2,
        "Qwen3.5-397B in #3079, 1k/1k, 128 at once": 9146.1 / 2,
    },
    ("vllm-project/tpu-inference#3116", "tpu7x-4", "served tok/s"): {
        "Qwen3.5-397B in #3116, 8k/1k, 4 at once": 3363.6 / 9,
        "Qwen3.5-397B in #3116, 8k/1k, 8 at once": 5115.5 / 9,
        "Qwen3.5-397B in #3116, 1k/1k, 4 at once": 946.3 / 2,
        "Qwen3.5-397B in #3116, 1k/1k, 8 at once": 1639.7 / 2,
    },
    ("vllm-project/tpu-inference#3412", "tpu7x-4", "served tok/s"): {"Qwen3.5-397B multi-turn, 16 streams": 417.1},
    (QWEN3_V6E, "v6e-4", "ms ITL, waves"): {
        "Qwen3-8B, 1k/1k, 8 at once": 5.99,
        "Qwen3-8B, 1k/1k, 16 at once": 6.62,
        "Qwen3-8B, 1k/1k, 32 at once": 8.18,
        "Qwen3-8B, 1k/1k, 64 at once": 11.11,
        "Qwen3-8B, 1k/1k, 128 at once": 17.06,
        "Qwen3-8B, 1k/1k, 256 at once": 30.00,
        "Qwen3-8B, 4k/1k, 8 at once": 6.61,
        "Qwen3-8B, 4k/1k, 16 at once": 9.00,
        "Qwen3-8B, 4k/1k, 32 at once": 13.48,
        "Qwen3-8B, 4k/1k, 64 at once": 21.13,
        "Qwen3-8B, 8k/1k, 8 at once": 7.98,
        "Qwen3-8B, 8k/1k, 16 at once": 11.48,
        "Qwen3-8B, 8k/1k, 32 at once": 19.22,
        "Qwen3-32B, 1k/1k, 8 at once": 18.29,
        "Qwen3-32B, 1k/1k, 16 at once": 19.16,
        "Qwen3-32B, 1k/1k, 32 at once": 22.17,
        "Qwen3-32B, 4k/1k, 8 at once": 19.88,
        "Qwen3-32B, 4k/1k, 16 at once": 22.45,
        "Qwen3-32B, 8k/1k, 8 at once": 21.85,
    },
    (QWEN3_V6E, "v6e-4", "ms TTFT, line"): {
        "Qwen3-8B, 1k/1k, 8 at once": 117.55,
        "Qwen3-8B, 1k/1k, 256 at once": 3793.50,
        "Qwen3-8B, 4k/1k, 8 at once": 523.78,
        "Qwen3-8B, 4k/1k, 64 at once": 4108.43,
        "Qwen3-8B, 8k/1k, 8 at once": 1202.65,
        "Qwen3-8B, 8k/1k, 32 at once": 4876.89,
        "Qwen3-32B, 1k/1k, 8 at once": 356.59,
        "Qwen3-32B, 1k/1k, 32 at once": 1429.91,
        "Qwen3-32B, 4k/1k, 8 at once": 1557.02,
        "Qwen3-32B, 8k/1k, 8 at once": 3510.68,
    },
    (QWEN3_V6E, "v6e-4", "tok/s, waves"): {
        "Qwen3-8B, 1k/1k, 8 at once": 1311.49,
        "Qwen3-8B, 1k/1k, 256 at once": 7571.84,
        "Qwen3-8B, 4k/1k, 8 at once": 1119.33,
        "Qwen3-8B, 4k/1k, 64 at once": 2528.79,
        "Qwen3-8B, 8k/1k, 8 at once": 867.68,
        "Qwen3-8B, 8k/1k, 32 at once": 1330.11,
        "Qwen3-32B, 1k/1k, 8 at once": 427.69,
        "Qwen3-32B, 1k/1k, 32 at once": 1355.93,
        "Qwen3-32B, 4k/1k, 8 at once": 373.17,
        "Qwen3-32B, 8k/1k, 8 at once": 315.90,
    },
    (f"{COOKBOOK} Qwen3.md", "tpu7x-4", "ms TPOT, waves"): {"Qwen3-8B, 1k/1k, 128 at once": 14.1},
    (f"{COOKBOOK} Qwen3.md", "tpu7x-4", "ms TTFT, waves"): {"Qwen3-8B, 1k/1k, 128 at once": 943},
    (f"{COOKBOOK} Qwen3.md", "tpu7x-4", "tok/s, waves"): {"Qwen3-8B, 1k/1k, 128 at once": 8521},
    (f"{COOKBOOK} Llama3.3-70B.md", "tpu7x-4", "ms TPOT, waves"): {"Llama-3.3-70B, 1k/1k, 128 at once": 30.8},
    (f"{COOKBOOK} Llama3.3-70B.md", "tpu7x-4", "ms TTFT, waves"): {"Llama-3.3-70B, 1k/1k, 128 at once": 4800},
    (f"{COOKBOOK} Llama3.3-70B.md", "tpu7x-4", "tok/s, waves"): {"Llama-3.3-70B, 1k/1k, 128 at once": 3610},
    (f"{COOKBOOK} Llama3.3-70B.md", "v6e-16", "ms TPOT"): {"Llama-3.3-70B, 506/524, 16 at once": 16.33},
    (f"{COOKBOOK} Llama3.3-70B.md", "v6e-16", "served tok/s"): {"Llama-3.3-70B, 506/524, 16 at once": 882.17},
    (f"{COOKBOOK} Qwen3-MoE.md", "tpu7x-4", "ms TPOT, waves"): {"Qwen3-30B-A3B, 1k/1k, 128 at once": 18.9},
    (f"{COOKBOOK} Qwen3-MoE.md", "tpu7x-4", "tok/s, waves"): {"Qwen3-30B-A3B, 1k/1k, 128 at once": 6179},
    (f"{COOKBOOK} Qwen3-MoE.md", "v6e-16", "ms TPOT"): {"Qwen3-30B-A3B, 506/524, 16 at once": 9.88},
    (f"{COOKBOOK} Qwen3-MoE.md", "v6e-16", "served tok/s"): {"Qwen3-30B-A3B, 506/524, 16 at once": 1476.18},
    (f"{COOKBOOK} Qwen3.8.md", "v6e-4", "ms TPOT, waves"): {"Qwen3.8-27B, 512/128, 8 at once": 18.52},
    (f"{COOKBOOK} Qwen3.8.md", "v6e-4", "ms TTFT, waves"): {"Qwen3.8-27B, 512/128, 8 at once": 169.93},
    (f"{COOKBOOK} Qwen3.8.md", "v6e-4", "tok/s, waves"): {"Qwen3.8-27B, 512/128, 8 at once": 391.77},
    (f"{COOKBOOK} GLM-4.5.md", "tpu7x-4", "served tok/s"): {"GLM-4.5-Air": 4014},
    (f"{COOKBOOK} MiMo-V2.5-Pro.md", "tpu7x-16", "ms TPOT"): {"MiMo-V2.5-Pro": 33.9},
    (f"{COOKBOOK} Ling-2.6.md", "tpu7x-16", "ms TPOT"): {"Ling-2.6-1T, 32 at once": 26.9},
    ("sgl-project/sglang-jax#1639", "tpu7x-16", "ms TPOT"): {"GLM-5.2, one verify": 33.3},
    ("AI-Hypercomputer/tpu-recipes#243", "tpu7x-1", "ms TPOT"): {"Gemma-4-31B": 53.8},
    ("vllm-torchtpu 0.29, latent_proj_intra_chip.py", "tpu7x-16", "ms TPOT"): {"Kimi K3 latent projections": 19},
    ("sgl-project/sglang#32548", "8x MI355", "ms TPOT"): {"Kimi K3, 2 at once": 20.9},
    ("lm-sys.github.io#413", "4x Blackwell", "tok/s"): {"Ling-3.0-flash with DSpark": 1120},
    ("pytorch.org blog (TokenSpeed)", "B200", "tok/s"): {"Qwen3.5-397B, batch 1": 580},
}
"""By source, place and measure: the sources' figures, copied a second time, so that no digit changes unseen."""

FITTED = {
    ("Kimi K3, batch 1", "tpu7x-16", "tok/s"),
    ("Kimi K3, batch 8", "tpu7x-16", "tok/s"),
    ("Kimi K3 with DSpark, length 6 forced", "tpu7x-16", "tok/s"),
    ("Qwen3.8-27B with DFlash2, length 6 forced", "tpu7x-4", "tok/s"),
    ("Qwen3.5-397B, 8k/1k, 4 at once", "tpu7x-4", "ms TPOT"),
    ("Qwen3.5-397B, 8k/1k, 32 at once", "tpu7x-4", "ms TPOT"),
    ("Qwen3.5-397B, 8k/1k, 256 at once", "tpu7x-4", "ms TPOT"),
    ("Qwen3-8B, 1k/1k, 128 at once", "tpu7x-4", "ms TPOT, waves"),
    ("Llama-3.3-70B, 1k/1k, 128 at once", "tpu7x-4", "ms TPOT, waves"),
    ("Llama-3.3-70B, 1k/1k, 128 at once", "tpu7x-4", "ms TTFT, waves"),
    ("Qwen3-30B-A3B, 1k/1k, 128 at once", "tpu7x-4", "ms TPOT, waves"),
    ("Qwen3-8B, 1k/1k, 8 at once", "v6e-4", "ms ITL, waves"),
    ("Qwen3-8B, 1k/1k, 256 at once", "v6e-4", "ms ITL, waves"),
    ("Qwen3-8B, 1k/1k, 256 at once", "v6e-4", "ms TTFT, line"),
    ("Qwen3-8B, 8k/1k, 32 at once", "v6e-4", "ms ITL, waves"),
    ("Qwen3-8B, 8k/1k, 32 at once", "v6e-4", "ms TTFT, line"),
    ("Qwen3-32B, 1k/1k, 8 at once", "v6e-4", "ms ITL, waves"),
    ("Qwen3-32B, 1k/1k, 8 at once", "v6e-4", "ms TTFT, line"),
    ("Qwen3-30B-A3B, 506/524, 16 at once", "v6e-16", "ms TPOT"),
}

SPECS = {
    "Kimi K3": "kimi-k3",
    "Qwen3.8-27B": "qwen3.8-27b",
    "Muse Spark 1.2": "muse-spark-1.2",
    "Qwen3.5-397B": "qwen3.5-397b-a17b",
    "Qwen3-8B": "qwen3-8b",
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    # The same shape.
    "Llama-3.3-70B": "llama-3.1-70b",
}
"""How the name of a point that is compared begins, and its model."""


def lengths(point: Point) -> tuple[int, int]:
    return point.prompt_tokens, point.output_tokens


def test_every_point_has_the_figure_of_its_source() -> None:
    here = {(one.source, one.slice_name, one.measure.value, one.name): one.value for one in POINTS}
    there = {(*place, name): value for place, figures in PUBLISHED.items() for name, value in figures.items()}
    assert here == pytest.approx(there)
    assert len(here) == len(POINTS)


def test_the_fit_has_seen_these_points() -> None:
    assert {(one.name, one.slice_name, one.measure.value) for one in POINTS if one.use is Use.FITTED} == FITTED


def test_points_that_are_compared_are_of_the_model_and_the_load_that_they_name() -> None:
    for point in POINTS:
        if point.use is Use.NOT_COMPARABLE:
            continue
        (model,) = (model for name, model in SPECS.items() if point.name.startswith(name))
        assert point.model == model
        if point.engine is Engine.SERVING:
            prompt, output = (f"{one // 1024}k" if one % 1024 == 0 else str(one) for one in lengths(point))
            assert point.name.endswith(f", {prompt}/{output}, {point.num_requests} at once")
            # The cookbook's server for Qwen3.8-27B has --chunked-prefill-size 512, the others 2048.
            assert point.chunk_tokens == (512 if model == "qwen3.8-27b" else 2048)


def test_fused_kernels_ran_as_their_scripts_say() -> None:
    # scripts/benchmark_kimi.sh, benchmark_kimi_dspark.sh; musespark: 151-token prompts, 128 timed steps.
    for point in POINTS:
        if point.engine is Engine.FUSED:
            drafts = "forced" in point.name
            wanted = (151, 128) if "Muse" in point.name else (1, 1000 if drafts else 1024)
            assert lengths(point) == wanted
            assert point.num_draft_tokens == (7 if drafts else 0)
            if drafts:
                assert point.name.endswith(f"length {point.acceptance_length:g} forced")
            else:
                assert point.name.endswith(f"batch {point.num_requests}")
            # A float32 scale per 128 values; and the dense projections and the head in int8.
            int8 = {"attention": 8, "latent projections": 8, "head": 8}
            narrowed = int8 if "int8" in point.name else {"routed experts": 4.25} if "int4" in point.name else {}
            assert {part.value: storage.bits for part, storage in point.weights} == narrowed


def test_points_are_told_apart_by_name_and_place() -> None:
    assert len({(point.name, point.slice_name, point.measure) for point in POINTS}) == len(POINTS)


def test_points_that_cannot_be_compared_say_why() -> None:
    assert all(point.reason for point in POINTS if point.use is Use.NOT_COMPARABLE)


def test_points_that_are_compared_name_a_model_and_a_slice() -> None:
    for point in POINTS:
        if point.use is not Use.NOT_COMPARABLE:
            assert point.model in models()
            find_slice(point.slice_name)


def test_forced_acceptance_is_marked() -> None:
    for point in POINTS:
        assert point.forced == (point.acceptance_length > 1)


def test_each_engine_has_points_that_it_was_not_fitted_to() -> None:
    for engine in Engine:
        uses = [point.use for point in POINTS if point.engine is engine]
        assert Use.FITTED in uses
        assert Use.HELD_OUT in uses
