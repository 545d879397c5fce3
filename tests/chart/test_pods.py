"""How each pod runs: rights, image, memory, probes, and an end that its drain fits into; in every render."""

import re

import pytest

from ostrya.api.v1 import admin_pb2, inference_pb2, worker_pb2
from ostrya.service.server import LIVENESS
from ostrya.worker.following import SERVICE as FOLLOWER
from tests.chart.commands import command_of, options
from tests.chart.manifest import Selector, Tree
from tests.chart.objects import LeaderWorkerSetSpec, WorkloadSpec
from tests.chart.pods import Pod, pods
from tests.chart.render import Render, preset, render, value_files
from tests.chart.restricted import baseline, restricted

V6E = {"generation": "v6e", "machineType": "ct6e-standard-8t", "topology": "2x4"}
READY = {"router": ("",), "worker": (worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,)}


def ours(shown: Render) -> tuple[Pod, ...]:
    """Routers and workers."""
    return tuple(pod for pod in pods(shown) if pod.component in READY)


def option(shown: Render, pod: Pod, name: str) -> object:
    return options(command_of(shown, pod, pod.main))[name]


def seconds(shown: Render, pod: Pod, name: str) -> float:
    value = option(shown, pod, name)
    assert isinstance(value, float)
    return value


def test_a_render_has_routers_and_workers_for_each_pool(shown: Render) -> None:
    pools = shown.values["pools"]
    assert isinstance(pools, dict)
    assert {(pod.component, pod.pool) for pod in ours(shown)} == {
        (component, pool) for component in READY for pool in pools
    }


def test_every_pod_keeps_the_pod_security_level_of_its_values(shown: Render) -> None:
    level = {"restricted": restricted, "baseline": baseline}[str(shown.values["podSecurity"])]
    found = {str(pod): level(pod) for pod in pods(shown)}
    assert found == {str(pod): [] for pod in pods(shown)}


def test_the_defaults_are_restricted() -> None:
    assert preset("defaults").values["podSecurity"] == "restricted"


@pytest.mark.parametrize("name", list(value_files()))
def test_baseline_relaxes_tpu_workers_alone(name: str) -> None:
    relaxed = preset(name, {"podSecurity": "baseline"})
    for pod in pods(relaxed):
        assert baseline(pod) == []
        uses_tpu = "google.com/tpu" in pod.main.resources.limits
        assert bool(restricted(pod)) is uses_tpu, f"{pod}: {restricted(pod)}"


_UNITS = {"m": 1e-3, "": 1.0, "Mi": 2.0**20, "Gi": 2.0**30}


def amount(quantity: str | int | float) -> float:
    """Cores, bytes or chips."""
    digits, unit = re.fullmatch(r"([0-9.]+)(\D*)", str(quantity)).groups()  # type: ignore[union-attr]
    return float(digits) * _UNITS[unit]


def test_no_container_writes_to_its_own_root(shown: Render) -> None:
    for pod in pods(shown):
        for container in pod.spec.all_containers:
            assert container.security_context.read_only_root_filesystem, f"{container.name} of {pod}"


def test_writable_places_are_there(shown: Render) -> None:
    for pod in ours(shown):
        writable = {mount.mount_path for mount in pod.main.volume_mounts if not mount.read_only}
        assert "/tmp" in writable
        if pod.component == "worker":
            assert {"/dev/shm", "/var/cache/ostrya"} <= writable
            (shm,) = [one["emptyDir"] for one in pod.spec.volumes if one["name"] == "shm"]
            assert isinstance(shm, dict)
            assert shm["medium"] == "Memory"


def test_images_are_pinned(shown: Render) -> None:
    for pod in pods(shown):
        for container in pod.spec.all_containers:
            name, _, tag = container.image.rpartition("/")[2].partition(":")
            assert name
            assert tag not in ("", "latest"), f"{container.name} of {pod}: {container.image}"


def test_no_service_link_becomes_an_option(shown: Render) -> None:
    for pod in ours(shown):
        assert not pod.spec.enable_service_links


def test_every_container_says_what_it_needs_and_bounds_its_memory(shown: Render) -> None:
    for pod in pods(shown):
        for container in pod.spec.all_containers:
            resources = container.resources
            assert {"cpu", "memory"} <= resources.requests.keys(), f"{container.name} of {pod}"
            assert "memory" in resources.limits, f"{container.name} of {pod}"
            for name in resources.requests.keys() & resources.limits.keys():
                asked, most = amount(resources.requests[name]), amount(resources.limits[name])
                assert asked <= most, f"{container.name} of {pod} asks for more {name} than its limit"


