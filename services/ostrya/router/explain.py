"""The decisions of the last ten minutes, each with all its inputs, so that it can be shown and replayed bit-exactly."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ostrya.errors import NotFound
from ostrya.prefix.chain import RoutingDigest
from ostrya.router import pick
from ostrya.router.types import Candidate, Choice, FleetSnapshot, WorkerId

KEEP_S = 600.0

MAX_DECISIONS = 20_000
"""Some 3 KB each with 64 replicas, as snapshots share their rows: at most 60 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One choice and the arguments it came from."""

    decision_id: str
    request_id: str
    time_s: float
    """Unix seconds."""
    attempt: int
    """Position in the request's tries: 1 = first choice."""
    snapshot: FleetSnapshot
    depths: Mapping[int, int]
    num_tokens: int
    first_digest: RoutingDigest | None
    seed: int
    excluded: frozenset[WorkerId]
    avoided: pick.Avoided
    choice: Choice


def replay(decision: Decision) -> Choice | None:
    """The choice made again from the recorded inputs: equal to the recorded one, always."""
    return pick.choose(
        decision.snapshot,
        decision.depths,
        num_tokens=decision.num_tokens,
        first_digest=decision.first_digest,
        seed=decision.seed,
        excluded=decision.excluded,
        avoided=decision.avoided,
    )


def candidates(decision: Decision) -> tuple[Candidate, ...]:
    """What every replica would have cost, cheapest first."""
    return pick.candidates(
        decision.snapshot,
        decision.depths,
        num_tokens=decision.num_tokens,
        excluded=decision.excluded,
        avoided=decision.avoided,
    )


class DecisionLog:
    """Newest decisions by id; bounded in time and number."""

    def __init__(self, *, clock: Callable[[], float], max_decisions: int = MAX_DECISIONS) -> None:
        self._clock = clock
        self._max_decisions = max_decisions
        self._kept: OrderedDict[str, tuple[float, Decision]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, decision: Decision) -> None:
        """Keeps it for ten minutes, or until too many came after it."""
        self._kept[decision.decision_id] = (self._clock(), decision)
        self._forget()

    def get(self, decision_id: str) -> Decision:
        """NotFound if the id is unknown or has expired."""
        self._forget()
        if decision_id not in self._kept:
            raise NotFound(
                f"decision {decision_id[:64]!r} is not known here; "
                f"decisions are kept {KEEP_S / 60:g} minutes, at most {self._max_decisions}"
            )
        return self._kept[decision_id][1]

    def _forget(self) -> None:
        oldest = self._clock() - KEEP_S
        while self._kept:
            at, _ = next(iter(self._kept.values()))
            if at >= oldest and len(self._kept) <= self._max_decisions:
                return
            self._kept.popitem(last=False)
