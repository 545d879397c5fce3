"""Numbers from outside are usable from where they enter."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.api.v1.common_pb2 import LoadReport
from ostrya.engine import types as engine
from ostrya.router import admin, figures
from ostrya.router.fleet import load_of
from ostrya.router.registry import _load
from ostrya.router.types import Load
from ostrya.state.board import LoadRow
from ostrya.worker import convert
from ostrya.worker.publisher import _load_row

ANY = st.one_of(st.integers(-(2**63), 2**64 - 1), st.sampled_from((0, 2**31, 2**32, 2**63, -1)))
RATE = st.floats(allow_nan=True, allow_infinity=True)


def check(load: Load) -> None:
    """It can be calculated with, and shown."""
    assert 0 <= load.prefill_tokens_per_s <= figures.MAX_TOKENS_PER_S
    steps = (load.step_base_s, load.step_row_s, load.step_prefill_token_s, load.step_kv_token_s)
    assert all(0 <= seconds <= figures.MAX_STEP_S for seconds in steps)
    counts = (load.num_running, load.num_waiting, load.queued_tokens, load.free_pages, load.reusable_pages)
    assert all(0 <= count <= figures.MAX_COUNT for count in (*counts, load.total_pages))
    assert admin._load(load).SerializeToString() is not None


@settings(deadline=None)
@given(counts=st.tuples(*[ANY] * 8), rate=RATE)
def test_whatever_a_row_of_the_load_board_says_is_clamped(counts: tuple[int, ...], rate: float) -> None:
    names = ("num_running", "num_waiting", "queued_tokens", "free_pages", "reusable_pages", "total_pages")
    row = LoadRow(
        stamp=1,
        prefill_tokens_per_s=rate,
        queried_tokens=counts[6],
        hit_tokens=counts[7],
        step_base_s=rate,
        step_row_s=-rate,
        step_prefill_token_s=rate,
        step_kv_token_s=rate,
        **dict(zip(names, counts, strict=False)),
    )
    check(_load(row))


@settings(deadline=None)
@given(rate=st.floats(width=32, allow_nan=True, allow_infinity=True), count=st.integers(0, 2**32 - 1))
def test_whatever_rides_on_a_response_is_clamped(rate: float, count: int) -> None:
    report = LoadReport(num_running=count, total_pages=count, prefill_tokens_per_s=rate)
    report.step_base_s = report.step_row_s = report.step_prefill_token_s = report.step_kv_token_s = rate
    check(load_of(report))


def test_how_long_steps_take_reaches_the_router_by_board_and_by_response() -> None:
    load = engine.Load(step_time=engine.StepTime(0.5, 0.25, 0.125, 0.0625))
    report = convert.load_report(load)
    row, answer = _load(_load_row(load, stamp=1)), load_of(report)
    assert row == answer
    assert (row.step_base_s, row.step_row_s) == (0.5, 0.25)
    assert (row.step_prefill_token_s, row.step_kv_token_s) == (0.125, 0.0625)
    assert admin._load(row) == report


@pytest.mark.parametrize(
    ("told", "used"),
    [(math.nan, 0), (-math.inf, 0), (math.inf, 2**32 - 1), (-1, 0), (2**63, 2**32 - 1), (3, 3), (0.7, 0)],
)
def test_a_count_is_a_whole_number_within_bounds(told: float, used: int) -> None:
    assert figures.count(told) == used


@pytest.mark.parametrize(
    ("theirs_s", "offset_s"), [(0.0, 0.0), (110.0, 10.0), (math.nan, 0.0), (math.inf, 1e9), (-math.inf, -1e9)]
)
def test_a_clock_offset_is_finite(theirs_s: float, offset_s: float) -> None:
    assert figures.clock_offset_s(theirs_s, 100.0) == offset_s
