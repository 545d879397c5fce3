"""From a request's tokens to a recorded decision, try by try."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
import pytest
from prometheus_client import CollectorRegistry

from ostrya.prefix.chain import ChainKey, page_digests, root, routing_digests
from ostrya.prefix.events import Stored
from ostrya.prefix.index import PrefixIndex
from ostrya.router import decide
from ostrya.router.admission import Ticket
from ostrya.router.decide import Decider, Routing, Together
from ostrya.router.explain import DecisionLog, candidates, replay
from ostrya.router.fleet import Fleet
from ostrya.router.metrics import RouterMetrics
from ostrya.router.offload import Offload
from ostrya.router.replica import ReplicaInfo
from ostrya.router.types import Hold, KnowledgeLevel, Load, Reason, ReplicaState, WorkerId

T = TypeVar("T")

CHAIN = ChainKey(model="tiny", tokenizer_fingerprint="fake")
PROMPT = array("I", range(400))


@dataclass
class Desk:
    """A decider and what it decides with."""

    fleet: Fleet
    index: PrefixIndex
    decisions: DecisionLog
    decider: Decider

    def add(
        self,
        name: str,
        *,
        page_size: int = 16,
        stride: int = 1,
        prefix_credit: bool = True,
        address: str = "127.0.0.1:1",
    ) -> None:
        """A routable replica."""
        info = ReplicaInfo(
            worker_id=WorkerId(name),
            address=address,
            epoch=1,
            model="tiny",
            page_size=page_size,
            routing_stride=stride,
            max_running=8,
            context_tokens=2048,
            vocab_size=1000,
            prefix_credit=prefix_credit,
        )
        self.fleet.add(info, grpc.aio.insecure_channel(info.address))
        self.fleet.set_state(info.worker_id, ReplicaState.READY)
        self.fleet.board(info.worker_id, Load(prefill_tokens_per_s=1_000.0), stamp=1)

    def holds(self, name: str, num_tokens: int, *, page_size: int = 16, stride: int = 1, namespace: str = "") -> None:
        """The index knows that the replica could continue the prompt's first tokens."""
        key = ChainKey(model="tiny", tokenizer_fingerprint="fake", namespace=namespace)
        pages = page_digests(root(key), PROMPT[:num_tokens], page_size=page_size)
        slot = self.fleet.followed()[WorkerId(name)].slot
        self.index.apply(slot, [Stored(tuple(routing_digests(pages, stride=stride)))])

    def routing(
        self, *, namespace: str = "", max_tokens: int | None = 8, together: Together | None = None, seed: int = 5
    ) -> Routing:
        ticket = Ticket(request_id="r", tenant="default", namespace=namespace, deadline=1e9)
        return self.decider.open(ticket, PROMPT, max_tokens=max_tokens, seed=seed, together=together)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    index = PrefixIndex()
    fleet = Fleet(index=index, clock=lambda: 0.0)
    fleet.set_following(True)
    decisions = DecisionLog(clock=lambda: 0.0)
    metrics = RouterMetrics(CollectorRegistry(), model="tiny", pool="default")
    offload = Offload()
    decider = Decider(
        fleet=fleet,
        index=index,
        chain=CHAIN,
        decisions=decisions,
        metrics=metrics,
        offload=offload,
        long_request_tokens=100,
        clock=lambda: 0.0,
    )
    yield Desk(fleet, index, decisions, decider)
    await fleet.close()
    await asyncio.to_thread(offload.close)


async def test_a_decision_is_recorded_with_what_replays_it(desk: Desk) -> None:
    desk.add("w0")
    desk.add("w1")
    desk.holds("w1", 160)
    decision = desk.routing().choose()
    assert decision is not None
    assert (decision.choice.worker_id, decision.choice.cached_tokens, decision.attempt) == ("w1", 160, 1)
    assert desk.decisions.get(decision.decision_id) is decision
    assert replay(decision) == decision.choice
    assert decision.snapshot.level is KnowledgeLevel.FRESH


async def test_later_tries_exclude_and_are_numbered(desk: Desk) -> None:
    desk.add("w0")
    desk.add("w1")
    desk.holds("w1", 160)
    routing = desk.routing()
    assert routing.choose() is not None
    second = routing.choose(excluded={WorkerId("w1")})
    assert second is not None
    assert (second.choice.worker_id, second.attempt) == ("w0", 2)
    assert replay(second) == second.choice
    assert routing.choose(excluded={WorkerId("w0"), WorkerId("w1")}) is None


async def test_siblings_of_a_pick_count_on_its_whole_prompt(desk: Desk) -> None:
    desk.add("w0")
    desk.add("w1")
    first, second = desk.routing().choose(), desk.routing().choose()
    assert first is not None
    assert second is not None
    assert second.choice.worker_id == first.choice.worker_id
    assert (second.choice.cached_tokens, second.choice.reason) == (399, Reason.PREFIX)


async def test_during_an_update_each_replica_is_looked_up_by_its_own_blocks(desk: Desk) -> None:
    desk.add("w0", page_size=16, stride=1)
    desk.add("w1", page_size=16, stride=4)
    desk.add("w2", page_size=32, stride=1)
    desk.holds("w0", 80, page_size=16, stride=1)
    desk.holds("w1", 128, page_size=16, stride=4)
    desk.holds("w2", 96, page_size=32, stride=1)
    decision = desk.routing().choose()
    assert decision is not None
    assert dict(decision.depths) == {0: 5, 1: 2, 2: 3}
    assert (decision.choice.worker_id, decision.choice.cached_tokens) == ("w1", 128)


