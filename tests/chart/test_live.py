"""What an upgrade makes of the objects that are there: replicas, the password of Redis, names that others have.

Helm's lookup finds nothing offline. So the chart's own templates decide of made objects here, in a chart that has
nothing else; and one test has the real Helm look up at a server that knows a few paths.
"""

import hashlib
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import helm_python
import pytest
import yaml

from tests.chart.manifest import Tree
from tests.chart.pods import PASSWORD_CHECKSUM, pods
from tests.chart.render import CHART, NAMESPACE, Refused, Render, chart, render, rendered_objects
from tests.chart.test_monitoring import part
from tests.fakes.kube_apply import KubeApply

# -- replicas ----------------------------------------------------------------------------------------------------------


def entry(manager: str, operation: str, *owned: str, subresource: str = "") -> Tree:
    """Of managedFields. `owned`: paths such as spec.replicas."""
    fields: Tree = {}
    for path in owned:
        at = fields
        for key in path.split("."):
            below = at.setdefault(f"f:{key}", {})
            assert isinstance(below, dict)
            at = below
    found: Tree = {"manager": manager, "operation": operation, "fieldsType": "FieldsV1", "fieldsV1": fields}
    return found | ({"subresource": subresource} if subresource else {})


def applied(manager: str, operation: str, *owned: str) -> Tree:
    """The entry of who wrote the whole object."""
    made = entry(manager, operation, "spec.template", *owned)
    fields = made["fieldsV1"]
    assert isinstance(fields, dict)
    fields["f:metadata"] = {"f:labels": {"f:helm.sh/chart": {}}}
    return made


SCALED = entry("kube-controller-manager", "Update", "spec.replicas", subresource="scale")
STATUS = entry("kube-controller-manager", "Update", "status.replicas", subresource="status")
POLICY = entry("policy-engine", "Apply", "metadata.annotations.team")


def live(replicas: object, *fields: object) -> Tree:
    return {"metadata": {"name": "w", "managedFields": list(fields)}, "spec": {"replicas": replicas}}


KEPT: dict[str, tuple[object, str]] = {
    # Server-side apply, and an autoscaler (or kubectl scale) has scaled since: the number is theirs.
    "scaled by an HPA": (live(5, applied("helm", "Apply"), SCALED, STATUS), ""),
    "scaled from before the first upgrade": (live(5, SCALED, STATUS, applied("helm", "Apply")), ""),
    "never scaled yet": (live(1, applied("helm", "Apply"), STATUS), ""),
    "edited by hand": (live(5, applied("helm", "Apply"), entry("kubectl-edit", "Update", "spec.replicas")), ""),
    "applied by a program of another name": (live(5, applied("python3.11", "Apply"), SCALED), ""),
    # Server-side apply, and Helm's own: a field that is applied no more falls back to 1.
    "autoscaling just switched on": (live(4, applied("helm", "Apply", "spec.replicas"), STATUS), "4"),
    "owned by both": (live(4, applied("helm", "Apply", "spec.replicas"), SCALED), "4"),
    "a switch of methods between": (
        live(3, applied("helm", "Apply"), entry("helm", "Update", "spec.replicas"), STATUS),
        "3",
    ),
    # Client-side apply: the last manifest counts as having set it.
    "client-side": (live(6, applied("helm", "Update", "spec.replicas"), STATUS), "6"),
    "client-side, scaled": (live(6, applied("helm", "Update"), SCALED, STATUS), "6"),
    "client-side beside a server-side policy": (live(6, applied("helm", "Update"), POLICY, SCALED), "6"),
    "server-side beside a policy": (live(6, applied("helm", "Apply"), POLICY, SCALED), ""),
    "scaled to nothing, client-side": (live(0, applied("helm", "Update", "spec.replicas")), "0"),
    # Nothing there, and what no API server sends.
    "not there": ({}, ""),
    "null": (None, ""),
    "without managedFields": ({"metadata": {"name": "w"}, "spec": {"replicas": 7}}, "7"),
    "managedFields null": ({"metadata": {"managedFields": None}, "spec": {"replicas": 7}}, "7"),
    "managedFields text": ({"metadata": {"managedFields": "[}"}, "spec": {"replicas": 7}}, "7"),
    "managedFields a mapping": ({"metadata": {"managedFields": {"operation": "Apply"}}, "spec": {"replicas": 7}}, "7"),
    "entries of other kinds": (live(7, None, 3, "Apply", [], {"operation": "Apply"}, {"fieldsV1": "x"}), "7"),
    "fields of another kind": (live(7, {"operation": "Apply", "manager": "helm", "fieldsV1": {"f:metadata": 1}}), "7"),
    "metadata text": ({"metadata": "w", "spec": {"replicas": 7}}, "7"),
    "without replicas": ({"metadata": {"name": "w"}, "spec": {}}, ""),
    "spec null": ({"metadata": {"name": "w"}, "spec": None}, ""),
    "replicas no number": (live("many", applied("helm", "Update", "spec.replicas")), ""),
    "replicas a fraction": (live(1.5, applied("helm", "Update", "spec.replicas")), ""),
}


