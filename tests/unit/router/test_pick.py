"""A choice is the cheapest replica, fair among equals, and the same for the same arguments."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.prefix.chain import RoutingDigest
from ostrya.router.pick import LOAD_BOUND, candidates, choose
from ostrya.router.types import Choice, FleetSnapshot, KnowledgeLevel, Load, Reason, ReplicaView, WorkerId
from tests.unit.router.fleets import LOAD, snapshot, view, with_load

KEY = RoutingDigest(0x1234_5678_9ABC_DEF0)


def chosen(
    fleet: FleetSnapshot,
    depths: Mapping[int, int] | None = None,
    *,
    num_tokens: int = 1_000,
    key: RoutingDigest | None = KEY,
    seed: int = 0,
) -> Choice:
    choice = choose(fleet, depths or {}, num_tokens=num_tokens, first_digest=key, seed=seed)
    assert choice is not None
    return choice


def test_the_replica_that_holds_the_prefix_gets_the_request() -> None:
    choice = chosen(snapshot(view(0), view(1), view(2)), {1: 20})
    assert (choice.worker_id, choice.cached_tokens, choice.reason) == ("w1", 640, Reason.PREFIX)


def test_a_long_wait_outweighs_a_prefix() -> None:
    choice = chosen(snapshot(view(0), view(1, own_prefill_tokens=4_000, own_requests=4)), {1: 10})
    assert (choice.worker_id, choice.reason) == ("w0", Reason.LOAD)


def test_a_busy_fleet_weighs_saved_work_more() -> None:
    """The same difference in waiting is paid for a prefix when everybody waits, and not when nobody does."""
    idle = snapshot(view(0), view(1, own_prefill_tokens=500))
    busy = snapshot(view(0, own_prefill_tokens=4_000), view(1, own_prefill_tokens=4_500))
    assert (chosen(idle, {1: 10}).worker_id, chosen(idle, {1: 10}).beta) == ("w0", 1.5)
    assert (chosen(busy, {1: 10}).worker_id, chosen(busy, {1: 10}).beta) == ("w1", 8.0)


def test_the_last_prompt_token_is_never_counted_as_cached() -> None:
    assert chosen(snapshot(view(0)), {0: 2}, num_tokens=64).cached_tokens == 63


def test_no_replica_means_no_choice() -> None:
    assert choose(snapshot(), {}, num_tokens=1, first_digest=None, seed=0) is None
    only = frozenset({WorkerId("w0")})
    assert choose(snapshot(view(0)), {}, num_tokens=1, first_digest=None, seed=0, excluded=only) is None


def test_excluded_replicas_are_not_chosen() -> None:
    fleet = snapshot(view(0), view(1))
    choice = choose(fleet, {0: 20}, num_tokens=1_000, first_digest=KEY, seed=0, excluded={WorkerId("w0")})
    assert choice is not None
    assert choice.worker_id == "w1"


def test_among_equals_siblings_meet_and_strangers_spread() -> None:
    fleet = snapshot(*map(view, range(8)))
    keys = [RoutingDigest(n * 0x9E37_79B9_7F4A_7C15 % 2**64) for n in range(1, 801)]
    counts = Counter(chosen(fleet, key=key).worker_id for key in keys)
    assert len(counts) == 8
    assert statistics.stdev(counts.values()) < 20, "binomial: 9.4"
    assert all(chosen(fleet, key=keys[0], seed=seed) == chosen(fleet, key=keys[0]) for seed in range(20))
    assert chosen(fleet).reason is Reason.TIE


def test_short_prompts_spread_by_seed() -> None:
    fleet = snapshot(*map(view, range(4)))
    counts = Counter(chosen(fleet, key=None, seed=seed * 7_919).worker_id for seed in range(400))
    assert min(counts.values()) > 60


def test_among_equals_fewer_tokens_in_flight_come_first() -> None:
    # One token is 1 ms here: as near as makes no difference.
    fleet = snapshot(view(0, own_prefill_tokens=1), view(1))
    assert {chosen(fleet, key=RoutingDigest(key)).worker_id for key in range(50)} == {"w1"}


def test_losing_a_replica_moves_only_its_own_keys() -> None:
    whole, without = snapshot(*map(view, range(5))), snapshot(*map(view, range(4)))
    for key in range(0, 2**64, 2**64 // 200):
        before = chosen(whole, key=RoutingDigest(key)).worker_id
        if before != "w4":
            assert chosen(without, key=RoutingDigest(key)).worker_id == before


def test_frozen_credit_halves_every_minute() -> None:
    def cached(age_s: float) -> int:
        fleet = snapshot(view(0), view(1), level=KnowledgeLevel.FROZEN_INDEX, index_age_s=age_s)
        return chosen(fleet, {1: 20}).cached_tokens

    assert [cached(0), cached(60), cached(120)] == [640, 320, 160]


@pytest.mark.parametrize(
    ("level", "index_age_s", "own_age_s", "cached"),
    [
        (KnowledgeLevel.FRESH, 0.0, 60.0, 320),
        (KnowledgeLevel.FROZEN_INDEX, 60.0, 120.0, 160),
        (KnowledgeLevel.FROZEN_INDEX, 120.0, 60.0, 160),
        (KnowledgeLevel.NO_INDEX, 0.0, 60.0, 0),
    ],
)
def test_the_credit_of_a_replica_that_is_not_heard_of_fades_by_itself(
    level: KnowledgeLevel, index_age_s: float, own_age_s: float, cached: int
) -> None:
    silent = replace(view(1), index_age_s=own_age_s)
    fleet = snapshot(view(0), silent, level=level, index_age_s=index_age_s)
    found = {str(row.worker_id): row.cached_tokens for row in candidates(fleet, {0: 20, 1: 20}, num_tokens=1_000)}
    assert found["w1"] == cached
    assert found["w0"] >= cached


def test_without_an_index_siblings_still_meet() -> None:
    fleet = snapshot(*map(view, range(6)), level=KnowledgeLevel.NO_INDEX)
    choices = {chosen(fleet, {3: 20}, seed=seed).worker_id for seed in range(20)}
    assert len(choices) == 1
    assert chosen(fleet).reason is Reason.FALLBACK
    assert chosen(fleet).cached_tokens == 0


@settings(deadline=None)
@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=12), key=st.integers(0, 2**64 - 1))
def test_without_an_index_nobody_is_loaded_beyond_the_bound(loads: list[int], key: int) -> None:
    views = [view(number, own_requests=load) for number, load in enumerate(loads)]
    choice = chosen(snapshot(*views, level=KnowledgeLevel.NO_INDEX), key=RoutingDigest(key))
    taken = next(view.own_requests for view in views if view.worker_id == choice.worker_id)
    assert taken < LOAD_BOUND * (sum(loads) + 1) / len(loads)


def test_without_loads_the_less_used_of_two_is_taken() -> None:
    views = [view(number, own_requests=number) for number in range(8)]
    fleet = snapshot(*views, level=KnowledgeLevel.NO_LOAD)
    counts = Counter(str(chosen(fleet, seed=seed).worker_id) for seed in range(800))
    assert counts["w7"] == 0, "there is always a better second"
    assert counts["w0"] > counts["w3"] > counts["w6"]


views = st.builds(
    lambda tokens, requests, running, queued, age_s, free, rate: with_load(
        view(0, own_prefill_tokens=tokens, own_requests=requests),
        age_s=age_s,
        num_running=running,
        queued_tokens=queued,
        free_pages=free,
        prefill_tokens_per_s=rate,
    ),
    st.integers(0, 10**6),
    st.integers(0, 500),
    st.integers(0, 500),
    st.integers(0, 10**6),
    st.floats(0, allow_nan=False, allow_infinity=True),
    st.integers(0, 1_000),
    st.one_of(st.just(0.0), st.floats(1, 1e6)),
)


def numbered(row: list[ReplicaView]) -> list[ReplicaView]:
    return [replace(one, worker_id=WorkerId(f"w{n}"), slot=n) for n, one in enumerate(row)]


@settings(deadline=None)
@given(
    row=st.lists(views, min_size=1, max_size=9).map(numbered),
    level=st.sampled_from(KnowledgeLevel),
    depths=st.dictionaries(st.integers(0, 8), st.integers(1, 40)),
    seed=st.integers(0, 2**64 - 1),
    key=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
)
def test_the_same_arguments_give_the_same_choice_and_the_terms_explain_it(
    row: list[ReplicaView], level: KnowledgeLevel, depths: dict[int, int], seed: int, key: int | None
) -> None:
    fleet = snapshot(*row, level=level, index_age_s=30.0)
    digest = None if key is None else RoutingDigest(key)
    first = chosen(fleet, depths, key=digest, seed=seed)
    assert chosen(fleet, dict(depths), key=digest, seed=seed) == first
    terms = candidates(fleet, depths, num_tokens=1_000)
    assert [one.cost_s for one in terms] == sorted(one.cost_s for one in terms)
    if level in (KnowledgeLevel.FRESH, KnowledgeLevel.FROZEN_INDEX):
        taken = next(one for one in terms if one.worker_id == first.worker_id)
        assert taken.cost_s <= terms[0].cost_s * 1.01 + 0.001
        assert taken.cost_s == pytest.approx(taken.wait_s + first.beta * taken.prefill_s + taken.decode_s)


def test_our_own_requests_on_the_board_are_counted_once() -> None:
    both = with_load(view(0, own_prefill_tokens=1_000), queued_tokens=1_000)
    assert candidates(snapshot(both), {}, num_tokens=100)[0].wait_s == 1.0


def test_an_old_board_row_is_worked_off() -> None:
    old = with_load(view(0), queued_tokens=1_000, age_s=0.4)
    assert candidates(snapshot(old), {}, num_tokens=100)[0].wait_s == pytest.approx(0.6)


def test_a_replica_that_was_never_heard_of_is_judged_by_what_we_sent() -> None:
    silent = with_load(view(0, own_prefill_tokens=500, load=Load()), age_s=float("inf"))
    known = view(1, load=LOAD)
    term = next(one for one in candidates(snapshot(silent, known), {}, num_tokens=100) if one.worker_id == "w0")
    assert (term.wait_s, term.prefill_s) == (0.5, 0.1), "at the rate of the others"


def test_one_bad_measurement_does_not_starve_a_replica() -> None:
    """Measured at a tenth of its peer, it still gets a request as soon as the peer has a little to do."""
    slow = with_load(view(0), prefill_tokens_per_s=100.0)
    fast = with_load(view(1, own_prefill_tokens=400), prefill_tokens_per_s=1_000.0)
    assert chosen(snapshot(slow, fast), num_tokens=100).worker_id == "w0"


def test_a_load_that_is_too_old_gives_way_to_our_own_count() -> None:
    heard_long_ago = with_load(view(0, own_requests=0), num_running=16, age_s=60.0)
    assert candidates(snapshot(heard_long_ago), {}, num_tokens=100)[0].decode_s == 0.0


def test_full_batches_and_full_pages_cost_decode_time() -> None:
    empty, batch, pages, over = (
        view(0),
        with_load(view(1), num_running=14),
        with_load(view(2), free_pages=100),
        with_load(view(3), num_running=16, num_waiting=16),
    )
    costs = {
        str(one.worker_id): one.decode_s for one in candidates(snapshot(empty, batch, pages, over), {}, num_tokens=9)
    }
    assert costs["w0"] == 0
    assert costs["w0"] < costs["w1"] < costs["w3"]
    assert costs["w0"] < costs["w2"] < costs["w3"]


def test_avoided_replicas_are_taken_only_for_want_of_others() -> None:
    fleet = snapshot(view(0), view(1, own_requests=9, own_prefill_tokens=9_000))
    w0, w1 = frozenset({WorkerId("w0")}), frozenset({WorkerId("w1")})

    def pick(*avoided: frozenset[WorkerId], excluded: frozenset[WorkerId] = frozenset()) -> str | None:
        choice = choose(fleet, {}, num_tokens=100, first_digest=KEY, seed=0, excluded=excluded, avoided=avoided)
        return None if choice is None else choice.worker_id

    assert pick() == "w0"
    assert pick(w0) == "w1"
    assert pick(w0 | w1) == "w0"
    assert pick(w0, w1) == "w1", "the most urgent is heeded first"
    assert pick(w1, w0) == "w0"
    assert pick(w0, excluded=w1) == "w0"
    assert pick(w0, excluded=w0 | w1) is None


@given(
    num=st.integers(1, 6),
    groups=st.lists(st.frozensets(st.integers(0, 7)), max_size=3),
    out=st.frozensets(st.integers(0, 7)),
    level=st.sampled_from(KnowledgeLevel),
)
def test_avoiding_never_leaves_a_request_without_a_replica(
    num: int, groups: list[frozenset[int]], out: frozenset[int], level: KnowledgeLevel
) -> None:
    fleet = snapshot(*(view(n) for n in range(num)), level=level)
    excluded = frozenset(WorkerId(f"w{n}") for n in out)
    avoided = tuple(frozenset(WorkerId(f"w{n}") for n in group) for group in groups)
    plain = choose(fleet, {}, num_tokens=10, first_digest=KEY, seed=1, excluded=excluded)
    choice = choose(fleet, {}, num_tokens=10, first_digest=KEY, seed=1, excluded=excluded, avoided=avoided)
    assert (choice is None) == (plain is None)
    if choice is not None and avoided:
        others = {one.worker_id for one in fleet.replicas} - excluded - avoided[0]
        assert choice.worker_id in others or not others
        rows = candidates(fleet, {}, num_tokens=10, excluded=excluded, avoided=avoided)
        assert choice.worker_id in {row.worker_id for row in rows}


anything = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from((0, 1, -1, 2**63, 10**400, 5e-324, 1e308, math.nan, math.inf, -math.inf)),
)
"""Any number of either kind, also where a field's type names one of them: rows come from other processes."""
wild_views = st.builds(
    lambda counts, rest: ReplicaView(
        worker_id=WorkerId("w0"),
        slot=0,
        max_running=rest[0],
        page_size=rest[1],
        routing_stride=rest[2],
        load=Load(**dict(zip(Load.__dataclass_fields__, counts, strict=True))),
        load_age_s=rest[3],
        own_requests=rest[4],
        own_prefill_tokens=rest[5],
        index_age_s=rest[6],
    ),
    st.tuples(*[anything] * len(Load.__dataclass_fields__)),
    st.tuples(*[anything] * 7),
)


