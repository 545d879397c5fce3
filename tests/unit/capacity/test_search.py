"""The search against a scan of every count, and what must never get cheaper or smaller."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf, log, sqrt
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.capacity.chips import find_slice
from ostrya.capacity.estimate import efficiency
from ostrya.capacity.facts import Setup
from ostrya.capacity.memory import fit
from ostrya.capacity.models import find_model
from ostrya.capacity.published import Engine
from ostrya.capacity.queueing import Goal, Term, burst_of, late_wait_s
from ostrya.capacity.remedies import nearest, remedies
from ostrya.capacity.report import report
from ostrya.capacity.search import Load, Market, search
from ostrya.capacity.serving import Serving, serving
from ostrya.capacity.spec import ModelSpec
from ostrya.capacity.speculation import Drafting
from ostrya.errors import ConfigError

MARKET = Market(engine=Engine.SERVING)
CHAT = Load(requests_per_s=5.0, prompt_tokens=2000, output_tokens=300, hit_ratio=0.5)
USUAL = Goal(ttft_s=1.0, tpot_s=0.03)
MOST_REPLICAS = 40


def on(*names: str) -> Market:
    return replace(MARKET, slices=tuple(find_slice(name) for name in names))


def scanned(spec: ModelSpec, slice_name: str, goal: Goal, load: Load) -> int | None:
    """Replicas, by trying 1, 2, 3, … and every batch: the definitions of queueing.py written out once more."""
    where = find_slice(slice_name)
    most = fit(spec, where, context_tokens=load.prompt_tokens + load.output_tokens).max_requests

    def at(count: int) -> Serving:
        return serving(
            spec,
            where,
            num_requests=count,
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            hit_ratio=load.hit_ratio,
            efficiency=efficiency(Engine.SERVING, where.chip.name),
        )

    states = [None, *(at(count) for count in range(1, min(most, 400) + 1))]
    for replicas in range(1, MOST_REPLICAS):
        rate = load.requests_per_s / replicas
        before = 0.0
        for count, state in enumerate(states):
            if state is None:
                continue
            if state.requests_per_s >= rate:
                mean = count - 1 + (rate - before) / (state.requests_per_s - before)
                burst = max(1, ceil(mean + 1.645 * sqrt(mean)))
                if burst < len(states):
                    full = states[burst]
                    assert full is not None
                    busy = rate * full.ttft_s
                    wait = 0.0 if busy < 1 else inf
                    if 0.05 < busy < 1:
                        wait = full.ttft_s * log(busy / 0.05) / (2 * (1 - busy))
                    if full.tpot_s <= goal.tpot_s and full.ttft_s + wait <= goal.ttft_s:
                        return replicas
                break
            before = state.requests_per_s
    return None


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "qwen3.8-27b"])
@pytest.mark.parametrize("slice_name", ["v6e-4", "v5p-4", "tpu7x-4"])
@pytest.mark.parametrize("goal", [USUAL, Goal(ttft_s=0.4), Goal(tpot_s=0.02), Goal(ttft_s=0.2, tpot_s=0.05)])
def test_the_count_of_replicas_is_the_one_a_scan_finds(name: str, slice_name: str, goal: Goal) -> None:
    spec = find_model(name)
    for rate in (0.3, 4.0, 30.0):
        load = replace(CHAT, requests_per_s=rate)
        best = search(spec, goal, load, on(slice_name)).best
        assert (best.num_replicas if best and best.num_replicas < MOST_REPLICAS else None) == scanned(
            spec, slice_name, goal, load
        )


def test_what_is_offered_keeps_the_objective_with_its_margins() -> None:
    for offer in search(find_model("qwen3.8-27b"), USUAL, CHAT, MARKET).offers:
        assert offer.ttft_s <= USUAL.ttft_s
        assert offer.tpot_s <= USUAL.tpot_s
        assert offer.mean_requests < offer.burst_requests <= offer.max_requests
        assert 0 < offer.utilisation_ratio < 1
        assert offer.num_replicas * offer.requests_per_s == pytest.approx(CHAT.requests_per_s)


def test_offers_are_sorted_by_price_and_without_prices_by_chips() -> None:
    spec = find_model("llama-3.1-8b")
    prices = {"v5e": 1.2, "v6e": 2.7, "tpu7x": 12.0}
    priced = search(spec, USUAL, CHAT, replace(MARKET, prices=prices))
    costs = [offer.price_per_hour_total for offer in priced.offers]
    assert all(costs)
    assert costs == sorted(costs, key=float)  # type: ignore[arg-type]
    for offer in priced.offers:
        assert offer.generation in prices
        assert offer.price_per_hour_total is not None
        assert offer.price_per_hour_total == pytest.approx(offer.num_chips_total * prices[offer.generation])
        per_hour = CHAT.requests_per_s * CHAT.output_tokens * 3600
        assert offer.price_per_million_output_tokens == pytest.approx(offer.price_per_hour_total / per_hour * 1e6)
    free = search(spec, USUAL, CHAT, MARKET)
    chips = [offer.num_chips_total for offer in free.offers]
    assert chips == sorted(chips)
    assert {offer.price_per_hour_total for offer in free.offers} == {None}
    assert [offer.generation for offer in free.best_by_generation] == list(
        dict.fromkeys(offer.generation for offer in free.offers)
    )


GOALS = st.builds(Goal, ttft_s=st.floats(0.05, 5.0), tpot_s=st.floats(0.005, 0.2))
LOADS = st.builds(
    Load,
    requests_per_s=st.floats(0.1, 200.0),
    prompt_tokens=st.integers(1, 20_000),
    output_tokens=st.integers(2, 2000),
    hit_ratio=st.floats(0.0, 1.0),
)


@settings(max_examples=40, deadline=None)
@given(goal=GOALS, load=LOADS, by=st.floats(0.3, 1.0))
def test_a_tighter_objective_is_never_cheaper(goal: Goal, load: Load, by: float) -> None:
    spec, market = (
        find_model("llama-3.1-8b"),
        replace(on("v6e-4", "tpu7x-1", "v5p-4"), prices={"v6e": 2.7, "tpu7x": 12.0}),
    )
    loose = search(spec, goal, load, market).best
    for tight in (replace(goal, ttft_s=goal.ttft_s * by), replace(goal, tpot_s=goal.tpot_s * by)):
        found = search(spec, tight, load, market).best
        if found is not None:
            assert loose is not None
            assert loose.price_per_hour_total is not None
            assert found.price_per_hour_total is not None
            assert loose.price_per_hour_total <= found.price_per_hour_total


@settings(max_examples=40, deadline=None)
@given(goal=GOALS, load=LOADS, times=st.floats(1.0, 20.0))
def test_a_higher_rate_never_needs_fewer_replicas(goal: Goal, load: Load, times: float) -> None:
    spec, market = find_model("qwen3.8-27b"), on("tpu7x-4")
    low = search(spec, goal, load, market).best
    high = search(spec, goal, replace(load, requests_per_s=load.requests_per_s * times), market).best
    assert (low is None) == (high is None)
    if low is not None and high is not None:
        assert low.num_replicas <= high.num_replicas


def test_a_burst_exceeds_the_mean_by_less_and_less() -> None:
    shares = [burst_of(float(mean)) / mean for mean in (1, 10, 100, 1000)]
    assert shares == sorted(shares, reverse=True)
    assert burst_of(0.001) == 1


def test_a_lane_that_is_always_busy_never_answers() -> None:
    assert late_wait_s(requests_per_s=10.0, service_s=0.1) == inf
    assert late_wait_s(requests_per_s=0.4, service_s=0.1) == 0.0
    waits = [late_wait_s(requests_per_s=rate, service_s=0.1) for rate in (1.0, 5.0, 9.0, 9.9)]
    assert waits == sorted(waits)


def test_a_model_that_fits_nowhere_is_refused_for_memory_with_the_bytes() -> None:
    answer = search(find_model("kimi-k3"), USUAL, CHAT, on("v5e-8", "v6e-8"))
    assert answer.best is None
    assert {one.term for one in answer.refusals} == {Term.MEMORY}
    close = nearest(answer)
    assert close
    assert close.slice_name == "v6e-8"
    room = fit(find_model("kimi-k3"), find_slice("v6e-8"), context_tokens=2300)
    assert close.value - close.allowed == pytest.approx(-room.free_bytes)


@pytest.mark.parametrize(
    ("goal", "term"), [(Goal(ttft_s=0.001, tpot_s=1.0), Term.TTFT), (Goal(ttft_s=9.0, tpot_s=0.0001), Term.TPOT)]
)
def test_the_term_that_forbids_is_named_with_what_it_would_be(goal: Goal, term: Term) -> None:
    answer = search(find_model("llama-3.1-8b"), goal, CHAT, MARKET)
    assert answer.best is None
    close = nearest(answer)
    assert close
    assert close.term is term
    assert close.value == (close.ttft_s if term is Term.TTFT else close.tpot_s)
    assert close.bound_by


def test_a_remedy_that_is_told_does_help() -> None:
    spec, goal = find_model("llama-3.1-8b"), Goal(ttft_s=0.02, tpot_s=0.05)
    market, load = on("v6e-4"), replace(CHAT, hit_ratio=0.0)
    answer = search(spec, goal, load, market)
    told = remedies(spec, goal, load, market, answer)
    ratio = next(float(one.split()[4]) for one in told if one.startswith("a hit ratio"))
    assert search(spec, goal, replace(load, hit_ratio=ratio), market).best
    assert not search(spec, goal, replace(load, hit_ratio=ratio - 0.01), market).best
    other = next(one for one in told if one.startswith("another slice"))
    assert search(spec, goal, load, on(other.split()[-1])).best


def test_an_answer_with_offers_needs_no_remedy() -> None:
    spec = find_model("llama-3.1-8b")
    answer = search(spec, USUAL, CHAT, MARKET)
    assert remedies(spec, USUAL, CHAT, MARKET, answer) == ()


@pytest.mark.parametrize(
    ("goal", "load"),
    [
        (Goal(ttft_s=0.0), CHAT),
        (Goal(tpot_s=float("nan")), CHAT),
        (USUAL, replace(CHAT, requests_per_s=0.0)),
        (USUAL, replace(CHAT, requests_per_s=inf)),
        (USUAL, replace(CHAT, prompt_tokens=0)),
        (USUAL, replace(CHAT, output_tokens=-1)),
        (USUAL, replace(CHAT, hit_ratio=1.1)),
        (USUAL, replace(CHAT, prompt_tokens=10**7)),
    ],
)
def test_a_load_that_makes_no_sense_is_one_line(goal: Goal, load: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        search(find_model("llama-3.1-8b"), goal, load, MARKET)
    assert "\n" not in str(raised.value)


def test_a_fused_kernel_is_a_remedy_where_it_helps() -> None:
    spec, goal = find_model("kimi-k3"), Goal(ttft_s=inf, tpot_s=0.005)
    answer = search(spec, goal, CHAT, MARKET)
    assert answer.best is None
    assert any("--engine fused" in one for one in remedies(spec, goal, CHAT, MARKET, answer))
    fused = replace(MARKET, engine=Engine.FUSED)
    assert search(spec, goal, CHAT, fused).best


def test_a_search_of_all_slices_takes_at_most_two_seconds() -> None:
    start = process_time()
    search(find_model("kimi-k3"), USUAL, CHAT, MARKET)
    assert process_time() - start <= 2


def test_drafting_is_judged_in_the_search() -> None:
    spec, load = find_model("kimi-k3"), Load(requests_per_s=0.5, prompt_tokens=8000, output_tokens=500)
    market, goal = replace(on("tpu7x-16"), engine=Engine.FUSED), Goal(tpot_s=0.0025)
    assert not search(spec, goal, load, market).offers
    drafting = replace(market, drafting=Drafting(num_draft_tokens=7, acceptance_length=5.0))
    best = search(spec, goal, load, drafting).best
    assert best
    assert best.tpot_s <= goal.tpot_s
    # Every drafted token keeps a state of its own, so memory holds fewer requests.
    slow = Goal(ttft_s=100.0, tpot_s=1.0)
    many = [search(spec, slow, load, one).best for one in (market, drafting)]
    assert many[0]
    assert many[1]
    assert many[1].max_requests < many[0].max_requests


def test_a_search_that_drafts_already_is_not_told_to() -> None:
    spec, load = find_model("kimi-k3"), Load(requests_per_s=0.5, prompt_tokens=8000, output_tokens=500)
    market, goal = replace(on("tpu7x-16"), engine=Engine.FUSED), Goal(tpot_s=0.0025)
    told = remedies(spec, goal, load, market, search(spec, goal, load, market))
    assert any("acceptance length" in one for one in told)
    drafting = replace(market, drafting=Drafting(num_draft_tokens=7, acceptance_length=1.1))
    told = remedies(spec, goal, load, drafting, search(spec, goal, load, drafting))
    assert not any("acceptance length" in one for one in told)


@pytest.mark.parametrize("drafting", [Drafting(num_draft_tokens=8), Drafting(num_draft_tokens=3, acceptance_length=5)])
def test_drafting_that_makes_no_sense_is_refused(drafting: Drafting) -> None:
    with pytest.raises(ConfigError, match=r"at most 7|from 1 to 4"):
        search(find_model("kimi-k3"), USUAL, CHAT, replace(MARKET, drafting=drafting))


@pytest.mark.parametrize(("name", "slice_name"), [("kimi-k3", "tpu7x-16"), ("llama-3.1-70b", "tpu7x-4")])
@pytest.mark.parametrize("prompt_tokens", [100, 2100, 8192, 50_000])
def test_a_request_alone_takes_what_the_report_says(name: str, slice_name: str, prompt_tokens: int) -> None:
    spec, where = find_model(name), find_slice(slice_name)
    setup = Setup(context_tokens=0, num_requests=1, prompt_tokens=prompt_tokens, engine=Engine.SERVING)
    alone_s = report(spec, where, setup).prompt.ttft_s.estimate
    load = Load(requests_per_s=0.001, prompt_tokens=prompt_tokens, output_tokens=100)
    for factor, offers in ((1.001, 1), (0.999, 0)):
        assert len(search(spec, Goal(ttft_s=alone_s * factor), load, on(slice_name)).offers) == offers


def follow(told: Sequence[str], pattern: str) -> float | None:
    """The number that a remedy names."""
    found = [float(match[1].replace(",", "")) for one in told if (match := re.match(pattern, one))]
    assert len(found) <= 1
    return found[0] if found else None


REFUSED = [
    ("qwen3.8-27b", "v5e-4", Goal(tpot_s=0.02), Load(requests_per_s=0.1, prompt_tokens=100, output_tokens=50)),
    ("llama-3.1-8b", "v6e-1", Goal(tpot_s=0.05), Load(requests_per_s=5, prompt_tokens=120_000, output_tokens=1000)),
    ("kimi-k3", "tpu7x-16", Goal(tpot_s=0.02), Load(requests_per_s=1, prompt_tokens=8000, output_tokens=99)),
    ("kimi-k3", "tpu7x-16", Goal(ttft_s=7.0), Load(requests_per_s=0.01, prompt_tokens=200_000, output_tokens=99)),
    ("qwen3.8-27b", "tpu7x-1", Goal(ttft_s=0.5), Load(requests_per_s=1, prompt_tokens=16_000, output_tokens=99)),
]


@pytest.mark.parametrize(("name", "slice_name", "goal", "load"), REFUSED)
def test_remedies_on_the_nearest_slice_do_help_and_less_would_not(
    name: str, slice_name: str, goal: Goal, load: Load
) -> None:
    spec, market = find_model(name), on(slice_name)
    answer = search(spec, goal, load, market)
    assert not answer.offers
    told = remedies(spec, goal, load, market, answer)
    assert told

    def does(load: Load = load, market: Market = market) -> bool:
        return bool(search(spec, goal, load, market).offers)

    if longest := follow(told, r"prompts of at most ([\d,]+) tokens"):
        assert does(replace(load, prompt_tokens=int(longest)))
        assert not does(replace(load, prompt_tokens=int(longest) + 1))
    if hits := follow(told, r"a hit ratio of ([\d.]+) or more"):
        assert does(replace(load, hit_ratio=hits))
        assert not does(replace(load, hit_ratio=hits - 0.01))
    if chunk := follow(told, r"prompts in chunks of ([\d,]+) tokens"):
        assert does(market=replace(market, chunk_tokens=int(chunk)))
    if length := follow(told, r"speculation: .* length of ([\d.]+) or more"):
        assert spec.drafter
        most = spec.drafter.max_draft_tokens
        assert does(market=replace(market, drafting=Drafting(num_draft_tokens=most, acceptance_length=length)))
        if length > 1:
            less = Drafting(num_draft_tokens=most, acceptance_length=length - 0.1)
            assert not does(market=replace(market, drafting=less))


def test_every_kind_of_remedy_is_told_of_some_load() -> None:
    told = [
        one
        for name, slice_name, goal, load in REFUSED
        for spec, market in [(find_model(name), on(slice_name))]
        for one in remedies(spec, goal, load, market, search(spec, goal, load, market))
    ]
    kinds = ("another", "weights in", "one fused", "prompts of", "a hit", "prompts in", "speculation", "an objective")
    assert {kind for kind in kinds if any(one.startswith(kind) for one in told)} == set(kinds)
