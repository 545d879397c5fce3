"""The fit finds what steps cost, follows changes, and says nothing absurd whatever it is told."""

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.engine.step_time import LIMITS, MIN_STEPS, UNITS, StepTimeFit
from ostrya.engine.types import StepTime, Work
from tests.unit.engine.bench import Bench

COSTS = StepTime(0.004, 0.0002, 0.00005, 1e-7)


def mixed(draw: random.Random, *, num: int) -> Iterator[Work]:
    """Decode steps, every third with a chunk of a prompt."""
    for index in range(num):
        rows = draw.randint(1, 64)
        chunk = draw.randint(16, 512) if index % 3 == 0 else 0
        yield Work(rows=rows, prefill_tokens=chunk, kv_tokens=chunk + rows * draw.randint(1, 2000))


def decode(draw: random.Random) -> Work:
    rows = draw.randint(1, 64)
    return Work(rows=rows, prefill_tokens=0, kv_tokens=rows * draw.randint(1, 2000))


def close(found: StepTime, true: StepTime, *, rel: float) -> bool:
    pairs = zip(parts(found), parts(true), strict=True)
    return all(math.isclose(one, other, rel_tol=rel) for one, other in pairs)


def parts(of: StepTime) -> tuple[float, ...]:
    return (of.base_s, of.row_s, of.prefill_token_s, of.kv_token_s)


COST = st.builds(StepTime, st.floats(1e-3, 1), st.floats(1e-5, 1e-2), st.floats(1e-6, 1e-2), st.floats(1e-8, 1e-5))


@settings(deadline=None, max_examples=25)
@given(costs=COST, seed=st.integers(0, 100))
def test_predictions_are_what_steps_take(costs: StepTime, seed: int) -> None:
    fit, draw = StepTimeFit(), random.Random(seed)
    for one in mixed(draw, num=200):
        fit.learn(one, costs.seconds(one))
    for one in mixed(draw, num=50):
        assert fit.expected_s(one) == pytest.approx(costs.seconds(one), rel=0.02)


def test_each_cost_is_found() -> None:
    fit, draw = StepTimeFit(), random.Random(1)
    for one in mixed(draw, num=300):
        fit.learn(one, COSTS.seconds(one))
    assert close(fit.step_time, COSTS, rel=0.01)


def test_noise_and_outliers_move_little() -> None:
    fit, draw = StepTimeFit(), random.Random(2)
    for index, one in enumerate(mixed(draw, num=1000)):
        hiccup = 50 if index % 40 == 39 else 1
        fit.learn(one, COSTS.seconds(one) * draw.uniform(0.9, 1.1) * hiccup)
    for one in mixed(draw, num=50):
        assert fit.expected_s(one) == pytest.approx(COSTS.seconds(one), rel=0.25)


@pytest.mark.parametrize("factor", [0.2, 5])
def test_a_change_is_followed(factor: float) -> None:
    fit, draw = StepTimeFit(), random.Random(3)
    for one in mixed(draw, num=2000):
        fit.learn(one, COSTS.seconds(one))
    for one in mixed(draw, num=200):
        fit.learn(one, factor * COSTS.seconds(one))
    for one in mixed(draw, num=50):
        assert fit.expected_s(one) == pytest.approx(factor * COSTS.seconds(one), rel=0.05)


def test_the_cost_of_a_prompt_is_not_forgotten_while_only_answers_are_written() -> None:
    fit, draw = StepTimeFit(), random.Random(4)
    for one in mixed(draw, num=200):
        fit.learn(one, COSTS.seconds(one))
    for _ in range(5000):
        one = decode(draw)
        fit.learn(one, COSTS.seconds(one) * draw.uniform(0.9, 1.1))
    assert fit.step_time.prefill_token_s == pytest.approx(COSTS.prefill_token_s, rel=0.2)


def test_steps_that_are_all_alike_are_predicted_too() -> None:
    fit, alike = StepTimeFit(), Work(rows=8, prefill_tokens=0, kv_tokens=800)
    for _ in range(20_000):
        fit.learn(alike, 0.005)
    assert fit.expected_s(alike) == pytest.approx(0.005, rel=1e-3)


def test_nothing_is_said_before_enough_was_seen() -> None:
    fit, one = StepTimeFit(), Work(rows=1, prefill_tokens=0, kv_tokens=10)
    for _ in range(MIN_STEPS - 1):
        fit.learn(one, 0.01)
    assert (fit.step_time, fit.expected_s(one)) == (StepTime(), 0.0)
    fit.learn(one, 0.01)
    assert fit.expected_s(one) == pytest.approx(0.01)


AMOUNT = st.integers(-1, 2**40) | st.integers(0, 4096)
SECONDS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-6, 3600)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(AMOUNT, AMOUNT, AMOUNT, SECONDS), min_size=MIN_STEPS, max_size=120))
def test_whatever_it_is_told_it_stays_within_limits(steps: list[tuple[int, int, int, float]]) -> None:
    fit = StepTimeFit()
    for rows, prefill_tokens, kv_tokens, step_s in steps:
        fit.learn(Work(rows=rows, prefill_tokens=prefill_tokens, kv_tokens=kv_tokens), step_s)
        limits = (LIMITS * UNITS).tolist()
        assert all(0 <= value <= limit * 1.0001 for value, limit in zip(parts(fit.step_time), limits, strict=True))
    assert math.isfinite(fit.expected_s(Work(rows=256, prefill_tokens=2048, kv_tokens=10**6)))


class Device:
    """A clock that a step moves by what it computes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("overlap", [True, False])
def test_the_engine_learns_the_device_s_time_with_and_without_overlap(overlap: bool) -> None:
    device = Device()
    b = Bench(clock=device, overlap=overlap, num_pages=400)
    draw = random.Random(5)
    for index in range(40):
        b.submit(str(index), draw.choices(range(900), k=draw.randint(1, 60)), max_tokens=draw.randint(1, 20))
    num_ended = 0
    off_by = []

    def wait(_: object, until_s: float | None) -> None:
        if until_s is None:
            plan = b.runner.plans[num_ended]
            num_prompt = plan.num_tokens - plan.num_decode_rows
            device.now_s += 0.004 + 2e-4 * plan.num_rows + 5e-5 * num_prompt

    while (report := b.engine.step(wait)) is not None:
        num_ended += 1
        if num_ended > 2 * MIN_STEPS:
            off_by.append(abs(report.expected_s / report.step_s - 1))
    assert len(off_by) > 10
    assert max(off_by) < 0.02
    assert b.engine.load().step_time.seconds(Work(rows=1, prefill_tokens=0, kv_tokens=1)) == pytest.approx(0.0042, 0.05)


def test_a_step_that_compiles_teaches_nothing_and_is_not_expected_to_be_short() -> None:
    device = Device()
    b = Bench(clock=device, overlap=False)
    b.runner.warm_up([])
    b.submit("a", range(4), max_tokens=3 * MIN_STEPS)
    num_late = 0

    def wait(*_: object) -> None:
        device.now_s += 0.004 if b.runner.num_late_shapes == num_late else 60.0

    while (report := b.engine.step(wait)) is not None:
        compiled, num_late = b.runner.num_late_shapes > num_late, b.runner.num_late_shapes
        assert report.expected_s == pytest.approx(
            0 if compiled or report.load.num_steps <= MIN_STEPS + num_late else 0.004
        )
    assert num_late > 1
