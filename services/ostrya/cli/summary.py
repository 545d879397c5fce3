"""Samples of a benchmark to numbers. Pure."""

import math
from collections import Counter
from collections.abc import Sequence

from ostrya.cli.load import Sample

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarise(samples: Sequence[Sample], wall_s: float) -> dict[str, object]:
    """Everything `ostrya bench` reports; percentiles in milliseconds, null where nothing was measured."""
    answered = [one for one in samples if not one.error]
    prompt, cached = sum(one.prompt_tokens for one in answered), sum(one.cached_tokens for one in answered)
    generated = sum(one.completion_tokens for one in answered)
    num_simulated = sum(one.is_simulated for one in answered)
    return {
        # First, because it is about every number that follows.
        **({"simulated": _how_many(num_simulated, len(answered))} if num_simulated else {}),
        "wall_s": round(wall_s, 3),
        "requests": len(samples),
        "answered": len(answered),
        "errors": dict(Counter(one.error for one in samples if one.error)),
        # A dict keeps the last of equal keys.
        "first_errors": {one.error: one.message for one in reversed(samples) if one.error},
        "by_replica": dict(sorted(Counter(one.replica for one in answered).items())),
        "requests_per_s": round(len(answered) / wall_s, 3) if wall_s else 0.0,
        "generated_tokens_per_s": round(generated / wall_s, 1) if wall_s else 0.0,
        "prompt_tokens": prompt,
        "generated_tokens": generated,
        "cached_ratio": round(cached / prompt, 4) if prompt else 0.0,
        "ttft_ms": _percentiles([one.ttft_s for one in answered]),
        "inter_token_ms": _percentiles([gap for one in answered for gap in one.inter_token_s]),
        "end_to_end_ms": _percentiles([one.duration_s for one in answered]),
    }


def _how_many(num_simulated: int, num_answered: int) -> str:
    whose = "all answers are" if num_simulated == num_answered else f"{num_simulated} of {num_answered} answers are"
    return f"{whose} of backend roofline, which computes nothing; its times are predictions"


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    return {f"p{p}": round(percentile(seconds, p) * 1e3, 2) if seconds else None for p in PERCENTILES}