def test_options_agree_with_what_kubernetes_is_told(shown: Render) -> None:
    for pod in ours(shown):
        asked = options(command_of(shown, pod, pod.main))
        assert asked["pool"] == pod.pool
        assert asked["host"] in ("0.0.0.0", "[::]")
        if pod.leads:
            assert (asked["port"], asked["metrics_port"]) == (pod.port("grpc"), pod.port("metrics"))
        if pod.component == "worker":
            assert asked["worker_id"] == pod.name
            assert asked["advertise_address"] == f"10.4.1.9:{asked['port']}"
        elif asked["discovery"] == "kubernetes":
            assert (asked["kubernetes_service"], asked["kubernetes_namespace"]) == (
                f"{pod.owner.name.removesuffix('-router')}-workers",
                pod.namespace,
            )


def test_routers_and_workers_of_a_pool_serve_one_model(shown: Render) -> None:
    for router in pods(shown, "router"):
        for worker in pods(shown, "worker"):
            if router.pool == worker.pool:
                # What is simulated has no files, so the router reads another model's tokenizer.
                model = () if option(shown, worker, "backend") == "roofline" else ("model",)
                for name in (*model, "model_name", "redis_url", "max_message_bytes"):
                    assert option(shown, router, name) == option(shown, worker, name), name


def test_the_bundled_redis_is_where_routers_and_workers_look(shown: Render) -> None:
    for pod in ours(shown):
        if pods(shown, "redis"):
            url = str(option(shown, pod, "redis_url"))
            host, _, port = url.rpartition("@")[2].partition("/")[0].partition(":")
            assert shown.has("Service", host)
            assert port == "6379"


def test_no_password_is_in_a_rendered_argument_or_plain_variable(shown: Render) -> None:
    for pod in pods(shown):
        for container in pod.spec.all_containers:
            words = [*container.command, *container.args, *(one.value for one in container.env)]
            with_password = [one for one in words if re.search(r"://[^/]*@", one)]
            assert all("$(REDIS_PASSWORD)@" in one for one in with_password), with_password


def test_probes_ask_for_health_services_that_the_process_has(shown: Render) -> None:
    for pod in ours(shown):
        assert pod.main.probes.keys() == {"startup", "readiness", "liveness"}
        for name, probe in pod.main.probes.items():
            assert probe.grpc is not None, f"{name} probe of {pod} is no gRPC probe"
            assert probe.grpc.port == pod.port("grpc" if pod.leads else "health")
            ready = READY[pod.component] if pod.leads else (FOLLOWER,)
            expected = ready if name == "readiness" else (LIVENESS,)
            assert probe.grpc.service in expected, f"{name} probe of {pod} asks for {probe.grpc.service!r}"


def test_a_start_may_take_as_long_as_the_values_say(shown: Render) -> None:
    for pod in ours(shown):
        startup = pod.main.startup_probe
        if startup is not None:
            least = {"router": 60, "worker": 1800 if "google.com/tpu" in pod.main.resources.limits else 120}
            assert startup.budget_s >= least[pod.component], f"{pod}: {startup.budget_s} s"


def test_the_grace_covers_pre_stop_farewell_and_drain(shown: Render) -> None:
    for pod in ours(shown):
        stop = pod.main.lifecycle.pre_stop
        assert stop is not None, f"{pod} has no preStop"
        assert stop.sleep is not None, "a shell may not be in the image"
        needed = float(stop.sleep.seconds) + seconds(shown, pod, "drain_timeout_s")
        if pod.component == "router":
            needed += seconds(shown, pod, "farewell_s")
        assert pod.spec.termination_grace_period_seconds >= needed, f"{pod}"


def test_hosts_of_a_slice_run_the_command_of_the_first_and_end_as_it_does(shown: Render) -> None:
    leaders = {pod.owner.name: pod for pod in pods(shown, "worker") if pod.leads}
    for follower in (pod for pod in pods(shown, "worker") if not pod.leads):
        leader = leaders[follower.owner.name]
        assert follower.main.args == leader.main.args
        assert follower.main.env == leader.main.env
        assert follower.main.lifecycle == leader.main.lifecycle
        assert follower.spec.termination_grace_period_seconds == leader.spec.termination_grace_period_seconds
        # Who is missing is said before the kubelet loses patience.
        assert leader.main.startup_probe is not None
        assert seconds(shown, leader, "join_timeout_s") < leader.main.startup_probe.budget_s


