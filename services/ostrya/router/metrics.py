"""What the router shows Prometheus, on a registry that is passed in. Names: docs/metrics.md."""

from collections import Counter as Count
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias, get_args

import grpc
import prometheus_client as prom

from ostrya.router.fleet import ReplicaRow
from ostrya.router.types import Choice, FleetSnapshot, Hold, Reason, ReplicaState, WorkerId
from ostrya.state.rows import Kind

# From a small model on this machine to a long prompt behind a queue.
_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48)
_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84)
# From a replica that is back at once to an outage as long as `no_replica_wait_s`.
_WAIT_S = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_DECISION_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)


Lifecycle: TypeAlias = Literal["serving", "draining"]
_LIFECYCLE: tuple[Lifecycle, ...] = get_args(Lifecycle)


class Follower(Protocol):
    """What follows the journals into the index (tracker.py)."""

    num_events: Count[str]
    num_snapshots: int
    num_gaps: int
    num_corrupt: int

    def staleness_s(self) -> dict[WorkerId, float]:
        """By worker; 0 = its part of the index is whole."""
        ...


class Watched(Protocol):
    """How a watch is doing (cluster.py)."""

    is_up: bool
    events: Count[str]
    """listed, reconnected, expired, failed."""


class Watcher(Protocol):
    """What watches the endpoints of the workers' Service (discovery.py)."""

    @property
    def kubernetes_up(self) -> bool | None:
        """None = not in mode kubernetes."""
        ...

    watch_events: Count[str]
    """listed, reconnected, expired, failed."""

    def endpoint_counts(self) -> dict[str, int]:
        """ready, serving, terminating."""
        ...


