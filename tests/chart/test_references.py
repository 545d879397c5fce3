"""What objects say of one another holds: selectors, ports, names, rights, in every render."""

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.chart.manifest import Manifest, Selecting, Selector, Tree
from tests.chart.objects import BudgetSpec, RoleRef, Rule, ServiceSpec, Subject, WorkloadSpec
from tests.chart.pods import POOL, Pod, pods
from tests.chart.render import Render, preset, render

SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# Of RBAC, cluster-wide: parts that are DNS labels, joined by what none of them can have.
JOINED = re.compile(rf"{DNS_LABEL.pattern}(:{DNS_LABEL.pattern})+")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
LONG_RELEASE = "a-release-whose-name-is-as-long-as-helm-lets-it-be-53"


def services(shown: Render) -> Iterator[tuple[Manifest, ServiceSpec, list[Pod]]]:
    for one in shown.of("Service"):
        spec = one.spec(ServiceSpec)
        yield one, spec, [pod for pod in pods(shown) if Selector(match_labels=spec.selector).selects(pod.labels)]


def test_every_service_selects_pods_of_one_component_and_pool(shown: Render) -> None:
    found = list(services(shown))
    assert found
    for service, spec, selected in found:
        assert spec.selector, f"{service} selects everything"
        assert selected, f"{service} selects no pod"
        assert len({(pod.component, pod.pool) for pod in selected}) == 1, f"{service} mixes {[*map(str, selected)]}"


def test_every_port_of_a_service_exists_in_each_pod_it_selects(shown: Render) -> None:
    for service, spec, selected in services(shown):
        for port in spec.ports:
            target = port.port if port.target_port is None else port.target_port
            for pod in selected:
                assert pod.port(target) is not None, f"{service} sends {port.name} to {target}, which {pod} has not"


def test_each_pool_has_its_three_services(shown: Render) -> None:
    by_name = {service.name: (spec, selected) for service, spec, selected in services(shown)}
    for router in pods(shown, "router"):
        prefix = router.owner.name.removesuffix("-router")
        spec, selected = by_name[prefix]
        assert {port.name for port in spec.ports} >= {"grpc"}
        assert [pod.component for pod in selected] == ["router"]
        headless, routers = by_name[f"{prefix}-routers"]
        assert headless.cluster_ip == "None"
        assert routers == selected
        headless, workers = by_name[f"{prefix}-workers"]
        assert headless.cluster_ip == "None"
        assert not headless.publish_not_ready_addresses
        # Routers dial what this Service names: only the first host of a slice answers.
        assert [(pod.component, pod.leads, pod.pool) for pod in workers] == [("worker", True, router.pool)]


# Where the values say that something exists already, by kind.
EXISTING = {
    "Secret": ("existingSecret", "tokenSecret", "caSecret", "pullSecrets"),
    "PersistentVolumeClaim": ("claimName",),
    "ServiceAccount": ("name",),
    "PriorityClass": ("name",),
    "ConfigMap": (),
}


def named_in(values: object, keys: tuple[str, ...], under: str = "") -> Iterator[str]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from named_in(value, keys, key)
    elif isinstance(values, list):
        for value in values:
            yield from named_in(value, keys, under)
    elif isinstance(values, str) and under in keys:
        yield values


def references(pod: Pod) -> Iterator[tuple[str, str, str]]:
    """(kind, name, key) of each object that the pod needs; no key where the whole is meant."""
    spec = pod.spec
    if spec.service_account_name:
        yield "ServiceAccount", spec.service_account_name, ""
    if spec.priority_class_name:
        yield "PriorityClass", spec.priority_class_name, ""
    yield from (("Secret", one.name, "") for one in spec.image_pull_secrets)
    for container in spec.all_containers:
        for variable in container.env:
            source = variable.value_from
            if source is not None and source.secret_key_ref is not None:
                yield "Secret", source.secret_key_ref.name, source.secret_key_ref.key
            if source is not None and source.config_map_key_ref is not None:
                yield "ConfigMap", source.config_map_key_ref.name, source.config_map_key_ref.key
        for whole in container.env_from:
            if whole.secret_ref is not None:
                yield "Secret", whole.secret_ref.name, ""
            if whole.config_map_ref is not None:
                yield "ConfigMap", whole.config_map_ref.name, ""
    for volume in spec.volumes:
        yield from volume_references(volume)


