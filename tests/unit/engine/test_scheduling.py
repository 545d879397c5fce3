"""Who waits for whom: siblings for one prefill, prompts for running answers, low priorities, and the cold for the warm
only as long as they would not notice."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.engine.plan import StepPlan
from tests.unit.engine.bench import Bench


def plan_of(b: Bench, **speed: float) -> StepPlan:
    plan = b.scheduler.plan(now=0.0, **speed)  # type: ignore[arg-type]
    assert plan is not None
    return plan


def running(b: Bench) -> list[str]:
    return [sequence.request.request_id for sequence in b.scheduler._running]


def num_prefilled(b: Bench) -> int:
    """Tokens computed by rows that are no decode rows."""
    return sum(plan.num_tokens - plan.num_decode_rows for plan in b.runner.plans)


def prefilled(b: Bench) -> int:
    """Prompt tokens of the step planned last."""
    return sum(row.num_tokens for row in b.scheduler._in_flight[-1].rows if row.start < row.sequence.num_prompt)


# One prefill for siblings.


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [8, 64])
def test_siblings_cost_one_prefill_and_a_tail_each(chunk: int, overlap: bool) -> None:
    b = Bench(max_prefill_chunk_tokens=chunk, overlap=overlap)
    for name in "abcd":
        b.submit(name, range(42), max_tokens=4)
    b.run()
    assert b.cached == {"a": 0, "b": 40, "c": 40, "d": 40}
    assert num_prefilled(b) == 42 + 3 * 2
    assert len({tuple(tokens) for tokens in b.tokens.values()}) == 1


def test_who_shares_a_part_waits_for_that_part_only_and_holds_up_nobody() -> None:
    b = Bench(max_prefill_chunk_tokens=8)
    b.submit("long", range(60))
    b.submit("part", [*range(12), 99, 98, 97, 96, 95])
    b.submit("other", range(200, 210))
    plan_of(b)
    assert running(b) == ["long", "other"]
    plan_of(b)
    assert running(b) == ["long", "other"]
    plan_of(b)  # the page of tokens 8 to 11 was launched in the step before
    assert running(b) == ["long", "part", "other"]


def test_a_sibling_goes_on_alone_when_the_one_it_waits_for_is_gone() -> None:
    b = Bench(max_prefill_chunk_tokens=8)
    b.submit("a", range(42))
    b.submit("b", range(42))
    plan_of(b)
    b.abort("a")
    plan_of(b)
    assert running(b) == ["b"]
    assert b.scheduler._running[0].num_cached_tokens == 8


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50)), min_size=1, max_size=12),
    st.sampled_from([8, 16, 64]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_page_that_fits_in_the_pool_is_computed_once(asks: list[tuple[int, int]], chunk: int, overlap: bool) -> None:
    b = Bench(num_pages=400, max_prefill_chunk_tokens=chunk, overlap=overlap)
    for index, (trunk, length) in enumerate(asks):
        b.submit(str(index), range(100 * trunk, 100 * trunk + length), max_tokens=1)
    b.run()
    # Of each prompt what follows its last usable page; of each trunk its pages once.
    tails = sum((length - 1) % 4 + 1 for _, length in asks)
    longest = {trunk: max(length for other, length in asks if other == trunk) for trunk, _ in asks}
    pages = sum((length - 1) // 4 * 4 for length in longest.values())
    assert b.engine.load().num_scheduled_tokens <= tails + pages


# Priorities.


def test_higher_priority_goes_first_and_equal_ones_in_order_of_arrival() -> None:
    b = Bench(max_running=1, overlap=False)
    for name, priority in (("a", 0), ("low", -1), ("b", 0), ("high", 5)):
        b.submit(name, range(4), max_tokens=2, priority=priority)
    b.run()
    assert list(b.tokens) == ["high", "a", "b", "low"]


def test_a_higher_priority_takes_the_place_of_the_lowest() -> None:
    b = Bench(max_running=2)
    b.submit("low", range(8), max_tokens=30, priority=-1)
    b.submit("middle", range(20, 28), max_tokens=30)
    b.step()
    b.submit("high", range(40, 48), max_tokens=4, priority=1)
    plan_of(b)
    assert running(b) == ["high", "middle"]


def test_preemption_takes_the_lowest_priority_and_no_token_changes() -> None:
    alone = {start: Bench().generate(range(start, start + 12), max_tokens=20) for start in (0, 100)}
    b = Bench(num_pages=13)
    b.submit("low", range(12), max_tokens=20, priority=-3)
    b.submit("high", range(100, 112), max_tokens=20)
    b.run()
    assert b.engine.load().num_preemptions >= 1
    assert list(b.tokens["low"]) == alone[0]
    assert list(b.tokens["high"]) == alone[100]
    assert b.scheduler.pool.num_referenced == 0


def test_prompts_of_higher_priority_get_the_budget_first() -> None:
    b = Bench(max_step_tokens=16)
    b.submit("long", range(100), priority=-1)
    plan_of(b)
    b.submit("urgent", range(200, 212))
    plan_of(b)
    assert [(row.sequence.num_prompt, row.num_tokens) for row in b.scheduler._in_flight[-1].rows] == [
        (12, 12),
        (100, 4),
    ]


# The warm before the cold.


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("later_s", "order"), [(0.01, ["warm", "cold"]), (0.05, ["cold", "warm"])])
def test_a_warm_prompt_goes_before_a_cold_one_that_came_little_earlier(later_s: float, order: list[str]) -> None:
    clock = Clock()
    b = Bench(max_running=1, clock=clock)
    b.generate(range(41))
    b.submit("runs", range(300, 304), max_tokens=6)
    b.step()
    b.submit("cold", range(100, 141), max_tokens=1)
    clock.now_s += later_s  # 40 tokens are cached: 0.04 s at 1,000 tokens a second
    b.submit("warm", range(41), max_tokens=1)
    b.run()
    assert list(b.tokens)[-2:] == order


def test_those_behind_the_window_wait_for_their_turn() -> None:
    b = Bench(max_running=1)
    b.generate(range(41))
    for index in range(64):
        b.submit(f"cold-{index}", range(100, 104), max_tokens=1)
    b.submit("warm", range(41), max_tokens=1)
    plan_of(b)
    assert running(b) == ["cold-0"]
    b.scheduler.commit(b.runner.execute(b.runner.plans[-1]).tokens(), now=0.0)
    plan_of(b)
    assert running(b) == ["warm"]


def test_a_cold_prompt_is_served_however_many_warm_ones_keep_coming() -> None:
    clock = Clock()
    b = Bench(max_running=1, clock=clock)
    b.generate(range(41))
    b.submit("cold", range(100, 141), max_tokens=1)
    for index in range(40):
        b.submit(f"warm-{index}", range(41), max_tokens=1)
        clock.now_s += 0.01
        b.step()
        if "cold" in b.tokens:
            break
    assert index <= 5


# Short pages.


def test_nobody_starts_who_would_be_preempted_at_once() -> None:
    b = Bench(num_pages=8)
    b.submit("first", range(12), max_tokens=4)
    b.submit("second", range(100, 112), max_tokens=4)
    b.step()
    assert running(b) == ["first"], "three pages and three are six of seven, but each is about to need its fourth"
    b.run()
    assert b.engine.load().num_preemptions == 0


def test_one_that_comes_back_keeps_its_seniority() -> None:
    b = Bench(num_pages=13)
    for name, start in (("first", 0), ("second", 100), ("third", 200)):
        b.submit(name, range(start, start + 10), max_tokens=20)
    while b.engine.load().num_preemptions < 2:
        b.step()
    assert [sequence.request.request_id for sequence in b.scheduler._waiting] == ["second", "third"]
    b.run()
    assert list(b.tokens) == ["first", "second", "third"]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(-1, 1)), min_size=1, max_size=10),
    st.integers(24, 60),
    st.sampled_from([8, 20, 64]),
    st.one_of(st.none(), st.integers(1, 12)),
)
@settings(max_examples=80, deadline=None)
def test_budgets_hold_and_everybody_finishes(
    asks: list[tuple[int, int, int]], num_pages: int, max_step_tokens: int, limit: int | None
) -> None:
    b = Bench(num_pages=num_pages, max_step_tokens=max_step_tokens)
    for index, (length, max_tokens, priority) in enumerate(asks):
        b.submit(str(index), range(index, index + length), max_tokens=max_tokens, priority=priority)
    num_left = {str(index): max_tokens for index, (_, max_tokens, _) in enumerate(asks)}
    while (plan := b.scheduler.plan(now=0.0, prefill_limit=limit)) is not None:
        handle = b.runner.execute(plan)
        rows = b.scheduler._in_flight[-1].rows
        assert plan.num_tokens <= max_step_tokens
        assert len({row.sequence for row in rows}) == len(rows) <= 8
        num_decoding = sum(row.start >= row.sequence.num_prompt for row in rows)
        if limit is not None and num_decoding and not b.engine.load().num_preemptions:
            assert prefilled(b) <= limit + _single_tokens(rows)
        b.scheduler.pool.check()
        for output in b.scheduler.commit(handle.tokens(), now=0.0):
            num_left[output.request_id] -= len(output.token_ids)
    assert set(num_left.values()) == {0}
    assert b.scheduler.pool.num_referenced == 0


def _single_tokens(rows: Sequence[object]) -> int:
    """A prompt whose last token alone is left counts as a decode row."""
    return len(rows)


# Answers that are written while prompts come in.


class Device:
    """A clock that a step moves by what it computes."""

    per_step_s, per_row_s, per_prompt_token_s = 0.010, 0.001, 0.001

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def run(self, plan: StepPlan) -> None:
        num_prompt = plan.num_tokens - plan.num_decode_rows
        self.now_s += self.per_step_s + self.per_row_s * plan.num_decode_rows + self.per_prompt_token_s * num_prompt


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("limit_s", "bound_s"), [(0.06, 0.07), (0.0, 1.0)])
def test_long_prompts_do_not_stop_answers_for_longer_than_set(limit_s: float, bound_s: float, overlap: bool) -> None:
    device = Device()
    b = Bench(
        clock=device,
        num_pages=2000,
        context_tokens=2048,
        max_step_tokens=512,
        max_prefill_chunk_tokens=512,
        max_inter_token_s=limit_s,
        overlap=overlap,
    )
    steps = iter(range(10_000))

    def wait(_: object, until_s: float | None) -> None:
        if until_s is None:
            device.run(b.runner.plans[next(steps)])

    b.submit("warm-up", range(500, 600), max_tokens=1)
    b.submit("answer", range(4), max_tokens=150)
    gaps: list[float] = []
    told_s: float | None = None
    index = 0
    while (report := b.engine.step(wait)) is not None:
        for output in report.outputs:
            b.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.request_id == "answer":
                gaps.append(device.now_s - told_s if told_s is not None else 0.0)
                told_s = device.now_s
        if len(gaps) in (20, 60, 100) and index < 6:
            for _ in range(2):
                b.submit(f"long-{index}", range(10_000 * index, 10_000 * index + 1500), max_tokens=2)
                index += 1
    assert len(b.tokens) == 8, "the long ones get on meanwhile"
    assert max(gaps) <= bound_s
    assert (max(gaps) > 0.3) == (limit_s == 0)


def test_a_prompt_gets_half_the_time_where_decoding_alone_takes_longer_than_set() -> None:
    device = Device()
    device.per_step_s = 0.5
    b = Bench(clock=device, num_pages=2000, context_tokens=2048, max_step_tokens=512, max_inter_token_s=0.1)
    steps = iter(range(10_000))

    def wait(_: object, until_s: float | None) -> None:
        if until_s is None:
            device.run(b.runner.plans[next(steps)])

    b.submit("answer", range(4), max_tokens=200)
    for _ in range(20):
        b.engine.step(wait)
    b.submit("long", range(10_000, 11_900), max_tokens=1)
    num_steps = 0
    while not any(output.request_id == "long" for output in b.engine.step(wait).outputs):  # type: ignore[union-attr]
        num_steps += 1
    assert num_steps < 40  # 64 tokens a step is the chunk's own limit
