"""From the limit to what to expect: efficiency factors, fitted to published points, with the residuals on all of them.

FACTORS is the one table; fit() is the code it came from, and a test keeps the two equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from types import MappingProxyType

from ostrya.capacity.chips import find_slice
from ostrya.capacity.least_squares import least_squares
from ostrya.capacity.models import find_model
from ostrya.capacity.published import POINTS, Engine, Measure, Point, Use
from ostrya.capacity.serving import prefill, serving
from ostrya.capacity.speculation import round_time
from ostrya.capacity.step import PEAK, Efficiency, Work, step_time

_FUSED_FLOPS_RATIO = 0.324
"""Assumed: nobody has published how fast such a kernel computes prompts; as serving engines on the same chip."""
ASSUMED: Mapping[Engine, frozenset[str]] = MappingProxyType(
    {
        Engine.FUSED: frozenset({"cache_bandwidth_ratio", "flops_ratio", "exposed_ici_ratio"}),
        Engine.SERVING: frozenset({"exposed_ici_ratio"}),
    }
)
"""Factors that no published point tells: transfers on links are taken as exposed, and a fused kernel's caches as read
like its dense weights, since its points have short contexts."""

FACTORS: Mapping[tuple[Engine, str], Efficiency] = MappingProxyType(
    {
        (Engine.FUSED, "tpu7x"): Efficiency(
            name=Engine.FUSED,
            dense_bandwidth_ratio=0.806,
            expert_bandwidth_ratio=0.306,
            cache_bandwidth_ratio=0.806,
            flops_ratio=_FUSED_FLOPS_RATIO,
            exposed_ici_ratio=1.0,
            layer_overhead_s=22.7e-6,
        ),
        (Engine.SERVING, "tpu7x"): Efficiency(
            name=Engine.SERVING,
            dense_bandwidth_ratio=0.865,
            expert_bandwidth_ratio=0.685,
            cache_bandwidth_ratio=0.213,
            flops_ratio=0.324,
            exposed_ici_ratio=1.0,
            layer_overhead_s=202e-6,
        ),
        (Engine.SERVING, "v6e"): Efficiency(
            name=Engine.SERVING,
            dense_bandwidth_ratio=0.795,
            expert_bandwidth_ratio=0.229,
            cache_bandwidth_ratio=0.411,
            flops_ratio=0.315,
            exposed_ici_ratio=1.0,
            layer_overhead_s=68.3e-6,
        ),
    }
)
"""What fit() finds, in three digits, by engine and TPU generation."""


def fitted_generation(engine: Engine, generation: str) -> str:
    """Whose factors an estimate for `generation` has: its own, or those of v6e, which is nearer to the older ones."""
    return next(one for one in (generation, "v6e", "tpu7x") if (engine, one) in FACTORS)


def efficiency(engine: Engine, generation: str) -> Efficiency:
    """What to expect of an engine on a TPU generation."""
    return FACTORS[engine, fitted_generation(engine, generation)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A published point against the model."""

    point: Point
    limit: float | None
    """In the point's own unit; None where it is not comparable."""
    estimate: float | None

    @property
    def error_ratio(self) -> float | None:
        """Estimate / published - 1. Positive promises too much for a speed, and too little for a time."""
        return None if self.estimate is None else self.estimate / self.point.value - 1


def predict(point: Point, efficiency: Efficiency) -> float:
    """The point's figure by the model, in the point's unit."""
    spec, where = find_model(point.model), find_slice(point.slice_name)
    spec = replace(spec, storage_by_part=MappingProxyType({**spec.storage_by_part, **dict(point.weights)}))
    # A request's context grows over its answer; on average it is half way.
    context_tokens = point.prompt_tokens + point.output_tokens / 2
    # Nothing forces anyone to cut a prompt.
    chunk_tokens = point.prompt_tokens if efficiency == PEAK else point.chunk_tokens
    match point.measure:
        case Measure.TOKENS_PER_S:
            return round_time(
                spec,
                where,
                num_draft_tokens=point.num_draft_tokens,
                num_requests=point.num_requests,
                context_tokens=context_tokens,
                efficiency=efficiency,
            ).tokens_per_s(point.acceptance_length)
        case Measure.TPOT_MS | Measure.SERVED_TOKENS_PER_S:
            load = serving(
                spec,
                where,
                num_requests=point.num_requests,
                prompt_tokens=point.prompt_tokens,
                output_tokens=point.output_tokens,
                chunk_tokens=chunk_tokens,
                efficiency=efficiency,
            )
            return 1e3 * load.tpot_s if point.measure is Measure.TPOT_MS else load.output_tokens_per_s
        case _:
            decode = Work(num_requests=point.num_requests, context_tokens=context_tokens)
            step_s = step_time(spec, where, decode, efficiency=efficiency).seconds
            prompt_s = prefill(
                spec, where, point.prompt_tokens, chunk_tokens=chunk_tokens, efficiency=efficiency
            ).seconds
            return _of_wave(point, step_s, prompt_s)