@pytest.fixture(scope="module")
def deciding(tmp_path_factory: pytest.TempPathFactory) -> helm_python.Chart:
    """The chart's helpers, and a template that hands made objects to those that decide."""
    folder = tmp_path_factory.mktemp("deciding")
    (folder / "templates").mkdir()
    for name in ("_live.tpl", "_helpers.tpl", "_refusals.tpl"):
        shutil.copy(CHART / "templates" / name, folder / "templates")
    shutil.copy(CHART / "Chart.yaml", folder)
    (folder / "values.yaml").write_text('live: {}\ntaken: {}\nfullnameOverride: ""\n')
    (folder / "templates" / "decided.yaml").write_text(
        "{{- range $name, $live := .Values.live }}\n"
        '{{ $name | quote }}: {{ include "ostrya.replicas.kept" $live | quote }}\n'
        "{{- end }}\n"
        "{{- range .Values.taken }}\n"
        '{{- $taken := dict "root" $ "what" "pools.y makes Service x" "live" . "do" "rename" }}\n'
        '{{ include "ostrya.refusals.owner" $taken }}\n'
        "{{- end }}\n"
    )
    return helm_python.Chart.load(folder)


def test_replicas_are_repeated_where_helm_has_set_them_and_left_out_where_another_has(
    deciding: helm_python.Chart,
) -> None:
    objects = {name: made for name, (made, _) in KEPT.items()}
    (text,) = deciding.render({"live": objects}).values()
    wanted = {name: f"replicas: {kept}" if kept else "" for name, (_, kept) in KEPT.items()}
    assert yaml.safe_load(text) == wanted


SCALING: Tree = {"autoscaling": {"type": "keda", "kedaServerAddress": "http://prometheus:9090"}}
AUTOSCALED: Tree = {
    "pools": {"default": SCALING},
    "monitoring": {"dashboards": {"enabled": False}},
}
OF = f"namespaces/{NAMESPACE}"
WORKERS = f"/apis/apps/v1/{OF}/statefulsets/ostrya-default-worker"
SERVICE = f"/api/v1/{OF}/services/ostrya-default"
CLASS = "/apis/scheduling.k8s.io/v1/priorityclasses/high"
SECRET = f"/api/v1/{OF}/secrets/ostrya-redis"


@contextmanager
def cluster() -> Iterator[tuple[KubeApply, helm_python.Config]]:
    """An empty one, and Helm at work on it."""
    with (
        KubeApply() as server,
        helm_python.Config(
            kube_apiserver=server.url, namespace=NAMESPACE, storage_driver="memory", qps=1000.0, burst_limit=1000
        ) as helm,
    ):
        yield server, helm


