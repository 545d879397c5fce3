"""Decisions are kept ten minutes, in bounded number, and replay to the same choice."""

import pytest

from ostrya.errors import NotFound
from ostrya.prefix.chain import RoutingDigest
from ostrya.router import pick
from ostrya.router.explain import Decision, DecisionLog, candidates, replay
from tests.unit.router.fleets import snapshot, view


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def decision(decision_id: str, *, seed: int = 0) -> Decision:
    fleet = snapshot(*(view(n, own_requests=n % 3, own_prefill_tokens=n * 37 % 101) for n in range(9)))
    depths = {2: 3, 5: 10}
    key = RoutingDigest(seed * 0x9E37_79B9 % 2**64)
    choice = pick.choose(fleet, depths, num_tokens=400, first_digest=key, seed=seed)
    assert choice is not None
    return Decision(
        decision_id=decision_id,
        request_id="r",
        time_s=0.0,
        attempt=1,
        snapshot=fleet,
        depths=depths,
        num_tokens=400,
        first_digest=key,
        seed=seed,
        excluded=frozenset(),
        avoided=(),
        choice=choice,
    )


def test_a_decision_is_found_for_ten_minutes() -> None:
    clock = Clock()
    log = DecisionLog(clock=clock)
    log.add(decision("a"))
    clock.now = 599.0
    assert log.get("a").decision_id == "a"
    clock.now = 601.0
    with pytest.raises(NotFound, match="10 minutes"):
        log.get("a")
    assert len(log) == 0


def test_only_the_newest_are_kept() -> None:
    log = DecisionLog(clock=Clock(), max_decisions=3)
    for name in "abcde":
        log.add(decision(name))
    assert len(log) == 3
    assert log.get("e").decision_id == "e"
    with pytest.raises(NotFound):
        log.get("b")


def test_every_decision_replays_to_the_same_choice() -> None:
    for seed in range(50):
        made = decision("a", seed=seed)
        assert replay(made) == made.choice
        assert {one.worker_id for one in candidates(made)} == {view.worker_id for view in made.snapshot.replicas}
