"""Values that the schema takes and Kubernetes or `ostrya` would not, each refused with its place and a way out."""

import pytest
import yaml

from tests.chart.manifest import Tree
from tests.chart.render import CHART, render
from tests.chart.test_awkward import assert_sound
from tests.chart.test_refusals import pool, refusal

MODEL_IN_MEMORY: Tree = {
    "source": "gs",
    "gs": {"url": "gs://bucket/model"},
    "download": {"medium": "Memory", "sizeLimit": "2Gi"},
}
OPERATOR: Tree = {"monitoring": {"provider": "prometheus-operator"}}
GMP: Tree = {"monitoring": {"provider": "gmp"}}
ADDRESSES: Tree = {"ipBlock": {"cidr": "10.0.0.0/8"}}


def external(url: str) -> Tree:
    return {"redis": {"mode": "external", "external": {"url": url}}}


def bundled(**values: object) -> Tree:
    return {"redis": {"bundled": values}}


def otlp(endpoint: str) -> Tree:
    return {"tracing": {"otlpEndpoint": endpoint}}


def dashboards(**values: object) -> Tree:
    return {"monitoring": {"dashboards": values}}


def clients(*peers: Tree) -> Tree:
    return {"networkPolicy": {"clients": list(peers)}}


def account(name: str, **more: object) -> Tree:
    return {"serviceAccount": {"name": name, **more}}


