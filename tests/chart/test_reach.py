"""Each leaf of the values schema arrives: another value changes the objects of those who should hear of it, no others.

Where the value is an option of `ostrya`, the option gets that very value; and a pool may override each of its own.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.chart.commands import command_of, options
from tests.chart.manifest import Manifest, Tree
from tests.chart.pods import COMPONENT, PASSWORD_CHECKSUM, pods
from tests.chart.render import Render, merged, render
from tests.chart.test_awkward import nested
from tests.chart.test_values import defaults, resolved, schema

RELEASE, ROUTER, WORKER, REDIS = "", "router", "worker", "redis"
"""Components of objects; those of the whole release have none."""


@dataclass(frozen=True, slots=True)
class Case:
    value: object
    under: Tree = field(default_factory=dict)
    """Values without which this one means nothing; before and after."""
    along: Tree = field(default_factory=dict)
    """What must change together with it."""


def pool(**values: object) -> Tree:
    return {"poolDefaults": values}


V6E_8 = pool(backend="xla", slice={"generation": "v6e", "machineType": "ct6e-standard-8t", "topology": "2x4"})
SIMULATED = pool(backend="roofline", simulate={"model": "kimi-k3", "slice": "tpu7x-16"})
V6E_2X4 = pool(backend="torchtpu", slice={"generation": "v6e", "machineType": "ct6e-standard-4t", "topology": "2x4"})
OPERATOR: Tree = {"monitoring": {"provider": "prometheus-operator"}}
KUBERNETES: Tree = {"discovery": "kubernetes"}
MAINTENANCE: Tree = KUBERNETES | {"maintenance": {"enabled": True}}
ROUTERS_SCALE: Tree = {"router": {"autoscaling": {"enabled": True}}}
EXTERNAL: Tree = {
    "redis": {"mode": "external", "external": {"url": "rediss://redis.example:6380/0", "existingSecret": "s"}}
}
EXTERNAL_CA = merged(EXTERNAL, {"redis": {"external": {"caSecret": "ca"}}})
HPA = merged(OPERATOR, pool(autoscaling={"type": "hpa"}))
KEDA = merged(OPERATOR, pool(autoscaling={"type": "keda", "kedaServerAddress": "http://prometheus:9090"}))


def source(name: str, **fields: str) -> Tree:
    return pool(model={"source": name, name: fields})


PVC = source("pvc", claimName="c")
GCS_FUSE = source("gcsFuse", bucket="models")
GS = source("gs", url="gs://bucket/model")
HUB = source("huggingFace", id="owner/name")
HUB_TOKEN = source("huggingFace", id="owner/name", tokenSecret="t")
ACCOUNT: Tree = {"serviceAccount": {"name": "reach"}}

# What neither BY_TYPE gives nor a switch or number that is simply another one.
CASES: dict[str, Case] = {
    "fullnameOverride": Case("llm"),
    "image.registry": Case("registry.example/reach"),
    "image.tag": Case("9.9"),
    "image.pullPolicy": Case("Always"),
    "image.pullSecrets": Case(["reach"]),
    "podSecurity": Case("baseline", V6E_8),
    "discovery": Case("kubernetes"),
    "maintenance.enabled": Case(True, KUBERNETES),
    "maintenance.horizonSeconds": Case(601, MAINTENANCE),
    "maintenance.longRequestTokens": Case(257, MAINTENANCE),
    "tracing.otlpEndpoint": Case("reach.example:4317"),
    "priorityClass.create": Case(True, {"priorityClass": {"name": "reach"}}),
    "priorityClass.value": Case(7, {"priorityClass": {"name": "reach", "create": True}}),
    "router.terminationGracePeriodSeconds": Case(900),
    "router.service.type": Case("NodePort", {"networkPolicy": {"clients": [{"podSelector": {}}]}}),
    "router.autoscaling.minReplicas": Case(3, ROUTERS_SCALE),
    "router.autoscaling.maxReplicas": Case(11, ROUTERS_SCALE),
    "router.autoscaling.targetCPUUtilizationPercentage": Case(71, ROUTERS_SCALE),
    "router.serviceAccount.name": Case("reach-router"),
    "router.serviceAccount.create": Case(False, {"router": ACCOUNT}),
    "poolDefaults.backend": Case("torchtpu", V6E_8),
    "poolDefaults.simulate.model": Case("qwen3-8b", SIMULATED),
    "poolDefaults.simulate.slice": Case("v6e-4", SIMULATED),
    "poolDefaults.workload": Case("Deployment"),
    "poolDefaults.model.name": Case("reach"),
    "poolDefaults.model.source": Case("gs", along=GS),
    "poolDefaults.model.baked.model": Case("reach"),
    "poolDefaults.model.pvc.claimName": Case("reach", PVC),
    "poolDefaults.model.pvc.path": Case("reach", PVC),
    "poolDefaults.model.gcsFuse.bucket": Case("reach", GCS_FUSE),
    "poolDefaults.model.gcsFuse.path": Case("reach", GCS_FUSE),
    "poolDefaults.model.gcsFuse.mountOptions": Case("implicit-dirs", GCS_FUSE),
    "poolDefaults.model.gcsFuse.cacheSizeLimit": Case("3Gi", GCS_FUSE),
    "poolDefaults.model.gs.url": Case("gs://bucket/reach", GS),
    "poolDefaults.model.huggingFace.id": Case("reach/model", HUB),
    "poolDefaults.model.huggingFace.file": Case("reach.gguf", HUB),
    "poolDefaults.model.huggingFace.revision": Case("reach", HUB),
    "poolDefaults.model.huggingFace.tokenSecret": Case("reach", HUB),
    "poolDefaults.model.huggingFace.tokenKey": Case("reach", HUB_TOKEN),
    "poolDefaults.model.download.sizeLimit": Case("3Gi", GS),
    "poolDefaults.model.download.medium": Case("Memory", merged(GS, pool(model={"download": {"sizeLimit": "512Mi"}}))),
    "poolDefaults.engine.dtype": Case("float32"),
    "poolDefaults.engine.weights": Case("f32", pool(engine={"dtype": "float32"})),
    "poolDefaults.engine.pageSize": Case(32),
    "poolDefaults.engine.maxContextTokens": Case(4096),
    "poolDefaults.engine.maxPrefillChunkTokens": Case(256),
    "poolDefaults.slice.machineType": Case("ct6e-standard-4t", merged(V6E_8, pool(backend="torchtpu"))),
    "poolDefaults.slice.topology": Case("4x4", V6E_2X4),
    "poolDefaults.compileCache.type": Case("pvc", V6E_8, pool(compileCache={"claimName": "c"})),
    "poolDefaults.compileCache.sizeLimit": Case("3Gi", V6E_8),
    "poolDefaults.compileCache.claimName": Case(
        "reach", merged(V6E_8, pool(compileCache={"type": "pvc", "claimName": "c"}))
    ),
    "poolDefaults.compileCache.tarball": Case("gs://bucket/reach.tar", V6E_8),
    "poolDefaults.startupBudgetSeconds": Case(77),
    "poolDefaults.terminationGracePeriodSeconds": Case(900),
    "poolDefaults.autoscaling.type": Case("hpa", OPERATOR),
    "poolDefaults.autoscaling.minReplicas": Case(2, HPA),
    "poolDefaults.autoscaling.maxReplicas": Case(5, HPA),
    "poolDefaults.autoscaling.waitingPerReplica": Case(9, HPA),
    "poolDefaults.autoscaling.queuedPerReplica": Case(2, HPA),
    "poolDefaults.autoscaling.scaleDownStabilizationSeconds": Case(1801, HPA),
    "poolDefaults.autoscaling.hpaMetrics": Case("gmp", HPA, {"monitoring": {"provider": "gmp"}}),
    "poolDefaults.autoscaling.queueWaitSeconds": Case(1.5, KEDA),
    "poolDefaults.autoscaling.kedaServerAddress": Case("http://reach:9090", KEDA),
    "poolDefaults.autoscaling.kedaAuthentication": Case("reach", KEDA),
    "poolDefaults.serviceAccount.create": Case(False, pool(**ACCOUNT)),
    "poolDefaults.computeClass": Case("reach", V6E_8),
    "redis.mode": Case("external", along={"redis": {"external": {"url": "redis://reach"}}}),
    "redis.bundled.image": Case("registry.example/reach:1"),
    "redis.bundled.maxMemory": Case("64mb"),
    "redis.external.url": Case("rediss://reach:6380/0", EXTERNAL),
    "redis.external.username": Case("reach", EXTERNAL),
    "redis.external.existingSecret": Case("reach", EXTERNAL),
    "redis.external.passwordKey": Case("reach", EXTERNAL),
    "redis.external.caSecret": Case("reach", EXTERNAL),
    "redis.external.caKey": Case("reach", EXTERNAL_CA),
    "monitoring.provider": Case("gmp"),
    "monitoring.interval": Case("16s", OPERATOR),
    "monitoring.labels": Case({"reach": "seen"}, OPERATOR),
    "monitoring.rules": Case(False, OPERATOR),
    "monitoring.runbookUrl": Case("https://reach.example", OPERATOR),
    "monitoring.dashboards.label": Case("reach"),
    "monitoring.dashboards.labelValue": Case("reach"),
    "networkPolicy.apiServer": Case([{"ipBlock": {"cidr": "10.0.0.1/32"}}], KUBERNETES),
    "networkPolicy.apiServerPorts": Case([7443], KUBERNETES),
    "networkPolicy.externalRedis": Case([{"ipBlock": {"cidr": "10.0.0.1/32"}}], EXTERNAL),
    "networkPolicy.otlp": Case([{"ipBlock": {"cidr": "10.0.0.1/32"}}], {"tracing": {"otlpEndpoint": "c:4317"}}),
    "networkPolicy.downloads": Case([{"ipBlock": {"cidr": "10.0.0.1/32"}}], GS),
}

BY_TYPE: dict[str, object] = {
    "labels": {"example.com/reach": "seen"},
    "annotations": {"example.com/reach": "seen"},
    "tolerations": [{"key": "reach", "operator": "Exists"}],
    "topologyKeys": ["example.com/rack"],
    "env": [{"name": "REACH", "value": "seen"}],
    "quantities": {"ephemeral-storage": "1Gi"},
    "peers": [{"podSelector": {"matchLabels": {"reach": "seen"}}}],
    "objectName": "reach",
    "secretKey": "reach",
    "image": "registry.example/reach:1",
    "hostPort": "reach.example:4317",
    "size": "384Mi",
    "logLevel": "warning",
    "disruptions": 2,
}

EXCEPTIONS = {
    "global": "Helm's own; the chart reads nothing of it",
    "poolDefaults.engine.tensorParallel": "any other than the slice's devices is refused: test_refusals.py, test_tpu",
    "poolDefaults.slice.generation": "no machine type is of two generations: each is rendered in test_tpu.py",
    "poolDefaults.router": "the same schema as router, whose leaves a pool overrides below",
}

# By the longest beginning that fits.
ARRIVES: dict[str, set[str]] = {
    "fullnameOverride": {RELEASE, ROUTER, WORKER, REDIS},
    "commonLabels": {RELEASE, ROUTER, WORKER, REDIS},
    "commonAnnotations": {RELEASE, ROUTER, WORKER, REDIS},
    "image": {ROUTER, WORKER},
    "image.pullPolicy": {ROUTER, WORKER, REDIS},
    "image.pullSecrets": {ROUTER, WORKER, REDIS},
    "podSecurity": {WORKER},
    "discovery": {ROUTER},
    "maintenance": {ROUTER},
    "tracing": {ROUTER, WORKER},
    "priorityClass.create": {RELEASE},
    "priorityClass.value": {RELEASE},
    "priorityClass.name": {ROUTER, WORKER, REDIS},
    "router": {ROUTER},
    "poolDefaults": {WORKER},
    "poolDefaults.maxMessageBytes": {ROUTER, WORKER},
    "poolDefaults.model": {ROUTER, WORKER},
    "poolDefaults.simulate.model": {ROUTER, WORKER},
    "poolDefaults.model.download.medium": {WORKER},
    "poolDefaults.autoscaling.hpaMetrics": {RELEASE, ROUTER, WORKER},
    "redis.mode": {ROUTER, WORKER, REDIS},
    "redis.bundled": {REDIS},
    "redis.bundled.existingSecret": {ROUTER, WORKER, REDIS},
    "redis.bundled.passwordKey": {ROUTER, WORKER, REDIS},
    "redis.external": {ROUTER, WORKER},
    "monitoring": {RELEASE},
    "monitoring.interval": {ROUTER, WORKER},
    "monitoring.labels": {RELEASE, ROUTER, WORKER},
    "monitoring.provider": {RELEASE, ROUTER, WORKER},
    "networkPolicy.enabled": {RELEASE, ROUTER, WORKER, REDIS},
    "networkPolicy.clients": {ROUTER},
    "networkPolicy.prometheus": {RELEASE},
    "networkPolicy.dns": {RELEASE},
    "networkPolicy.apiServer": {ROUTER},
    "networkPolicy.apiServerPorts": {ROUTER},
    "networkPolicy.externalRedis": {ROUTER, WORKER},
    "networkPolicy.otlp": {ROUTER, WORKER},
    "networkPolicy.downloads": {ROUTER, WORKER},
}


def leaves(node: object, root: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """(path, name of its definition or type) of whatever the schema takes as one value."""
    assert isinstance(node, dict)
    known = resolved(node, root)
    name = ".".join(path)
    properties = known.get("properties")
    if isinstance(properties, dict) and name not in EXCEPTIONS:
        for key, below in properties.items():
            yield from leaves(below, root, (*path, key))
    elif path != ("pools",):
        yield name, str(node.get("$ref", known.get("type"))).rpartition("/")[2]


LEAVES = dict(leaves(schema(), schema()))


def case_of(leaf: str) -> Case:
    """KeyError for a leaf whose other value nobody has named."""
    if leaf in CASES:
        return CASES[leaf]
    kind = LEAVES[leaf]
    if kind == "object":
        # A part of an affinity, as Kubernetes has it.
        return Case({"preferredDuringSchedulingIgnoredDuringExecution": []})
    if kind in BY_TYPE:
        return Case(BY_TYPE[kind])
    default: object = defaults()
    for key in leaf.split("."):
        assert isinstance(default, dict)
        default = default[key]
    if isinstance(default, bool):
        return Case(not default)
    if isinstance(default, int | float):
        return Case(default + 1)
    raise KeyError(f"{leaf} needs a line in CASES")


def trees(shown: Render) -> dict[str, tuple[str, Tree]]:
    """Component and tree of each object, without the password that each render makes anew, and its checksum."""
    return {str(one): (one.metadata.labels.get(COMPONENT, ""), _without_password(one)) for one in shown.objects}


def _without_password(one: Manifest) -> Tree:
    data = one.tree.get("data")
    tree = one.tree | {"data": sorted(data)} if one.kind == "Secret" and isinstance(data, dict) else one.tree
    bare = _without_checksum(tree)
    assert isinstance(bare, dict)
    return bare


def _without_checksum(node: object) -> object:
    if isinstance(node, dict):
        return {key: _without_checksum(below) for key, below in node.items() if key != PASSWORD_CHECKSUM}
    return [*map(_without_checksum, node)] if isinstance(node, list) else node


def arrivals(leaf: str) -> set[str]:
    return ARRIVES[max((one for one in ARRIVES if f"{leaf}.".startswith(f"{one}.")), key=len)]


def after(leaf: str) -> Render:
    """With another value of the leaf."""
    case = case_of(leaf)
    return render(merged(merged(case.under, case.along), nested(tuple(leaf.split(".")), case.value)))


ALL = sorted(LEAVES.keys() - EXCEPTIONS.keys())
OF_A_POOL = [one for one in ALL if one.startswith(("router.", "poolDefaults."))]


@pytest.mark.parametrize("leaf", ALL)
def test_another_value_arrives_where_it_should_and_nowhere_else(leaf: str) -> None:
    before, now = trees(render(case_of(leaf).under)), trees(after(leaf))
    changed = {
        (before.get(one) or now[one])[0] for one in before.keys() | now.keys() if before.get(one) != now.get(one)
    }
    assert changed == arrivals(leaf)


def option_of(leaf: str) -> str:
    """noReplicaWaitSeconds is --no-replica-wait-s."""
    return re.sub("([A-Z])", r"_\1", leaf.rpartition(".")[2]).lower().replace("_seconds", "_s")


def test_a_value_that_is_an_option_is_what_the_option_gets() -> None:
    checked = []
    for leaf in ALL:
        if leaf.startswith("poolDefaults.model."):
            # Its fields together make one path: test_commands.py.
            continue
        for component in arrivals(leaf) & {ROUTER, WORKER}:
            shown = after(leaf)
            (pod,) = [one for one in pods(shown, component) if one.leads]
            asked = options(command_of(shown, pod, pod.main))
            if leaf == "poolDefaults.simulate.model" and component == ROUTER:
                continue  # whose text another model spells
            if option_of(leaf) in asked:
                got = asked[option_of(leaf)]
                assert getattr(got, "value", got) == case_of(leaf).value, f"{leaf} of {component}"
                checked.append(leaf)
    assert len(checked) >= 25, checked


def test_a_pool_overrides_what_all_pools_are_given() -> None:
    """All leaves at once that mean something under the same values: mappings merge, so none hides another."""
    groups: dict[str, list[str]] = {}
    for leaf in OF_A_POOL:
        case = case_of(leaf)
        groups.setdefault(json.dumps(merged(case.under, case.along), sort_keys=True), []).append(leaf)
    for under, together in groups.items():
        for_all = own = json.loads(under)
        for leaf in together:
            owner, *rest = leaf.split(".")
            at = ("pools", "default", *(("router",) if owner == "router" else ()), *rest)
            for_all = merged(for_all, nested((owner, *rest), case_of(leaf).value))
            own = merged(own, nested(at, case_of(leaf).value))
        assert trees(render(own)) == trees(render(for_all)), together


def test_what_every_object_gets_every_object_has() -> None:
    given = {"example.com/reach": "seen"}
    shown = render(
        merged(merged(MAINTENANCE, OPERATOR), {"commonLabels": given, "commonAnnotations": given} | ROUTERS_SCALE)
    )
    for one in shown.objects:
        assert given.items() <= one.metadata.labels.items(), f"{one} without commonLabels"
        assert given.items() <= one.metadata.annotations.items(), f"{one} without commonAnnotations"
    for pod in pods(shown):
        assert given.items() <= pod.labels.items(), f"{pod} without commonLabels"


def test_no_exception_and_no_case_outlives_its_leaf() -> None:
    assert len(LEAVES) > 150
    assert (CASES.keys() | EXCEPTIONS.keys()) - LEAVES.keys() == set()
