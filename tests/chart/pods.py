"""The pods a render leads to: one for each pod template, with the labels that its controller adds."""

from dataclasses import dataclass

from tests.chart.manifest import Manifest
from tests.chart.objects import LeaderWorkerSetSpec, WorkloadSpec
from tests.chart.podspec import Container, PodSpec, Template
from tests.chart.render import NAMESPACE, Render

COMPONENT = "app.kubernetes.io/component"
POOL = "ostrya.dev/pool"
PASSWORD_CHECKSUM = "ostrya.dev/redis-password"
"""Annotation of pods."""
_LWS = "leaderworkerset.sigs.k8s.io"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod, as its controller would create the first of its kind."""

    owner: Manifest
    name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: PodSpec
    leads: bool = True
    """False for the followers of a multi-host slice."""

    def __str__(self) -> str:
        return f"pod {self.name} of {self.owner}"

    @property
    def component(self) -> str:
        return self.labels.get(COMPONENT, "")

    @property
    def pool(self) -> str:
        return self.labels.get(POOL, "")

    @property
    def namespace(self) -> str:
        return self.owner.metadata.namespace or NAMESPACE

    def port(self, named: int | str) -> int | None:
        """The number of a container port, given its name or number; None if no container declares it."""
        declared = [port for one in self.spec.containers for port in one.ports]
        return next((one.container_port for one in declared if named in (one.name, one.container_port)), None)

    @property
    def main(self) -> Container:
        return self.spec.containers[0]


def pods(render: Render, component: str | None = None) -> tuple[Pod, ...]:
    """All of them, or those of one component."""
    found = [pod for one in render.objects for pod in _pods_of(one)]
    return tuple(pod for pod in found if component is None or pod.component == component)


def _pods_of(owner: Manifest) -> list[Pod]:
    match owner.kind:
        case "Deployment":
            # Kubernetes cuts what it appends a random part to.
            name = f"{owner.name}-5d8f7c9b4d-"[:58] + "x2x7z"
            return [_pod(owner, owner.spec(WorkloadSpec).template, name, {})]
        case "StatefulSet":
            name = f"{owner.name}-0"
            return [
                _pod(owner, owner.spec(WorkloadSpec).template, name, {"statefulset.kubernetes.io/pod-name": name}),
            ]
        case "LeaderWorkerSet":
            template = owner.spec(LeaderWorkerSetSpec).leader_worker_template
            leader = template.leader_template or template.worker_template
            group = {f"{_LWS}/name": owner.name, f"{_LWS}/group-index": "0", f"{_LWS}/group-key": "a1b2"}
            made = [_pod(owner, leader, f"{owner.name}-0", group | {f"{_LWS}/worker-index": "0"})]
            if template.size > 1:
                labels = group | {f"{_LWS}/worker-index": "1"}
                made.append(_pod(owner, template.worker_template, f"{owner.name}-0-1", labels, leads=False))
            return made
        case _:
            return []


def _pod(owner: Manifest, template: Template, name: str, added: dict[str, str], *, leads: bool = True) -> Pod:
    return Pod(
        owner=owner,
        name=name,
        labels=template.metadata.labels | added,
        annotations=template.metadata.annotations,
        spec=template.spec,
        leads=leads,
    )
