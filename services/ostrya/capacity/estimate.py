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

_FUSED_FLOPS_RATIO = 0.317
"""Assumed: nobody has published how fast such a kernel computes prompts; as serving engines on the same chip."""

FACTORS: Mapping[tuple[Engine, str], Efficiency] = MappingProxyType(
    {
        (Engine.FUSED, "tpu7x"): Efficiency(
            name=Engine.FUSED,
            dense_bandwidth_ratio=0.806,
            expert_bandwidth_ratio=0.306,
            # Assumed as dense: the published points have short contexts.
            cache_bandwidth_ratio=0.806,
            flops_ratio=_FUSED_FLOPS_RATIO,
            exposed_ici_ratio=1.0,
            layer_overhead_s=22.7e-6,
        ),
        (Engine.SERVING, "tpu7x"): Efficiency(
            name=Engine.SERVING,
            dense_bandwidth_ratio=0.865,
            expert_bandwidth_ratio=0.821,
            cache_bandwidth_ratio=0.183,
            flops_ratio=0.317,
            exposed_ici_ratio=1.0,
            layer_overhead_s=211e-6,
        ),
        (Engine.SERVING, "v6e"): Efficiency(
            name=Engine.SERVING,
            dense_bandwidth_ratio=0.807,
            expert_bandwidth_ratio=0.238,
            cache_bandwidth_ratio=0.442,
            flops_ratio=0.180,
            exposed_ici_ratio=1.0,
            layer_overhead_s=73.0e-6,
        ),
    }
)
"""What fit() finds, in three digits, by engine and TPU generation. Transfers on links are taken as exposed, since no
point tells them apart."""


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
        case Measure.WAVE_TPOT_MS | Measure.WAVE_TTFT_MS | Measure.WAVE_TOKENS_PER_S:
            decode = Work(num_requests=point.num_requests, context_tokens=context_tokens)
            tpot_s = step_time(spec, where, decode, efficiency=efficiency).seconds
            prompt_s = prefill(
                spec, where, point.prompt_tokens, chunk_tokens=chunk_tokens, efficiency=efficiency
            ).seconds
            if point.measure is Measure.WAVE_TPOT_MS:
                return 1e3 * tpot_s
            if point.measure is Measure.WAVE_TTFT_MS:
                return 1e3 * prompt_s * (point.num_requests + 1) / 2
            wave_s = point.num_requests * prompt_s + (point.output_tokens - 1) * tpot_s
            return point.num_requests * point.output_tokens / wave_s
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


def residuals(points: Sequence[Point] = POINTS) -> tuple[Residual, ...]:
    """Every point, comparable or not, in the order of published.py."""
    return tuple(_residual(point) for point in points)


def leave_one_out(points: Sequence[Point] = POINTS) -> tuple[Residual, ...]:
    """Every FITTED point against factors fitted to the others: what the fit would have said of it unseen."""
    return tuple(
        _residual(left, fit(left.engine, left.generation, [point for point in points if point is not left]))
        for left in points
        if left.use is Use.FITTED
    )


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
    """Factors that minimize the squared logarithms of estimate / published over the FITTED points of both.

    The best that is found from every one of _STARTS: where a ratio is held at 1 the errors have no slope.
    """
    fitted = [
        point for point in points if (point.engine, point.generation, point.use) == (engine, generation, Use.FITTED)
    ]

    def errors(logs: Sequence[float]) -> list[float]:
        factors = _efficiency(engine, [exp(value) for value in logs])
        return [log(predict(point, factors) / point.value) for point in fitted]

    unknowns = 3 if engine is Engine.FUSED else 5
    found = (least_squares(errors, [log(value) for value in start[:unknowns]]) for start in _STARTS)
    best = min(found, key=lambda logs: sum(error**2 for error in errors(logs)))
    return _efficiency(engine, [exp(value) for value in best])


_STARTS = ((0.7, 0.3, 2e-5, 0.3, 0.4), (0.4, 0.6, 2e-4, 0.2, 0.4), (0.7, 0.2, 7e-5, 0.2, 0.3))
"""Where the search begins: bandwidth of dense weights and experts, seconds per layer, FLOP/s, bandwidth of caches."""
_MOST_BANDWIDTH_RATIO = 0.865
"""Copies out of HBM reached 3.2 TB/s of a TPU7x core's 3.7 (Inferact/tpu-megakernels, Muse Spark results)."""


def _efficiency(engine: Engine, values: Sequence[float]) -> Efficiency:
    dense, experts, layer_s, *rest = values
    flops, caches = rest or (_FUSED_FLOPS_RATIO, dense)
    return Efficiency(
        name=engine,
        dense_bandwidth_ratio=min(_MOST_BANDWIDTH_RATIO, dense),
        expert_bandwidth_ratio=min(_MOST_BANDWIDTH_RATIO, experts),
        cache_bandwidth_ratio=min(_MOST_BANDWIDTH_RATIO, caches),
        flops_ratio=min(1.0, flops),
        exposed_ici_ratio=1.0,
        layer_overhead_s=layer_s,
    )
