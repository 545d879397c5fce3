"""What NetworkPolicies allow: given the policies, may this end open a connection to that one?

Semantics as in the NetworkPolicy v1 API: policies add up, a pod that no policy of a direction selects is open in that
direction, a peer without namespaceSelector means the policy's own namespace, a named port is the target's.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.chart.manifest import Manifest
from tests.chart.objects import NetworkPolicySpec, Peer, PolicyPort, PolicyRule
from tests.chart.pods import Pod
from tests.chart.render import NAMESPACE


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a connection: a pod, or with no namespace an address outside the cluster."""

    name: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    address: str = ""
    """Empty for a pod whose network does not match pods by address (as GKE's Dataplane V2)."""

    @property
    def namespace_labels(self) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace}


def end_of(pod: Pod, *, address: str = "") -> End:
    ports = {port.name: port.container_port for one in pod.spec.containers for port in one.ports if port.name}
    return End(name=pod.name, namespace=pod.namespace, labels=pod.labels, ports=ports, address=address)


def allows(policies: Iterable[Manifest], source: End, target: End, port: int | str, *, protocol: str = "TCP") -> bool:
    """Whether `source` may open a connection to `port` (a number, or a name at the target) of `target`."""
    number = target.ports[port] if isinstance(port, str) else port
    found = [(one.metadata.namespace or NAMESPACE, one.spec(NetworkPolicySpec)) for one in policies]
    ways_out = [(space, one) for space, one in found if _binds(space, one, source) and "Egress" in _types(one)]
    ways_in = [(space, one) for space, one in found if _binds(space, one, target) and "Ingress" in _types(one)]
    out = any(
        _ports(rule, target, number, protocol) and _peers(rule.receivers, space, target)
        for space, policy in ways_out
        for rule in policy.egress
    )
    into = any(
        _ports(rule, target, number, protocol) and _peers(rule.senders, space, source)
        for space, policy in ways_in
        for rule in policy.ingress
    )
    return (out or not ways_out) and (into or not ways_in)


def _types(policy: NetworkPolicySpec) -> tuple[str, ...]:
    """Ingress is always meant where policyTypes is not given; Egress where there are egress rules."""
    return policy.policy_types or ("Ingress", *(("Egress",) if policy.egress else ()))


def _binds(namespace: str, policy: NetworkPolicySpec, end: End) -> bool:
    return end.namespace == namespace and policy.pod_selector.selects(end.labels)


def _ports(rule: PolicyRule, target: End, number: int, protocol: str) -> bool:
    return not rule.ports or any(_port(one, target, number, protocol) for one in rule.ports)


def _port(port: PolicyPort, target: End, number: int, protocol: str) -> bool:
    if port.protocol != protocol:
        return False
    if port.port is None:
        return True
    if isinstance(port.port, str):
        return target.ports.get(port.port) == number
    return port.port <= number <= (port.end_port or port.port)


def _peers(peers: tuple[Peer, ...], namespace: str, end: End) -> bool:
    return not peers or any(_peer(one, namespace, end) for one in peers)


def _peer(peer: Peer, namespace: str, end: End) -> bool:
    if peer.ip_block is not None:
        block = peer.ip_block
        return (
            bool(end.address)
            and _within(end.address, block.cidr)
            and not any(_within(end.address, one) for one in block.excluded)
        )
    if not end.namespace:
        return False
    if peer.namespace_selector is None:
        here = end.namespace == namespace
    else:
        here = peer.namespace_selector.selects(end.namespace_labels)
    return here and (peer.pod_selector is None or peer.pod_selector.selects(end.labels))


def _within(address: str, cidr: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(cidr)
