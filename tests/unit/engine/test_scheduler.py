"""Who gets which place in a step, who is preempted, and what an abort leaves behind."""

import numpy as np
import pytest

from ostrya.engine.noise import uniform
from ostrya.engine.plan import StepPlan
from ostrya.errors import InvalidRequest
from tests.fakes.runner import EOS
from tests.unit.engine.bench import Bench


def plan_of(b: Bench) -> StepPlan:
    plan = b.scheduler.plan(now=0.0)
    assert plan is not None
    return plan


def commit(b: Bench, *tokens: int) -> list[str]:
    """Commits the planned step with these tokens; the ids that got one."""
    outputs = b.scheduler.commit(np.array([*tokens, 0, 0, 0, 0], np.int32), now=0.0)
    return [output.request_id for output in outputs]


def test_idle_scheduler_plans_nothing() -> None:
    assert Bench().scheduler.plan(now=0.0) is None


def test_decode_rows_come_first_and_prefill_fills_the_budget_exactly() -> None:
    b = Bench(max_step_tokens=16)
    b.submit("short", range(5))
    b.step()
    b.submit("long", range(100, 140))
    plan = plan_of(b)
    assert (plan.num_tokens, plan.num_rows, plan.num_decode_rows) == (16, 2, 1)
    assert plan.query_start[:3].tolist() == [0, 1, 16]
    assert plan.wants_token[:2].tolist() == [True, False]
    assert plan.token_ids[1:16].tolist() == list(range(100, 115))


def test_chunk_is_limited_and_the_rest_of_the_budget_goes_to_the_next() -> None:
    b = Bench(max_step_tokens=32, max_prefill_chunk_tokens=12)
    for name in ("a", "b", "c"):
        b.submit(name, [ord(name)] * 20)
    plan = plan_of(b)
    assert np.diff(plan.query_start[:4]).tolist() == [12, 12, 8]


def test_one_token_chunk_counts_as_a_decode_row() -> None:
    b = Bench(max_step_tokens=8, max_running=8, max_prefill_chunk_tokens=7)
    b.submit("a", range(20))
    b.submit("b", range(50, 70))
    plan = plan_of(b)
    assert plan.num_decode_rows == 1
    assert np.diff(plan.query_start[:3]).tolist() == [1, 7]
    assert not plan.wants_token.any()


def test_arrays_are_padded_to_the_bucket() -> None:
    b = Bench()
    b.submit("a", range(10, 17), temperature=0.5, seed=9)
    plan = plan_of(b)
    tokens, rows, pages = plan.bucket.tokens, plan.bucket.rows, plan.bucket.pages
    assert plan.token_ids.shape == plan.positions.shape == plan.slot_mapping.shape == (tokens,)
    assert plan.query_start.tolist() == [0, *[7] * rows]
    assert plan.page_table.shape == (rows, pages)
    assert plan.kv_lens.tolist() == [7] + [0] * (rows - 1)
    assert plan.logits_index[0] == 6
    assert plan.uniform[0] == np.float32(uniform(9, 7))
    assert set(plan.slot_mapping[7:].tolist()) <= set(range(b.config.page_size))


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    b = Bench(num_pages=11)
    b.submit("a", range(30), max_tokens=2)
    b.submit("large", range(100, 130), max_tokens=2)
    b.submit("small", range(200, 204), max_tokens=2)
    b.step()
    load = b.engine.load()
    assert (load.num_running, load.num_waiting) == (1, 2)
    b.run()
    assert list(b.tokens) == ["a", "large", "small"]


def test_hit_never_covers_the_last_prompt_token() -> None:
    b = Bench()
    b.generate(range(16))
    b.generate(range(16))
    assert list(b.cached.values()) == [0, 12]
    assert (b.engine.load().queried_tokens, b.engine.load().hit_tokens) == (32, 12)


def test_generated_tokens_are_reused_too() -> None:
    b = Bench()
    answer = b.generate(range(10), max_tokens=12)
    b.generate([*range(10), *answer, 5])
    # 21 tokens were computed: the last one generated never was.
    assert b.cached["alone-1"] == 20


def test_another_cache_namespace_shares_nothing() -> None:
    b = Bench()
    b.generate(range(16))
    b.submit("other", range(16), cache_namespace="tenant")
    b.run()
    assert b.cached["other"] == 0
    assert b.tokens["other"] == b.tokens["alone-0"]


