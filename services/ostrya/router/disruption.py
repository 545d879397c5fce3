"""What is coming for a node, by the labels and taints GKE puts on it, and what that means for its replicas. Pure.

Facts: GKE, "Manage GKE node disruption for GPUs and TPUs". A scheduled maintenance is certain; for a TPU it ends every
pod on the node, so long work should not start there shortly before.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ostrya.router.types import Hold

SCHEDULED_LABEL = "cloud.google.com/scheduled-maintenance-time"
"""Unix seconds."""
ACTIVE_LABEL = "cloud.google.com/active-node-maintenance"
TERMINATION_TAINT = "cloud.google.com/impending-node-termination"

_ONGOING = "ONGOING"
_MAX_DIGITS = 11
"""Of Unix seconds until the year 5138; more would be milliseconds."""


class NodeMetadata(msgspec.Struct, frozen=True):
    """The part of ObjectMeta that says something here."""

    name: str
    labels: Mapping[str, str] | None = None


class Taint(msgspec.Struct, frozen=True):
    """Its effect does not matter: the key alone announces the end."""

    key: str


class NodeSpec(msgspec.Struct, frozen=True):
    """The part of a node's spec that says something here."""

    taints: tuple[Taint, ...] | None = None


class Node(msgspec.Struct, frozen=True):
    """A core/v1 Node, as far as it announces disruption."""

    metadata: NodeMetadata
    spec: NodeSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a node announces."""

    maintenance_at_s: float | None = None
    """Unix seconds."""
    is_ending: bool = False
    """Maintenance goes on, or the node is about to be terminated."""
    malformed: str = ""
    """The scheduled time as it stands on the node, if it is none; then nothing is scheduled."""


QUIET = Outlook()


def outlook(node: Node) -> Outlook:
    """What the node's labels and taints say."""
    labels = node.metadata.labels or {}
    taints = (node.spec.taints if node.spec is not None else None) or ()
    scheduled = labels.get(SCHEDULED_LABEL, "")
    is_time = scheduled.isascii() and scheduled.isdigit() and len(scheduled) <= _MAX_DIGITS
    return Outlook(
        maintenance_at_s=float(scheduled) if is_time else None,
        is_ending=labels.get(ACTIVE_LABEL) == _ONGOING or any(taint.key == TERMINATION_TAINT for taint in taints),
        malformed="" if is_time else scheduled,
    )


def announced(nodes: Mapping[str, Node]) -> Mapping[str, Outlook]:
    """The outlooks by name, of those nodes that announce something."""
    every = {name: outlook(node) for name, node in nodes.items()}
    return {name: coming for name, coming in every.items() if coming != QUIET}


def holds(coming: Outlook, *, now_s: float, horizon_s: float) -> tuple[Hold, ...]:
    """What keeps new work off the node at `now_s` (Unix seconds), the most urgent first.

    A time that has passed still counts: the label goes when the maintenance is over.
    """
    found = (Hold.TERMINATION_IMPENDING,) if coming.is_ending else ()
    if coming.maintenance_at_s is not None and now_s >= coming.maintenance_at_s - horizon_s:
        return (*found, Hold.MAINTENANCE)
    return found
