"""Slow steps and pages that do not add up are told once and not a thousand times."""

import logging

import pytest

from ostrya.engine.types import Load, StepReport, Work
from ostrya.worker.remarks import QUIET_S, Remarks

WORK = Work(rows=8, prefill_tokens=16, kv_tokens=900)


class Told:
    """Remarks with a clock that stands, and what they said."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now_s = 0.0
        self.remarks = Remarks(clock=lambda: self.now_s)
        self._caplog = caplog

    def step(self, step_s: float, expected_s: float) -> list[dict[str, float]]:
        self.remarks.report(StepReport(step_s=step_s, expected_s=expected_s, work=WORK))
        return self.fields()

    def fields(self) -> list[dict[str, float]]:
        found = [vars(record)["fields"] for record in self._caplog.records]
        self._caplog.clear()
        return found


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    caplog.set_level(logging.WARNING)
    return Told(caplog)


def test_a_slow_step_is_told_with_its_shape_and_what_was_expected(told: Told) -> None:
    (fields,) = told.step(0.5, 0.1)
    assert fields == {
        "seconds": 0.5,
        "expected_seconds": 0.1,
        "rows": 8,
        "prefill_tokens": 16,
        "kv_tokens": 900,
        "num_untold": 0,
    }


@pytest.mark.parametrize(("step_s", "expected_s"), [(0.3, 0.1), (0.04, 0.001), (5.0, 0.0)])
def test_a_step_is_not_slow_within_bounds_in_no_time_or_when_nothing_was_expected(
    told: Told, step_s: float, expected_s: float
) -> None:
    assert told.step(step_s, expected_s) == []


def test_slow_steps_are_told_once_a_minute_and_counted_meanwhile(told: Told) -> None:
    assert len(told.step(1.0, 0.1)) == 1
    for _ in range(3):
        assert told.step(1.0, 0.1) == []
    told.now_s += QUIET_S
    (fields,) = told.step(1.0, 0.1)
    assert fields["num_untold"] == 3


def test_pages_that_do_not_add_up_are_told_once(told: Told) -> None:
    for _ in range(2):
        told.remarks.report(StepReport(load=Load(total_pages=20, free_pages=10, reusable_pages=7, num_page_leaks=1)))
    assert told.fields() == [{"total": 20, "free": 10, "reusable": 7, "missing": 3}]
