"""Every values file the chart ships lints clean and renders to what Kubernetes and the operators take."""

import helm_python
import pytest

from tests.chart.pods import PASSWORD_CHECKSUM
from tests.chart.render import CHART, Render, overrides, preset, value_files
from tests.chart.schemas import VERSIONS, problems

PRESETS = ("cpu-demo", "v5e-1", "v5e-8", "v6e-1", "v6e-8", "v5p-4", "tpu7x-4", "tpu7x-16")
_WARNING = 2


def test_every_promised_preset_is_there() -> None:
    assert value_files().keys() >= {f"values/{name}" for name in PRESETS}
    assert any(name.startswith("ci/") for name in value_files())


@pytest.mark.parametrize("name", list(value_files()))
def test_lints_clean(name: str) -> None:
    report = helm_python.lint(CHART, overrides(name), strict=True)
    assert report["total_charts_linted"] == 1
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] >= _WARNING] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_that_kubernetes_takes(shown: Render, version: str) -> None:
    found = {f"{one} of {one.source}": problems(one, version) for one in shown.objects}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_every_template_is_rendered_by_one_of_the_values_files() -> None:
    templates = {f"ostrya/templates/{path.name}" for path in CHART.glob("templates/*.yaml")}
    assert templates == {one.source for name in value_files() for one in preset(name).objects}


def test_every_kind_that_the_chart_can_make_is_made_by_one_of_the_values_files() -> None:
    made = {one.kind for name in value_files() for one in preset(name).objects}
    assert made >= {
        *("Deployment", "StatefulSet", "LeaderWorkerSet", "Service", "ConfigMap", "Secret", "ServiceAccount"),
        *("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "NetworkPolicy", "PodDisruptionBudget"),
        *("HorizontalPodAutoscaler", "ScaledObject", "PriorityClass"),
        *("PodMonitor", "PrometheusRule", "PodMonitoring", "Rules"),
    }


def test_labels_name_the_release_and_the_version(shown: Render) -> None:
    for one in shown.objects:
        labels = one.metadata.labels
        assert labels["app.kubernetes.io/name"] == "ostrya"
        assert labels["app.kubernetes.io/instance"] == shown.release
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/version"]


def test_a_render_is_the_same_each_time_but_for_the_generated_password_and_its_checksum() -> None:
    first, again = (
        helm_python.Chart.load(CHART).render(overrides("values/tpu7x-16"), name="ostrya", namespace="serving")
        for _ in range(2)
    )
    lines = {
        line.split(":")[0].strip(' "')
        for path in first
        for pair in zip(first[path].splitlines(), again[path].splitlines(), strict=True)
        for line in pair
        if pair[0] != pair[1]
    }
    assert lines <= {"redis-password", PASSWORD_CHECKSUM}