def test_same_step_prefix_is_not_a_hit_but_ends_on_one_page() -> None:
    """Prompts of whole pages: their last page is computed by each, because a hit never covers it."""
    b = Bench(overlap=False)
    b.submit("a", range(4))
    b.submit("b", range(4))
    b.step()
    assert b.scheduler.pool.num_referenced == 1
    b.run()
    assert b.cached == {"a": 0, "b": 0}
    assert b.tokens["a"] == b.tokens["b"]


def test_last_admitted_is_preempted_and_finishes_with_the_same_tokens() -> None:
    alone = [Bench().generate(range(start, start + 12), max_tokens=20) for start in (0, 100)]
    b = Bench(num_pages=13)
    b.submit("first", range(12), max_tokens=20)
    b.submit("second", range(100, 112), max_tokens=20)
    b.run()
    assert b.engine.load().num_preemptions >= 1
    assert [b.tokens["first"], b.tokens["second"]] == alone
    assert b.cached["second"] == 0  # what the first admission found


def test_request_that_can_never_fit_is_refused() -> None:
    b = Bench(num_pages=5)
    with pytest.raises(InvalidRequest, match=r"12 \+ 5 tokens.*together at most 16"):
        b.submit("a", range(12), max_tokens=5)
    b.submit("b", range(12), max_tokens=4)
    b.run()
    assert len(b.tokens["b"]) == 4


def test_stop_token_ends_the_answer_and_is_part_of_it() -> None:
    tokens = Bench().generate(range(9), max_tokens=8)
    assert Bench().generate(range(9), max_tokens=8, stop_token_ids=frozenset({tokens[3]})) == tokens[:4]


@pytest.mark.parametrize(("ignore_eos", "num_running"), [(False, 0), (True, 1)])
def test_end_of_sequence_ends_the_answer_unless_ignored(ignore_eos: bool, num_running: int) -> None:
    b = Bench()
    b.submit("a", range(5), ignore_eos=ignore_eos)
    plan_of(b)
    assert commit(b, EOS) == ["a"]
    assert b.engine.load().num_running == num_running


def test_abort_frees_pages_at_once_while_the_step_runs() -> None:
    b = Bench()
    b.submit("a", range(30))
    b.submit("b", range(50, 60))
    referenced: list[int] = []

    def abort() -> None:
        b.abort("a")
        referenced.append(b.scheduler.pool.num_referenced)

    b.step(abort)
    assert referenced == [3]
    b.run()
    assert list(b.tokens) == ["b"]


def test_pages_of_an_aborted_request_are_safe_to_reuse_in_the_next_step() -> None:
    expected = Bench(num_pages=9).generate(range(100, 128), max_tokens=4)
    b = Bench(num_pages=9)
    b.submit("a", range(30), max_tokens=2)
    plan = plan_of(b)
    b.abort("a")
    b.submit("b", range(100, 128), max_tokens=4)
    b.runner.execute(plan)
    assert commit(b, 1) == []
    b.run()
    assert b.tokens["b"] == expected


def test_waiting_request_can_be_aborted() -> None:
    b = Bench(max_running=1)
    b.submit("a", range(8))
    b.submit("b", range(8))
    b.step()
    b.abort("b")
    b.run()
    assert list(b.tokens) == ["a"]


def test_continuation_elsewhere_gives_the_same_tokens() -> None:
    whole = Bench().generate(range(11), max_tokens=12, temperature=1, seed=77)
    rest = Bench().generate([*range(11), *whole[:5]], max_tokens=7, temperature=1, seed=77)
    assert whole[5:] == rest
    assert whole != Bench().generate(range(11), max_tokens=12, temperature=1, seed=78)


def test_preempted_request_goes_before_those_that_never_ran() -> None:
    b = Bench(num_pages=13, max_running=2)
    b.submit("first", range(12), max_tokens=20)
    b.submit("second", range(100, 112), max_tokens=30)
    b.submit("third", range(200, 204), max_tokens=2)
    while not b.engine.load().num_preemptions:
        b.step()
    assert [sequence.request.request_id for sequence in b.scheduler._waiting] == ["second", "third"]
    b.run()
    assert [len(b.tokens[name]) for name in ("first", "second", "third")] == [20, 30, 2]
