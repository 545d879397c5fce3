"""The loop measures with the clock it is given, and tells the whole truth in every report."""

import pytest

from ostrya.engine.engine import CHECK_EVERY_S, Engine
from ostrya.engine.plan import StepPlan
from ostrya.engine.types import EngineRequest, Peaks, RequestId, Sampling, StepLimit
from tests.fakes.runner import CONTEXT_TOKENS
from tests.unit.engine.bench import Bench


class FakeClock:
    """Each look is one second later."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_idle_engine_has_no_step_to_report() -> None:
    assert Bench().engine.step() is None


def test_waiting_and_prefill_are_timed_by_the_given_clock() -> None:
    b = Bench(clock=FakeClock(), max_step_tokens=16, overlap=False)
    b.submit("a", range(20), max_tokens=2)  # at 1; steps start at 2 and 4, the first token is there at 5
    reports = [b.engine.step() for _ in range(3)]
    first, second = (output for report in reports if report for output in report.outputs)
    assert (first.queue_s, first.prefill_s) == (1.0, 3.0)
    assert (second.queue_s, second.prefill_s) == (0.0, 0.0), "told once"


def test_prefill_rate_is_tokens_over_time_of_steps_that_prefilled() -> None:
    b = Bench(clock=FakeClock(), overlap=False)
    assert b.engine.load().prefill_tokens_per_s == 0
    b.submit("a", range(40), max_tokens=5)
    b.run()
    assert b.engine.load().prefill_tokens_per_s == pytest.approx(40.0)


def test_report_counts_padding_and_shapes() -> None:
    b = Bench()
    b.submit("a", range(20), max_tokens=2)
    b.run()
    load = b.engine.load()
    assert (load.num_steps, load.num_scheduled_tokens, load.num_padded_tokens) == (2, 21, 32 + 4)
    assert load.num_shapes == len(b.scheduler.ladder.buckets)
    assert load.num_late_shapes == 0


def test_requests_may_come_and_go_while_a_step_runs() -> None:
    b = Bench()
    b.submit("a", range(20), max_tokens=3)
    b.step(lambda: b.submit("b", range(30, 40), max_tokens=3))
    assert b.engine.load().num_waiting == 1
    b.run()
    assert len(b.tokens["b"]) == 3


def test_context_is_what_model_setting_and_pool_allow() -> None:
    assert Bench(context_tokens=100).scheduler.context_tokens == 100
    assert Bench(context_tokens=100, max_context_tokens=50).scheduler.context_tokens == 50
    assert Bench(context_tokens=100, num_pages=11).scheduler.context_tokens == 40


def test_decode_rows_do_not_count_as_prefill() -> None:
    b = Bench(clock=FakeClock(), overlap=False)
    b.submit("decoding", range(4), max_tokens=50)
    b.step()
    b.submit("prefilling", range(100, 130), max_tokens=1)
    b.step()
    assert b.engine.load().prefill_tokens_per_s == pytest.approx(30.0)


class Clock:
    """Stands until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_pages_of_an_idle_engine_are_looked_at_once_a_minute_and_not_while_it_works() -> None:
    clock = Clock()
    b = Bench(clock=clock)
    assert b.engine.step() is None
    leaked = b.scheduler.pool.allocate()
    clock.now_s += CHECK_EVERY_S - 1
    assert b.engine.step() is None
    assert b.engine.load().num_page_leaks == 0, "it was looked at less than a minute ago"
    clock.now_s += 1
    b.submit("a", range(4), max_tokens=3)
    while b.engine.step() is not None:
        assert b.engine.load().num_page_leaks == 0, "whoever works has pages"
    assert b.engine.load().num_page_leaks == 1
    b.scheduler.pool.release([leaked])
    clock.now_s += CHECK_EVERY_S
    assert b.engine.step() is None
    assert b.engine.load().num_page_leaks == 1


class RowsAreSeconds:
    """A limit that tells plans from each other."""

    peaks = Peaks(1.0, 1.0, "")

    def limit(self, plan: StepPlan) -> StepLimit:
        return StepLimit("decode", plan.num_rows, plan.num_tokens)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_report_has_the_limit_of_the_step_it_is_about_unless_that_compiled(overlap: bool) -> None:
    b = Bench(overlap=overlap)
    engine = Engine(b.runner, b.config, context_tokens=CONTEXT_TOKENS, eos_token_ids=(), limit=RowsAreSeconds())
    engine.warm_up()
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=3)
    for name, num_prompt in (("a", 10), ("b", 20)):
        engine.submit(EngineRequest(request_id=RequestId(name), token_ids=[7] * num_prompt, sampling=sampling))
    found = []
    while (report := engine.step()) is not None:
        assert report.limit is not None
        found.append((report.limit.memory_s, report.limit.compute_s))
    assert found == [(plan.num_rows, plan.num_tokens) for plan in b.runner.plans]
    b.runner.warm_up([])
    engine.submit(EngineRequest(request_id=RequestId("late"), token_ids=[7] * 40, sampling=sampling))
    late = engine.step()
    assert late is not None
    assert late.limit is None
