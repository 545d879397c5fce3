"""The NetworkPolicy evaluator agrees with the API's documented semantics."""

from tests.chart.manifest import Manifest, Tree, read
from tests.chart.policies import End, allows
from tests.chart.render import NAMESPACE

WEB = End(name="web", namespace=NAMESPACE, labels={"app": "web"}, ports={"http": 8080})
DATA = End(name="data", namespace=NAMESPACE, labels={"app": "data"}, ports={"sql": 5432})
SCRAPER = End(name="scraper", namespace="monitoring", labels={"app": "scraper"})
OUTSIDE = End(name="outside", address="203.0.113.9")
ADDRESSED = End(name="web", namespace=NAMESPACE, labels={"app": "web"}, address="10.4.0.9")


def policy(spec: Tree) -> Manifest:
    tree: Tree = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "p"},
        "spec": spec,
    }
    return read("p.yaml", tree)


DENY = policy({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]})


def ingress(to: str, *rules: Tree) -> Manifest:
    selector = {"matchLabels": {"app": to}}
    return policy({"podSelector": selector, "policyTypes": ["Ingress"], "ingress": list(rules)})


def egress(source: str, *rules: Tree) -> Manifest:
    selector = {"matchLabels": {"app": source}}
    return policy({"podSelector": selector, "policyTypes": ["Egress"], "egress": list(rules)})


def test_without_a_policy_everything_is_open() -> None:
    assert allows([], OUTSIDE, DATA, 5432)
    assert allows([], WEB, DATA, "sql")


def test_an_empty_policy_closes_its_namespace_in_both_directions_and_no_other() -> None:
    assert not allows([DENY], WEB, DATA, 5432)
    assert not allows([DENY], SCRAPER, DATA, 5432)
    assert not allows([DENY], WEB, SCRAPER, 80)
    assert allows([DENY], OUTSIDE, SCRAPER, 80)


def test_a_connection_needs_both_ends_and_policies_add_up() -> None:
    into = ingress("data", {"from": [{"podSelector": {"matchLabels": {"app": "web"}}}], "ports": [{"port": "sql"}]})
    out = egress("web", {"to": [{"podSelector": {"matchLabels": {"app": "data"}}}], "ports": [{"port": 5432}]})
    assert not allows([DENY, into], WEB, DATA, 5432)
    assert not allows([DENY, out], WEB, DATA, 5432)
    assert allows([DENY, into, out], WEB, DATA, 5432)
    assert not allows([DENY, into, out], WEB, DATA, 22)
    assert not allows([DENY, into, out], DATA, WEB, 8080)


def test_a_peer_without_a_namespace_selector_is_in_the_policys_own_namespace() -> None:
    assert not allows([ingress("data", {"from": [{"podSelector": {}}]})], SCRAPER, DATA, 5432)
    elsewhere = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert allows([ingress("data", {"from": [elsewhere]})], SCRAPER, DATA, 5432)
    assert not allows([ingress("data", {"from": [elsewhere]})], WEB, DATA, 5432)
    both = elsewhere | {"podSelector": {"matchLabels": {"app": "other"}}}
    assert not allows([ingress("data", {"from": [both]})], SCRAPER, DATA, 5432)


def test_an_address_block_matches_addresses_and_leaves_out_its_exceptions() -> None:
    block = {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}
    rules = [egress("web", {"to": [block], "ports": [{"port": 443}]})]
    assert allows(rules, WEB, OUTSIDE, 443)
    assert not allows(rules, WEB, End(name="inside", address="10.1.2.3"), 443)
    assert not allows(rules, WEB, DATA, 443)
    assert allows([ingress("data", {"from": [{"ipBlock": {"cidr": "10.4.0.0/16"}}]})], ADDRESSED, DATA, 5432)


def test_ports_match_by_range_protocol_and_the_targets_names() -> None:
    ranged = ingress("data", {"ports": [{"port": 5000, "endPort": 5500}]})
    assert allows([ranged], WEB, DATA, 5432)
    assert not allows([ranged], WEB, DATA, 5501)
    assert not allows([ranged], WEB, DATA, 5432, protocol="UDP")
    assert not allows([ingress("data", {"ports": [{"port": "http"}]})], WEB, DATA, 5432)
    assert allows([ingress("data", {"ports": [{"protocol": "UDP"}]})], WEB, DATA, 9, protocol="UDP")


def test_policy_types_default_to_ingress_and_to_egress_only_where_there_are_rules() -> None:
    unnamed = policy({"podSelector": {"matchLabels": {"app": "web"}}})
    assert not allows([unnamed], DATA, WEB, 8080)
    assert allows([unnamed], WEB, DATA, 5432)
    with_rule = policy({"podSelector": {"matchLabels": {"app": "web"}}, "egress": [{"to": [{"podSelector": {}}]}]})
    assert allows([with_rule], WEB, DATA, 5432)
    assert not allows([with_rule], WEB, SCRAPER, 80)


def test_match_expressions_select() -> None:
    either = {"matchExpressions": [{"key": "app", "operator": "In", "values": ["web", "batch"]}]}
    rules = [ingress("data", {"from": [{"podSelector": either}]})]
    assert allows(rules, WEB, DATA, 5432)
    assert not allows(rules, DATA, DATA, 5432)
    without = {"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}
    assert not allows([ingress("data", {"from": [{"podSelector": without}]})], WEB, DATA, 5432)
