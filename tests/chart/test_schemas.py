"""The schema checks find what an API server would refuse, in built-in and custom kinds alike."""

import pytest

from tests.chart.manifest import Tree, read
from tests.chart.render import merged
from tests.chart.schemas import NEWEST, OLDEST, problems

POD: Tree = {"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [{"name": "a", "image": "a:1"}]}}
SELECTOR: Tree = {"matchLabels": {"app": "a"}}
PROMETHEUS: Tree = {
    "type": "prometheus",
    "metadata": {"serverAddress": "http://prometheus:9090", "query": "up", "threshold": "1"},
}
VALID: dict[str, Tree] = {
    "apps/v1 Deployment": {"selector": SELECTOR, "template": POD},
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": {"leaderWorkerTemplate": {"size": 2, "workerTemplate": POD}},
    "monitoring.googleapis.com/v1 PodMonitoring": {
        "selector": SELECTOR,
        "endpoints": [{"port": "metrics", "interval": "15s", "metricRelabeling": [{"targetLabel": "replica"}]}],
        "targetLabels": {"metadata": ["pod"], "fromPod": [{"from": "ostrya.dev/pool", "to": "pool"}]},
    },
    "monitoring.googleapis.com/v1 Rules": {
        "groups": [{"name": "g", "interval": "30s", "rules": [{"alert": "A", "expr": "up == 0", "for": "5m"}]}]
    },
    "monitoring.coreos.com/v1 PrometheusRule": {"groups": [{"name": "g", "rules": [{"record": "a:b", "expr": "1"}]}]},
    "monitoring.coreos.com/v1 PodMonitor": {"selector": SELECTOR, "podMetricsEndpoints": [{"port": "metrics"}]},
    "keda.sh/v1alpha1 ScaledObject": {"scaleTargetRef": {"name": "a"}, "triggers": [PROMETHEUS]},
}


def found(kind: str, change: Tree, version: str = OLDEST) -> tuple[str, ...]:
    api_version, name = kind.split()
    tree: Tree = {"apiVersion": api_version, "kind": name, "metadata": {"name": "a"}, "spec": VALID.get(kind, {})}
    return problems(read("a.yaml", merged(tree, change)), version)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("kind", VALID)
def test_a_valid_object_passes(kind: str, version: str) -> None:
    assert found(kind, {}, version) == ()


@pytest.mark.parametrize("kind", VALID)
def test_an_unknown_field_is_found(kind: str) -> None:
    assert any("'speck'" in one for one in found(kind, {"speck": {}})), found(kind, {"speck": {}})
    assert any("'replcas'" in one for one in found(kind, {"spec": {"replcas": 1}}))


WRONG: dict[str, tuple[str, Tree, str]] = {
    "a kind without a schema": ("example.com/v1 Thing", {}, "no schema for example.com/v1 Thing"),
    "null where a template found nothing": (
        "apps/v1 Deployment",
        {"spec": {"replicas": None}},
        "spec.replicas is null",
    ),
    "a misspelled field of an embedded pod": (
        "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet",
        {"spec": {"leaderWorkerTemplate": {"leaderTemplate": {"spec": {"containers": [{"name": "a", "imge": "a"}]}}}}},
        "'imge'",
    ),
    "a rollout that Kubernetes has and LeaderWorkerSet has not": (
        "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet",
        {"spec": {"rolloutStrategy": {"type": "OnDelete"}}},
        "'RollingUpdate' was expected",
    ),
    "relabeling onto a label that GMP protects": (
        "monitoring.googleapis.com/v1 PodMonitoring",
        {"spec": {"endpoints": [{"port": "metrics", "metricRelabeling": [{"targetLabel": "job"}]}]}},
        "'job'",
    ),
    "GMP rules without an interval": (
        "monitoring.googleapis.com/v1 Rules",
        {"spec": {"groups": [{"name": "g", "rules": [{"alert": "A", "expr": "1"}]}]}},
        "'interval' is a required property",
    ),
    "a rule that is alert and record at once": (
        "monitoring.coreos.com/v1 PrometheusRule",
        {"spec": {"groups": [{"name": "g", "rules": [{"alert": "A", "record": "a:b", "expr": "1"}]}]}},
        "is valid under each of",
    ),
    "an interval that is no duration": (
        "monitoring.coreos.com/v1 PodMonitor",
        {"spec": {"podMetricsEndpoints": [{"port": "metrics", "interval": "15 s"}]}},
        "'15 s' does not match",
    ),
    "a number where KEDA wants a string": (
        "keda.sh/v1alpha1 ScaledObject",
        {"spec": {"triggers": [merged(PROMETHEUS, {"metadata": {"threshold": 4}})]}},
        "4 is not of type 'string'",
    ),
    "a KEDA trigger without its query": (
        "keda.sh/v1alpha1 ScaledObject",
        {"spec": {"triggers": [{"type": "prometheus", "metadata": {"serverAddress": "http://p", "threshold": "1"}}]}},
        "'query' is a required property",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_finds(what: str) -> None:
    kind, change, words = WRONG[what]
    assert any(words in one for one in found(kind, change)), found(kind, change)
