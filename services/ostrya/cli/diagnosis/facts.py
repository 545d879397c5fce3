"""What `ostrya doctor` found out, before anybody judges it. Made by cli/probes.py; plain values and messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from ostrya.api.v1 import admin_pb2
from ostrya.cli.diagnosis.certificate import Certificate
from ostrya.state.members import Member


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock against ours."""

    offset_s: float
    """How far it is ahead."""
    error_s: float = 0.0
    """Half of the round trip that told it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFacts:
    """One router, asked."""

    target: str
    error: str = ""
    """Why it does not answer; all below is then empty."""
    is_serving: bool = False
    status: admin_pb2.GetStatusResponse | None = None
    """None: it is too old to tell."""
    replicas: Mapping[str, admin_pb2.Replica] = field(default_factory=dict)
    level: "admin_pb2.KnowledgeLevel.ValueType" = admin_pb2.KNOWLEDGE_LEVEL_UNSPECIFIED
    clock: Clock | None = None

    @property
    def pool(self) -> str:
        return self.status.pool if self.status else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of Redis."""

    used_bytes: int
    max_bytes: int
    """0 = no limit."""
    policy: str
    evicted_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What decides whether Redis takes writes, besides its memory."""

    master: str = ""
    """Whose read-only replica it is; empty = nobody's."""
    lacks_replicas: bool = False
    """It wants some before it writes, and has none."""
    is_disk_broken: bool = False
    """Its last save failed, after which it refuses writes unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRows:
    """What Redis has of a pool."""

    members: Mapping[str, Member]
    leases: Mapping[str, float]
    """Seconds that live leases have left."""
    unreadable: tuple[str, ...] = ()
    """Rows that cannot be read, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """Redis, asked."""

    where: str
    """Its URL without the password."""
    error: str = ""
    latency_s: float = 0.0
    clock: Clock | None = None
    memory: Memory | None = None
    """None: this user may not ask; so below."""
    standing: Standing | None = None
    pools: Mapping[str, PoolRows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeTarget:
    """A series of `up`."""

    job: str
    pool: str
    replica: str
    instance: str
    is_up: bool
    age_s: float
    """Since its newest sample."""

    @property
    def name(self) -> str:
        return self.replica or self.instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of ours that Prometheus has loaded."""

    name: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert of ours that fires."""

    name: str
    severity: str
    summary: str
    runbook: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusFacts:
    """Prometheus, asked."""

    where: str
    error: str = ""
    targets: tuple[ScrapeTarget, ...] = ()
    workers: frozenset[tuple[str, str]] = frozenset()
    """(pool, replica) of ostrya_worker_info."""
    routers: frozenset[tuple[str, str]] = frozenset()
    """The same of ostrya_router_info."""
    blind_to_nodes: frozenset[tuple[str, str]] = frozenset()
    """Those of ostrya_router_kubernetes_up that should watch nodes and cannot."""
    rules: tuple[Rule, ...] | None = None
    """None: it does not tell, as managed ones do not."""
    alerts: tuple[Alert, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFacts:
    """A TLS endpoint, greeted. Whether its issuer is trusted is not asked: clusters have their own."""

    endpoint: str
    host: str
    error: str = ""
    certificate: Certificate | None = None


class Dialled(Enum):
    """What came of asking a worker at its address."""

    ANSWERS = auto()
    SILENT = auto()
    """The connection was accepted, and nothing came."""
    REFUSED = auto()
    """Nobody listens there."""
    UNREACHABLE = auto()
    """From here; that says nothing of the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything."""

    now_s: float
    routers: tuple[RouterFacts, ...]
    redis: RedisFacts | None = None
    """None: not asked for; so below."""
    prometheus: PrometheusFacts | None = None
    tls: tuple[TlsFacts, ...] = ()
    workers: Mapping[str, Dialled] = field(default_factory=dict)
    """By address: all that routers or Redis know."""

    @property
    def answering(self) -> tuple[RouterFacts, ...]:
        return tuple(router for router in self.routers if not router.error)

    @property
    def pools(self) -> tuple[str, ...]:
        """Those that routers serve."""
        return tuple(sorted({router.pool for router in self.answering if router.pool}))