def volume_references(volume: Tree) -> Iterator[tuple[str, str, str]]:
    for field, kind, name in (
        ("configMap", "ConfigMap", "name"),
        ("secret", "Secret", "secretName"),
        ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
    ):
        source = volume.get(field)
        if isinstance(source, dict):
            items = source.get("items", [])
            keys = [str(item["key"]) for item in items] if isinstance(items, list) else []
            yield from ((kind, str(source[name]), key) for key in keys or [""])
    projected = volume.get("projected")
    if isinstance(projected, dict):
        for source in projected["sources"]:
            for field, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
                if field in source:
                    yield kind, str(source[field]["name"]), ""


def test_what_a_pod_refers_to_is_rendered_or_named_by_the_values(shown: Render) -> None:
    for pod in pods(shown):
        for kind, name, key in references(pod):
            if shown.has(kind, name):
                tree = shown.named(kind, name).tree
                held = {**_mapping(tree.get("data")), **_mapping(tree.get("stringData"))}
                assert not key or key in held, f"{pod} reads {key} of {kind}/{name}, which holds {sorted(held)}"
            else:
                existing = set(named_in(shown.values, EXISTING[kind]))
                assert name in existing, f"{pod} needs {kind}/{name}, which neither is rendered nor named by the values"


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def test_every_mount_has_its_volume_and_every_volume_a_mount(shown: Render) -> None:
    for pod in pods(shown):
        volumes = Counter(str(one["name"]) for one in pod.spec.volumes)
        mounted = {mount.name for one in pod.spec.all_containers for mount in one.volume_mounts}
        # The GCS FUSE driver's sidecar, injected by GKE, uses the cache volume by its name.
        injected = {"gke-gcsfuse-cache"} if pod.annotations.get("gke-gcsfuse/volumes") == "true" else set()
        assert max(volumes.values(), default=1) == 1, f"{pod} has volumes twice: {volumes}"
        assert mounted <= volumes.keys(), f"{pod} mounts {mounted - volumes.keys()}, which it has not"
        assert volumes.keys() - injected <= mounted, f"{pod} has unused volumes {volumes.keys() - mounted}"
        for container in pod.spec.all_containers:
            paths = Counter(mount.mount_path for mount in container.volume_mounts)
            assert max(paths.values(), default=1) == 1, f"{container.name} of {pod} mounts twice at one path: {paths}"


def test_roles_let_routers_read_what_they_watch_and_nothing_else(shown: Render) -> None:
    read = ("get", "list", "watch")
    slices = Rule(api_groups=("discovery.k8s.io",), resources=("endpointslices",), verbs=read)
    nodes = Rule(api_groups=("",), resources=("nodes",), verbs=read)
    watches = shown.values["discovery"] == "kubernetes"
    maintenance = shown.values["maintenance"]
    assert isinstance(maintenance, dict)
    for role in shown.of("Role"):
        assert role.part("rules", list[Rule]) == [slices]
    for role in shown.of("ClusterRole"):
        assert role.part("rules", list[Rule]) == [nodes]
    assert bool(shown.of("Role")) is watches
    assert bool(shown.of("ClusterRole")) is bool(maintenance["enabled"])


