"""A pod's spec, with everything that restricted.py and the tests of pods look at."""

import msgspec

from tests.chart.manifest import Meta, Part, Tree


class KeyRef(Part, frozen=True, kw_only=True):
    name: str
    key: str = ""
    optional: bool = False


class FieldRef(Part, frozen=True, kw_only=True):
    field_path: str


class ValueFrom(Part, frozen=True, kw_only=True):
    field_ref: FieldRef | None = None
    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    resource_field_ref: Tree | None = None


class EnvVar(Part, frozen=True, kw_only=True):
    name: str
    value: str = ""
    value_from: ValueFrom | None = None


class EnvFrom(Part, frozen=True, kw_only=True):
    prefix: str = ""
    config_map_ref: KeyRef | None = None
    secret_ref: KeyRef | None = None


class ContainerPort(Part, frozen=True, kw_only=True):
    container_port: int
    name: str = ""
    protocol: str = "TCP"
    host_port: int = 0


class GrpcAction(Part, frozen=True, kw_only=True):
    port: int
    service: str = ""


class ExecAction(Part, frozen=True, kw_only=True):
    command: tuple[str, ...] = ()


class PortAction(Part, frozen=True, kw_only=True):
    port: int | str
    host: str = ""


class SleepAction(Part, frozen=True, kw_only=True):
    seconds: int


class Probe(Part, frozen=True, kw_only=True):
    grpc: GrpcAction | None = None
    exec: ExecAction | None = None
    tcp_socket: PortAction | None = None
    http_get: PortAction | None = None
    initial_delay_seconds: int = 0
    period_seconds: int = 10
    timeout_seconds: int = 1
    failure_threshold: int = 3

    @property
    def budget_s(self) -> int:
        """How long it may fail before it counts."""
        return self.initial_delay_seconds + self.period_seconds * self.failure_threshold


class Handler(Part, frozen=True, kw_only=True):
    exec: ExecAction | None = None
    sleep: SleepAction | None = None
    http_get: PortAction | None = None
    tcp_socket: PortAction | None = None


class Lifecycle(Part, frozen=True, kw_only=True):
    pre_stop: Handler | None = None
    post_start: Handler | None = None


class Resources(Part, frozen=True, kw_only=True):
    requests: dict[str, str | int | float] = msgspec.field(default_factory=dict)
    limits: dict[str, str | int | float] = msgspec.field(default_factory=dict)


class Profile(Part, frozen=True, kw_only=True):
    """Of seccomp or AppArmor."""

    type: str
    localhost_profile: str = ""


class SeLinux(Part, frozen=True, kw_only=True):
    type: str = ""
    user: str = ""
    role: str = ""


class Capabilities(Part, frozen=True, kw_only=True):
    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


class Windows(Part, frozen=True, kw_only=True):
    host_process: bool = False


class Sysctl(Part, frozen=True, kw_only=True):
    name: str
    value: str = ""


class SecurityContext(Part, frozen=True, kw_only=True):
    """Of a container, or of a pod: each has some fields that the other has not."""

    privileged: bool = False
    allow_privilege_escalation: bool | None = None
    read_only_root_filesystem: bool = False
    run_as_non_root: bool | None = None
    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    capabilities: Capabilities = Capabilities()
    seccomp_profile: Profile | None = None
    app_armor_profile: Profile | None = None
    se_linux_options: SeLinux = SeLinux()
    proc_mount: str = "Default"
    windows_options: Windows = Windows()
    sysctls: tuple[Sysctl, ...] = ()


class VolumeMount(Part, frozen=True, kw_only=True):
    name: str
    mount_path: str
    read_only: bool = False
    sub_path: str = ""


class Container(Part, frozen=True, kw_only=True):
    name: str
    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    env_from: tuple[EnvFrom, ...] = ()
    ports: tuple[ContainerPort, ...] = ()
    resources: Resources = Resources()
    volume_mounts: tuple[VolumeMount, ...] = ()
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    lifecycle: Lifecycle = Lifecycle()
    security_context: SecurityContext = SecurityContext()
    restart_policy: str = ""

    @property
    def probes(self) -> dict[str, Probe]:
        named = {"startup": self.startup_probe, "readiness": self.readiness_probe, "liveness": self.liveness_probe}
        return {name: probe for name, probe in named.items() if probe is not None}


class PodSpec(Part, frozen=True, kw_only=True):
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    ephemeral_containers: tuple[Container, ...] = ()
    volumes: tuple[Tree, ...] = ()
    security_context: SecurityContext = SecurityContext()
    service_account_name: str = ""
    automount_service_account_token: bool | None = None
    enable_service_links: bool = True
    host_network: bool = False
    host_pid: bool = msgspec.field(default=False, name="hostPID")
    host_ipc: bool = msgspec.field(default=False, name="hostIPC")
    node_selector: dict[str, str] = msgspec.field(default_factory=dict)
    tolerations: tuple[Tree, ...] = ()
    termination_grace_period_seconds: int = 30
    priority_class_name: str = ""
    image_pull_secrets: tuple[KeyRef, ...] = ()
    topology_spread_constraints: tuple[Tree, ...] = ()
    affinity: Tree = msgspec.field(default_factory=dict)
    subdomain: str = ""

    @property
    def all_containers(self) -> tuple[Container, ...]:
        return (*self.init_containers, *self.containers, *self.ephemeral_containers)


class Template(Part, frozen=True, kw_only=True):
    metadata: Meta = Meta()
    spec: PodSpec
