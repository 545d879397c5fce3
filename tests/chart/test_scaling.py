"""Autoscalers and what they scale: one owner of `replicas`, a target that exists, metrics that processes export."""

import re

import pytest
from prometheus_client import CollectorRegistry

from ostrya.router.metrics import RouterMetrics
from ostrya.worker.metrics import WorkerMetrics
from tests.chart.manifest import Tree
from tests.chart.objects import AutoscalerSpec, BudgetSpec, ScaledObjectSpec, ScaleTarget
from tests.chart.pods import pods
from tests.chart.render import Render, render

V6E = {"generation": "v6e", "machineType": "ct6e-standard-8t", "topology": "2x4"}
MULTI_HOST = {"generation": "v6e", "machineType": "ct6e-standard-4t", "topology": "4x4"}
KEDA: Tree = {"type": "keda", "minReplicas": 2, "maxReplicas": 6, "kedaServerAddress": "http://prometheus:9090"}
HPA: Tree = {"type": "hpa", "minReplicas": 2, "maxReplicas": 6}


def targets(shown: Render) -> list[tuple[ScaleTarget, int, int]]:
    """(target, fewest, most) of each autoscaler."""
    found = []
    for one in shown.of("HorizontalPodAutoscaler"):
        hpa = one.spec(AutoscalerSpec)
        found.append((hpa.scale_target_ref, hpa.min_replicas, hpa.max_replicas))
    for one in shown.of("ScaledObject"):
        keda = one.spec(ScaledObjectSpec)
        found.append((keda.scale_target_ref, keda.min_replica_count, keda.max_replica_count))
    return found


def exported() -> set[str]:
    """Every metric and sample name of router and worker."""
    registry = CollectorRegistry()
    RouterMetrics(registry, model="m", pool="p")
    WorkerMetrics(registry, model="m")
    names = set(registry._names_to_collectors)
    return names | {name + suffix for name in names for suffix in ("_bucket", "_sum", "_count")}


def test_each_autoscaler_has_a_target_of_the_right_kind_and_owns_its_replicas(shown: Render) -> None:
    seen: list[str] = []
    for target, fewest, most in targets(shown):
        workload = shown.named(target.kind, target.name)
        assert workload.api_version == target.api_version
        spec = workload.tree["spec"]
        assert isinstance(spec, dict)
        assert "replicas" not in spec, f"{workload} would be reset to its replicas by each upgrade"
        assert 1 <= fewest <= most
        seen.append(str(workload))
    assert len(seen) == len(set(seen)), f"scaled twice: {seen}"


def test_what_no_autoscaler_owns_says_its_replicas(shown: Render) -> None:
    scaled = {target.name for target, _, _ in targets(shown)}
    for workload in shown.of("Deployment", "StatefulSet", "LeaderWorkerSet"):
        spec = workload.tree["spec"]
        assert isinstance(spec, dict)
        assert ("replicas" in spec) is (workload.name not in scaled), f"{workload}"


def test_metrics_that_scale_are_exported(shown: Render) -> None:
    known = exported()
    for one in shown.of("HorizontalPodAutoscaler", "ScaledObject"):
        named = set(re.findall(r"\bostrya_[a-z0-9_]+", str(one.tree["spec"])))
        assert named <= known, f"{one} reads {named - known}"


@pytest.mark.parametrize(
    ("slice_values", "kind", "api_version"),
    [
        (None, "StatefulSet", "apps/v1"),
        (V6E, "StatefulSet", "apps/v1"),
        (MULTI_HOST, "LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1"),
    ],
)
@pytest.mark.parametrize("autoscaling", [HPA, HPA | {"hpaMetrics": "gmp"}, KEDA], ids=["hpa", "gmp", "keda"])
def test_workers_scale_by_whole_slices(
    slice_values: Tree | None, kind: str, api_version: str, autoscaling: Tree
) -> None:
    pool: Tree = {"autoscaling": autoscaling}
    if slice_values is not None:
        pool |= {"backend": "xla", "slice": slice_values}
    shown = render({"pools": {"default": pool}})
    ((target, fewest, most),) = targets(shown)
    assert (target.kind, target.api_version, fewest, most) == (kind, api_version, 2, 6)
    test_each_autoscaler_has_a_target_of_the_right_kind_and_owns_its_replicas(shown)
    test_metrics_that_scale_are_exported(shown)
    (scaler,) = shown.of("HorizontalPodAutoscaler", "ScaledObject")
    assert re.findall(r"ostrya_\w+", str(scaler.tree["spec"]))
    # A new worker compiles again: it must not go at the first quiet minute.
    assert "1800" in str(scaler.tree["spec"])


def test_routers_scale_on_cpu() -> None:
    shown = render({"router": {"autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 5}}})
    ((target, fewest, most),) = targets(shown)
    assert (target.kind, fewest, most) == ("Deployment", 3, 5)
    assert target.name == pods(shown, "router")[0].owner.name


def test_a_budget_still_lets_one_go_at_the_fewest_replicas(shown: Render) -> None:
    """maxUnavailable in percent rounds up, so that any number of replicas leaves an eviction."""
    for budget in shown.of("PodDisruptionBudget"):
        most = budget.spec(BudgetSpec).max_unavailable
        assert (isinstance(most, int) and most >= 1) or (isinstance(most, str) and int(most.removesuffix("%")) >= 1)