def test_bindings_name_roles_and_accounts_that_exist(shown: Render) -> None:
    for binding in shown.of("RoleBinding", "ClusterRoleBinding"):
        role = binding.part("roleRef", RoleRef)
        assert shown.has(role.kind, role.name), f"{binding} binds {role.kind}/{role.name}"
        accounts = {pod.spec.service_account_name: pod.component for pod in pods(shown)}
        for subject in binding.part("subjects", list[Subject]):
            assert (subject.kind, accounts.get(subject.name)) == ("ServiceAccount", "router")
            assert subject.namespace, f"{binding} names an account without its namespace"


def test_only_a_router_that_watches_gets_a_token(shown: Render) -> None:
    for pod in pods(shown):
        watches = pod.component == "router" and shown.values["discovery"] == "kubernetes"
        assert pod.spec.automount_service_account_token is watches, f"{pod} mounts a token: {not watches}"


def test_a_workload_selects_its_own_pods_alone_and_by_labels_that_never_change(shown: Render) -> None:
    assert_selects_its_own(shown)


def assert_selects_its_own(shown: Render) -> None:
    for workload in shown.of("Deployment", "StatefulSet"):
        selector = workload.spec(WorkloadSpec).selector
        assert selector.match_labels
        assert not {key for key in selector.named if "version" in key or "chart" in key}
        selected = [pod for pod in pods(shown) if selector.selects(pod.labels)]
        assert [str(pod.owner) for pod in selected] == [str(workload)], f"{workload} selects {[*map(str, selected)]}"


def test_a_disruption_budget_covers_one_workload_and_always_leaves_an_eviction(shown: Render) -> None:
    for budget in shown.of("PodDisruptionBudget"):
        spec = budget.spec(BudgetSpec)
        owners = {str(pod.owner) for pod in pods(shown) if spec.selector.selects(pod.labels)}
        assert len(owners) == 1, f"{budget} covers {owners}"
        # minAvailable would block every drain of a node once the replicas are down to it.
        assert spec.min_available is None
        assert spec.max_unavailable not in (None, 0, "0%"), f"{budget} lets no pod go"
        # A pod that is not ready (a worker that compiles for half an hour) must not hold up a node's drain.
        assert spec.unhealthy_pod_eviction_policy == "AlwaysAllow", f"{budget} keeps pods that serve nobody"


def test_no_two_objects_share_kind_and_name(shown: Render) -> None:
    assert_unique_names(shown)


def assert_unique_names(shown: Render) -> None:
    twice = [name for name, count in Counter(map(str, shown.objects)).items() if count > 1]
    assert twice == []


def assert_well_named(shown: Render) -> None:
    for one in shown.objects:
        if one.kind in ("ClusterRole", "ClusterRoleBinding"):
            assert JOINED.fullmatch(one.name), f"{one} may meet one of another namespace"
        else:
            assert len(one.name) <= 63, f"{one} is {len(one.name)} characters long"
            assert DNS_LABEL.fullmatch(one.name), f"{one} is no DNS label"
        for key, value in one.metadata.labels.items():
            assert_label(str(one), key, value)
    for pod in pods(shown):
        # Kubernetes makes the pod's host name of it, and a StatefulSet's revision hash takes 11 of a label's 63.
        assert len(pod.name) <= 63, f"{pod}"
        assert len(pod.owner.name) <= 52 or pod.owner.kind != "StatefulSet", f"{pod.owner}"
        for key, value in pod.labels.items():
            assert_label(str(pod), key, value)
        for container in pod.spec.all_containers:
            assert DNS_LABEL.fullmatch(container.name)
            names = [port.name for port in container.ports]
            assert len(names) == len(set(names))
            assert all(PORT_NAME.fullmatch(name) for name in names), names


def assert_label(where: str, key: str, value: str) -> None:
    assert LABEL_KEY.fullmatch(key), f"{where}: label {key}"
    assert len(value) <= 63, f"{where}: label {key} is {value}"
    assert LABEL_VALUE.fullmatch(value), f"{where}: label {key} is {value}"


def test_names_and_labels_are_valid(shown: Render) -> None:
    assert_well_named(shown)


LONG_POOL = "a-pool-with-a-n"


