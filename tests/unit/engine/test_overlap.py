"""A step is planned and launched while the one before runs; nothing but time may show it."""

import numpy as np
import pytest

from ostrya.engine.plan import StepPlan
from ostrya.engine.types import Shape
from tests.unit.engine.bench import Bench


def launch(b: Bench) -> StepPlan:
    plan = b.scheduler.plan(now=0.0)
    assert plan is not None
    b.runner.execute(plan)
    return plan


def commit(b: Bench, *tokens: int) -> list[str]:
    """Ends the oldest step with these tokens; the ids that got one."""
    outputs = b.scheduler.commit(np.array([*tokens, 0, 0, 0, 0], np.int32), now=0.0)
    b.scheduler.pool.check()
    return [output.request_id for output in outputs]


def sources(plan: StepPlan) -> list[int]:
    return [int(source) for source in plan.token_source[: plan.num_tokens]]


def test_the_next_step_takes_its_tokens_from_rows_of_the_one_that_runs() -> None:
    b = Bench()
    b.submit("a", range(5))
    b.submit("b", range(50, 70))
    b.submit("c", [7])
    assert sources(launch(b)) == [-1] * 26
    second = launch(b)
    # In the first step c was the row of one token, and stood first; the second is in order of arrival.
    assert sources(second) == [1, 2, 0]
    assert second.token_ids[:3].tolist() == [0, 0, 0]
    assert second.positions[:3].tolist() == [5, 20, 1]
    assert commit(b, 11, 22, 33) == ["c", "a", "b"]
    third = launch(b)
    assert sources(third) == [0, 1, 2]


def test_without_overlap_the_host_brings_every_token() -> None:
    b = Bench(overlap=False)
    b.submit("a", range(5))
    b.run()
    assert all(set(sources(plan)) == {-1} for plan in b.runner.plans)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_no_row_is_launched_beyond_max_tokens(max_tokens: int) -> None:
    b = Bench()
    b.submit("a", range(5), max_tokens=max_tokens)
    b.run()
    assert [plan.num_rows for plan in b.runner.plans] == [1] * max_tokens
    assert len(b.tokens["a"]) == max_tokens


def test_a_row_behind_a_stop_token_is_thrown_away_and_its_page_is_free_for_others() -> None:
    expected = Bench(num_pages=5).generate(range(100, 112), max_tokens=4)
    b = Bench(num_pages=5)
    b.submit("a", range(12), max_tokens=4, stop_token_ids=frozenset({9}))
    launch(b)
    launch(b)  # takes the last page, for the token after the stop
    assert b.scheduler.pool.num_available == 0
    assert commit(b, 9) == ["a"]
    assert b.scheduler.pool.num_referenced == 0
    b.submit("b", range(100, 112), max_tokens=4)
    third = b.scheduler.plan(now=0.0)
    assert third is not None
    assert third.num_rows == 1
    handle = b.runner.execute(third)  # into the pages that the second still writes
    assert commit(b, 5) == []
    assert commit(b, int(handle.tokens()[0])) == ["b"]
    b.run()
    assert b.tokens["b"] == expected[1:]


def test_an_abort_frees_pages_at_once_with_two_steps_in_flight() -> None:
    b = Bench()
    b.submit("a", range(30))
    b.submit("b", range(50, 60))
    launch(b)
    launch(b)
    b.abort("a")
    assert b.scheduler.pool.num_referenced == 3
    assert commit(b, 1, 2) == ["b"]
    assert commit(b, 1, 2) == ["b"]


def preempted_in_flight() -> Bench:
    """Two requests are in the step in flight; in the next, one of them finds no page."""
    b = Bench(num_pages=9)
    b.submit("first", range(12))
    b.submit("second", range(100, 112))
    launch(b)
    b.scheduler.pool.allocate()
    assert b.scheduler.pool.num_available == 1
    assert launch(b).num_rows == 1
    assert b.engine.load().num_preemptions == 1
    return b


def test_who_is_preempted_with_a_step_in_flight_keeps_its_token() -> None:
    b = preempted_in_flight()
    assert commit(b, 11, 22) == ["first", "second"]
    [waiting] = b.scheduler._waiting
    assert list(waiting.token_ids) == [*range(100, 112), 22]


def test_pages_of_who_is_preempted_with_a_step_in_flight_stay_matchable() -> None:
    assert preempted_in_flight().scheduler.pool.num_reusable == 3


def test_pages_are_matchable_from_the_plan_after_their_launch_on() -> None:
    b = Bench()
    b.submit("first", range(40))
    launch(b)
    b.submit("second", range(40))
    b.submit("other", range(40), cache_namespace="tenant")
    assert np.diff(launch(b).query_start[:4]).tolist() == [1, 4, 40]


def test_a_sequence_that_needs_the_host_waits_for_its_commit() -> None:
    b = Bench(max_step_tokens=8)
    b.submit("a", range(12))
    [sequence] = b.scheduler._waiting
    sequence.needs_host = True
    launch(b)
    launch(b)  # the rest of the prompt: no token was chosen yet
    assert b.scheduler.plan(now=0.0) is None
    commit(b, 0)
    assert b.scheduler.plan(now=0.0) is None
    commit(b, 11)
    assert launch(b).token_ids[0] == 11


def test_what_comes_while_a_step_runs_is_in_the_next_that_is_launched() -> None:
    b = Bench(clock=Clock(), overlap=True)
    b.submit("a", range(4), max_tokens=30)
    for _ in range(5):
        b.step()
    b.submit("b", range(50, 60), max_tokens=1)
    b.step()
    assert b.runner.plans[-1].num_rows == 2


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_step_is_timed_from_the_end_of_the_one_before_and_the_next_is_planned_late() -> None:
    clock = Clock()
    b = Bench(clock=clock)
    b.submit("a", range(4), max_tokens=30)
    waits: list[float | None] = []
    times: list[float] = []

    def step(takes_s: float) -> None:
        end_s = clock.now_s + takes_s

        def wait(_: object, until_s: float | None) -> None:
            waits.append(until_s and until_s - (end_s - takes_s))
            clock.now_s = end_s if until_s is None else min(until_s, end_s)

        report = b.engine.step(wait)
        assert report is not None
        times.append(report.step_s)

    step(9.0)
    for takes_s in (1.0, 2.0, 0.5, 1.0):
        step(takes_s)
    assert times == pytest.approx([9.0, 1.0, 2.0, 0.5, 1.0])
    # The first two are unlike any before; then the shortest of their like counts.
    assert [wait for wait in waits if wait is not None] == pytest.approx([0.748, 0.75 * 1.01 - 0.002, 0.373])
    assert sum(wait is None for wait in waits) == 5


def test_a_late_shape_counts_when_the_device_comes_to_it() -> None:
    b = Bench()
    b.submit("a", range(4), max_tokens=30)
    b.step()
    b.runner.warm_up([plan.bucket for plan in b.runner.plans])
    b.step()
    b.submit("b", range(100, 140), max_tokens=1)
    seen: list[tuple[int, Shape | None]] = []
    for _ in range(3):
        b.step(lambda: seen.append((b.engine.load().num_late_shapes, b.engine.running)))
    late = [num_late for num_late, _ in seen]
    assert b.runner.num_late_shapes == 1
    assert late == sorted(late)
    first = late.index(1)
    assert all(shape is not None and shape.tokens == 4 for _, shape in seen[:first])
    assert seen[first][1] == Shape(64, 8, 64)
