"""Values that are misspelled, wrong or impossible are refused, with a message that names the key and what is right."""

import pytest

from tests.chart.manifest import Tree
from tests.chart.render import Refused, render

V6E_8: Tree = {"generation": "v6e", "machineType": "ct6e-standard-8t", "topology": "2x4"}
V6E_16: Tree = {"generation": "v6e", "machineType": "ct6e-standard-4t", "topology": "4x4"}


def pool(**values: object) -> Tree:
    return {"pools": {"default": values}}


def tpu(slice_values: Tree, **values: object) -> Tree:
    return pool(backend="torchtpu", slice=slice_values, **values)


def refusal(values: Tree) -> str:
    with pytest.raises(Refused) as refused:
        render(values)
    return str(refused.value)


# What is given -> words of the message: where, and the key that nobody knows.
MISSPELLED: dict[str, tuple[Tree, str, str]] = {
    "top level": ({"replicaCount": 3}, "''", "replicaCount"),
    "another case": ({"Pools": {}}, "''", "Pools"),
    "image": ({"image": {"repository": "r"}}, "/image", "repository"),
    "maintenance": ({"maintenance": {"enable": True}}, "/maintenance", "enable"),
    "tracing": ({"tracing": {"endpoint": "h:1"}}, "/tracing", "endpoint"),
    "priority class": ({"priorityClass": {"named": "x"}}, "/priorityClass", "named"),
    "router": ({"router": {"replica": 3}}, "/router", "replica"),
    "router's service": ({"router": {"service": {"annotation": {}}}}, "/router/service", "annotation"),
    "router's autoscaling": ({"router": {"autoscaling": {"minReplica": 1}}}, "/router/autoscaling", "minReplica"),
    "router's budget": (
        {"router": {"podDisruptionBudget": {"minAvailable": 1}}},
        "/router/podDisruptionBudget",
        "minAvailable",
    ),
    "router's account": ({"router": {"serviceAccount": {"annotation": {}}}}, "/router/serviceAccount", "annotation"),
    "defaults of pools": ({"poolDefaults": {"replcias": 2}}, "/poolDefaults", "replcias"),
    "a pool": (pool(replcias=2), "/pools/default", "replcias"),
    "a pool's model": (pool(model={"src": "gs"}), "/pools/default/model", "src"),
    "a pool's claim": (pool(model={"pvc": {"claim": "c"}}), "/pools/default/model/pvc", "claim"),
    "a pool's bucket": (pool(model={"gcsFuse": {"buckt": "b"}}), "/pools/default/model/gcsFuse", "buckt"),
    "a pool's token": (pool(model={"huggingFace": {"token": "t"}}), "/pools/default/model/huggingFace", "token"),
    "a pool's download": (pool(model={"download": {"size": "1Gi"}}), "/pools/default/model/download", "size"),
    "a pool's engine": (pool(engine={"tensorParallelism": 8}), "/pools/default/engine", "tensorParallelism"),
    "a pool's slice": (pool(slice={"machinetype": "ct6e-standard-8t"}), "/pools/default/slice", "machinetype"),
    "a pool's compile cache": (pool(compileCache={"claim": "c"}), "/pools/default/compileCache", "claim"),
    "a pool's autoscaling": (pool(autoscaling={"minReplica": 1}), "/pools/default/autoscaling", "minReplica"),
    "a pool's resources": (pool(resources={"limit": {}}), "/pools/default/resources", "limit"),
    "a pool's toleration": (pool(tolerations=[{"effects": "NoSchedule"}]), "/tolerations/0", "effects"),
    "a pool's variable": (pool(extraEnv=[{"name": "A", "val": "1"}]), "/extraEnv/0", "val"),
    "a pool's router": (pool(router={"replica": 1}), "/pools/default/router", "replica"),
    "redis": ({"redis": {"type": "external"}}, "/redis", "type"),
    "bundled redis": ({"redis": {"bundled": {"maxmemory": "1gb"}}}, "/redis/bundled", "maxmemory"),
    "external redis": ({"redis": {"external": {"uri": "redis://h"}}}, "/redis/external", "uri"),
    "monitoring": ({"monitoring": {"enabled": True}}, "/monitoring", "enabled"),
    "dashboards": ({"monitoring": {"dashboards": {"enable": True}}}, "/monitoring/dashboards", "enable"),
    "network policy": ({"networkPolicy": {"enable": False}}, "/networkPolicy", "enable"),
    "a peer": ({"networkPolicy": {"clients": [{"podSelectr": {}}]}}, "/networkPolicy/clients/0", "podSelectr"),
}