@pytest.mark.parametrize("name", ["values/cpu-demo", "values/v6e-8", "values/tpu7x-16"])
def test_names_stay_valid_with_the_longest_release_and_pool(name: str) -> None:
    short = preset(name)
    (pool,) = {pod.pool for pod in pods(short, "router")}
    assert len(LONG_RELEASE) == 53
    assert_well_named(preset(name, release=LONG_RELEASE))
    pools = short.values["pools"]
    assert isinstance(pools, dict)
    overrides: Tree = {
        "discovery": "kubernetes",
        "maintenance": {"enabled": True},
        "monitoring": {"provider": "prometheus-operator"},
        "pools": {pool: None, LONG_POOL: pools[pool]},
    }
    assert_well_named(preset(name, overrides, release=LONG_RELEASE))


TWO_POOLS: Tree = {
    "discovery": "kubernetes",
    "maintenance": {"enabled": True},
    "monitoring": {"provider": "prometheus-operator"},
    "pools": {
        "default": {},
        "large": {
            "backend": "torchtpu",
            "slice": {"generation": "v6e", "machineType": "ct6e-standard-4t", "topology": "4x4"},
        },
    },
}


def test_two_pools_share_no_object_and_no_pod() -> None:
    shown = render(TWO_POOLS)
    assert {pod.pool for pod in pods(shown) if pod.component != "redis"} == {"default", "large"}
    assert_unique_names(shown)
    assert_selects_its_own(shown)
    for service, _, selected in services(shown):
        if selected[0].component != "redis":
            assert len({pod.pool for pod in selected}) == 1
            assert POOL in service.spec(ServiceSpec).selector


def test_a_pool_may_change_between_one_host_and_several() -> None:
    """The LeaderWorkerSet controller makes a StatefulSet and a Service of the set's own name."""
    one, several = (
        render(TWO_POOLS | {"pools": {"large": {"backend": "torchtpu", "slice": slice_values}, "default": None}})
        for slice_values in (
            {"generation": "v6e", "machineType": "ct6e-standard-8t", "topology": "2x4"},
            {"generation": "v6e", "machineType": "ct6e-standard-4t", "topology": "4x4"},
        )
    )
    (of_slices,) = several.of("LeaderWorkerSet")
    for shown in (one, several):
        assert not shown.has("StatefulSet", of_slices.name)
        assert not shown.has("Service", of_slices.name)


# The second two are cut to the same first characters.
@pytest.mark.parametrize("releases", [("one", "two"), (LONG_RELEASE, LONG_RELEASE[:-2] + "54"), ("ostrya", "a")])
def test_two_releases_in_one_namespace_do_not_meet(releases: tuple[str, str]) -> None:
    first, second = (render(TWO_POOLS, release=release) for release in releases)
    assert {str(one) for one in first.objects} & {str(one) for one in second.objects} == set()
    for mine, other in ((first, second), (second, first)):
        for service in mine.of("Service"):
            selector = Selector(match_labels=service.spec(ServiceSpec).selector)
            assert not [pod for pod in pods(other) if selector.selects(pod.labels)], f"{service} selects strangers"
        for kinds in ("Deployment", "StatefulSet", "PodDisruptionBudget", "PodMonitor"):
            for one in mine.of(kinds):
                selector = one.spec(Selecting).selector
                assert not [pod for pod in pods(other) if selector.selects(pod.labels)], f"{one} selects strangers"


CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding", "PriorityClass")


def test_releases_of_one_name_in_two_namespaces_share_nothing_cluster_wide() -> None:
    first, second = (render(TWO_POOLS, namespace=namespace) for namespace in ("one", "two"))
    wide = [{str(one) for one in shown.of(*CLUSTER_WIDE)} for shown in (first, second)]
    assert wide[0]
    assert wide[0] & wide[1] == set()
    assert all(one.metadata.namespace == "one" for one in first.objects if one.kind not in CLUSTER_WIDE)
