"""What Prometheus reads of a router: names that promtool accepts, and figures that add up."""

import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field

import grpc
import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from ostrya.api.v1 import common_pb2
from ostrya.errors import NoReplica, Overloaded
from ostrya.router.fleet import ReplicaRow
from ostrya.router.metrics import KubernetesMetrics, RouterMetrics
from ostrya.router.observe import observed
from ostrya.router.proxy import Part
from ostrya.router.types import Choice, Hold, Load, Reason, ReplicaState, WorkerId
from tests.fakes.pool import replica
from tests.unit.router.fleets import snapshot, view


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Follower:
    """Figures of a tracker."""

    num_events: Counter[str] = field(default_factory=lambda: Counter(stored=5))
    num_snapshots: int = 1
    num_gaps: int = 0
    num_corrupt: int = 0

    def staleness_s(self) -> dict[WorkerId, float]:
        return {WorkerId("w0"): 1.5}


@dataclass
class Watcher:
    """Figures of a watch of endpoints."""

    kubernetes_up: bool | None = True
    watch_events: Counter[str] = field(default_factory=lambda: Counter(listed=2, failed=1))

    def endpoint_counts(self) -> dict[str, int]:
        return {"ready": 3, "serving": 4, "terminating": 1}


@dataclass
class Nodes:
    """Figures of a watch of nodes."""

    is_up: bool = False
    events: Counter[str] = field(default_factory=lambda: Counter(failed=4))


def row(number: int, *holds: Hold) -> ReplicaRow:
    info = replica(f"w{number}", f"127.0.0.1:{number}", epoch=1)
    return ReplicaRow(
        info=info, state=ReplicaState.READY, load=Load(), load_age_s=0.0, in_flight=0, indexed_blocks=0, holds=holds
    )


def filled(registry: CollectorRegistry) -> RouterMetrics:
    metrics = RouterMetrics(registry, model="tiny", pool="default")
    choice = Choice(worker_id=WorkerId("w0"), cached_tokens=64, reason=Reason.PREFIX, beta=1.0)
    metrics.decided(choice, lookup_s=1e-4, decision_s=2e-4)
    metrics.show_fleet([], snapshot(view(0)), redis_up=True)
    metrics.show_index(Follower(), num_entries=7, num_refused=0)
    return metrics


def part(*token_ids: int) -> Part:
    return Part(
        token_ids=token_ids,
        finish_reason=common_pb2.FINISH_REASON_UNSPECIFIED,
        cached_tokens=48,
        worker_id=WorkerId("w0"),
        decision_id="d",
    )


def test_promtool_finds_nothing_to_complain_about() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        if os.environ.get("OSTRYA_REQUIRE_ALL") == "1":
            pytest.fail("no promtool on this machine")
        pytest.skip("no promtool on this machine")
    registry = CollectorRegistry()
    disable_created_metrics()  # type: ignore[no-untyped-call]
    metrics = filled(registry)
    metrics.queue_wait_s.observe(0.5)
    KubernetesMetrics(registry).show(Watcher(), Nodes())
    with observed(metrics, Clock()) as observation:
        observation.part(part(1, 2))
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=generate_latest(registry), capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_predicted_and_actual_reuse_stand_side_by_side() -> None:
    registry, clock = CollectorRegistry(), Clock()
    metrics = filled(registry)
    with observed(metrics, clock) as observation:
        observation.num_prompt_tokens = 100
        clock.now = 0.25
        observation.part(part(1, 2))
        observation.part(part(3))
    read = registry.get_sample_value
    assert read("ostrya_router_predicted_cached_tokens_total") == 64
    assert read("ostrya_router_actual_cached_tokens_total") == 48
    assert (read("ostrya_router_prompt_tokens_total"), read("ostrya_router_generation_tokens_total")) == (100, 3)
    assert (read("ostrya_router_ttft_seconds_sum"), read("ostrya_router_ttft_seconds_count")) == (0.25, 1)


def test_totals_of_the_index_are_counted_once_however_often_they_are_shown() -> None:
    registry, follower = CollectorRegistry(), Follower()
    metrics = RouterMetrics(registry, model="tiny", pool="default")
    for stored in (5, 5, 8):
        follower.num_events["stored"] = stored
        metrics.show_index(follower, num_entries=7, num_refused=2)
    read = registry.get_sample_value
    assert read("ostrya_router_index_ops_total", {"op": "stored"}) == 8
    assert read("ostrya_router_index_ops_total", {"op": "refused"}) == 2
    assert read("ostrya_router_index_staleness_seconds", {"worker": "w0"}) == 1.5


