"""Specs of the kinds that the chart renders, other than pods."""

import msgspec

from tests.chart.manifest import Part, Selector, Tree
from tests.chart.podspec import Template


class RollingUpdate(Part, frozen=True, kw_only=True):
    max_unavailable: int | str | None = None
    max_surge: int | str | None = None
    partition: int | None = None


class Strategy(Part, frozen=True, kw_only=True):
    type: str = "RollingUpdate"
    rolling_update: RollingUpdate = RollingUpdate()


class WorkloadSpec(Part, frozen=True, kw_only=True):
    """Of a Deployment or a StatefulSet."""

    template: Template
    selector: Selector = Selector()
    replicas: int | None = None
    strategy: Strategy = Strategy()
    update_strategy: Strategy = Strategy()
    service_name: str = ""
    pod_management_policy: str = "OrderedReady"
    volume_claim_templates: tuple[Tree, ...] = ()


class LeaderWorkerTemplate(Part, frozen=True, kw_only=True):
    worker_template: Template
    leader_template: Template | None = None
    size: int = 1
    restart_policy: str = "RecreateGroupOnPodRestart"


class RolloutStrategy(Part, frozen=True, kw_only=True):
    rolling_update_configuration: RollingUpdate = RollingUpdate()


class LeaderWorkerSetSpec(Part, frozen=True, kw_only=True):
    leader_worker_template: LeaderWorkerTemplate
    replicas: int | None = None
    rollout_strategy: RolloutStrategy = RolloutStrategy()
    startup_policy: str = "LeaderCreated"


class ServicePort(Part, frozen=True, kw_only=True):
    port: int
    name: str = ""
    target_port: int | str | None = None
    protocol: str = "TCP"
    app_protocol: str = ""


class ServiceSpec(Part, frozen=True, kw_only=True):
    ports: tuple[ServicePort, ...] = ()
    selector: dict[str, str] = msgspec.field(default_factory=dict)
    type: str = "ClusterIP"
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    publish_not_ready_addresses: bool = False


class IpBlock(Part, frozen=True, kw_only=True):
    cidr: str
    excluded: tuple[str, ...] = msgspec.field(default=(), name="except")


class Peer(Part, frozen=True, kw_only=True):
    pod_selector: Selector | None = None
    namespace_selector: Selector | None = None
    ip_block: IpBlock | None = None


class PolicyPort(Part, frozen=True, kw_only=True):
    port: int | str | None = None
    end_port: int | None = None
    protocol: str = "TCP"


class PolicyRule(Part, frozen=True, kw_only=True):
    ports: tuple[PolicyPort, ...] = ()
    senders: tuple[Peer, ...] = msgspec.field(default=(), name="from")
    receivers: tuple[Peer, ...] = msgspec.field(default=(), name="to")


class NetworkPolicySpec(Part, frozen=True, kw_only=True):
    pod_selector: Selector = Selector()
    policy_types: tuple[str, ...] = ()
    ingress: tuple[PolicyRule, ...] = ()
    egress: tuple[PolicyRule, ...] = ()


class BudgetSpec(Part, frozen=True, kw_only=True):
    """Of a PodDisruptionBudget."""

    selector: Selector
    min_available: int | str | None = None
    max_unavailable: int | str | None = None
    unhealthy_pod_eviction_policy: str = "IfHealthyBudget"


class ScaleTarget(Part, frozen=True, kw_only=True):
    name: str
    kind: str = "Deployment"
    api_version: str = "apps/v1"


class AutoscalerSpec(Part, frozen=True, kw_only=True):
    scale_target_ref: ScaleTarget
    max_replicas: int
    min_replicas: int = 1
    metrics: tuple[Tree, ...] = ()
    behavior: Tree = msgspec.field(default_factory=dict)


class Trigger(Part, frozen=True, kw_only=True):
    type: str
    metadata: dict[str, str]


class ScaledObjectSpec(Part, frozen=True, kw_only=True):
    scale_target_ref: ScaleTarget
    min_replica_count: int = 0
    max_replica_count: int = 100
    triggers: tuple[Trigger, ...] = ()


class Rule(Part, frozen=True, kw_only=True):
    """Of a Role."""

    api_groups: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    resource_names: tuple[str, ...] = ()


class RoleRef(Part, frozen=True, kw_only=True):
    kind: str
    name: str
    api_group: str = ""


class Subject(Part, frozen=True, kw_only=True):
    kind: str
    name: str
    namespace: str = ""
