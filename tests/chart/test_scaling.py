"""Autoscalers and what they scale: one owner of `replicas`, a target that exists, metrics that processes export."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from ostrya.router.metrics import RouterMetrics
from ostrya.worker.metrics import WorkerMetrics
from tests.chart.manifest import Selecting, Tree
from tests.chart.objects import AutoscalerSpec, BudgetSpec, ScaledObjectSpec, ScaleTarget
from tests.chart.pods import pods
from tests.chart.render import CHART, NAMESPACE, Render, render
from tests.chart.test_monitoring import OPERATOR, monitors, part, promtool, target_labels

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


def exported(component: str) -> dict[str, str]:
    """The type of each sample that routers or workers export, by its name."""
    registry = CollectorRegistry()
    if component == "router":
        RouterMetrics(registry, model="m", pool="p")
    else:
        WorkerMetrics(registry, model="m")
    found = {name: family.type for family in registry.collect() for name in (family.name, f"{family.name}_total")}
    return found | {f"{name}{end}": kind for name, kind in found.items() for end in ("_bucket", "_sum", "_count")}


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
    known = exported("router").keys() | exported("worker").keys()
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
@pytest.mark.parametrize(
    ("autoscaling", "provider"),
    [(HPA, "prometheus-operator"), (HPA | {"hpaMetrics": "gmp"}, "gmp"), (KEDA, "none")],
    ids=["hpa", "gmp", "keda"],
)
def test_workers_scale_by_whole_slices(
    slice_values: Tree | None, kind: str, api_version: str, autoscaling: Tree, provider: str
) -> None:
    pool: Tree = {"autoscaling": autoscaling}
    if slice_values is not None:
        pool |= {"backend": "torchtpu", "slice": slice_values}
    shown = render({"pools": {"default": pool}, "monitoring": {"provider": provider}})
    ((target, fewest, most),) = targets(shown)
    assert (target.kind, target.api_version, fewest, most) == (kind, api_version, 2, 6)
    test_each_autoscaler_has_a_target_of_the_right_kind_and_owns_its_replicas(shown)
    test_metrics_that_scale_are_exported(shown)
    (scaler,) = shown.of("HorizontalPodAutoscaler", "ScaledObject")
    assert re.findall(r"ostrya_\w+", str(scaler.tree["spec"]))
    # A new worker compiles again: it must not go at the first quiet minute.
    assert "1800" in str(scaler.tree["spec"])


TWO_POOLS: Tree = {
    "poolDefaults": {"autoscaling": HPA},
    "pools": {"default": {}, "chat": {"autoscaling": KEDA}},
    **OPERATOR,
}


def queries(shown: Render) -> list[str]:
    (scaled,) = shown.of("ScaledObject")
    return [one.metadata["query"] for one in scaled.spec(ScaledObjectSpec).triggers]


def test_a_query_of_keda_asks_for_its_own_pool_by_the_labels_that_targets_have() -> None:
    shown = render(TWO_POOLS)
    (worker,) = [pod for pod in pods(shown, "worker") if pod.pool == "chat"]
    ((monitor, endpoint, job),) = [
        one for one in monitors(shown) if one[0].spec(Selecting).selector.selects(worker.labels)
    ]
    # The Prometheus operator adds namespace.
    known = target_labels(monitor, endpoint, job, worker) | {"namespace": NAMESPACE}
    assert len(queries(shown)) == 3
    for query in queries(shown):
        ((metric, matchers),) = re.findall(r"(ostrya_\w+)\{([^}]*)\}", query)
        component = "router" if metric.startswith("ostrya_router_") else "worker"
        assert metric in exported(component)
        asked = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
        assert asked == {"namespace": NAMESPACE, "pool": "chat"}
        assert asked.items() <= known.items()


def test_the_queries_of_keda_parse(tmp_path: Path) -> None:
    tool = promtool()
    rules = [
        {"record": f"ostrya:query:{index}", "expr": query} for index, query in enumerate(queries(render(TWO_POOLS)))
    ]
    written = tmp_path / "queries.yaml"
    written.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    checked = subprocess.run([tool, "check", "rules", written], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("source", ["prometheus-adapter", "gmp"])
def test_an_hpa_asks_workers_and_routers_of_its_own_pool_for_what_each_exports(source: str) -> None:
    provider = "gmp" if source == "gmp" else "prometheus-operator"
    pool: Tree = {"autoscaling": HPA | {"hpaMetrics": source}}
    shown = render({"pools": {"chat": pool, "default": None}, "monitoring": {"provider": provider}})
    (scaler,) = shown.of("HorizontalPodAutoscaler")
    of_pods, external = scaler.spec(AutoscalerSpec).metrics
    named = {"worker": part(of_pods, "pods", "metric"), "router": part(external, "external", "metric")}
    for component, metric in named.items():
        assert isinstance(metric, dict)
        words = metric["name"].split("|")
        # As custom-metrics-stackdriver-adapter takes it: a prefix, the name, and its type in Managed Prometheus.
        name = words[1] if source == "gmp" else words[0]
        assert words == (["prometheus.googleapis.com", name, "gauge"] if source == "gmp" else [name])
        assert exported(component)[name] == "gauge"
    selector = part(named["router"], "selector", "matchLabels")
    if source == "gmp":
        assert selector == {"metric.labels.pool": "chat", "resource.labels.namespace": NAMESPACE}
    else:
        # The namespace of an External metric is the HPA's own: the adapter adds it.
        assert selector == {"pool": "chat"}


def test_the_rules_for_prometheus_adapter_give_what_an_hpa_asks_for() -> None:
    rules = yaml.safe_load((CHART / "prometheus-adapter.yaml").read_text())["rules"]
    shown = render({"pools": {"default": {"autoscaling": HPA}}} | OPERATOR)
    (scaler,) = shown.of("HorizontalPodAutoscaler")
    of_pods, external = scaler.spec(AutoscalerSpec).metrics
    # A Pods metric is found by its pod, an External one by its namespace; the selector names further labels.
    for (rule,), metric, resources, labels in (
        (rules["custom"], part(of_pods, "pods", "metric", "name"), ["namespace", "pod"], set()),
        (rules["external"], part(external, "external", "metric", "name"), ["namespace"], {"pool"}),
    ):
        ((name, matchers),) = re.findall(r"^(\w+)\{(.*)\}$", rule["seriesQuery"])
        assert name == metric
        assert set(re.findall(r'(\w+)!=""', matchers)) == {*resources, *labels}
        assert rule["resources"]["overrides"] == {one: {"resource": one} for one in resources}
    selector = part(external, "external", "metric", "selector", "matchLabels")
    assert selector == {"pool": "default"}


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