async def test_another_tenants_prefix_is_not_seen(desk: Desk) -> None:
    desk.add("w0")
    desk.holds("w0", 160, namespace="theirs")
    ours, theirs = desk.routing().choose(), desk.routing(namespace="theirs").choose()
    assert ours is not None
    assert theirs is not None
    assert (ours.choice.cached_tokens, theirs.choice.cached_tokens) == (0, 160)


async def test_a_replica_with_another_chain_is_used_without_credit(desk: Desk) -> None:
    desk.add("w0", prefix_credit=False)
    decision = desk.routing().choose()
    assert decision is not None
    assert (decision.choice.worker_id, decision.choice.cached_tokens) == ("w0", 0)
    again = desk.routing().choose()
    assert again is not None
    assert again.choice.cached_tokens == 0, "nothing is predicted for it either"


async def test_what_a_request_avoids_depends_on_its_length_and_is_recorded(desk: Desk) -> None:
    for number in range(3):
        desk.add(f"w{number}", address=f"127.0.0.1:{number + 1}")
    soon, now = frozenset({WorkerId("w0")}), frozenset({WorkerId("w1")})
    desk.fleet.set_holds({"127.0.0.1:1": (Hold.MAINTENANCE,), "127.0.0.1:2": (Hold.TERMINATION_IMPENDING,)})
    for max_tokens, avoided, expected in (
        (99, (now,), {"w0", "w2"}),
        (100, (now, soon), {"w2"}),
        (None, (now, soon), {"w2"}),
    ):
        decision = desk.routing(max_tokens=max_tokens).choose()
        assert decision is not None
        assert (decision.avoided, decision.choice.worker_id in expected) == (avoided, True)
        assert replay(decision) == decision.choice
        assert {row.worker_id for row in candidates(decision)} == expected
    last = desk.routing(max_tokens=None).choose(excluded={WorkerId("w2")})
    assert last is not None
    assert last.choice.worker_id == "w0", "soon is better than now"
    assert replay(last) == last.choice


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("num_tokens", [0, 16, 16 * 1024, 16 * 1024 + 16, 40_000])
async def test_a_prompt_hashed_in_slices_has_the_digests_of_one_hashed_whole(
    desk: Desk, num_tokens: int, stride: int
) -> None:
    desk.add("w0", stride=stride)
    prompt = array("I", (position * 7 % 1000 for position in range(num_tokens)))
    ticket = Ticket(request_id="r", tenant="default", namespace="", deadline=1e9)
    routing = desk.decider.open(ticket, prompt, max_tokens=8, seed=5)
    await routing.prepare()
    whole = routing_digests(page_digests(root(CHAIN), prompt, page_size=16), stride=stride)
    desk.index.apply(desk.fleet.followed()[WorkerId("w0")].slot, [Stored(tuple(whole))])
    decision = routing.choose()
    assert decision is not None
    assert decision.depths == ({0: len(whole)} if whole else {})
    assert decision.first_digest == (whole[0] if whole else None)


async def test_no_prompt_is_so_long_that_its_look_up_takes_long(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "_MAX_BLOCKS", 5)
    desk.add("w0")
    desk.holds("w0", 160)
    decision = desk.routing().choose()
    assert decision is not None
    assert decision.choice.cached_tokens == 5 * 16


async def test_answers_to_one_prompt_go_to_one_replica_first_and_anywhere_afterwards(desk: Desk) -> None:
    for name in ("w0", "w1", "w2"):
        desk.add(name, prefix_credit=False)  # so that nothing else brings them together
    together = Together()
    routings = [desk.routing(together=together, seed=seed) for seed in range(12)]
    firsts = [routing.choose() for routing in routings]
    (chosen,) = {first.choice.worker_id for first in firsts if first is not None}
    assert all(first is not None and replay(first) == first.choice for first in firsts)
    second = routings[3].choose(excluded={chosen})
    assert second is not None
    assert second.choice.worker_id != chosen


async def test_answers_to_one_prompt_do_not_wait_for_a_replica_that_is_gone(desk: Desk) -> None:
    desk.add("w0")
    together = Together(WorkerId("w9"))
    decision = desk.routing(together=together).choose()
    assert decision is not None
    assert decision.choice.worker_id == "w0"


async def test_a_long_prompt_is_hashed_once_for_all_its_answers(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.add("w0")
    num_hashed, in_thread = 0, desk.decider.offload.in_thread

    async def counted(work: Callable[[], T], *, num_bytes: int) -> T:
        nonlocal num_hashed
        num_hashed += 1
        return await in_thread(work, num_bytes=num_bytes)

    monkeypatch.setattr(desk.decider.offload, "in_thread", counted)
    monkeypatch.setattr("ostrya.router.decide.SMALL_BYTES", 0)
    together = Together()
    routings = [desk.routing(together=together) for _ in range(4)]
    await asyncio.gather(*(routing.prepare() for routing in routings))
    assert num_hashed == 1
    assert {decision.choice.worker_id for routing in routings if (decision := routing.choose())} == {"w0"}