def test_an_update_of_workers_takes_no_spare_slice_and_one_of_routers_loses_none(shown: Render) -> None:
    for pod in ours(shown):
        match pod.owner.kind:
            case "Deployment":
                strategy = pod.owner.spec(WorkloadSpec).strategy
                assert strategy.type == "RollingUpdate"
                expected = (0, 1) if pod.component == "router" else (1, 0)
                assert (strategy.rolling_update.max_unavailable, strategy.rolling_update.max_surge) == expected
            case "StatefulSet":
                spec = pod.owner.spec(WorkloadSpec)
                assert spec.update_strategy.type == "RollingUpdate"
                assert spec.update_strategy.rolling_update.max_unavailable in (None, 1)
                assert shown.has("Service", spec.service_name)
                # One replica that does not come up must not keep the others from coming.
                assert spec.pod_management_policy == "Parallel"
            case "LeaderWorkerSet":
                rolling = pod.owner.spec(LeaderWorkerSetSpec).rollout_strategy.rolling_update_configuration
                assert (rolling.max_unavailable, rolling.max_surge) == (1, 0)
            case other:
                pytest.fail(f"{pod} is run by a {other}")


def test_pods_are_spread_over_their_own_kind(shown: Render) -> None:
    for pod in ours(shown):
        for constraint in pod.spec.topology_spread_constraints:
            selector = constraint["labelSelector"]
            assert isinstance(selector, dict)
            found = Selector(match_labels=selector["matchLabels"])
            assert {other.owner.name for other in pods(shown) if found.selects(other.labels)} == {pod.owner.name}


def test_routers_and_workers_are_spread_by_default() -> None:
    assert all(pod.spec.topology_spread_constraints for pod in ours(preset("defaults")))


def test_the_bundled_redis_keeps_to_its_memory_and_asks_for_a_password() -> None:
    shown = preset("defaults")
    (redis,) = pods(shown, "redis")
    words = " ".join([*redis.main.command, *redis.main.args])
    mounted = " ".join(str(one.tree.get("data", "")) for one in shown.of("ConfigMap"))
    assert "maxmemory" in words + mounted
    assert "requirepass" in words + mounted
    assert redis.main.probes.keys() >= {"readiness", "liveness"}


def test_a_priority_class_reaches_every_pod() -> None:
    made = render({"priorityClass": {"create": True, "name": "serving", "value": 5000}})
    assert made.named("PriorityClass", "serving").tree["value"] == 5000
    existing = render({"priorityClass": {"name": "serving"}})
    assert not existing.of("PriorityClass")
    for shown in (made, existing):
        assert {pod.spec.priority_class_name for pod in pods(shown)} == {"serving"}


def test_a_compute_class_replaces_the_tpu_labels() -> None:
    pool: Tree = {"backend": "xla", "slice": V6E, "computeClass": "tpu-v6e-2x4"}
    (worker,) = pods(render({"pools": {"default": pool}}), "worker")
    assert worker.spec.node_selector == {"cloud.google.com/compute-class": "tpu-v6e-2x4"}
    assert worker.main.resources.limits["google.com/tpu"] == 8


@pytest.mark.parametrize("slice_values", [V6E, V6E | {"machineType": "ct6e-standard-4t", "topology": "4x4"}])
def test_a_kueue_queue_labels_the_workload(slice_values: dict[str, str]) -> None:
    pool: Tree = {"backend": "torchtpu", "slice": slice_values, "kueueQueue": "tpus"}
    shown = render({"pools": {"default": pool}})
    (worker, *_) = pods(shown, "worker")
    assert worker.owner.metadata.labels["kueue.x-k8s.io/queue-name"] == "tpus"


def test_the_services_of_the_api_are_what_probes_could_ask_for() -> None:
    """READY names what the processes register."""
    names = {
        one.full_name
        for api in (admin_pb2, inference_pb2, worker_pb2)
        for one in api.DESCRIPTOR.services_by_name.values()
    }
    assert set(READY["worker"]) <= names
