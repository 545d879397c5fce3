"""Which replica gets a request. Pure: no I/O, no clock, no state; the same arguments always give the same choice.

So a decision is explained and replayed from its arguments alone, and the simulator runs this very code. Total: whatever
numbers the arguments hold, there is a choice as long as there is somebody to choose.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence, Set

from ostrya.prefix.chain import RoutingDigest
from ostrya.router.cost import Scores, credit_ratio, score
from ostrya.router.types import Candidate, Choice, FleetSnapshot, KnowledgeLevel, Reason, ReplicaView, WorkerId

NEAR_S = 0.001
NEAR_RATIO = 0.01
"""Costs this close to the least are equal: the terms are not known better than that."""

LOAD_BOUND = 1.25
"""Consistent hashing with bounded loads: nobody gets more than this times the mean (Mirrokni et al. 2018)."""

MAX_REQUESTS = 2**31
"""A count above it, or below none, is not one: its replica counts as this full."""

_MASK = (1 << 64) - 1
_NOBODY: frozenset[WorkerId] = frozenset()

Avoided = tuple[Set[WorkerId], ...]
"""Groups of replicas to keep away from, the most urgent first; each is heeded while somebody else remains."""


def choose(
    snapshot: FleetSnapshot,
    depths: Mapping[int, int],
    *,
    num_tokens: int,
    first_digest: RoutingDigest | None,
    seed: int,
    excluded: Set[WorkerId] = _NOBODY,
    avoided: Avoided = (),
) -> Choice | None:
    """The replica for a request, or None if all are excluded or there is none.

    `depths` are the leading routing blocks each slot holds; `first_digest` is that of the first routing block (None:
    the prompt is shorter); `seed` breaks the ties that are left. `excluded` replicas are never chosen, `avoided` ones
    only for want of others.
    """
    replicas = _eligible(snapshot, excluded, avoided)
    if not replicas:
        return None
    if snapshot.level is KnowledgeLevel.NO_LOAD or (snapshot.level is KnowledgeLevel.NO_INDEX and first_digest is None):
        return _fallback(_of_two(replicas, seed))
    if snapshot.level is KnowledgeLevel.NO_INDEX and first_digest is not None:
        return _fallback(_bounded(replicas, first_digest))
    return _cheapest(
        replicas, score(replicas, depths, num_tokens=num_tokens, credit=credit_ratio(snapshot)), first_digest, seed
    )


def candidates(
    snapshot: FleetSnapshot,
    depths: Mapping[int, int],
    *,
    num_tokens: int,
    excluded: Set[WorkerId] = _NOBODY,
    avoided: Avoided = (),
) -> tuple[Candidate, ...]:
    """Every replica's terms in the choice with these arguments, cheapest first."""
    replicas = _eligible(snapshot, excluded, avoided)
    scores = score(replicas, depths, num_tokens=num_tokens, credit=credit_ratio(snapshot))
    rows = [
        Candidate(
            worker_id=view.worker_id,
            cached_tokens=scores.cached_tokens[i],
            wait_s=scores.wait_s[i],
            prefill_s=scores.prefill_s[i],
            decode_s=scores.decode_s[i],
            cost_s=scores.cost_s[i],
        )
        for i, view in enumerate(replicas)
    ]
    return tuple(sorted(rows, key=lambda row: (row.cost_s, row.worker_id)))


def _eligible(snapshot: FleetSnapshot, excluded: Set[WorkerId], avoided: Avoided) -> Sequence[ReplicaView]:
    replicas: Sequence[ReplicaView] = snapshot.replicas
    if excluded:
        replicas = [view for view in replicas if view.worker_id not in excluded]
    for group in avoided:
        replicas = [view for view in replicas if view.worker_id not in group] or replicas
    return replicas


def _cheapest(replicas: Sequence[ReplicaView], scores: Scores, first_digest: RoutingDigest | None, seed: int) -> Choice:
    costs, cached = scores.cost_s, scores.cached_tokens
    least = min(costs)
    near = least + max(NEAR_S, least * NEAR_RATIO)
    equals = [i for i, cost in enumerate(costs) if cost <= near]
    chosen = equals[0] if len(equals) == 1 else _break_tie(replicas, equals, first_digest, seed)
    most = max(cached)
    if most and cached[chosen] == most and cached.count(most) < len(cached):
        reason = Reason.PREFIX
    elif len(equals) > 1:
        reason = Reason.TIE
    else:
        reason = Reason.LOAD
    return Choice(worker_id=replicas[chosen].worker_id, cached_tokens=cached[chosen], reason=reason, beta=scores.beta)


def _break_tie(
    replicas: Sequence[ReplicaView], equals: Sequence[int], first_digest: RoutingDigest | None, seed: int
) -> int:
    """Fewer tokens in flight, then fewer requests, then rendezvous: siblings meet, strangers spread."""
    load_of = {i: (replicas[i].own_prefill_tokens, replicas[i].own_requests) for i in equals}
    least = min(load_of.values())
    key = seed if first_digest is None else first_digest
    idle = [i for i in equals if load_of[i] == least]
    return idle[0] if len(idle) == 1 else max(idle, key=lambda i: _rendezvous(key, replicas[i].worker_id))


def _bounded(replicas: Sequence[ReplicaView], first_digest: RoutingDigest) -> ReplicaView:
    """Rendezvous order, skipping who is above the bound. Somebody is always at or below the mean."""
    loads = {view.worker_id: _requests(view) for view in replicas}
    bound = LOAD_BOUND * (sum(loads.values()) + 1) / len(replicas)
    free = [view for view in replicas if loads[view.worker_id] < bound]
    return max(free, key=_order(first_digest))


def _of_two(replicas: Sequence[ReplicaView], seed: int) -> ReplicaView:
    """Power of two choices on our own requests in flight (Mitzenmacher 2001)."""
    two = sorted(replicas, key=_order(seed))[:2]
    return min(two, key=lambda view: view.own_requests)


def _fallback(view: ReplicaView) -> Choice:
    return Choice(worker_id=view.worker_id, cached_tokens=0, reason=Reason.FALLBACK, beta=1.0)


def _requests(view: ReplicaView) -> int:
    return max(_count(view.own_requests), _count(view.load.num_running) + _count(view.load.num_waiting))


def _count(told: int) -> int:
    return told if 0 <= told <= MAX_REQUESTS else MAX_REQUESTS


def _order(key: int) -> Callable[[ReplicaView], int]:
    return lambda view: _rendezvous(key, view.worker_id)


def _rendezvous(key: int, worker_id: WorkerId) -> int:
    """A fixed mix of both (the finalizer of splitmix64): uniform, the same in every process."""
    mixed = (key ^ zlib.crc32(worker_id.encode()) * 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31