def _of_wave(point: Point, step_s: float, prompt_s: float) -> float:
    """From the time of a step that decodes all requests, and of one prompt alone."""
    count, output_tokens = point.num_requests, point.output_tokens
    match point.measure:
        case Measure.WAVE_ITL_MS:
            return 1e3 * step_s
        case Measure.WAVE_TPOT_MS:
            # On average half of the other prompts come after a request's own.
            return 1e3 * (step_s + (count - 1) / 2 * prompt_s / (output_tokens - 1))
        case Measure.WAVE_TTFT_MS:
            return 1e3 * (count + 1) / 2 * prompt_s
        case Measure.LINE_TTFT_MS:
            # A third as in a wave, and two thirds behind all others.
            return 1e3 * ((count + 1) / 2 + 2 * count) / 3 * prompt_s
        case Measure.WAVE_TOKENS_PER_S:
            return count * output_tokens / (count * prompt_s + (output_tokens - 1) * step_s)
        case _:
            raise AssertionError(point.measure)


def residuals(points: Sequence[Point] = POINTS) -> tuple[Residual, ...]:
    """Every point, comparable or not, in the order of published.py."""
    return tuple(_residual(point) for point in points)


def leave_one_out(points: Sequence[Point] = POINTS) -> tuple[Residual, ...]:
    """Every FITTED point against factors fitted to the others: what the fit would have said of it unseen.

    No estimate for the only point that tells how fast routed experts are read.
    """
    found = []
    for left in (point for point in points if point.use is Use.FITTED):
        others = [point for point in points if point is not left]
        alike = [point for point in others if (point.engine, point.generation) == (left.engine, left.generation)]
        fitted = (find_model(point.model) for point in alike if point.use is Use.FITTED)
        if find_model(left.model).is_moe and not any(spec.is_moe for spec in fitted):
            found.append(Residual(point=left, limit=predict(left, PEAK), estimate=None))
        else:
            found.append(_residual(left, fit(left.engine, left.generation, others)))
    return tuple(found)


def held_out_errors(rows: Sequence[Residual]) -> tuple[float, ...]:
    """|error ratio| of the held-out points that are evidence of their own, smallest first: for a median and a worst."""
    independent = (row for row in rows if row.point.use is Use.HELD_OUT and not row.point.repeats_fitted)
    return tuple(sorted(abs(row.error_ratio) for row in independent if row.error_ratio is not None))


def _residual(point: Point, factors: Efficiency | None = None) -> Residual:
    if point.use is Use.NOT_COMPARABLE:
        return Residual(point=point, limit=None, estimate=None)
    estimate = predict(point, factors or efficiency(point.engine, point.generation))
    return Residual(point=point, limit=predict(point, PEAK), estimate=estimate)


def fit(engine: Engine, generation: str, points: Sequence[Point] = POINTS) -> Efficiency:
    """Factors that minimize the squared logarithms of estimate / published over the FITTED points of both."""
    fitted = [
        point for point in points if (point.engine, point.generation, point.use) == (engine, generation, Use.FITTED)
    ]

    def errors(unknowns: Sequence[float]) -> list[float]:
        factors = _efficiency(engine, unknowns)
        return [log(predict(point, factors) / point.value) for point in fitted]

    return _efficiency(engine, least_squares(errors, _START[engine]))


_MOST_BANDWIDTH_RATIO = 0.865
"""Copies out of HBM reached 3.2 TB/s of a TPU7x core's 3.7 (Inferact/tpu-megakernels, Muse Spark results)."""
_START: Mapping[Engine, tuple[float, ...]] = MappingProxyType(
    {Engine.FUSED: (1.0, -1.0, log(5e-5)), Engine.SERVING: (1.0, -1.0, log(5e-5), -1.0, -1.0)}
)
"""Where the search begins; _efficiency says of what."""


def _efficiency(engine: Engine, unknowns: Sequence[float]) -> Efficiency:
    """Every number from -inf to inf is a share between 0 and the most there can be; time per layer is a logarithm."""
    dense, experts, layer, *rest = unknowns
    bandwidth = _MOST_BANDWIDTH_RATIO * _share(dense)
    return Efficiency(
        name=engine,
        dense_bandwidth_ratio=bandwidth,
        expert_bandwidth_ratio=_MOST_BANDWIDTH_RATIO * _share(experts),
        cache_bandwidth_ratio=_MOST_BANDWIDTH_RATIO * _share(rest[0]) if rest else bandwidth,
        flops_ratio=_share(rest[1]) if rest else _FUSED_FLOPS_RATIO,
        exposed_ici_ratio=1.0,
        layer_overhead_s=exp(layer),
    )


def _share(unknown: float) -> float:
    return 1 / (1 + exp(-unknown))
