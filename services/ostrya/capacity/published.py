"""What others measured, as data: points that estimate.py is fitted to, points it is only judged by, and the rest.

A point that cannot be compared stays in the table with the reason, so that nobody looks for it in vain.
"""

from dataclasses import dataclass
from enum import StrEnum

from ostrya.capacity.chips import Dtype
from ostrya.capacity.layers import Part
from ostrya.capacity.spec import INT8, Storage


class Use(StrEnum):
    """What a published point is used for."""

    FITTED = "fitted"
    HELD_OUT = "held out"
    NOT_COMPARABLE = "not comparable"


class Measure(StrEnum):
    """What the published figure is."""

    TOKENS_PER_S = "tok/s"
    """Output tokens of all requests, decoding alone."""
    TPOT_MS = "ms TPOT"
    """Time per output token under a load of prompts and answers."""
    WAVE_TPOT_MS = "ms TPOT, waves"
    """The same where all requests have equal lengths: they start together, and no prompt disturbs decoding."""
    WAVE_TTFT_MS = "ms TTFT, waves"
    """Time to first token, mean over requests that arrive together and whose prompts are computed one by one."""
    SERVED_TOKENS_PER_S = "served tok/s"
    """Output tokens of all requests under a load of prompts and answers."""


class Engine(StrEnum):
    """Whose efficiency a point shows."""

    FUSED = "fused"
    """One kernel for all layers, dense caches, a handful of requests (Inferact/tpu-megakernels)."""
    SERVING = "serving"
    """Paged caches, continuous batching (tpu-inference, SGLang-JAX)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published figure and the set-up it was measured in."""

    name: str
    engine: Engine
    model: str
    """A name in models; only a description where the point is not comparable."""
    slice_name: str
    measure: Measure
    value: float
    source: str
    use: Use
    num_requests: int = 1
    prompt_tokens: int = 1
    output_tokens: int = 1024
    weights: tuple[tuple[Part, Storage], ...] = ()
    """Parts that were stored otherwise than in the ready spec."""
    num_draft_tokens: int = 0
    acceptance_length: float = 1.0
    forced: bool = False
    """The acceptance was set by the benchmark, not earned by a drafter."""
    repeats_fitted: bool = False
    """The same measured time as a fitted point, in other words: no evidence of its own."""
    reason: str = ""
    """Why it is held out, known to be missed, or not comparable."""


_MEGAKERNELS = "Inferact/tpu-megakernels README, assets/figures"
_COOKBOOK = "sgl-project/sglang-jax cookbook"
_INFERENCE_3050 = "vllm-project/tpu-inference#3050"
_K3, _QWEN_27B, _QWEN_397B = "kimi-k3", "qwen3.8-27b", "qwen3.5-397b-a17b"

_MUSE_README = "Inferact/tpu-megakernels README and musespark/README.md"
_MUSE_INT4 = Storage("int4", 4 + 32 / 128, Dtype.BF16)
"""A float32 scale per 128 values."""
_MUSE: tuple[tuple[str, tuple[tuple[Part, Storage], ...], dict[int, float]], ...] = (
    ("NVFP4", (), {1: 281, 2: 491, 4: 865, 8: 1646}),
    (
        "NVFP4 + int8",
        ((Part.ATTENTION, INT8), (Part.LATENT, INT8), (Part.HEAD, INT8)),
        {1: 307, 2: 547, 4: 942, 8: 1793},
    ),
    ("int4", ((Part.ROUTED_EXPERTS, _MUSE_INT4),), {1: 278, 2: 540, 4: 1022, 8: 1864}),
)
"""Weights, how they differ from the ready spec, and tok/s by batch."""
_SAME_EXPERTS = "all rows had the same prompt, and so the same experts"


def _k3(num_requests: int, value: float, use: Use, reason: str = "") -> Point:
    return Point(
        name=f"Kimi K3, batch {num_requests}",
        engine=Engine.FUSED,
        model=_K3,
        slice_name="tpu7x-16",
        measure=Measure.TOKENS_PER_S,
        value=value,
        source=_MEGAKERNELS,
        use=use,
        num_requests=num_requests,
        reason=reason,
    )


