"""Who may talk to whom: each flow the platform needs is allowed by the rendered policies, and the others are not.

A flow that is needed must be allowed on networks that match pods by label alone (no addresses); one that is not needed
must be denied also where a pod's address counts.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.chart.manifest import Tree
from tests.chart.objects import NetworkPolicySpec
from tests.chart.pods import Pod, pods
from tests.chart.policies import End, allows, end_of
from tests.chart.render import NAMESPACE, Render, preset, render

CLIENT = End(name="client", namespace=NAMESPACE, labels={"app": "client"}, address="10.4.9.9")
STRANGER = End(name="stranger", namespace="elsewhere", labels={"app": "client"}, address="10.4.9.8")
PROMETHEUS = End(name="prometheus", namespace="monitoring", labels={"app.kubernetes.io/name": "prometheus"})
GMP = (
    End(name="collector", namespace="gmp-system", labels={"app.kubernetes.io/name": "collector"}),
    End(name="collector", namespace="gke-gmp-system", labels={"app.kubernetes.io/name": "collector"}),
)
DNS = End(name="kube-dns", namespace="kube-system", labels={"k8s-app": "kube-dns"})
NODE_LOCAL_DNS = End(name="node-local-dns", address="169.254.20.10")
API_SERVER = End(name="API server", address="10.0.0.1")
INTERNET = End(name="internet", address="142.250.74.91")
METADATA = End(name="metadata server", address="169.254.169.254")
# GKE's own metadata server behind that address, which policies of Calico see.
GKE_METADATA = End(name="metadata server of the node", address="169.254.169.252")
TPU_PORT = 8476
SLICE_PORTS = (50053, 50054)
"""Step plans, and where collectives meet."""

GRPC, METRICS, WORKER = "grpc", "metrics", 50052


def ends(shown: Render, component: str, *, leads: bool = True) -> list[End]:
    return [end_of(pod) for pod in pods(shown, component) if pod.leads is leads]


def addressed(end: End) -> End:
    return replace(end, address="10.4.1.7")


def same_pool(one: End, other: End) -> bool:
    return one.labels["ostrya.dev/pool"] == other.labels["ostrya.dev/pool"]


def downloads(pod: Pod) -> bool:
    """From outside the cluster: by `ostrya fetch`, or by the GCS FUSE sidecar."""
    fetches = any(container.args[:1] == ("fetch",) for container in pod.spec.init_containers)
    return fetches or pod.annotations.get("gke-gcsfuse/volumes") == "true"


Flow = tuple[End, End, int | str]


def needed(shown: Render) -> Iterator[Flow]:
    routers, workers, redis = (ends(shown, one) for one in ("router", "worker", "redis"))
    scrapers = GMP if _monitoring(shown)["provider"] == "gmp" else (PROMETHEUS,)
    for router in routers:
        if not _policy(shown)["clients"]:
            yield CLIENT, router, GRPC
        # `ostrya doctor` in a router asks each router of its pool.
        yield from ((router, replace(one, name="another router"), GRPC) for one in routers if same_pool(router, one))
        yield from ((router, worker, GRPC) for worker in workers if same_pool(router, worker))
        yield from ((router, one, 6379) for one in redis)
        yield from ((scraper, router, METRICS) for scraper in scrapers)
        if shown.values["discovery"] == "kubernetes":
            yield router, API_SERVER, 443
    for worker in workers:
        yield from ((worker, one, 6379) for one in redis)
        yield from ((scraper, worker, METRICS) for scraper in scrapers)
        for peer in ends(shown, "worker", leads=False):
            if same_pool(worker, peer):
                for port in (TPU_PORT, *SLICE_PORTS):
                    yield worker, peer, port
                    yield peer, worker, port
        yield from ((scraper, peer, METRICS) for scraper in scrapers for peer in ends(shown, "worker", leads=False))
    for pod in pods(shown):
        if downloads(pod):
            yield end_of(pod), INTERNET, 443
            yield end_of(pod), METADATA, 80
            yield end_of(pod), GKE_METADATA, 988


def unneeded(shown: Render) -> Iterator[Flow]:
    routers, workers, redis = ([*map(addressed, ends(shown, one))] for one in ("router", "worker", "redis"))
    followers = [addressed(one) for one in ends(shown, "worker", leads=False)]
    for router in routers:
        yield STRANGER, router, GRPC
        yield CLIENT, router, METRICS
        yield PROMETHEUS, router, GRPC
        yield router, CLIENT, 8080
        yield from ((router, other, GRPC) for other in routers if not same_pool(router, other))
        yield from ((router, other, METRICS) for other in routers)
        yield from ((router, worker, METRICS) for worker in workers)
        yield from ((router, worker, GRPC) for worker in workers if not same_pool(router, worker))
        yield router, API_SERVER, 8443
    for worker in [*workers, *followers]:
        yield CLIENT, worker, WORKER
        yield CLIENT, worker, 9401
        yield STRANGER, worker, WORKER
        yield PROMETHEUS, worker, WORKER
        yield CLIENT, worker, TPU_PORT
        yield from ((worker, router, GRPC) for router in routers)
        yield from ((worker, router, METRICS) for router in routers)
        yield from ((router, worker, port) for router in routers for port in (TPU_PORT, *SLICE_PORTS))
        yield from ((other, worker, SLICE_PORTS[0]) for other in (CLIENT, STRANGER, PROMETHEUS))
        yield worker, CLIENT, 8080
        yield worker, API_SERVER, 6443
    for worker in workers:
        yield from ((worker, other, WORKER) for other in [*workers, *followers])
    for one in redis:
        yield CLIENT, one, 6379
        yield STRANGER, one, 6379
        yield PROMETHEUS, one, 6379
        yield from ((one, other, 6379) for other in redis)
        yield from ((one, other, GRPC) for other in [*routers, *workers])
        yield from ((one, other, port) for other in (INTERNET, API_SERVER, METADATA) for port in (80, 443))
    for pod in pods(shown):
        if not downloads(pod):
            yield addressed(end_of(pod)), METADATA, 80
            if pod.component != "router" or shown.values["discovery"] != "kubernetes":
                yield addressed(end_of(pod)), INTERNET, 443
                yield addressed(end_of(pod)), API_SERVER, 443


def _policy(shown: Render) -> dict[str, object]:
    policy = shown.values["networkPolicy"]
    assert isinstance(policy, dict)
    return policy


def _monitoring(shown: Render) -> dict[str, object]:
    monitoring = shown.values["monitoring"]
    assert isinstance(monitoring, dict)
    return monitoring


def guarded(shown: Render) -> bool:
    return bool(_policy(shown)["enabled"])


def test_policies_are_rendered_exactly_where_they_are_enabled(shown: Render) -> None:
    assert bool(shown.of("NetworkPolicy")) is guarded(shown)


def test_every_policy_selects_pods_of_this_release_alone(shown: Render) -> None:
    for policy in shown.of("NetworkPolicy"):
        selector = policy.spec(NetworkPolicySpec).pod_selector
        assert any(selector.selects(pod.labels) for pod in pods(shown)), f"{policy} selects none of our pods"
        assert not selector.selects(CLIENT.labels), f"{policy} closes pods that are not ours"


def test_every_pod_is_closed_in_both_directions(shown: Render) -> None:
    if not guarded(shown):
        return
    for pod in pods(shown):
        types = {
            one
            for policy in shown.of("NetworkPolicy")
            if policy.spec(NetworkPolicySpec).pod_selector.selects(pod.labels)
            for one in policy.spec(NetworkPolicySpec).policy_types
        }
        assert types == {"Ingress", "Egress"}, f"{pod}: {types}"


def test_each_needed_flow_is_allowed(shown: Render) -> None:
    policies = shown.of("NetworkPolicy")
    flows = list(needed(shown))
    assert len(flows) >= 4
    denied = [f"{a.name} -> {b.name}:{port}" for a, b, port in flows if not allows(policies, a, b, port)]
    assert denied == []


def test_pods_that_look_up_names_reach_dns_and_redis_does_not(shown: Render) -> None:
    if not guarded(shown):
        return
    for pod in pods(shown):
        looks_up = pod.component != "redis"
        for server in (DNS, NODE_LOCAL_DNS, METADATA):
            for protocol in ("UDP", "TCP"):
                allowed = allows(shown.of("NetworkPolicy"), end_of(pod), server, 53, protocol=protocol)
                assert allowed is looks_up, f"{pod} -> {server.name} {protocol}"


def test_no_other_flow_is_allowed(shown: Render) -> None:
    if not guarded(shown):
        return
    policies = shown.of("NetworkPolicy")
    allowed = [f"{a.name} -> {b.name}:{port}" for a, b, port in unneeded(shown) if allows(policies, a, b, port)]
    assert allowed == []


TWO_POOLS: Tree = {"pools": {"default": {}, "other": {"replicas": 1}}}


def test_pools_are_closed_to_one_another_and_releases_too() -> None:
    shown, other = render(TWO_POOLS), render(TWO_POOLS, release="second")
    policies = [*shown.of("NetworkPolicy"), *other.of("NetworkPolicy")]
    for router in ends(shown, "router"):
        for worker in ends(shown, "worker"):
            assert allows(policies, router, worker, GRPC) is same_pool(router, worker)
        for stranger in ends(other, "worker"):
            assert not allows(policies, addressed(router), stranger, GRPC)
        for stranger in ends(other, "redis"):
            assert not allows(policies, addressed(router), stranger, 6379)


def test_another_release_without_policies_reaches_no_more_than_a_client_and_is_not_closed_by_ours() -> None:
    shown, other = render(TWO_POOLS), render(TWO_POOLS | {"networkPolicy": {"enabled": False}}, release="second")
    policies = shown.of("NetworkPolicy")
    for policy in policies:
        selector = policy.spec(NetworkPolicySpec).pod_selector
        closed = [str(pod) for pod in pods(other) if selector.selects(pod.labels)]
        assert closed == [], f"{policy} closes pods of another release"
    for stranger in map(addressed, map(end_of, pods(other))):
        for end in map(end_of, pods(shown)):
            for port in end.ports:
                is_client = end.labels["app.kubernetes.io/component"] == "router" and port == GRPC
                assert allows(policies, stranger, end, port) is is_client, f"{stranger.name} -> {end.name}:{port}"


def test_only_the_named_clients_reach_routers() -> None:
    front = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "front"}}}
    shown = render({"networkPolicy": {"clients": [front]}})
    (router,) = ends(shown, "router")
    policies = shown.of("NetworkPolicy")
    assert allows(policies, replace(STRANGER, namespace="front"), router, GRPC)
    assert not allows(policies, CLIENT, router, GRPC)
    assert allows(policies, router, replace(router, name="another router"), GRPC)


def test_only_the_named_scraper_reaches_metrics() -> None:
    agent = {"podSelector": {"matchLabels": {"app": "agent"}}}
    shown = render({"networkPolicy": {"prometheus": [agent]}})
    policies = shown.of("NetworkPolicy")
    for pod in (*ends(shown, "router"), *ends(shown, "worker")):
        assert allows(policies, End(name="agent", namespace=NAMESPACE, labels={"app": "agent"}), pod, METRICS)
        assert not allows(policies, PROMETHEUS, pod, METRICS)


@pytest.mark.parametrize("component", ["router", "worker"])
def test_the_collector_of_traces_is_reached_where_it_is_named(component: str) -> None:
    collector = End(name="collector", namespace="tracing", labels={"app": "collector"}, address="10.4.7.7")
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tracing"}}}
    tracing: Tree = {"otlpEndpoint": "collector.tracing:4317"}
    shown = render({"tracing": tracing, "networkPolicy": {"otlp": [peer]}})
    anywhere = render({"tracing": tracing})
    for end in ends(shown, component):
        assert allows(shown.of("NetworkPolicy"), end, replace(collector, address=""), 4317)
        assert not allows(shown.of("NetworkPolicy"), end, collector, 4318)
        assert not allows(shown.of("NetworkPolicy"), end, INTERNET, 4317)
        assert allows(anywhere.of("NetworkPolicy"), end, replace(collector, address=""), 4317)
        assert not allows(render({}).of("NetworkPolicy"), end, collector, 4317)


def test_an_external_redis_is_reached_at_its_own_port_and_address() -> None:
    redis: Tree = {"mode": "external", "external": {"url": "rediss://redis.example:6380/0"}}
    shown = render({"redis": redis, "networkPolicy": {"externalRedis": [{"ipBlock": {"cidr": "10.9.0.5/32"}}]}})
    server = End(name="redis", address="10.9.0.5")
    for component in ("router", "worker"):
        for end in ends(shown, component):
            assert allows(shown.of("NetworkPolicy"), end, server, 6380)
            assert not allows(shown.of("NetworkPolicy"), end, server, 6379)
            assert not allows(shown.of("NetworkPolicy"), end, INTERNET, 6380)
            assert allows(render({"redis": redis}).of("NetworkPolicy"), end, INTERNET, 6380)


def test_slices_of_one_pool_talk_over_the_runtime_ports_and_strangers_do_not() -> None:
    shown = preset("values/tpu7x-16")
    (leader,), (follower,) = ends(shown, "worker"), ends(shown, "worker", leads=False)
    for port in (8471, 8476, 8477, *SLICE_PORTS):
        assert allows(shown.of("NetworkPolicy"), leader, follower, port)
        assert allows(shown.of("NetworkPolicy"), follower, leader, port)
        assert not allows(shown.of("NetworkPolicy"), CLIENT, leader, port)
