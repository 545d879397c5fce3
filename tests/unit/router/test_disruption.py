"""Nodes' labels and taints to holds."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostrya.router.disruption import (
    ACTIVE_LABEL,
    QUIET,
    SCHEDULED_LABEL,
    TERMINATION_TAINT,
    Node,
    NodeMetadata,
    NodeSpec,
    Outlook,
    Taint,
    holds,
    outlook,
)
from ostrya.router.types import Hold

NOW = 1_790_000_000.0


def node(labels: dict[str, str] | None = None, *taints: str) -> Node:
    return Node(metadata=NodeMetadata(name="n1", labels=labels), spec=NodeSpec(taints=tuple(map(Taint, taints))))


def test_an_ordinary_node_announces_nothing() -> None:
    assert outlook(node({"kubernetes.io/os": "linux"}, "google.com/tpu")) == QUIET
    assert outlook(Node(metadata=NodeMetadata(name="n1"))) == QUIET
    assert holds(QUIET, now_s=NOW, horizon_s=600) == ()


def test_scheduled_maintenance_holds_from_the_horizon_on_and_stays() -> None:
    coming = outlook(node({SCHEDULED_LABEL: "1790000000"}))
    assert coming == Outlook(maintenance_at_s=NOW)
    assert holds(coming, now_s=NOW - 601, horizon_s=600) == ()
    assert holds(coming, now_s=NOW - 600, horizon_s=600) == (Hold.MAINTENANCE,)
    assert holds(coming, now_s=NOW + 3600, horizon_s=600) == (Hold.MAINTENANCE,)


@pytest.mark.parametrize(
    "ending",
    [node({ACTIVE_LABEL: "ONGOING"}), node(None, "google.com/tpu", TERMINATION_TAINT)],
)
def test_ongoing_maintenance_and_impending_termination_are_the_end(ending: Node) -> None:
    assert holds(outlook(ending), now_s=NOW, horizon_s=600) == (Hold.TERMINATION_IMPENDING,)


def test_both_are_told_the_urgent_first() -> None:
    both = outlook(node({SCHEDULED_LABEL: "1790000000"}, TERMINATION_TAINT))
    assert holds(both, now_s=NOW, horizon_s=0) == (Hold.TERMINATION_IMPENDING, Hold.MAINTENANCE)


def test_another_state_of_maintenance_is_not_the_end() -> None:
    assert not outlook(node({ACTIVE_LABEL: "PENDING"})).is_ending


@pytest.mark.parametrize("value", ["soon", "-1", "1.5e9", "2026-12-01T00:00:00Z", "1790000000000", "٣", " 1790000000"])
def test_a_malformed_time_schedules_nothing_and_is_told(value: str) -> None:
    coming = outlook(node({SCHEDULED_LABEL: value}))
    assert (coming.maintenance_at_s, coming.malformed) == (None, value)
    assert holds(coming, now_s=NOW, horizon_s=1e9) == ()


@given(st.text())
def test_no_label_whatever_breaks_it(value: str) -> None:
    coming = outlook(node({SCHEDULED_LABEL: value, ACTIVE_LABEL: value}))
    assert (coming.maintenance_at_s is None) == ((coming.malformed == value and value != "") or value == "")


def test_what_an_api_server_sends_is_understood() -> None:
    wire = b"""{"kind": "Node", "metadata": {"name": "n1", "labels": {"cloud.google.com/active-node-maintenance":
      "ONGOING"}}, "spec": {"podCIDR": "10.0.0.0/24", "taints": [{"key": "google.com/tpu", "value": "present",
      "effect": "NoSchedule"}]}, "status": {}}"""
    assert outlook(msgspec.json.decode(wire, type=Node)) == Outlook(is_ending=True)
    assert outlook(msgspec.json.decode(b'{"metadata": {"name": "n1", "labels": null}, "spec": {}}', type=Node)) == QUIET