@pytest.mark.parametrize("where", MISSPELLED)
def test_a_misspelled_key_is_named(where: str) -> None:
    values, path, key = MISSPELLED[where]
    said = refusal(values)
    assert f"'{key}'" in said, said
    assert path in said, said
    assert "not allowed" in said, said


# What is given -> where the message says it is, and a word of what would be right.
WRONG: dict[str, tuple[Tree, tuple[str, ...]]] = {
    "text for a number": ({"router": {"replicas": "two"}}, ("/router/replicas", "integer")),
    "a fraction for a count": ({"router": {"replicas": 1.5}}, ("/router/replicas", "integer")),
    "text for a list": ({"image": {"pullSecrets": "regcred"}}, ("/image/pullSecrets", "array")),
    "text for a switch": ({"networkPolicy": {"enabled": "yes"}}, ("/networkPolicy/enabled", "boolean")),
    "a list for the pools": ({"pools": []}, ("pools",)),
    "a number in quotes": (pool(engine={"pageSize": "16"}), ("/engine/pageSize", "16")),
    "pages in quotes": (pool(engine={"numPages": "1024"}), ("/engine/numPages", "auto")),
    "a number for a duration": ({"monitoring": {"interval": 15}}, ("/monitoring/interval", "string")),
    "a duration with a space": ({"monitoring": {"interval": "15 s"}}, ("/monitoring/interval", "15 s")),
    "a number for a label": ({"commonLabels": {"team": 7}}, ("/commonLabels/team", "string")),
    "fewer than none": (pool(replicas=-1), ("/replicas", "-1")),
    "a drain before its time": (pool(drainTimeoutSeconds=-5), ("/drainTimeoutSeconds", "-5")),
    "a budget that blocks": (pool(podDisruptionBudget={"maxUnavailable": 0}), ("/podDisruptionBudget", "minimum")),
    "a port beyond all": ({"networkPolicy": {"apiServerPorts": [70000]}}, ("/apiServerPorts", "70,000", "65,535")),
    "pages that are no power of two": (pool(engine={"pageSize": 24}), ("/engine/pageSize", "8, 16, 32")),
    "a sleep of nothing": (pool(preStopSeconds=0), ("/preStopSeconds", "minimum")),
    "no pages": (pool(engine={"numPages": 0}), ("/engine/numPages", "minimum")),
    "memory in a wrong unit": ({"redis": {"bundled": {"maxMemory": "256Mi"}}}, ("/redis/bundled/maxMemory", "256Mi")),
    "a size in a wrong unit": (pool(sharedMemory="1 GB"), ("/sharedMemory", "1 GB")),
    "an image without a tag": (pool(image="registry/worker"), ("pools.default.image", "registry/worker", "NAME:TAG")),
    "a secret in the URL": (
        {"redis": {"mode": "external", "external": {"url": "redis://user:pass@h:6379"}}},
        ("redis.external.url", "redis.external.username", "redis.external.existingSecret"),
    ),
    "a collector with a scheme": (
        {"tracing": {"otlpEndpoint": "http://c:4317"}},
        ("tracing.otlpEndpoint", "http://c", "https://HOST:PORT"),
    ),
    "a bucket of another cloud": (
        pool(model={"source": "gs", "gs": {"url": "s3://b/m"}}),
        ("pools.default.model.gs.url", "s3://b/m", "gs://"),
    ),
    "level": ({"podSecurity": "privileged"}, ("/podSecurity", "'restricted', 'baseline'")),
    "discovery": ({"discovery": "dns"}, ("/discovery", "'registry', 'kubernetes'")),
    "pull policy": ({"image": {"pullPolicy": "Sometimes"}}, ("/image/pullPolicy", "IfNotPresent")),
    "log level": ({"router": {"logLevel": "verbose"}}, ("/router/logLevel", "debug")),
    "backend": (pool(backend="gpu"), ("/backend", "cpu", "xla", "torchtpu", "roofline")),
    "type of numbers": (pool(engine={"dtype": "float16"}), ("/engine/dtype", "bfloat16")),
    "weights for other numbers": (pool(engine={"weights": "f32"}), ("engine.weights is f32", "bfloat16")),
    "numbers for other weights": (pool(engine={"weights": "int4", "dtype": "float32"}), ("int4", "float32")),
    "model source": (pool(model={"source": "s3"}), ("/model/source", "huggingFace", "gcsFuse")),
    "workload": (pool(workload="ReplicaSet"), ("/workload", "LeaderWorkerSet", "StatefulSet")),
    "redis mode": ({"redis": {"mode": "cluster"}}, ("/redis/mode", "bundled", "external")),
    "monitoring provider": ({"monitoring": {"provider": "datadog"}}, ("/monitoring/provider", "gmp")),
    "autoscaling type": (pool(autoscaling={"type": "vpa"}), ("/autoscaling/type", "keda")),
    "pool name in capitals": ({"pools": {"Default": {}}}, ("/pools", "Default")),
    "pool name too long": ({"pools": {"a-pool-of-sixteen": {}}}, ("/pools", "a-pool-of-sixteen")),
    "name prefix too long": ({"fullnameOverride": "a" * 27}, ("/fullnameOverride", "26")),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_value_is_named_with_what_is_allowed(what: str) -> None:
    values, words = WRONG[what]
    said = refusal(values)
    assert all(word in said for word in words), said


# What is given -> the offending key or value, then what would be right.
IMPOSSIBLE: dict[str, tuple[Tree, tuple[str, ...]]] = {
    "fewer devices than chips": (
        tpu(V6E_8, engine={"tensorParallel": 4}),
        ("pools.default.engine.tensorParallel is 4", "2x4 has 8 devices", "set 8"),
    ),
    "more devices than chips": (
        tpu(V6E_8, engine={"tensorParallel": 16}),
        ("pools.default.engine.tensorParallel is 16", "2x4 has 8 devices", "set 8"),
    ),
    "a multi-host slice with the devices of one host": (
        tpu(V6E_16, engine={"tensorParallel": 4}),
        ("tensorParallel is 4", "4x4 has 16 devices", "set 16"),
    ),
    "devices on CPUs": (pool(engine={"tensorParallel": 2}), ("tensorParallel is 2", "backend cpu takes 1")),
    "a generation that is not": (
        tpu(V6E_8 | {"generation": "v7"}),
        ("generation", "v7", "tpu7x", "v5e", "v5p", "v6e"),
    ),
    "a topology of another generation": (
        tpu(V6E_8 | {"topology": "2x2x1"}),
        ("pools.default.slice.topology", "2x2x1", "v6e has", "2x4", "4x4"),
    ),
    "a flat topology on cubes": (
        tpu({"generation": "v5p", "machineType": "ct5p-hightpu-4t", "topology": "2x2"}),
        ("topology", '"2x2"', "v5p has", "2x2x1"),
    ),
    "a machine type of another generation": (
        tpu(V6E_8 | {"machineType": "ct5lp-hightpu-8t"}),
        ("pools.default.slice.machineType", "ct5lp-hightpu-8t", "ct6e-standard-8t"),
    ),
    "a machine type too small for its topology": (
        tpu(V6E_8 | {"machineType": "ct6e-standard-1t"}),
        ("ct6e-standard-1t", "forms 1x1", "2x4", "ct6e-standard-4t or ct6e-standard-8t"),
    ),
    "a machine type that is not": (
        tpu(V6E_8 | {"machineType": "ct6e-standard-16t"}),
        ("ct6e-standard-16t", "ct6e-standard-8t"),
    ),
    "a slice without its machine type": (
        tpu({"generation": "v6e", "topology": "2x4"}),
        ("machineType", "ct6e-standard-4t or ct6e-standard-8t"),
    ),
    "a slice without its topology": (
        tpu({"generation": "v6e", "machineType": "ct6e-standard-8t"}),
        ("topology", "v6e has", "2x4"),
    ),
    "a topology without its generation": (
        pool(slice={"topology": "2x4"}),
        ("pools.default.slice", "no generation", "v5e", "v6e"),
    ),
    "too few chips asked for": (
        tpu(V6E_8, resources={"limits": {"google.com/tpu": 4}}),
        ("resources.limits", "4 google.com/tpu", "ct6e-standard-8t has 8"),
    ),
    "all chips of a slice asked of one host": (
        tpu(V6E_16, resources={"requests": {"google.com/tpu": 16}}),
        ("resources.requests", "16 google.com/tpu", "ct6e-standard-4t has 4"),
    ),
    "chips without a slice": (
        pool(resources={"limits": {"google.com/tpu": 8}}),
        ("8 google.com/tpu", "no slice", "slice.topology"),
    ),
    "the CPU backend on a slice": (pool(slice=V6E_8), ("backend is cpu", "v6e 2x4", "xla or torchtpu")),
    "a simulation on a slice": (
        pool(backend="roofline", simulate={"model": "kimi-k3", "slice": "tpu7x-16"}, slice=V6E_8),
        ("backend is roofline", "v6e 2x4", "remove the slice"),
    ),
    "a simulation of nothing": (pool(backend="roofline"), ("needs simulate.model and simulate.slice",)),
    "a simulation of weights": (
        pool(backend="roofline", simulate={"model": "m", "slice": "v6e-8"}, model={"source": "gs", "gs": {"url": "u"}}),
        ("reads no weights", "model.gs", "simulate.model"),
    ),
    "what is simulated, and computed": (
        pool(simulate={"model": "kimi-k3", "slice": "tpu7x-16"}),
        ("simulate is set but backend is cpu", "set backend to roofline"),
    ),
    "a TPU backend without a slice": (pool(backend="xla"), ("backend xla needs a TPU", "slice.generation")),
    "several hosts for a backend of one": (
        pool(backend="xla", slice=V6E_16),
        ("backend is xla", "4x4 of ct6e-standard-4t has 4 hosts", "set backend to torchtpu"),
    ),
    "several hosts in a StatefulSet": (
        tpu(V6E_16, workload="StatefulSet"),
        ("workload is StatefulSet", "4x4", "4 hosts", "LeaderWorkerSet, or auto"),
    ),
    "several hosts in a Deployment": (
        tpu(V6E_16, workload="Deployment"),
        ("workload is Deployment", "4 hosts", "LeaderWorkerSet, or auto"),
    ),
    "one host in a LeaderWorkerSet": (
        tpu(V6E_8, workload="LeaderWorkerSet"),
        ("workload is LeaderWorkerSet", "one host", "StatefulSet"),
    ),
    "a ComputeClass without a slice": (
        pool(computeClass="tpu-v6e"),
        ("computeClass is tpu-v6e", "no slice", "nodeSelector"),
    ),
    "a node label against the slice": (
        tpu(V6E_8, nodeSelector={"cloud.google.com/gke-tpu-topology": "4x4"}),
        ("nodeSelector", "cloud.google.com/gke-tpu-topology", "4x4", "slice"),
    ),
}

INCONSISTENT: dict[str, tuple[Tree, tuple[str, ...]]] = {
    "a step smaller than its rows": (
        pool(engine={"maxStepTokens": 8, "maxRunning": 16}),
        ("maxStepTokens", "8", "16"),
    ),
    "a worker killed while it drains": (
        pool(drainTimeoutSeconds=600, terminationGracePeriodSeconds=30),
        ("pools.default.terminationGracePeriodSeconds is 30", "612", "null"),
    ),
    "a router killed while it drains": (
        {"router": {"drainTimeoutSeconds": 300, "terminationGracePeriodSeconds": 60}},
        ("router.terminationGracePeriodSeconds is 60", "316", "null"),
    ),
    "more at least than at most": (
        pool(autoscaling={"type": "hpa", "minReplicas": 5, "maxReplicas": 2}),
        ("pools.default.autoscaling.minReplicas is 5", "maxReplicas 2"),
    ),
    "more routers at least than at most": (
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}},
        ("router.autoscaling.minReplicas is 5", "maxReplicas 2"),
    ),
    "routers scaled on a CPU they do not ask for": (
        {"router": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}},
        ("router.autoscaling", "router.resources.requests.cpu"),
    ),
    "KEDA without a Prometheus": (pool(autoscaling={"type": "keda"}), ("keda", "kedaServerAddress")),
    "maintenance without nodes": (
        {"maintenance": {"enabled": True}},
        ("maintenance.enabled", "discovery kubernetes", "registry"),
    ),
    "external Redis without a URL": ({"redis": {"mode": "external"}}, ("redis.external.url", "rediss://")),
    "a URL for the bundled Redis": (
        {"redis": {"external": {"url": "redis://h:6379"}}},
        ("redis.external.url is set", "redis.mode is bundled", "external"),
    ),
    "the bundled password for an external Redis": (
        {"redis": {"mode": "external", "external": {"url": "redis://h"}, "bundled": {"existingSecret": "s"}}},
        ("redis.bundled.existingSecret", "redis.external.existingSecret"),
    ),
    "a CA without TLS": (
        {"redis": {"mode": "external", "external": {"url": "redis://h", "caSecret": "ca"}}},
        ("redis.external.caSecret", "redis://h", "rediss://"),
    ),
    "a user without a password": (
        {"redis": {"mode": "external", "external": {"url": "redis://h", "username": "u"}}},
        ("redis.external.username is u", "redis.external.existingSecret"),
    ),
    "a source without its place": (pool(model={"source": "gs"}), ("model.source is gs", "model.gs.url")),
    "a claim without its name": (pool(model={"source": "pvc"}), ("model.source is pvc", "model.pvc.claimName")),
    "two sources at once": (
        pool(model={"source": "gs", "gs": {"url": "gs://bkt/m"}, "pvc": {"claimName": "c"}}),
        ("model.pvc.claimName is set", "model.source is gs", "set source to pvc"),
    ),
    "a place without its source": (
        pool(model={"huggingFace": {"id": "Qwen/Qwen3-8B"}}),
        ("model.huggingFace.id is set", "model.source is baked", "set source to huggingFace"),
    ),
    "a shared cache without its claim": (pool(compileCache={"type": "pvc"}), ("compileCache", "claimName")),
    "a claim for a private cache": (
        pool(compileCache={"claimName": "c"}),
        ("compileCache.claimName is set", "emptyDir", "set type to pvc"),
    ),
    "a priority without its name": (
        {"priorityClass": {"create": True}},
        ("priorityClass.create", "priorityClass.name"),
    ),
    "no pool": ({"pools": {"default": None}}, ("pools is empty", "pools.default")),
    "a foreign account without its name": (
        pool(serviceAccount={"create": False}),
        ("pools.default.serviceAccount.create is false", "serviceAccount.name"),
    ),
    "a pool called like an object of the chart": ({"pools": {"redis": {}}}, ("pools.redis", "taken")),
    "a pool that ends like an object of the chart": ({"pools": {"a-workers": {}}}, ("pools.a-workers", "taken")),
    "a label that selects": (
        {"commonLabels": {"app.kubernetes.io/instance": "mine"}},
        ("commonLabels", "app.kubernetes.io/instance"),
    ),
    "a pod label that selects": (pool(podLabels={"ostrya.dev/pool": "mine"}), ("podLabels", "ostrya.dev/pool")),
    "a variable that the chart sets": (
        pool(extraEnv=[{"name": "OSTRYA_REDIS_URL", "value": "redis://h"}]),
        ("extraEnv", "OSTRYA_REDIS_URL"),
    ),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_impossible_slice_is_refused_with_what_would_be_right(what: str) -> None:
    values, words = IMPOSSIBLE[what]
    said = refusal(values)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("what", INCONSISTENT)
def test_settings_that_contradict_one_another_are_refused_with_a_way_out(what: str) -> None:
    values, words = INCONSISTENT[what]
    said = refusal(values)
    assert all(word in said for word in words), said


def test_there_are_as_many_cases_as_promised() -> None:
    assert len(MISSPELLED) + len(WRONG) + len(IMPOSSIBLE) + len(INCONSISTENT) >= 50


def test_a_refusal_is_one_sentence_without_the_templates_path() -> None:
    """What Helm puts around fail's sentence is noise; the sentence must stand at the end of it."""
    said = refusal(pool(backend="xla"))
    assert said.rstrip().endswith("set slice.generation, slice.machineType and slice.topology"), said