@settings(deadline=None, max_examples=150)
@given(
    row=st.lists(wild_views, min_size=1, max_size=5).map(numbered),
    level=st.sampled_from(KnowledgeLevel),
    depths=st.dictionaries(st.integers(-1, 5), anything),
    num_tokens=st.one_of(st.integers(0, 10**6), st.integers()),
    index_age_s=anything,
    seed=st.integers(),
    key=st.one_of(st.none(), st.integers()),
    excluded=st.frozensets(st.integers(0, 5).map(lambda number: WorkerId(f"w{number}"))),
)
def test_there_is_a_choice_whatever_the_numbers_are(
    row: list[ReplicaView],
    level: KnowledgeLevel,
    depths: dict[int, int],
    num_tokens: int,
    index_age_s: float,
    seed: int,
    key: int | None,
    excluded: frozenset[WorkerId],
) -> None:
    fleet = FleetSnapshot(replicas=tuple(row), level=level, index_age_s=index_age_s)
    digest = None if key is None else RoutingDigest(key)
    choice = choose(fleet, depths, num_tokens=num_tokens, first_digest=digest, seed=seed, excluded=excluded)
    left = {one.worker_id for one in row} - excluded
    assert (choice is not None) == bool(left)
    if choice is not None:
        assert choice.worker_id in left
        assert 0 <= choice.cached_tokens <= max(0, num_tokens)
        assert math.isfinite(choice.beta)
    terms = candidates(fleet, depths, num_tokens=num_tokens, excluded=excluded)
    assert {one.worker_id for one in terms} == left
    assert all(math.isfinite(one.cost_s) for one in terms)


def test_a_replica_whose_numbers_are_none_comes_last() -> None:
    sound = view(0, own_requests=5)
    for changes in ({"prefill_tokens_per_s": math.nan}, {"num_running": 2**63}, {"queued_tokens": math.inf}):
        odd = with_load(view(1), **changes)
        assert chosen(snapshot(sound, replace(odd, max_running=0))).worker_id == "w0"