class RouterMetrics:
    """Every metric of one router."""

    def __init__(self, registry: prom.CollectorRegistry, *, model: str, pool: str) -> None:
        def counter(name: str, text: str, *labels: str) -> prom.Counter:
            return prom.Counter(f"ostrya_router_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> prom.Gauge:
            return prom.Gauge(f"ostrya_router_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> prom.Histogram:
            return prom.Histogram(f"ostrya_router_{name}", text, buckets=buckets, registry=registry)

        info = gauge("info", "Constant 1; what this router serves.", "model", "pool")
        info.labels(model, pool).set(1)
        self.requests = counter("requests", "Generate calls ended, by gRPC code.", "code")
        self.duration_s = histogram("request_duration_seconds", "Generate calls from start to end.", _DURATION_S)
        self.ttft_s = histogram("ttft_seconds", "From a request's arrival to its first message.", _TTFT_S)
        self.in_flight = gauge("requests_in_flight", "Requests inside this router.")
        self.queue_depth = gauge("queue_depth", "Requests that wait for a routable replica.")
        self.queue_wait_s = histogram("queue_wait_seconds", "How long requests waited for a routable replica.", _WAIT_S)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.generated_tokens = counter("generation_tokens", "Tokens sent to clients.")
        self._decision_s = histogram(
            "routing_decision_seconds", "Hashing, index look-up and scoring for one try.", _DECISION_S
        )
        self._lookup_s = histogram("index_lookup_seconds", "Hashing and index look-up for one try.", _DECISION_S)
        self._decisions = counter("routing_decisions", "Tries sent to a replica, by why it was chosen.", "reason")
        self._predicted = counter("predicted_cached_tokens", "Prompt tokens expected in the replica's cache.")
        self.actual = counter("actual_cached_tokens", "Prompt tokens the replica did reuse.")
        self.retries = counter("retries", "Tries after the first, by whether a token had been received.", "phase")
        self.shed = counter("shed", "Requests refused for lack of a place or of a replica.", "reason")
        self.undecodable = counter("undecodable_requests", "Calls whose bytes are not their method's message.")
        self._index_entries = gauge("index_entries", "Distinct routing blocks in the index.")
        self._index_age_s = gauge("index_age_seconds", "Since the index last heard of a replica through Redis.")
        self._staleness_s = gauge("index_staleness_seconds", "Since a worker's part of the index was whole.", "worker")
        self._index_ops = counter("index_ops", "Digests applied to the index, and what went wrong.", "op")
        self._level = gauge("knowledge_level", "1 fresh, 2 frozen index, 3 no index, 4 no load data.")
        self._redis_up = gauge("redis_up", "Whether Redis answers.")
        self._workers_ready = gauge("workers_ready", "Routable replicas.")
        self._workers = gauge("workers", "Known replicas by state.", "state")
        self._holds = gauge(
            "replica_holds", "Replicas kept from new work, by why; lease_not_renewed keeps none.", "hold"
        )
        self._part_up = gauge("part_up", "0 while a part of the router fails and is started again.", "part")
        self._part_restarts = counter("part_restarts", "Starts of a part after it failed.", "part")
        self._unreadable = counter("unreadable", "Rows and entries in Redis that were skipped, by kind.", "kind")
        self._lifecycle = gauge("lifecycle_state", "1 for the state the router is in.", "state")
        self._shown: Count[str] = Count()
        """Index operations counted so far; the follower keeps totals. Likewise the next two."""
        self._shown_restarts: Count[str] = Count()
        self._shown_unreadable: Count[str] = Count()
        for code in grpc.StatusCode:
            self.requests.labels(code.name)
        for state in ReplicaState:
            self._workers.labels(state.name.lower())
        for hold in Hold:
            self._holds.labels(hold)
        for name in _LIFECYCLE:
            self._lifecycle.labels(name)
        for kind in Kind:
            self._unreadable.labels(kind)
        for reason in Reason:
            self._decisions.labels(reason)
        for phase in ("before_first_token", "after_first_token"):
            self.retries.labels(phase)
        for cause in ("queue_full", "no_replica"):
            self.shed.labels(cause)

    def decided(self, choice: Choice, *, lookup_s: float, decision_s: float) -> None:
        """A try was sent to a replica."""
        self._lookup_s.observe(lookup_s)
        self._decision_s.observe(decision_s)
        self._decisions.labels(choice.reason).inc()
        self._predicted.inc(choice.cached_tokens)

    def show_fleet(self, rows: Sequence[ReplicaRow], snapshot: FleetSnapshot, *, redis_up: bool) -> None:
        """The fleet's gauges; from the event loop, because the endpoint's thread must not read the fleet."""
        self._index_age_s.set(snapshot.index_age_s)
        self._level.set(snapshot.level)
        self._redis_up.set(redis_up)
        self._workers_ready.set(len(snapshot.replicas))
        states = Count(row.state for row in rows)
        for state in ReplicaState:
            self._workers.labels(state.name.lower()).set(states[state])
        holds = Count(hold for row in rows for hold in row.holds)
        for hold in Hold:
            self._holds.labels(hold).set(holds[hold])

    def show_parts(self, failing: Collection[str], num_restarts: Mapping[str, int]) -> None:
        """How the router's own parts are doing."""
        for part, total in num_restarts.items():
            self._part_up.labels(part).set(part not in failing)
            self._part_restarts.labels(part).inc(total - self._shown_restarts[part])
            self._shown_restarts[part] = total

    def show_rejects(self, counts: Mapping[Kind, int]) -> None:
        """What stood in Redis and could not be read."""
        for kind, total in counts.items():
            self._unreadable.labels(kind).inc(total - self._shown_unreadable[kind])
            self._shown_unreadable[kind] = total

    def enter(self, state: Lifecycle) -> None:
        """The router is in that state from now on."""
        for name in _LIFECYCLE:
            self._lifecycle.labels(name).set(name == state)

    def show_index(self, follower: Follower, *, num_entries: int, num_refused: int) -> None:
        """The index's gauges and counters; from the event loop too."""
        self._index_entries.set(num_entries)
        self._staleness_s.clear()
        for worker_id, seconds in follower.staleness_s().items():
            self._staleness_s.labels(worker_id).set(seconds)
        totals = {
            **{op: follower.num_events[op] for op in ("stored", "removed", "cleared")},
            "snapshot": follower.num_snapshots,
            "gap": follower.num_gaps,
            "corrupt": follower.num_corrupt,
            "refused": num_refused,
        }
        for op, total in totals.items():
            self._index_ops.labels(op).inc(total - self._shown[op])
            self._shown[op] = total


class KubernetesMetrics:
    """What a router in mode kubernetes shows besides."""

    def __init__(self, registry: prom.CollectorRegistry) -> None:
        self._up = prom.Gauge(
            "ostrya_router_kubernetes_up",
            "Whether a resource of Kubernetes is watched; exported with discovery kubernetes only.",
            ("resource",),
            registry=registry,
        )
        self._watch = prom.Counter(
            "ostrya_router_kubernetes_watch",
            "What happened to a watch: listed, reconnected, expired, failed.",
            ("resource", "event"),
            registry=registry,
        )
        self._endpoints = prom.Gauge(
            "ostrya_router_endpoints",
            "Endpoints of the workers' Service: ready, serving, terminating.",
            ("condition",),
            registry=registry,
        )
        self._shown: Count[tuple[str, str]] = Count()
        for event in ("listed", "reconnected", "expired", "failed"):
            self._watch.labels("endpointslices", event)
        for condition in ("ready", "serving", "terminating"):
            self._endpoints.labels(condition)

    def show(self, watcher: Watcher, nodes: Watched | None = None) -> None:
        """Everything it says, and the watch of the nodes if there is one; from the event loop."""
        self._show_watch("endpointslices", bool(watcher.kubernetes_up), watcher.watch_events)
        if nodes is not None:
            self._show_watch("nodes", nodes.is_up, nodes.events)
        for condition, number in watcher.endpoint_counts().items():
            self._endpoints.labels(condition).set(number)

    def _show_watch(self, resource: str, is_up: bool, events: Count[str]) -> None:
        self._up.labels(resource).set(is_up)
        for event, total in events.items():
            self._watch.labels(resource, event).inc(total - self._shown[resource, event])
            self._shown[resource, event] = total
