"""Scraping, rules and dashboards: the labels that queries rely on, and files that arrive as they were written."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.manifest import Manifest, Selecting, Tree
from tests.chart.pods import Pod, pods
from tests.chart.render import ROOT, Render, render

OBSERVABILITY = ROOT / "deploy" / "observability"
OPERATOR: Tree = {"monitoring": {"provider": "prometheus-operator"}}
GMP: Tree = {"monitoring": {"provider": "gmp"}}


def part(tree: object, *path: str | int) -> object:
    for key in path:
        assert isinstance(tree, dict | list)
        tree = tree[key]  # type: ignore[index]
    return tree


def monitors(shown: Render) -> list[tuple[Manifest, Tree, str]]:
    """(monitor, its only endpoint, the job it gives)."""
    found = []
    for one in shown.of("PodMonitor"):
        endpoint = part(one.tree, "spec", "podMetricsEndpoints", 0)
        assert isinstance(endpoint, dict)
        found.append((one, endpoint, ""))
    for one in shown.of("PodMonitoring"):
        endpoint = part(one.tree, "spec", "endpoints", 0)
        assert isinstance(endpoint, dict)
        # GMP: the object's name is the job.
        found.append((one, endpoint, one.name))
    return found


def relabeled(rules: object, labels: dict[str, str]) -> dict[str, str]:
    """What Prometheus' `replace` rules make of the labels; no other action is used."""
    assert isinstance(rules, list)
    for rule in rules:
        assert rule.get("action", "replace") == "replace"
        source = rule.get("separator", ";").join(labels.get(one, "") for one in rule.get("sourceLabels", []))
        match = re.fullmatch(rule.get("regex", "(.*)"), source)
        if match:
            replacement = re.sub(r"\$(\d)", r"\\\1", rule.get("replacement", "$1"))
            labels = labels | {rule["targetLabel"]: match.expand(replacement)}
    return labels


