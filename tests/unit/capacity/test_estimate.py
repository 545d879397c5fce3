"""The estimate against published points: fitted on some, judged on all, and its factors are what the fit finds."""

from collections.abc import Sequence

import pytest

from ostrya.capacity.estimate import FACTORS, Residual, fit, held_out_errors, leave_one_out, residuals
from ostrya.capacity.least_squares import least_squares
from ostrya.capacity.published import POINTS, Engine, Measure, Use

_SPEEDS = {Measure.TOKENS_PER_S, Measure.SERVED_TOKENS_PER_S}


def found(name: str, measure: Measure = Measure.TOKENS_PER_S) -> Residual:
    (residual,) = residuals([point for point in POINTS if (point.name, point.measure) == (name, measure)])
    return residual


def error(name: str, measure: Measure = Measure.TOKENS_PER_S) -> float:
    ratio = found(name, measure).error_ratio
    assert ratio is not None
    return ratio


@pytest.mark.parametrize(("batch", "published"), [(1, 249), (2, 392), (8, 865)])
def test_kimi_k3_is_within_15_percent_at_batch_1_2_and_8(batch: int, published: float) -> None:
    residual = found(f"Kimi K3, batch {batch}")
    assert residual.point.value == published
    assert residual.estimate == pytest.approx(published, rel=0.15)


def test_kimi_k3_at_batch_4_is_a_known_miss_and_says_so() -> None:
    residual = found("Kimi K3, batch 4")
    assert residual.point.use is Use.HELD_OUT
    assert residual.point.reason.startswith("known miss")
    assert residual.error_ratio is not None
    assert 0.15 < residual.error_ratio < 0.35


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Kimi K3 with DSpark, length 6 forced", 709),
        ("Kimi K3 with DSpark, length 3 forced", 350),
        ("Qwen3.8-27B with DFlash2, length 6 forced", 1515),
    ],
)
def test_forced_acceptance_is_within_10_percent(name: str, published: float) -> None:
    residual = found(name)
    assert residual.point.forced
    assert residual.estimate == pytest.approx(published, rel=0.10)


def test_serving_engines_are_within_a_third_on_every_point() -> None:
    for residual in residuals():
        if residual.point.engine is Engine.SERVING and residual.error_ratio is not None:
            assert abs(residual.error_ratio) < 0.35, residual.point.name


@pytest.mark.parametrize("weights", ["NVFP4", "NVFP4 + int8", "int4"])
def test_a_model_and_a_kernel_that_no_factor_was_fitted_to_are_within_a_quarter(weights: str) -> None:
    assert abs(error(f"Muse Spark 1.2 {weights}, batch 1")) < 0.25


def test_a_model_that_no_factor_was_fitted_to_is_within_a_quarter() -> None:
    assert abs(error("Qwen3-30B-A3B, 1k/1k, 128 at once", Measure.WAVE_TPOT_MS)) < 0.25
    assert abs(error("Qwen3-8B, 1k/1k, 128 at once", Measure.WAVE_TTFT_MS)) < 0.25


def test_a_point_with_other_weights_than_its_spec_is_predicted_with_those() -> None:
    plain, narrow = (found(f"Muse Spark 1.2 {weights}, batch 1") for weights in ("NVFP4", "NVFP4 + int8"))
    assert plain.limit
    assert narrow.limit
    # Its layout.py: of a layer's dense weights each of 8 devices reads 34 MiB less; and the head's vocabulary halves.
    saved_bytes = 62 * 8 * 34 * 2**20 + 202_048 * 8192
    assert 1 / plain.limit - 1 / narrow.limit == pytest.approx(saved_bytes / (4 * 7.40e12), rel=0.01)


def test_nobody_beats_the_limit() -> None:
    for residual in residuals():
        if residual.limit is not None and residual.estimate is not None:
            best, measured = residual.limit, residual.point.value
            speed = residual.point.measure in _SPEEDS
            assert measured < best if speed else measured > best
            assert residual.estimate < best if speed else residual.estimate > best


@pytest.mark.parametrize("engine", list(Engine))
def test_the_table_of_factors_is_what_the_fit_finds(engine: Engine) -> None:
    fitted, table = fit(engine), FACTORS[engine]
    assert table.name == fitted.name == engine
    for factor in ("dense_bandwidth_ratio", "expert_bandwidth_ratio", "flops_ratio", "layer_overhead_s"):
        assert getattr(table, factor) == pytest.approx(getattr(fitted, factor), rel=0.005)


def test_the_fit_uses_nothing_that_is_held_out() -> None:
    without = [point for point in POINTS if point.use is Use.FITTED]
    assert fit(Engine.FUSED, without) == fit(Engine.FUSED)


def test_every_fitted_point_is_judged_by_a_fit_without_it() -> None:
    fitted = [residual for residual in residuals() if residual.point.use is Use.FITTED]
    unseen = leave_one_out()
    assert [residual.point for residual in unseen] == [residual.point for residual in fitted]
    for residual, seen in zip(unseen, fitted, strict=True):
        assert residual.estimate != seen.estimate


def test_a_round_that_was_fitted_is_no_evidence_at_another_length() -> None:
    rows = residuals()
    held = [row for row in rows if row.point.use is Use.HELD_OUT]
    assert [row.point.name for row in held if row.point.repeats_fitted] == ["Kimi K3 with DSpark, length 3 forced"]
    assert len(held_out_errors(rows)) == len(held) - 1


def test_factors_are_shares_of_a_peak() -> None:
    for factors in FACTORS.values():
        ratios = (factors.dense_bandwidth_ratio, factors.expert_bandwidth_ratio, factors.flops_ratio)
        assert all(0 < ratio <= 1 for ratio in ratios)


def test_every_point_is_in_the_table_once_and_those_not_comparable_have_no_figure() -> None:
    table = residuals()
    assert [residual.point for residual in table] == list(POINTS)
    for residual in table:
        comparable = residual.point.use is not Use.NOT_COMPARABLE
        assert (residual.estimate is not None) == (residual.limit is not None) == comparable
        assert (residual.error_ratio is not None) == comparable


def test_least_squares_finds_a_line() -> None:
    def errors(unknowns: Sequence[float]) -> list[float]:
        slope, offset = unknowns
        return [slope * x + offset - (3 * x - 2) for x in (0.0, 1.0, 2.0, 5.0)]

    assert least_squares(errors, [1.0, 1.0]) == pytest.approx([3.0, -2.0], abs=1e-4)