def _forced(name: str, model: str, slice_name: str, length: float, value: float, use: Use, reason: str = "") -> Point:
    return Point(
        name=f"{name}, length {length:g} forced",
        engine=Engine.FUSED,
        model=model,
        slice_name=slice_name,
        measure=Measure.TOKENS_PER_S,
        value=value,
        source=_MEGAKERNELS,
        use=use,
        output_tokens=1000,
        num_draft_tokens=7,
        acceptance_length=length,
        forced=True,
        repeats_fitted=use is Use.HELD_OUT,
        reason=reason,
    )


def _qwen_397b(prompt_tokens: int, num_requests: int, value: float, use: Use) -> Point:
    return Point(
        name=f"Qwen3.5-397B FP8, {prompt_tokens // 1024}k/1k, {num_requests} at once",
        engine=Engine.SERVING,
        model=_QWEN_397B,
        slice_name="tpu7x-4",
        measure=Measure.TPOT_MS,
        value=value,
        source=_INFERENCE_3050,
        use=use,
        num_requests=num_requests,
        prompt_tokens=prompt_tokens,
    )


def _cookbook(name: str, model: str, measure: Measure, value: float, use: Use, page: str) -> Point:
    return Point(
        name=f"{name}, 1k/1k, 128 at once",
        engine=Engine.SERVING,
        model=model,
        slice_name="tpu7x-4",
        measure=measure,
        value=value,
        source=f"{_COOKBOOK} {page}",
        use=use,
        num_requests=128,
        prompt_tokens=1024,
    )


def _muse(weights: str, stored: tuple[tuple[Part, Storage], ...], num_requests: int, value: float) -> Point:
    return Point(
        name=f"Muse Spark 1.2 {weights}, batch {num_requests}",
        engine=Engine.FUSED,
        model="muse-spark-1.2",
        slice_name="tpu7x-4",
        measure=Measure.TOKENS_PER_S,
        value=value,
        source=_MUSE_README,
        use=Use.HELD_OUT if num_requests == 1 else Use.NOT_COMPARABLE,
        num_requests=num_requests,
        prompt_tokens=151,
        output_tokens=128,
        weights=stored,
        reason="" if num_requests == 1 else _SAME_EXPERTS,
    )


def _other(
    name: str, engine: Engine, slice_name: str, measure: Measure, value: float, source: str, reason: str
) -> Point:
    return Point(
        name=name,
        engine=engine,
        model=name,
        slice_name=slice_name,
        measure=measure,
        value=value,
        source=source,
        use=Use.NOT_COMPARABLE,
        reason=reason,
    )


