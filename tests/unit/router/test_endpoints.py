"""EndpointSlices to endpoints: defaults, duplicates, families, ports."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostrya.router.endpoints import Conditions, Endpoint, Port, Slice, SliceEndpoint, count, merge

GRPC = (Port(name="metrics", port=9401), Port(name="grpc", port=50052))
FLAG = st.sampled_from([None, False, True])
ENTRY = st.builds(
    SliceEndpoint,
    addresses=st.sampled_from([("10.0.0.1",), ("10.0.0.2",), ("10.0.0.3", "10.0.9.9"), ()]),
    conditions=st.one_of(st.none(), st.builds(Conditions, ready=FLAG, serving=FLAG, terminating=FLAG)),
    node_name=st.sampled_from([None, "n1"]),
)
SLICE = st.builds(
    Slice,
    address_type=st.sampled_from(["IPv4", "IPv6", "FQDN"]),
    endpoints=st.one_of(st.none(), st.lists(ENTRY, max_size=4).map(tuple)),
    ports=st.sampled_from([None, (), GRPC, GRPC[:1]]),
)


def entry(address: str = "10.0.0.1", *, node: str | None = "n1", **conditions: bool | None) -> SliceEndpoint:
    return SliceEndpoint(addresses=(address,), conditions=Conditions(**conditions), node_name=node)


def v4(*entries: SliceEndpoint, ports: tuple[Port, ...] | None = GRPC) -> Slice:
    return Slice(address_type="IPv4", endpoints=entries, ports=ports)


def only(*slices: Slice) -> Endpoint:
    (endpoint,) = merge(slices).values()
    return endpoint


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, (True, True, False)),
        ({"ready": False}, (False, False, False)),
        ({"ready": False, "serving": True, "terminating": True}, (False, True, True)),
        ({"ready": True, "serving": False}, (True, False, False)),
        ({"terminating": True}, (True, True, True)),
    ],
)
def test_absent_conditions_mean_what_the_api_documents(
    conditions: dict[str, bool], expected: tuple[bool, bool, bool]
) -> None:
    one = only(v4(SliceEndpoint(addresses=("10.0.0.1",), conditions=Conditions(**conditions))))
    assert (one.is_ready, one.is_serving, one.is_terminating) == expected


def test_no_conditions_at_all_is_ready() -> None:
    assert only(v4(SliceEndpoint(addresses=("10.0.0.1",)))).is_ready


def test_the_port_is_found_by_its_name_in_each_slice() -> None:
    named_elsewhere = v4(entry("10.0.0.2"), ports=(Port(name="grpc", port=6000),))
    without = v4(entry("10.0.0.3"), ports=(Port(name="http", port=80),))
    assert merge([v4(entry()), named_elsewhere, without, v4(entry("10.0.0.4"), ports=None)]).keys() == {
        "10.0.0.1:50052",
        "10.0.0.2:6000",
    }


def test_the_first_of_several_addresses_is_enough() -> None:
    assert only(v4(SliceEndpoint(addresses=("10.0.0.1", "10.0.0.9")))).address == "10.0.0.1:50052"


def test_ipv6_is_bracketed() -> None:
    assert only(Slice(address_type="IPv6", endpoints=(entry("fd00::1"),), ports=GRPC)).address == "[fd00::1]:50052"


def test_a_pod_of_a_dual_stack_service_comes_once() -> None:
    slices = [Slice(address_type="IPv6", endpoints=(entry("fd00::1"),), ports=GRPC), v4(entry())]
    assert merge(slices).keys() == {"10.0.0.1:50052"}
    assert merge([slices[0], v4()]).keys() == {"[fd00::1]:50052"}


def test_names_are_not_addresses() -> None:
    assert merge([Slice(address_type="FQDN", endpoints=(entry("worker.example"),), ports=GRPC)]) == {}


def test_the_node_is_kept() -> None:
    assert only(v4(entry(node="tpu-7"))).node == "tpu-7"
    assert only(v4(entry(node=None))).node == ""


def test_of_a_duplicate_the_more_ready_one_counts_in_any_order() -> None:
    ready, not_ready = v4(entry(ready=True)), v4(entry(ready=False))
    serving_on = v4(entry(ready=False, serving=True, terminating=True))
    gone = v4(entry(ready=False, serving=False, terminating=True))
    ranked = [ready, not_ready, serving_on, gone]
    for better, worse in itertools.combinations(ranked, 2):
        assert only(better, worse) == only(worse, better) == only(better)


def test_what_an_api_server_sends_is_understood() -> None:
    wire = b"""{"kind": "EndpointSlice", "metadata": {"name": "s", "resourceVersion": "7"}, "addressType": "IPv4",
      "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": true, "serving": true, "terminating": false},
                     "nodeName": "n1", "targetRef": {"kind": "Pod", "name": "w-0"}, "zone": "a"}],
      "ports": [{"name": "grpc", "port": 50052, "protocol": "TCP"}]}"""
    assert merge([msgspec.json.decode(wire, type=Slice)]).keys() == {"10.0.0.1:50052"}
    empty = msgspec.json.decode(b'{"addressType": "IPv4", "endpoints": null, "ports": null}', type=Slice)
    assert merge([empty]) == {}


def test_endpoints_are_counted_by_condition() -> None:
    found = merge(
        [v4(entry(), entry("10.0.0.2", ready=False, serving=True, terminating=True), entry("3", ready=False))]
    )
    assert count(found.values()) == {"ready": 1, "serving": 2, "terminating": 1}


@given(st.lists(SLICE, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_slices_decides_nothing_but_the_node(slices: list[Slice], order: random.Random) -> None:
    shuffled = list(slices)
    order.shuffle(shuffled)

    def said(found: list[Slice]) -> dict[str, tuple[bool, bool, bool]]:
        return {one.address: (one.is_ready, one.is_serving, one.is_terminating) for one in merge(found).values()}

    assert said(slices) == said(shuffled)


@given(st.lists(SLICE, max_size=5))
def test_every_merged_endpoint_stands_in_some_slice_and_every_address_is_merged(slices: list[Slice]) -> None:
    found = merge(slices)
    family = {one.address.startswith("[") for one in found.values()}
    assert len(family) <= 1
    hosts = {address.rpartition(":")[0].strip("[]") for address in found}
    named = {e.addresses[0] for one in slices for e in one.endpoints or () if e.addresses and one.ports == GRPC}
    assert hosts <= named
    if all(one.address_type == "IPv4" for one in slices):
        assert hosts == named