# What is given -> where, then what is wrong with it or would be right.
REFUSED: dict[str, tuple[Tree, tuple[str, ...]]] = {
    "a Redis port beyond all": (external("redis://h:99999"), ("redis.external.url", "h:99999", "1 to 65535")),
    "one more than the last port": (external("redis://h:65536/0"), ("redis.external.url", "65536")),
    "no port": (external("rediss://h:0"), ("redis.external.url", "h:0", "1 to 65535")),
    "another scheme for Redis": (external("http://h:6379"), ("redis.external.url", "rediss://")),
    "a collector's port beyond all": (otlp("c:99999"), ("tracing.otlpEndpoint", "c:99999", "1 to 65535")),
    "a collector without a port": (otlp("https://collector"), ("tracing.otlpEndpoint", "HOST:PORT")),
    "a worker that asks for more than its limit": (
        pool(resources={"requests": {"memory": "3Gi"}}),
        ("pools.default.resources.requests.memory is 3Gi", "limits.memory 2Gi"),
    ),
    "more by less, in another unit": (
        pool(resources={"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}}),
        ("pools.default.resources.requests.cpu is 1500m", "limits.cpu 1"),
    ),
    "a router that asks for more than its limit": (
        {"router": {"resources": {"requests": {"memory": "2G"}}}},
        ("pools.default.router.resources.requests.memory is 2G", "limits.memory 1Gi"),
    ),
    "a Redis that asks for more than its limit": (
        bundled(resources={"requests": {"memory": "1Gi"}}),
        ("redis.bundled.resources.requests.memory is 1Gi", "limits.memory 512Mi"),
    ),
    "data of Redis above its limit": (bundled(maxMemory="1gb"), ("redis.bundled.maxMemory is 1gb", "512Mi")),
    "data of Redis that fill its limit": (bundled(maxMemory="385mb"), ("redis.bundled.maxMemory is 385mb", "room")),
    "a download in more memory than the pod has": (
        pool(model=MODEL_IN_MEMORY),
        ("pools.default.resources.limits.memory is 2Gi", "model.download.sizeLimit 2Gi"),
    ),
    "shared memory that fills the pod's": (
        pool(sharedMemory="2Gi"),
        ("pools.default.resources.limits.memory is 2Gi", "sharedMemory 2Gi"),
    ),
    "a peer by address and label": (
        clients(ADDRESSES | {"podSelector": {}}),
        ("networkPolicy.clients", "ipBlock", "two entries"),
    ),
    "an address beyond all": (clients({"ipBlock": {"cidr": "10.0.0.256/32"}}), ("networkPolicy.clients", "10.0.0.256")),
    "more bits than an address": (clients({"ipBlock": {"cidr": "10.0.0.0/33"}}), ("networkPolicy.clients", "/33")),
    "an exception that is no range": (
        {"networkPolicy": {"dns": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.1"]}}]}},
        ("networkPolicy.dns", "10.0.0.1", "10.0.0.0/8"),
    ),
    "a toleration of any value and of one": (
        pool(tolerations=[{"key": "a", "operator": "Exists", "value": "b"}]),
        ("pools.default.tolerations", "Exists", "value b", "Equal"),
    ),
    "a toleration of nothing": ({"router": {"tolerations": [{}]}}, ("router.tolerations", "without key", "Exists")),
    "a toleration of nothing by Redis": (
        bundled(tolerations=[{"effect": "NoSchedule"}]),
        ("redis.bundled.tolerations", "without key"),
    ),
    "a time without an eviction": (
        pool(tolerations=[{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5}]),
        ("pools.default.tolerations", "tolerationSeconds", "NoExecute"),
    ),
    "a variable with two values": (
        pool(extraEnv=[{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
        ("pools.default.extraEnv", "A with value and valueFrom"),
    ),
    "a PriorityClass of Kubernetes' own": (
        {"priorityClass": {"create": True, "name": "system-serving"}},
        ("priorityClass.name is system-serving", "system-"),
    ),
    "a label that is none": (dashboards(label="a b"), ("monitoring.dashboards.label", "a b")),
    "a label of the chart's own": (dashboards(label="ostrya.dev/pool"), ("monitoring.dashboards.label", "the chart")),
    "a label's value that is none": (dashboards(labelValue="-"), ("monitoring.dashboards.labelValue", "63")),
    "a spread over no label": (pool(spreadOver=["a b"]), ("pools.default.spreadOver", "a b")),
    "a registry with a scheme": ({"image": {"registry": "https://r.example"}}, ("image.registry", "without a scheme")),
    "a registry in capitals": ({"image": {"registry": "R.example/Team"}}, ("image.registry", "lower case")),
    "a Redis image without a tag": (bundled(image="valkey"), ("redis.bundled.image", "NAME:TAG")),
    "a model above its claim": (
        pool(model={"source": "pvc", "pvc": {"claimName": "c", "path": "a/../../etc"}}),
        ("pools.default.model.pvc.path", ".."),
    ),
    "a model above its bucket": (
        pool(model={"source": "gcsFuse", "gcsFuse": {"bucket": "bkt", "path": ".."}}),
        ("pools.default.model.gcsFuse.path", ".."),
    ),
    "a bucket with its scheme": (
        pool(model={"source": "gcsFuse", "gcsFuse": {"bucket": "gs://bkt"}}),
        ("pools.default.model.gcsFuse.bucket", "without gs://"),
    ),
    "a model without its owner": (
        pool(model={"source": "huggingFace", "huggingFace": {"id": "Qwen3-8B"}}),
        ("pools.default.model.huggingFace.id", "OWNER/NAME", "Qwen/Qwen3-8B"),
    ),
    "a cache that is no archive": (
        pool(compileCache={"tarball": "gs://bkt/cache.zip"}),
        ("pools.default.compileCache.tarball", "cache.zip", ".tar.gz"),
    ),
    "a part of a prompt longer than a step": (
        pool(engine={"maxPrefillChunkTokens": 513}),
        ("pools.default.engine.maxPrefillChunkTokens is 513", "maxStepTokens 512"),
    ),
    "a context longer than all pages": (
        pool(engine={"maxContextTokens": 1023 * 16 + 1}),
        ("pools.default.engine.maxContextTokens is 16369", "16368 tokens", "numPages"),
    ),
    "a load balancer whose callers are not let in": (
        {"router": {"service": {"type": "LoadBalancer"}}},
        ("service.type is LoadBalancer", "networkPolicy.clients", "networkPolicy.enabled"),
    ),
    "a node port whose callers are not let in": (
        pool(router={"service": {"type": "NodePort"}}),
        ("pools.default.router.service.type is NodePort", "networkPolicy.clients"),
    ),
    "an HPA whose metrics nobody scrapes": (
        pool(autoscaling={"type": "hpa"}),
        ("pools.default.autoscaling.hpaMetrics is prometheus-adapter", "none", "prometheus-operator"),
    ),
    "an HPA on GMP without it": (
        pool(autoscaling={"type": "hpa", "hpaMetrics": "gmp"}) | OPERATOR,
        ("hpaMetrics is gmp", "monitoring.provider is prometheus-operator"),
    ),
    "an HPA on the adapter with GMP": (
        pool(autoscaling={"type": "hpa"}) | GMP,
        ("hpaMetrics is prometheus-adapter", "monitoring.provider is gmp"),
    ),
    "one account of two pools": (
        {"poolDefaults": account("shared"), "pools": {"default": {}, "other": {}}},
        ("pools.other.serviceAccount.name is shared", "pools.default.serviceAccount creates", "create to false"),
    ),
    "one account of router and worker": (
        pool(**account("shared"), router=account("shared")),
        ("serviceAccount.name is shared", "creates already", "create to false"),
    ),
    "a pool whose name another pool's slices have": ({"pools": {"a-slices": {}}}, ("pools.a-slices", "-slices")),
    "no Redis at all": ({"redis": None}, ("redis",)),
    "no engine at all": (pool(engine=None), ("/pools/default/engine", "null")),
    "no engine by default": ({"poolDefaults": {"engine": None}}, ("engine",)),
    "no resources of routers at all": ({"router": {"resources": None}}, ("resources",)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_not_work_is_refused_with_where_and_what_would(what: str) -> None:
    values, words = REFUSED[what]
    said = refusal(values)
    assert all(word in said for word in words), said
    assert "nil pointer" not in said, said


def test_the_preset_that_needs_a_bucket_asks_for_it() -> None:
    said = refusal(yaml.safe_load((CHART / "values" / "tpu7x-16.yaml").read_text()))
    assert "model.source is gcsFuse; it needs model.gcsFuse.bucket" in said


# As near to what is refused as it gets.
TAKEN: dict[str, Tree] = {
    "the last port": external("redis://h:65535/15"),
    "a collector with TLS": otlp("https://collector.example:4317"),
    "as much as the limit, in another unit": pool(
        resources={"requests": {"memory": "2048Mi", "cpu": "0.5"}, "limits": {"cpu": "500m"}}
    ),
    "three quarters for data": bundled(maxMemory="384mb"),
    "a download that leaves room": pool(model=MODEL_IN_MEMORY, resources={"limits": {"memory": "3Gi"}}),
    "peers of all kinds": clients(
        ADDRESSES,
        {"ipBlock": {"cidr": "2001:db8::/32", "except": ["2001:db8::/48"]}},
        {"ipBlock": {"cidr": "0.0.0.0/0"}},
        {"namespaceSelector": {}, "podSelector": {}},
    ),
    "tolerations of all kinds": pool(
        tolerations=[
            {"operator": "Exists"},
            {"key": "a", "value": "b"},
            {"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0},
        ]
    ),
    "a registry with a port": {"image": {"registry": "localhost:5000/team/a_b/"}},
    "dots in a path": pool(model={"source": "pvc", "pvc": {"claimName": "c", "path": "a/..b/v1..2"}}),
    "the longest context": pool(engine={"maxContextTokens": 1023 * 16}),
    "a load balancer for named clients": {"router": {"service": {"type": "LoadBalancer"}}} | clients(ADDRESSES),
    "a load balancer without policies": {
        "router": {"service": {"type": "LoadBalancer"}},
        "networkPolicy": {"enabled": False},
    },
    "an account that another pool makes": {
        "pools": {"default": account("shared"), "other": account("shared", create=False)}
    },
}


@pytest.mark.parametrize("what", TAKEN)
def test_what_works_is_taken(what: str) -> None:
    assert_sound(render(TAKEN[what]))
