"""From the limit to what to expect: efficiency factors, fitted to published points, with the residuals on all of them.

FACTORS is the one table; fit() is the code it came from, and a test keeps the two equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from types import MappingProxyType

from ostrya.capacity.chips import find_slice
from ostrya.capacity.least_squares import least_squares
from ostrya.capacity.memory import CHUNK_TOKENS
from ostrya.capacity.models import find_model
from ostrya.capacity.published import POINTS, Engine, Measure, Point, Use
from ostrya.capacity.serving import prefill, serving
from ostrya.capacity.speculation import round_time
from ostrya.capacity.step import PEAK, Efficiency, Work, step_time

_SERVING_FLOPS_RATIO = 0.287

FACTORS: Mapping[Engine, Efficiency] = MappingProxyType(
    {
        Engine.FUSED: Efficiency(
            name=Engine.FUSED,
            dense_bandwidth_ratio=0.806,
            expert_bandwidth_ratio=0.306,
            # Assumed: nobody has published how fast such a kernel computes prompts.
            flops_ratio=_SERVING_FLOPS_RATIO,
            exposed_ici_ratio=1.0,
            layer_overhead_s=22.7e-6,
        ),
        Engine.SERVING: Efficiency(
            name=Engine.SERVING,
            dense_bandwidth_ratio=0.333,
            expert_bandwidth_ratio=0.602,
            flops_ratio=_SERVING_FLOPS_RATIO,
            exposed_ici_ratio=1.0,
            layer_overhead_s=196e-6,
        ),
    }
)
"""What fit() finds, in three digits. Transfers on links are taken as exposed, since no point tells them apart."""


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
    chunk_tokens = point.prompt_tokens if efficiency == PEAK else CHUNK_TOKENS
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
        case Measure.WAVE_TPOT_MS:
            decode = Work(num_requests=point.num_requests, context_tokens=context_tokens)
            return 1e3 * step_time(spec, where, decode, efficiency=efficiency).seconds
        case Measure.WAVE_TTFT_MS:
            alone = prefill(spec, where, point.prompt_tokens, chunk_tokens=chunk_tokens, efficiency=efficiency)
            return 1e3 * alone.seconds * (point.num_requests + 1) / 2
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
        _residual(left, fit(left.engine, [point for point in points if point is not left]))
        for left in points
        if left.use is Use.FITTED
    )


def held_out_errors(rows: Sequence[Residual]) -> tuple[float, ...]:
    """|error ratio| of the held-out points that are evidence of their own, smallest first: for a median and a worst."""
    independent = (row for row in rows if row.point.use is Use.HELD_OUT and not row.point.repeats_fitted)
    return tuple(sorted(abs(row.error_ratio) for row in independent if row.error_ratio is not None))


def _residual(point: Point, efficiency: Efficiency | None = None) -> Residual:
    if point.use is Use.NOT_COMPARABLE:
        return Residual(point=point, limit=None, estimate=None)
    estimate = predict(point, efficiency or FACTORS[point.engine])
    return Residual(point=point, limit=predict(point, PEAK), estimate=estimate)


def fit(engine: Engine, points: Sequence[Point] = POINTS) -> Efficiency:
    """Factors that minimize the squared logarithms of estimate / published over the engine's FITTED points."""
    fitted = [point for point in points if point.engine is engine and point.use is Use.FITTED]

    def errors(logs: Sequence[float]) -> list[float]:
        efficiency = _efficiency(engine, [exp(value) for value in logs])
        return [log(predict(point, efficiency) / point.value) for point in fitted]

    found = least_squares(errors, [log(value) for value in _STARTS[engine]])
    return _efficiency(engine, [exp(value) for value in found])


_STARTS: Mapping[Engine, tuple[float, ...]] = MappingProxyType(
    {Engine.FUSED: (0.7, 0.3, 2e-5), Engine.SERVING: (0.4, 0.6, 2e-4, 0.2)}
)
"""Where the search begins: bandwidth ratios, seconds per layer, and of serving engines the share of peak FLOP/s."""


def _efficiency(engine: Engine, values: Sequence[float]) -> Efficiency:
    dense, experts, layer_s, *rest = values
    return Efficiency(
        name=engine,
        # Nobody reads faster than the memory gives.
        dense_bandwidth_ratio=min(1.0, dense),
        expert_bandwidth_ratio=min(1.0, experts),
        flops_ratio=min(1.0, rest[0]) if rest else _SERVING_FLOPS_RATIO,
        exposed_ici_ratio=1.0,
        layer_overhead_s=layer_s,
    )
