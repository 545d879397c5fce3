"""The Pod Security checks themselves find each violation, and nothing in a clean pod."""

import copy

import pytest

from tests.chart.manifest import Tree, read
from tests.chart.pods import Pod, pods
from tests.chart.render import Render, merged
from tests.chart.restricted import baseline, restricted

CLEAN: Tree = {
    "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
    "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "weights", "persistentVolumeClaim": {"claimName": "w"}}],
}
CONTAINER: Tree = {
    "name": "main",
    "image": "registry.example/app:1",
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    "ports": [{"containerPort": 8080}],
}


def pod(spec: Tree, container: Tree, *, init: Tree | None = None, annotations: Tree | None = None) -> Pod:
    whole = copy.deepcopy(merged(CLEAN, spec))
    whole["containers"] = [merged(CONTAINER, container)]
    if init is not None:
        whole["initContainers"] = [merged(CONTAINER, {"name": "init"} | init)]
    return deployment(whole, annotations or {})


def deployment(spec: Tree, annotations: Tree) -> Pod:
    template = {"metadata": {"labels": {"app": "a"}, "annotations": annotations}, "spec": spec}
    tree: Tree = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "a"},
        "spec": {"selector": {"matchLabels": {"app": "a"}}, "template": template},
    }
    (only,) = pods(Render(release="r", values={}, objects=(read("a.yaml", tree),)))
    return only


def test_a_clean_pod_passes_both() -> None:
    clean = pod({}, {"securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}}}, init={})
    assert (baseline(clean), restricted(clean)) == ([], [])


BASELINE: dict[str, tuple[Tree, Tree]] = {
    "hostNetwork": ({"hostNetwork": True}, {}),
    "hostPID": ({"hostPID": True}, {}),
    "hostIPC": ({"hostIPC": True}, {}),
    "privileged": ({}, {"securityContext": {"privileged": True}}),
    "capability SYS_ADMIN": ({}, {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}),
    "hostPath": ({"volumes": [{"name": "dev", "hostPath": {"path": "/dev"}}]}, {}),
    "host's port": ({}, {"ports": [{"containerPort": 8080, "hostPort": 8080}]}),
    "AppArmor": ({}, {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}),
    "SELinux": ({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, {}),
    "the pod sets SELinux": ({"securityContext": {"seLinuxOptions": {"user": "system_u"}}}, {}),
    "procMount": ({}, {"securityContext": {"procMount": "Unmasked"}}),
    "seccomp": ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, {}),
    "container main has the seccomp": ({}, {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}),
    "sysctl kernel.msgmax": ({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, {}),
    "HostProcess": ({}, {"securityContext": {"windowsOptions": {"hostProcess": True}}}),
    "host in its liveness": ({}, {"livenessProbe": {"httpGet": {"port": 80, "host": "10.0.0.1"}}}),
    "host in its preStop": ({}, {"lifecycle": {"preStop": {"httpGet": {"port": 80, "host": "10.0.0.1"}}}}),
}


@pytest.mark.parametrize("words", BASELINE)
def test_baseline_finds(words: str) -> None:
    spec, container = BASELINE[words]
    violating = pod(spec, container)
    assert any(words in one for one in baseline(violating)), baseline(violating)
    assert set(baseline(violating)) <= set(restricted(violating))


def test_baseline_finds_what_an_init_container_does() -> None:
    assert baseline(pod({}, {}, init={"securityContext": {"privileged": True}})) == ["container init is privileged"]


def test_baseline_finds_an_unconfined_annotation() -> None:
    key = "container.apparmor.security.beta.kubernetes.io/main"
    assert baseline(pod({}, {}, annotations={key: "unconfined"})) == [f"annotation {key} is unconfined"]
    assert baseline(pod({}, {}, annotations={key: "runtime/default"})) == []


RESTRICTED: dict[str, tuple[Tree, Tree]] = {
    "privilege escalation": ({}, {"securityContext": {"allowPrivilegeEscalation": True}}),
    "drop ALL": ({}, {"securityContext": {"capabilities": {"drop": ["NET_RAW"]}}}),
    "capability CHOWN": ({}, {"securityContext": {"capabilities": {"add": ["CHOWN"]}}}),
    "the pod has runAsNonRoot false": ({"securityContext": {"runAsNonRoot": False}}, {}),
    "container main does not have runAsNonRoot": ({}, {"securityContext": {"runAsNonRoot": False}}),
    "the pod runs as user 0": ({"securityContext": {"runAsUser": 0}}, {}),
    "container main runs as user 0": ({}, {"securityContext": {"runAsUser": 0}}),
    "volume share is a nfs": ({"volumes": [{"name": "share", "nfs": {"server": "s", "path": "/"}}]}, {}),
}


@pytest.mark.parametrize("words", RESTRICTED)
def test_restricted_finds_what_baseline_allows(words: str) -> None:
    spec, container = RESTRICTED[words]
    violating = pod(spec, container)
    assert any(words in one for one in restricted(violating)), restricted(violating)
    assert baseline(violating) == []


def test_restricted_finds_everything_that_an_untouched_pod_leaves_open() -> None:
    untouched = deployment({"containers": [{"name": "main", "image": "registry.example/app:1"}]}, {})
    assert baseline(untouched) == []
    assert restricted(untouched) == [
        "container main does not forbid privilege escalation",
        "container main does not drop ALL capabilities",
        "container main does not have runAsNonRoot",
        "container main has no seccomp profile",
    ]