@pytest.mark.parametrize(
    ("error", "code", "shed"),
    [(NoReplica("x"), "UNAVAILABLE", "no_replica"), (Overloaded("x"), "RESOURCE_EXHAUSTED", "queue_full")],
)
def test_what_is_shed_is_counted_by_cause_and_code(error: Exception, code: str, shed: str) -> None:
    registry = CollectorRegistry()
    with pytest.raises(type(error)), observed(filled(registry), Clock()):
        raise error
    assert registry.get_sample_value("ostrya_router_requests_total", {"code": code}) == 1
    assert registry.get_sample_value("ostrya_router_shed_total", {"reason": shed}) == 1


@pytest.mark.parametrize(("now", "code"), [(1.0, grpc.StatusCode.CANCELLED), (9.0, grpc.StatusCode.DEADLINE_EXCEEDED)])
def test_a_call_that_ended_late_is_a_deadline_and_otherwise_a_cancel(now: float, code: grpc.StatusCode) -> None:
    registry, clock = CollectorRegistry(), Clock()
    with pytest.raises(GeneratorExit), observed(filled(registry), clock) as observation:
        observation.deadline = 5.0
        clock.now = now
        raise GeneratorExit
    assert registry.get_sample_value("ostrya_router_requests_total", {"code": code.name}) == 1


def test_replicas_that_are_held_are_counted_by_why() -> None:
    registry = CollectorRegistry()
    metrics = filled(registry)
    rows = [row(0, Hold.MAINTENANCE), row(1, Hold.MAINTENANCE, Hold.TERMINATION_IMPENDING), row(2)]
    metrics.show_fleet(rows, snapshot(view(0)), redis_up=True)
    shown = {hold: registry.get_sample_value("ostrya_router_replica_holds", {"hold": hold}) for hold in Hold}
    assert (shown[Hold.MAINTENANCE], shown[Hold.TERMINATION_IMPENDING], shown[Hold.NO_LEASE]) == (2, 1, 0)
    metrics.show_fleet([], snapshot(), redis_up=True)
    assert registry.get_sample_value("ostrya_router_replica_holds", {"hold": "maintenance"}) == 0


def test_a_router_is_in_one_state() -> None:
    registry = CollectorRegistry()
    metrics = filled(registry)

    def states() -> list[float | None]:
        name = "ostrya_router_lifecycle_state"
        return [registry.get_sample_value(name, {"state": state}) for state in ("serving", "draining")]

    assert states() == [0, 0]
    metrics.enter("serving")
    assert states() == [1, 0]
    metrics.enter("draining")
    assert states() == [0, 1]


def test_each_watch_is_shown_and_its_events_are_counted_once() -> None:
    registry, watcher, nodes = CollectorRegistry(), Watcher(), Nodes()
    metrics = KubernetesMetrics(registry)
    for listed in (2, 2, 5):
        watcher.watch_events["listed"] = listed
        metrics.show(watcher, nodes)
    read = registry.get_sample_value

    def up(resource: str) -> float | None:
        return read("ostrya_router_kubernetes_up", {"resource": resource})

    def events(resource: str, event: str) -> float | None:
        return read("ostrya_router_kubernetes_watch_total", {"resource": resource, "event": event})

    assert (up("endpointslices"), up("nodes")) == (1, 0)
    assert [events("endpointslices", event) for event in ("listed", "failed", "expired")] == [5, 1, 0]
    assert events("nodes", "failed") == 4
    assert read("ostrya_router_endpoints", {"condition": "serving"}) == 4
    watcher.kubernetes_up, nodes.is_up = False, True
    metrics.show(watcher, nodes)
    assert (up("endpointslices"), up("nodes")) == (0, 1)


def test_a_watch_that_nobody_asked_for_is_not_shown() -> None:
    registry = CollectorRegistry()
    KubernetesMetrics(registry).show(Watcher())
    assert registry.get_sample_value("ostrya_router_kubernetes_up", {"resource": "endpointslices"}) == 1
    assert registry.get_sample_value("ostrya_router_kubernetes_up", {"resource": "nodes"}) is None