def target_labels(monitor: Manifest, endpoint: Tree, job: str, pod: Pod) -> dict[str, str]:
    """The labels of this pod's target that do not begin with two underscores."""
    meta = {f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', key)}": one for key, one in pod.labels.items()}
    if monitor.kind == "PodMonitor":
        labels = relabeled(endpoint["relabelings"], meta | {"__meta_kubernetes_pod_name": pod.name})
    else:
        labels = {"job": job, "pod": pod.name}
        mappings = part(monitor.tree, "spec", "targetLabels", "fromPod")
        assert isinstance(mappings, list)
        labels |= {one["to"]: pod.labels[one["from"]] for one in mappings}
        assert "pod" in str(part(monitor.tree, "spec", "targetLabels", "metadata"))
        labels = relabeled(endpoint["metricRelabeling"], labels)
    return {key: one for key, one in labels.items() if not key.startswith("__")}


def test_each_serving_pod_is_scraped_once_with_the_labels_that_queries_use(shown: Render) -> None:
    found = monitors(shown)
    monitoring = shown.values["monitoring"]
    assert isinstance(monitoring, dict)
    if monitoring["provider"] == "none":
        assert found == []
        return
    for pod in pods(shown):
        scraping = [
            (monitor, endpoint, job)
            for monitor, endpoint, job in found
            if monitor.spec(Selecting).selector.selects(pod.labels) and pod.port(str(endpoint["port"])) is not None
        ]
        if pod.component not in ("router", "worker"):
            assert scraping == [], f"{pod} has no metrics"
            continue
        ((monitor, endpoint, job),) = scraping
        labels = target_labels(monitor, endpoint, job, pod)
        expected = {"job": f"ostrya-{pod.component}", "pool": pod.pool, "replica": pod.name}
        assert expected.items() <= labels.items()
        assert endpoint["interval"] == monitoring["interval"]
        assert endpoint.get("path", "/metrics") == "/metrics"


def test_dashboards_arrive_byte_for_byte() -> None:
    shown = render({})
    files = sorted((OBSERVABILITY / "dashboards").glob("*.json"))
    assert len(files) == 5
    arrived: dict[str, object] = {}
    for one in shown.of("ConfigMap"):
        if one.metadata.labels.get("grafana_dashboard") == "1":
            data = one.tree["data"]
            assert isinstance(data, dict)
            arrived |= data
    assert arrived == {f"ostrya-{one.name}": one.read_text() for one in files}
    assert all(json.loads(str(text)) for text in arrived.values())


def test_no_dashboard_without_being_asked() -> None:
    shown = render({"monitoring": {"dashboards": {"enabled": False}}})
    assert [one for one in shown.of("ConfigMap") if "dashboard" in one.name] == []


def written() -> dict[str, Tree]:
    """The rule groups in deploy/observability by name."""
    files = sorted((OBSERVABILITY / "rules").glob("*.yaml"))
    groups = [group for one in files for group in yaml.safe_load(one.read_text())["groups"]]
    assert groups
    return {group["name"]: group for group in groups}


def groups_of(shown: Render, kind: str) -> dict[str, Tree]:
    found: dict[str, Tree] = {}
    for one in shown.of(kind):
        groups = part(one.tree, "spec", "groups")
        assert isinstance(groups, list)
        found |= {group["name"]: group for group in groups}
    return found


def test_rules_arrive_as_written_for_the_prometheus_operator() -> None:
    assert groups_of(render(OPERATOR), "PrometheusRule") == written()


def test_rules_arrive_as_written_for_gmp_with_the_interval_that_it_requires() -> None:
    assert groups_of(render(GMP), "Rules") == {name: {"interval": "30s"} | group for name, group in written().items()}


@pytest.mark.parametrize(("values", "kind"), [(OPERATOR, "PrometheusRule"), (GMP, "Rules")])
def test_templates_in_annotations_are_left_to_prometheus(values: Tree, kind: str) -> None:
    texts = [
        text
        for group in groups_of(render(values), kind).values()
        for rule in group["rules"]  # type: ignore[attr-defined]
        for text in rule.get("annotations", {}).values()
    ]
    assert any("{{ $labels" in text for text in texts), "no annotation with a template arrived"


def promtool() -> str:
    """The program; without it the test is skipped, or fails where OSTRYA_REQUIRE_ALL=1."""
    found = shutil.which("promtool")
    if found is None:
        skip_or_fail = pytest.fail if os.environ.get("OSTRYA_REQUIRE_ALL") == "1" else pytest.skip
        skip_or_fail("no promtool on this machine")
    assert found is not None
    return found


@pytest.mark.parametrize(("values", "kind"), [(OPERATOR, "PrometheusRule"), (GMP, "Rules")])
def test_promtool_takes_the_rendered_rules(values: Tree, kind: str, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": list(groups_of(render(values), kind).values())}))
    checked = subprocess.run([promtool(), "check", "rules", rules], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "SUCCESS" in checked.stdout


def test_runbooks_are_linked_where_the_values_say() -> None:
    shown = render({"monitoring": {"provider": "prometheus-operator", "runbookUrl": "https://wiki.example/ostrya/"}})
    links = re.findall(r"'runbook_url': '([^']+)'", str(groups_of(shown, "PrometheusRule")))
    assert links
    for link in links:
        assert link.startswith("https://wiki.example/ostrya/"), link
        assert (OBSERVABILITY / "runbooks" / link.removeprefix("https://wiki.example/ostrya/")).is_file(), link


def test_labels_for_the_operator_reach_monitors_and_rules() -> None:
    shown = render({"monitoring": {"provider": "prometheus-operator", "labels": {"release": "kube-prometheus"}}})
    for one in shown.of("PodMonitor", "PrometheusRule"):
        assert one.metadata.labels["release"] == "kube-prometheus"


def test_rules_can_be_left_out() -> None:
    shown = render({"monitoring": {"provider": "gmp", "rules": False}})
    assert shown.of("Rules") == ()
    assert len(shown.of("PodMonitoring")) == 2
