"""What others measured: points that estimate.py is fitted to, points it is only judged by, and the rest.

A point that cannot be compared stays in the table with the reason, so that nobody looks for it in vain.
"""

from collections.abc import Mapping

from ostrya.capacity.chips import Dtype
from ostrya.capacity.layers import Part
from ostrya.capacity.points import Engine, Measure, Point, Use
from ostrya.capacity.published_serving import SERVING_POINTS
from ostrya.capacity.spec import INT8, Storage

__all__ = ["POINTS", "Engine", "Measure", "Point", "Use"]

_MEGAKERNELS = "Inferact/tpu-megakernels README, assets/figures, scripts"
_MUSE_README = "Inferact/tpu-megakernels README and musespark/README.md"
_COOKBOOK = "sgl-project/sglang-jax cookbook"

_MUSE_INT4 = Storage("int4", 4 + 32 / 128, Dtype.BF16)
"""A float32 scale per 128 values."""
_MUSE: tuple[tuple[str, tuple[tuple[Part, Storage], ...], Mapping[int, float]], ...] = (
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
    """One token of prompt, 1,024 of answer (scripts/benchmark_kimi.sh)."""
    return Point(
        name=f"Kimi K3, batch {num_requests}",
        engine=Engine.FUSED,
        model="kimi-k3",
        slice_name="tpu7x-16",
        measure=Measure.TOKENS_PER_S,
        value=value,
        source=_MEGAKERNELS,
        use=use,
        num_requests=num_requests,
        prompt_tokens=1,
        output_tokens=1024,
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


_NO_SPEC, _GPUS = "no spec of the model here", "GPUs: no TPU slice"
_NOT_COMPARABLE: tuple[tuple[str, str, Measure, float, str, str], ...] = (
    (
        "Qwen3.5-397B multi-turn, 16 streams",
        "tpu7x-4",
        Measure.SERVED_TOKENS_PER_S,
        417.1,
        "vllm-project/tpu-inference#3412",
        "measured with wrong outputs; prompt and hit lengths unknown",
    ),
    ("GLM-4.5-Air", "tpu7x-4", Measure.SERVED_TOKENS_PER_S, 4014, f"{_COOKBOOK} GLM-4.5.md", _NO_SPEC),
    ("MiMo-V2.5-Pro", "tpu7x-16", Measure.TPOT_MS, 33.9, f"{_COOKBOOK} MiMo-V2.5-Pro.md", _NO_SPEC),
    ("Ling-2.6-1T, 32 at once", "tpu7x-16", Measure.TPOT_MS, 26.9, f"{_COOKBOOK} Ling-2.6.md", _NO_SPEC),
    (
        "GLM-5.2, one verify",
        "tpu7x-16",
        Measure.TPOT_MS,
        33.3,
        "sgl-project/sglang-jax#1639",
        f"{_NO_SPEC}; a round, not a token",
    ),
    (
        "Gemma-4-31B",
        "tpu7x-1",
        Measure.TPOT_MS,
        53.8,
        "AI-Hypercomputer/tpu-recipes#243",
        f"{_NO_SPEC}; batch unknown",
    ),
    (
        "Kimi K3 latent projections",
        "tpu7x-16",
        Measure.TPOT_MS,
        19,
        "vllm-torchtpu 0.29, latent_proj_intra_chip.py",
        "derived from a profile whose batch is unknown",
    ),
    ("Kimi K3, 2 at once", "8x MI355", Measure.TPOT_MS, 20.9, "sgl-project/sglang#32548", _GPUS),
    ("Kimi K3, length 6 forced", "16x GB200", Measure.TOKENS_PER_S, 452, _MEGAKERNELS, _GPUS),
    ("Ling-3.0-flash with DSpark", "4x Blackwell", Measure.TOKENS_PER_S, 1120, "lm-sys.github.io#413", _GPUS),
    ("Qwen3.5-397B, batch 1", "B200", Measure.TOKENS_PER_S, 580, "pytorch.org blog (TokenSpeed)", _GPUS),
)
"""Name, place, measure, value, source, reason."""


def _other(name: str, place: str, measure: Measure, value: float, source: str, reason: str) -> Point:
    return Point(
        name=name,
        engine=Engine.SERVING,
        model=name,
        slice_name=place,
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
    _forced("Kimi K3 with DSpark", "kimi-k3", "tpu7x-16", 6, 709, Use.FITTED),
    _forced("Kimi K3 with DSpark", "kimi-k3", "tpu7x-16", 3, 350, Use.HELD_OUT, "the same round as at length 6"),
    _forced("Qwen3.8-27B with DFlash2", "qwen3.8-27b", "tpu7x-4", 6, 1515, Use.FITTED),
    *(_muse(weights, stored, batch, value) for weights, stored, speeds in _MUSE for batch, value in speeds.items()),
    *SERVING_POINTS,
    *(_other(*row) for row in _NOT_COMPARABLE),
)
