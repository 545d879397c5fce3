"""EndpointSlices → the addresses behind the workers' Service, and what Kubernetes says of each. Pure.

The values are those of discovery.k8s.io/v1, decoded leniently: absent conditions mean what the API documents, and an
API server may send null for an empty list.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec


class Conditions(msgspec.Struct, frozen=True):
    """Absent = unknown; `merge` says what that counts as."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    """One pod in a slice."""

    addresses: tuple[str, ...] = ()
    """All of the same pod; the first is enough."""
    conditions: Conditions | None = None
    node_name: str | None = None


class Port(msgspec.Struct, frozen=True):
    """Of every endpoint in the slice."""

    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct, frozen=True, rename="camel"):
    """One EndpointSlice; a Service has several when it is large, dual-stack, or just being rewritten."""

    address_type: str
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One address behind the Service."""

    address: str
    """host:port."""
    is_ready: bool
    is_serving: bool
    """Ready, but for that it may be terminating."""
    is_terminating: bool
    node: str
    """Empty = not said."""


def merge(slices: Collection[Slice], *, port_name: str = "grpc") -> Mapping[str, Endpoint]:
    """The endpoints by address. A slice without that port adds none.

    While the controller moves an endpoint to another slice it may be in both, with an older and a newer state, and
    nothing in them tells which is which. The more ready one counts: a stale "ready" is corrected by the worker's own
    health stream, while a stale "not ready" would hide a good replica.

    Of a dual-stack Service each pod is in a slice of either family; IPv4 is taken, so that no pod comes twice.
    """
    found: dict[str, Endpoint] = {}
    family = _family(slices)
    for one in slices:
        port = _port(one, port_name)
        if one.address_type != family or port is None:
            continue
        for entry in one.endpoints or ():
            endpoint = _endpoint(entry, port, is_v6=family == "IPv6")
            if endpoint is None:
                continue
            known = found.get(endpoint.address)
            if known is None or _readiness(endpoint) > _readiness(known):
                found[endpoint.address] = endpoint
    return found


def count(endpoints: Collection[Endpoint]) -> dict[str, int]:
    """How many are ready, serving, terminating; one may be of several."""
    return {
        "ready": sum(endpoint.is_ready for endpoint in endpoints),
        "serving": sum(endpoint.is_serving for endpoint in endpoints),
        "terminating": sum(endpoint.is_terminating for endpoint in endpoints),
    }


def _family(slices: Collection[Slice]) -> str:
    return "IPv4" if any(one.address_type == "IPv4" and one.endpoints for one in slices) else "IPv6"


def _port(one: Slice, name: str) -> int | None:
    return next((port.port for port in one.ports or () if port.name == name), None)


def _endpoint(entry: SliceEndpoint, port: int, *, is_v6: bool) -> Endpoint | None:
    if not entry.addresses:
        return None
    host = f"[{entry.addresses[0]}]" if is_v6 else entry.addresses[0]
    said = entry.conditions or Conditions()
    ready = True if said.ready is None else said.ready
    return Endpoint(
        address=f"{host}:{port}",
        is_ready=ready,
        is_serving=ready if said.serving is None else said.serving,
        is_terminating=bool(said.terminating),
        node=entry.node_name or "",
    )


def _readiness(endpoint: Endpoint) -> tuple[bool, bool, bool]:
    return not endpoint.is_terminating and endpoint.is_ready, not endpoint.is_terminating, endpoint.is_serving
