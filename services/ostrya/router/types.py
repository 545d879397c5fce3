"""The router's own values: what its parts hand to each other. No gRPC, no Redis, no I/O."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NewType

WorkerId = NewType("WorkerId", str)


class KnowledgeLevel(IntEnum):
    """How much the router knows; each level is worse, none fails a request."""

    FRESH = 1
    FROZEN_INDEX = 2
    NO_INDEX = 3
    NO_LOAD = 4


class ReplicaState(IntEnum):
    """Where a replica is in its life; only READY is routable, if nothing holds it (Hold)."""

    STARTING = 1
    READY = 2
    DRAINING = 3
    LOST = 4


class Hold(StrEnum):
    """What keeps new work from a replica although it serves. The first three hold absolutely, the next two while
    somebody else can take the request; the last holds nothing."""

    NOT_READY = "not_ready"
    """Its endpoint says so."""
    TERMINATING = "terminating"
    """Its endpoint says so, or is no longer there."""
    NO_LEASE = "no_lease"
    """Redis is there, its lease is over, and it does not answer."""
    MAINTENANCE = "maintenance"
    """Of its node, soon: no long requests."""
    TERMINATION_IMPENDING = "termination_impending"
    """Its node is under maintenance, or about to end."""
    LEASE_NOT_RENEWED = "lease_not_renewed"
    """Its lease is over and it answers: it works as before, while the credit of its cached prefixes fades."""


ABSOLUTE_HOLDS = frozenset({Hold.NOT_READY, Hold.TERMINATING, Hold.NO_LEASE})


class Reason(StrEnum):
    """Why a replica was chosen."""

    PREFIX = "prefix"
    LOAD = "load"
    TIE = "tie"
    FALLBACK = "fallback"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The newest of a replica's load board row and what rode on its responses."""

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    free_pages: int = 0
    reusable_pages: int = 0
    total_pages: int = 0
    prefill_tokens_per_s: float = 0.0
    queried_tokens: int = 0
    hit_tokens: int = 0
    step_base_s: float = 0.0
    """A step takes that, plus so much for each row, prompt token and KV token in it; all 0 = not told."""
    step_row_s: float = 0.0
    step_prefill_token_s: float = 0.0
    step_kv_token_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One routable replica as a pick sees it."""

    worker_id: WorkerId
    slot: int
    """Its slot in the prefix index; -1 = no prefix credit (digest chains differ, or none registered)."""
    max_running: int
    page_size: int
    routing_stride: int
    load: Load
    load_age_s: float
    """Seconds since `load` was true; inf = never heard."""
    own_requests: int
    """This router's requests in flight there."""
    own_prefill_tokens: int
    """Of those, uncached prompt tokens whose first token has not come yet."""
    index_age_s: float = 0.0
    """Seconds since its part of the index last heard of it; 0 = it is as old as the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """All a pick needs to know. Replicas are routable ones only, ordered by worker_id."""

    replicas: tuple[ReplicaView, ...]
    level: KnowledgeLevel
    index_age_s: float
    """Seconds since the index last heard of any replica; 0 while it is followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One replica's terms in a decision, seconds."""

    worker_id: WorkerId
    cached_tokens: int
    wait_s: float
    prefill_s: float
    decode_s: float
    cost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a request goes, and why."""

    worker_id: WorkerId
    cached_tokens: int
    """Predicted reuse on it."""
    reason: Reason
    beta: float
