"""The Pod Security Standards "baseline" and "restricted" as functions over pods, control by control.

Written from kubernetes.io/docs/concepts/security/pod-security-standards (as of Kubernetes 1.34): each gives what an
admission controller enforcing that level would complain about. Linux pods only.
"""

from collections.abc import Iterator

from tests.chart.pods import Pod
from tests.chart.podspec import Container, SecurityContext

_BASELINE_CAPABILITIES = frozenset(
    (
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    )
)
_SELINUX_TYPES = frozenset(("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"))
_SAFE_SYSCTLS = frozenset(
    (
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    )
)
_RESTRICTED_VOLUMES = frozenset(
    ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
)
_APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"


def baseline(pod: Pod) -> list[str]:
    """Every violation of the baseline level."""
    return list(_baseline(pod))


def restricted(pod: Pod) -> list[str]:
    """Every violation of the restricted level, which includes baseline."""
    return [*_baseline(pod), *_restricted(pod)]


def _baseline(pod: Pod) -> Iterator[str]:
    spec = pod.spec
    for field, shared in (("hostNetwork", spec.host_network), ("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc)):
        if shared:
            yield f"{field} is true"
    yield from (f"volume {one['name']} is a hostPath" for one in spec.volumes if "hostPath" in one)
    yield from (
        f"sysctl {one.name} is not a safe one" for one in spec.security_context.sysctls if one.name not in _SAFE_SYSCTLS
    )
    yield from (
        f"annotation {key} is {value}"
        for key, value in pod.annotations.items()
        if key.startswith(_APPARMOR_ANNOTATION) and value != "runtime/default" and not value.startswith("localhost/")
    )
    yield from _context(spec.security_context, "the pod")
    for container in spec.all_containers:
        name = f"container {container.name}"
        context = container.security_context
        yield from _context(context, name)
        if context.privileged:
            yield f"{name} is privileged"
        yield from (
            f"{name} adds the capability {one}" for one in context.capabilities.add if one not in _BASELINE_CAPABILITIES
        )
        yield from (f"{name} takes the host's port {port.host_port}" for port in container.ports if port.host_port)
        if context.proc_mount != "Default":
            yield f"{name} has procMount {context.proc_mount}"
        yield from (f"{name} names a host in its {which}" for which, host in _hosts(container) if host)


def _context(context: SecurityContext, whose: str) -> Iterator[str]:
    """Controls whose fields stand on pods and containers alike."""
    if context.seccomp_profile is not None and context.seccomp_profile.type not in ("RuntimeDefault", "Localhost"):
        yield f"{whose} has the seccomp profile {context.seccomp_profile.type}"
    if context.app_armor_profile is not None and context.app_armor_profile.type not in ("RuntimeDefault", "Localhost"):
        yield f"{whose} has the AppArmor profile {context.app_armor_profile.type}"
    selinux = context.se_linux_options
    if selinux.type not in _SELINUX_TYPES or selinux.user or selinux.role:
        yield f"{whose} sets SELinux options"
    if context.windows_options.host_process:
        yield f"{whose} is a Windows HostProcess"


def _hosts(container: Container) -> Iterator[tuple[str, str]]:
    """Handlers that could reach out to a host other than the pod."""
    for name, probe in container.probes.items():
        for action in (probe.http_get, probe.tcp_socket):
            if action is not None:
                yield f"{name} probe", action.host
    for name, handler in (("preStop", container.lifecycle.pre_stop), ("postStart", container.lifecycle.post_start)):
        for action in (handler.http_get, handler.tcp_socket) if handler is not None else ():
            if action is not None:
                yield name, action.host


def _restricted(pod: Pod) -> Iterator[str]:
    spec = pod.spec
    for volume in spec.volumes:
        yield from (f"volume {volume['name']} is a {key}" for key in volume.keys() - {"name"} - _RESTRICTED_VOLUMES)
    if spec.security_context.run_as_user == 0:
        yield "the pod runs as user 0"
    if spec.security_context.run_as_non_root is False:
        yield "the pod has runAsNonRoot false"
    for container in spec.all_containers:
        name = f"container {container.name}"
        context = container.security_context
        if context.allow_privilege_escalation is not False:
            yield f"{name} does not forbid privilege escalation"
        if "ALL" not in context.capabilities.drop:
            yield f"{name} does not drop ALL capabilities"
        yield from (
            f"{name} adds the capability {one}" for one in context.capabilities.add if one != "NET_BIND_SERVICE"
        )
        non_root = (context.run_as_non_root, spec.security_context.run_as_non_root)
        if next((one for one in non_root if one is not None), False) is not True:
            yield f"{name} does not have runAsNonRoot"
        if context.run_as_user == 0:
            yield f"{name} runs as user 0"
        if context.seccomp_profile is None and spec.security_context.seccomp_profile is None:
            yield f"{name} has no seccomp profile"