POINTS: tuple[Point, ...] = (
    _k3(1, 249, Use.FITTED),
    _k3(2, 392, Use.HELD_OUT),
    _k3(
        4,
        515,
        Use.HELD_OUT,
        "known miss: the step took 2.7 ms longer than at batch 2 and 1.5 ms less than at 8; bytes do not explain it",
    ),
    _k3(8, 865, Use.FITTED),
    _forced("Kimi K3 with DSpark", _K3, "tpu7x-16", 6, 709, Use.FITTED),
    _forced("Kimi K3 with DSpark", _K3, "tpu7x-16", 3, 350, Use.HELD_OUT, "the same round as at length 6"),
    _forced("Qwen3.8-27B with DFlash2", _QWEN_27B, "tpu7x-4", 6, 1515, Use.FITTED),
    *(_muse(weights, stored, batch, value) for weights, stored, speeds in _MUSE for batch, value in speeds.items()),
    _qwen_397b(8192, 4, 15.1, Use.FITTED),
    _qwen_397b(8192, 8, 14.2, Use.HELD_OUT),
    _qwen_397b(8192, 16, 17.1, Use.HELD_OUT),
    _qwen_397b(8192, 32, 23.9, Use.FITTED),
    _qwen_397b(8192, 64, 33.6, Use.HELD_OUT),
    _qwen_397b(8192, 128, 51.5, Use.HELD_OUT),
    _qwen_397b(8192, 256, 75.4, Use.FITTED),
    _qwen_397b(1024, 4, 13.1, Use.HELD_OUT),
    _qwen_397b(1024, 8, 13.5, Use.HELD_OUT),
    _qwen_397b(1024, 16, 14.9, Use.HELD_OUT),
    _cookbook("Qwen3-8B", "qwen3-8b", Measure.WAVE_TPOT_MS, 14.1, Use.FITTED, "Qwen3.md"),
    _cookbook("Qwen3-8B", "qwen3-8b", Measure.WAVE_TTFT_MS, 943, Use.HELD_OUT, "Qwen3.md"),
    _cookbook("Llama-3.3-70B", "llama-3.1-70b", Measure.WAVE_TPOT_MS, 30.8, Use.FITTED, "Llama3.3-70B.md"),
    _cookbook("Llama-3.3-70B", "llama-3.1-70b", Measure.WAVE_TTFT_MS, 4800, Use.FITTED, "Llama3.3-70B.md"),
    _cookbook("Qwen3-30B-A3B", "qwen3-30b-a3b", Measure.WAVE_TPOT_MS, 18.9, Use.HELD_OUT, "Qwen3-MoE.md"),
    _other(
        "Qwen3.5-397B multi-turn, 16 streams",
        Engine.SERVING,
        "tpu7x-4",
        Measure.SERVED_TOKENS_PER_S,
        417.1,
        "vllm-project/tpu-inference#3412",
        "measured with wrong outputs; prompt and hit lengths unknown",
    ),
    _other(
        "GLM-4.5-Air",
        Engine.SERVING,
        "tpu7x-4",
        Measure.SERVED_TOKENS_PER_S,
        4014,
        f"{_COOKBOOK} GLM-4.5.md",
        "no spec of the model here",
    ),
    _other(
        "MiMo-V2.5-Pro",
        Engine.SERVING,
        "tpu7x-16",
        Measure.TPOT_MS,
        33.9,
        f"{_COOKBOOK} MiMo-V2.5-Pro.md",
        "no spec of the model here",
    ),
    _other(
        "Ling-2.6-1T, 32 at once",
        Engine.SERVING,
        "tpu7x-16",
        Measure.TPOT_MS,
        26.9,
        f"{_COOKBOOK} Ling-2.6.md",
        "no spec of the model here",
    ),
    _other(
        "GLM-5.2, one verify",
        Engine.SERVING,
        "tpu7x-16",
        Measure.TPOT_MS,
        33.3,
        "sgl-project/sglang-jax#1639",
        "no spec of the model here; a round, not a token",
    ),
    _other(
        "Gemma-4-31B",
        Engine.SERVING,
        "tpu7x-1",
        Measure.TPOT_MS,
        53.8,
        "AI-Hypercomputer/tpu-recipes#243",
        "no spec of the model here; batch unknown",
    ),
    _other(
        "Kimi K3 latent projections",
        Engine.SERVING,
        "tpu7x-16",
        Measure.TPOT_MS,
        19,
        "vllm-torchtpu 0.29, latent_proj_intra_chip.py",
        "derived from a profile whose batch is unknown",
    ),
    _other(
        "Kimi K3, 2 at once",
        Engine.SERVING,
        "8x MI355",
        Measure.TPOT_MS,
        20.9,
        "sgl-project/sglang#32548",
        "GPUs: no TPU slice",
    ),
    _other(
        "Kimi K3, length 6 forced",
        Engine.SERVING,
        "16x GB200",
        Measure.TOKENS_PER_S,
        452,
        _MEGAKERNELS,
        "GPUs: no TPU slice",
    ),
    _other(
        "Ling-3.0-flash with DSpark",
        Engine.SERVING,
        "4x Blackwell",
        Measure.TOKENS_PER_S,
        1120,
        "lm-sys.github.io#413",
        "GPUs: no TPU slice",
    ),
    _other(
        "Qwen3.5-397B, batch 1",
        Engine.SERVING,
        "B200",
        Measure.TOKENS_PER_S,
        580,
        "pytorch.org blog (TokenSpeed)",
        "GPUs: no TPU slice",
    ),
)