def test_helm_hands_the_chart_the_live_objects() -> None:
    password = "b2xkZXI="
    there: Tree = {"apiVersion": "apps/v1", "kind": "StatefulSet"}
    secret: Tree = {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": {"redis-password": password}}
    for fields, kept in (([applied("helm", "Apply"), SCALED], False), ([applied("helm", "Update"), SCALED], True)):
        with cluster() as (server, helm):
            server.put(WORKERS, there | live(5, *fields))
            server.put(SECRET, secret)
            found = helm.render(chart(), AUTOSCALED, name="ostrya", namespace=NAMESPACE, is_upgrade=True)
        assert ("\n  replicas: 5\n" in found["ostrya/templates/workers.yaml"]) is kept
        for name in ("redis", "router", "workers"):
            checksum = hashlib.sha256(password.encode()).hexdigest()[:16]
            assert f"{PASSWORD_CHECKSUM}: {checksum}" in found[f"ostrya/templates/{name}.yaml"].replace('"', "")
        assert password in found["ostrya/templates/redis.yaml"]


# -- upgrades and rollbacks, by the real Helm and its server-side apply ------------------------------------------------


class Release:
    """Of the chart, in a cluster."""

    def __init__(self, server: KubeApply, helm: helm_python.Config) -> None:
        self.server, self.helm = server, helm

    def install(self, values: Tree) -> None:
        self.helm.install(chart(), "ostrya", values, namespace=NAMESPACE, timeout=60)

    def upgrade(self, values: Tree) -> None:
        self.helm.upgrade(chart(), "ostrya", values, namespace=NAMESPACE, timeout=60)

    def roll_back(self, version: int) -> None:
        self.helm.rollback("ostrya", version=version, timeout=60)

    def replicas(self) -> object:
        return part(self.server.get(WORKERS), "spec", "replicas")


@pytest.fixture
def release() -> Iterator[Release]:
    with cluster() as found:
        yield Release(*found)


QUIET: Tree = {"monitoring": {"dashboards": {"enabled": False}}, "networkPolicy": {"enabled": False}}
FEWER: Tree = AUTOSCALED | QUIET
CHANGED = FEWER | {"router": {"logLevel": "debug"}}


def test_a_rollback_after_an_autoscaler_has_scaled_goes_through_and_keeps_its_number(release: Release) -> None:
    release.install(FEWER)
    release.server.scale(WORKERS, 5)
    release.upgrade(CHANGED)
    assert release.replicas() == 5
    release.server.scale(WORKERS, 7)
    release.upgrade(FEWER)
    release.server.scale(WORKERS, 8)
    # What an upgrade has rendered must hold no number of an earlier moment; what the install rendered has none anyway.
    for version, is_changed in ((2, True), (1, False)):
        release.roll_back(version)
        assert release.replicas() == 8
        routers = release.server.get(f"/apis/apps/v1/{OF}/deployments/ostrya-default-router")
        assert ("debug" in str(routers)) is is_changed


def test_switching_autoscaling_on_keeps_the_number_and_the_first_scaling_takes_it_over(release: Release) -> None:
    release.install(QUIET | {"pools": {"default": {"replicas": 4}}})
    release.upgrade(FEWER)
    assert release.replicas() == 4, "a field that is applied no more would be 1"
    release.server.scale(WORKERS, 6)
    release.upgrade(CHANGED)
    release.server.scale(WORKERS, 7)
    release.upgrade(FEWER)
    assert release.replicas() == 7
    release.roll_back(3)
    assert release.replicas() == 7
    # What stays, and what the README says of it: these revisions hold a number, which is another's now.
    for version in (1, 2):
        with pytest.raises(helm_python.HelmError, match=r"conflict.*spec\.replicas"):
            release.roll_back(version)


def test_a_rollback_over_an_external_redis_restarts_everything_that_has_another_password(release: Release) -> None:
    release.install(QUIET)
    first = release.server.get(SECRET)
    release.upgrade(QUIET | {"redis": {"mode": "external", "external": {"url": "redis://r.example:6379/0"}}})
    assert release.server.get(SECRET) is None
    release.upgrade(QUIET)
    pods_of = [f"/apis/apps/v1/{OF}/deployments/{name}" for name in ("ostrya-redis", "ostrya-default-router")]
    before, second = [release.server.get(path) for path in (*pods_of, WORKERS)], release.server.get(SECRET)
    release.roll_back(1)
    assert part(release.server.get(SECRET), "data") == part(first, "data") != part(second, "data")
    after = [release.server.get(path) for path in (*pods_of, WORKERS)]
    for old, new in zip(before, after, strict=True):
        assert part(old, "spec", "template") != part(new, "spec", "template"), "its pods go on with the other password"


# -- the password of Redis ---------------------------------------------------------------------------------------------


def assert_pods_start_anew_with_another_password(shown: Render) -> None:
    secrets = [one.tree["data"] for one in shown.of("Secret")]
    wanted: set[str | None] = {hashlib.sha256(one["redis-password"].encode()).hexdigest()[:16] for one in secrets}  # type: ignore[index]
    found = {str(pod): pod.annotations.get(PASSWORD_CHECKSUM) for pod in pods(shown)}
    assert set(found.values()) == (wanted or {None}), found


def test_every_pod_carries_the_checksum_of_the_password_that_is_rendered_with_it(shown: Render) -> None:
    assert_pods_start_anew_with_another_password(shown)


def test_each_password_has_its_own_checksum_and_a_secret_of_the_users_none() -> None:
    plain: Tree = {"monitoring": {"dashboards": {"enabled": False}}}
    checksums = set()
    for _ in range(2):  # not the cached render
        shown = Render(release="ostrya", values={}, objects=rendered_objects(chart(), plain, "ostrya"))
        assert_pods_start_anew_with_another_password(shown)
        checksums |= {pod.annotations[PASSWORD_CHECKSUM] for pod in pods(shown)}
    assert len(checksums) == 2
    for redis in (
        {"bundled": {"existingSecret": "mine"}},
        {"mode": "external", "external": {"url": "redis://r.example:6379/0", "existingSecret": "mine"}},
    ):
        shown = render(plain | {"redis": redis})
        assert shown.of("Secret") == ()
        assert_pods_start_anew_with_another_password(shown)


# -- names -------------------------------------------------------------------------------------------------------------


def owned(release: str | None, namespace: str = NAMESPACE) -> Tree:
    annotations = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": namespace}
    return {"metadata": {"name": "x"} | ({"annotations": annotations} if release else {})}


def test_a_name_that_another_release_has_is_refused_with_both_names(deciding: helm_python.Chart) -> None:
    mine: list[object] = [{}, None, owned(None), owned("ostrya-x"), {"metadata": {"annotations": None}}]
    rendered_objects_of(deciding, mine)
    for other in (owned("ostrya"), owned("ostrya-x", "prod")):
        with pytest.raises(helm_python.HelmError) as refused:
            rendered_objects_of(deciding, [*mine, other])
        annotations = other["metadata"]["annotations"]  # type: ignore[index]
        who = "release {} of namespace {}".format(*annotations.values())
        assert f"pools.y makes Service x, which {who} has already; rename" in str(refused.value)


def rendered_objects_of(deciding: helm_python.Chart, taken: list[object]) -> None:
    deciding.render({"taken": taken}, name="ostrya-x", namespace=NAMESPACE)


def test_helm_asks_before_anything_is_made(release: Release) -> None:
    classes: Tree = AUTOSCALED | {"priorityClass": {"create": True, "name": "high"}}
    for path, version, words in (
        (CLASS, "scheduling.k8s.io/v1", r"priorityClass\.create makes PriorityClass high"),
        (SERVICE, "v1", r"pools\.default makes Service ostrya-default"),
    ):
        there: Tree = {"apiVersion": version, "kind": words.split()[-2]}
        release.server.put(path, there | owned("os-trya"))
        with pytest.raises(helm_python.HelmError, match=f"{words}, which release os-trya of namespace serving has"):
            release.install(classes)
    assert release.server.num_applied == 0


# (namespace, release, pool): names that joins of names make alike.
ALIKE = [
    ("prod", "eu", "default"),
    ("prod-eu", "ostrya", "default"),
    ("prod", "eu-ostrya", "default"),
    ("prod", "ostrya-x", "y"),
    ("prod", "ostrya", "x-y"),
    ("prod", "ostrya-x-y", "redis1"),
    ("prod", "ostrya", "x-redis"),
    ("prod", "ostrya-x", "maintenance"),
    ("prod-ostrya", "x-ostrya", "y"),
    ("prod-ostrya-x", "ostrya", "y"),
    ("prod", "ostrya", "x"),
    ("prod", "ostrya-x", "discovery"),
]


def test_releases_in_two_namespaces_share_no_name_and_in_one_none_that_nobody_refuses() -> None:
    """The chart asks for its pools' Services and Redis'; any other name that two pools share comes with one of them."""
    made = []
    for namespace, release, pool in ALIKE:
        values: Tree = {
            "discovery": "kubernetes",
            "maintenance": {"enabled": True},
            "monitoring": {"provider": "prometheus-operator"},
            "pools": {"default": None, pool: SCALING},
        }
        shown = render(values, release=release, namespace=namespace)
        made.append({(one.kind, one.metadata.namespace, one.name) for one in shown.objects})
    met = set()
    for (i, first), (j, second) in itertools.combinations(enumerate(made), 2):
        if ALIKE[i][:2] != ALIKE[j][:2] and (same := first & second):
            assert ALIKE[i][0] == ALIKE[j][0], f"{ALIKE[i]} and {ALIKE[j]} share {same}"
            assert any(kind == "Service" for kind, _, _ in same), f"{ALIKE[i]} and {ALIKE[j]} share {same} unseen"
            met.add((i, j))
    assert {(0, 2), (3, 4), (3, 6)} <= met, "they are not as alike as they should be"


def test_a_pool_is_refused_whose_name_another_object_of_the_chart_has() -> None:
    with pytest.raises(Refused, match=r"pools\.redis: the name is taken"):
        render({"pools": {"redis": {}}})
