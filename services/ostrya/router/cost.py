"""What a request would cost on each replica: cost = wait + beta * uncached tokens / prefill rate + decode pressure.

Pure arithmetic over a fleet snapshot; pick.py decides with it, explain.py shows it. One pass with local names only: it
runs on every request for every replica, so it keeps plain lists and makes no objects. Total: whatever numbers a
snapshot has, every term is a finite one, so that there is always a least.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ostrya.router.figures import MAX_TOKENS_PER_S
from ostrya.router.types import FleetSnapshot, KnowledgeLevel, ReplicaView

DEFAULT_PREFILL_TOKENS_PER_S = 2_000.0
"""Until a replica of the fleet has measured one; only its relation to the waits matters, and those use it too."""

RATE_TRUST = 1.25
"""A pool is one configuration, so its replicas' rates are alike: a measurement further than this factor from the mean
is noise, and would starve its replica of the very work that could correct it."""

STALE_LOAD_S = 2.0
"""Ten load board periods. What is older (Redis is gone and no response came) says less than our own count."""

BETA_WAIT_S = 0.5
MAX_EXTRA_BETA = 7.0
"""A busier fleet must save more work: the weight of uncached tokens grows with the mean wait (router.md 3.4)."""

DECODE_STEP_S = 0.02
"""What one more row costs a half-full batch; a typical decode step."""

MAX_BUSY = 0.98

WORST_S = 1e9
"""A term that is more than this, or is no number at all, counts as this much: its replica comes last."""

CREDIT_HALF_LIFE_S = 60.0
"""Of a frozen index, or of a replica's part of it (architecture section 5)."""


class Scores(NamedTuple):
    """Terms in seconds, one entry a replica, in the order given."""

    beta: float
    cached_tokens: list[int]
    wait_s: list[float]
    prefill_s: list[float]
    decode_s: list[float]
    cost_s: list[float]


def credit_ratio(snapshot: FleetSnapshot) -> float:
    """What the index's word is worth: 1 while it is followed, halved every minute once it is frozen."""
    if snapshot.level is not KnowledgeLevel.FROZEN_INDEX:
        return 1.0 if snapshot.level is KnowledgeLevel.FRESH else 0.0
    return _fading(snapshot.index_age_s)


def score(
    replicas: Sequence[ReplicaView], depths: Mapping[int, int], *, num_tokens: int, credit: float = 1.0
) -> Scores:
    """Every replica's terms for a request of `num_tokens`; `depths` are leading routing blocks by slot, of which
    `credit` counts, and less where a replica's part of the index is older than the whole."""
    cached, waits, prefills, decodes = [], [], [], []
    typical_rate = _typical_rate(replicas)
    least_rate, most_rate = typical_rate / RATE_TRUST, typical_rate * RATE_TRUST
    last = num_tokens - 1  # the last prompt token is always computed
    for view in replicas:
        load = view.load
        try:
            rate = load.prefill_tokens_per_s
            if not least_rate <= rate <= most_rate:  # true for NaN too
                rate = most_rate if rate > most_rate else least_rate if rate > 0 else typical_rate
            depth = depths.get(view.slot)
            worth = credit
            if (age_s := view.index_age_s) and (own := _fading(age_s)) < credit:
                worth = own
            usable = int(min(depth * view.page_size * view.routing_stride, last) * worth) if depth else 0
            # The board counts our own requests too, so the larger of both counts nothing twice; the board's part is
            # worked off while it ages.
            ahead, queued = view.own_prefill_tokens, load.queued_tokens
            if queued > ahead:
                left = queued - view.load_age_s * rate
                wait = (left if left > ahead else ahead) / rate
            else:
                wait = ahead / rate
            there = load.num_running + load.num_waiting if view.load_age_s < STALE_LOAD_S else 0
            own_requests = view.own_requests
            busy = (there if there > own_requests else own_requests) / view.max_running
            if total := load.total_pages:
                full = 1.0 - (load.free_pages + load.reusable_pages) / total
                busy = full if full > busy else busy
            prefill = (num_tokens - usable) / rate
            decode = DECODE_STEP_S * busy / (1.0 - busy) if busy < MAX_BUSY else _overfull_s(busy)
        except (ArithmeticError, ValueError):  # a number too large for arithmetic, or a zero where none can be
            usable, wait, prefill, decode = 0, WORST_S, WORST_S, WORST_S
        cached.append(usable if 0 <= usable <= last else 0)
        waits.append(wait if 0.0 <= wait <= WORST_S else WORST_S)
        prefills.append(prefill if 0.0 <= prefill <= WORST_S else WORST_S)
        decodes.append(decode if 0.0 <= decode <= WORST_S else WORST_S)
    beta = 1.0 + min(MAX_EXTRA_BETA, sum(waits) / len(waits) / BETA_WAIT_S) if waits else 1.0
    costs = [wait + beta * prefill + decode for wait, prefill, decode in zip(waits, prefills, decodes, strict=True)]
    return Scores(beta, cached, waits, prefills, decodes, costs)


def _fading(age_s: float) -> float:
    # False for NaN too.
    return float(0.5 ** (age_s / CREDIT_HALF_LIFE_S)) if 0.0 <= age_s <= WORST_S else 0.0


def _overfull_s(busy: float) -> float:
    """Beyond MAX_BUSY k / (1 - k) says nothing more; what is over is counted as whole batches."""
    return DECODE_STEP_S * MAX_BUSY / (1.0 - MAX_BUSY) * max(busy, 1.0)


def _typical_rate(replicas: Sequence[ReplicaView]) -> float:
    """The mean of those that have measured one."""
    measured = [rate for view in replicas if 0 < (rate := view.load.prefill_tokens_per_s) <= MAX_TOKENS_PER_S]
    return sum(measured) / len(measured) if measured else DEFAULT_PREFILL_TOKENS_PER_S
