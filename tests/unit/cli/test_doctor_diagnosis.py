"""Each fault and its sentence: facts about an install in, findings out. No network."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ostrya.api.v1 import admin_pb2
from ostrya.cli.diagnosis import diagnose
from ostrya.cli.diagnosis.certificate import Certificate
from ostrya.cli.diagnosis.facts import (
    Alert,
    Clock,
    Dialled,
    Facts,
    Memory,
    PoolRows,
    PrometheusFacts,
    RedisFacts,
    RouterFacts,
    Rule,
    ScrapeTarget,
    Standing,
    TlsFacts,
)
from ostrya.cli.diagnosis.findings import Finding, Status, counted, listed
from tests.fakes.pool import member

NOW_S = 1_800_000_000.0
DAY_S = 86_400.0
MIB = 1 << 20
READY, LOST = admin_pb2.REPLICA_STATE_READY, admin_pb2.REPLICA_STATE_LOST
STARTING, DRAINING = admin_pb2.REPLICA_STATE_STARTING, admin_pb2.REPLICA_STATE_DRAINING
FRESH, FROZEN = admin_pb2.KNOWLEDGE_LEVEL_FRESH, admin_pb2.KNOWLEDGE_LEVEL_FROZEN_INDEX


def replica(name: str = "w0", **changes: object) -> admin_pb2.Replica:
    fields: dict[str, object] = {
        "worker_id": name,
        "address": f"{name}:50052",
        "state": READY,
        "prefix_credit": True,
        "state_schema": 1,
        "version": "0.1.0",
    }
    return admin_pb2.Replica(**{**fields, **changes})  # type: ignore[arg-type]


def status(**changes: object) -> admin_pb2.GetStatusResponse:
    fields: dict[str, object] = {
        "version": "0.1.0",
        "pool": "default",
        "model": "tiny",
        "discovery": "registry",
        "state_schema": 1,
        "redis_connected": True,
        "level": FRESH,
    }
    return admin_pb2.GetStatusResponse(**{**fields, **changes})  # type: ignore[arg-type]


def router(
    target: str = "r0:50051", *replicas: admin_pb2.Replica, level: int = FRESH, offset_s: float = 0.0, **changes: object
) -> RouterFacts:
    return RouterFacts(
        target=target,
        is_serving=True,
        status=status(level=level, **changes),
        replicas={one.worker_id: one for one in replicas or (replica("w0"), replica("w1"))},
        level=admin_pb2.KnowledgeLevel.ValueType(level),
        clock=Clock(offset_s, 0.01),
    )


def rows(*names: str, leased: tuple[str, ...] | None = None, schemas: Mapping[str, int] | None = None) -> PoolRows:
    from msgspec.structs import replace as with_changes

    found = {name: with_changes(member(name), schema=(schemas or {}).get(name, 1)) for name in names}
    return PoolRows(members=found, leases=dict.fromkeys(names if leased is None else leased, 2.5))


def redis(pool: PoolRows | None = None, **changes: object) -> RedisFacts:
    memory = Memory(used_bytes=10 * MIB, max_bytes=256 * MIB, policy="volatile-lru", evicted_keys=0)
    sound = RedisFacts(
        where="redis://redis:6379/0",
        latency_s=0.001,
        clock=Clock(0.0, 0.001),
        memory=memory,
        pools={"default": pool or rows("w0", "w1")},
    )
    return replace(sound, **changes)  # type: ignore[arg-type]


def target(job: str, name: str, **changes: object) -> ScrapeTarget:
    sound = ScrapeTarget(job=job, pool="default", replica=name, instance=f"{name}:9401", is_up=True, age_s=5.0)
    return replace(sound, **changes)  # type: ignore[arg-type]


def prometheus(**changes: object) -> PrometheusFacts:
    sound = PrometheusFacts(
        where="http://prometheus:9090",
        targets=(target("ostrya-router", "r0"), target("ostrya-worker", "w0"), target("ostrya-worker", "w1")),
        workers=frozenset({("default", "w0"), ("default", "w1")}),
        routers=frozenset({("default", "r0")}),
        rules=(Rule(name="NoReadyWorkers", error=""),),
    )
    return replace(sound, **changes)  # type: ignore[arg-type]


def tls(*, before_days: float = -10, after_days: float = 60, names: tuple[str, ...] = ("router.example",)) -> TlsFacts:
    made = Certificate(
        not_before_s=NOW_S + before_days * DAY_S, not_after_s=NOW_S + after_days * DAY_S + 60, names=names
    )
    return TlsFacts(endpoint="router.example:443", host="router.example", certificate=made)


def install(*routers: RouterFacts, **changes: object) -> Facts:
    sound = Facts(
        now_s=NOW_S,
        routers=routers or (router(),),
        redis=redis(),
        prometheus=prometheus(),
        tls=(tls(),),
    )
    return replace(sound, **changes)  # type: ignore[arg-type]


def complaints(facts: Facts) -> list[tuple[str, str, str]]:
    """Status, check and sentence of everything that is not well; each comes with advice."""
    bad = [one for one in diagnose(facts) if one.status in (Status.FAIL, Status.WARN)]
    assert all(one.advice.endswith(".") for one in bad), bad
    return [(one.status.value, one.check, one.sentence) for one in bad]


def unrenewed() -> RouterFacts:
    """A router whose replicas all answer, while nobody can write to Redis."""
    return router("r0:50051", *(replica(name, holds=["lease_not_renewed"]) for name in ("w0", "w1")))


FULL = Memory(used_bytes=MIB + MIB // 5, max_bytes=MIB, policy="noeviction", evicted_keys=0)


def test_a_sound_install_has_nothing_but_good_news() -> None:
    findings = diagnose(install(router("r0:50051"), router("r1:50051")))
    two_routers = install(
        router("r0:50051"),
        router("r1:50051"),
        prometheus=prometheus(routers=frozenset({("default", "r0"), ("default", "r1")})),
    )
    findings = diagnose(two_routers)
    assert {one.status for one in findings} == {Status.OK}, findings
    said = " ".join(one.sentence for one in findings)
    assert "pool 'default' has 2 ready replicas, as seen by Redis, r0:50051 and r1:50051" in said
    assert "good for 60 days" in said
    assert "10.0 MiB of 256 MiB" in said


def test_what_was_not_asked_for_is_skipped_and_no_complaint() -> None:
    findings = diagnose(install(redis=None, prometheus=None, tls=()))
    assert [one.check for one in findings if one.status is Status.SKIPPED] == ["redis", "scraping", "alerts", "tls"]
    assert {one.status for one in findings} == {Status.OK, Status.SKIPPED}


FAULTS: list[tuple[str, Facts, str, str]] = [
    (
        "a router that is not there",
        install(RouterFacts(target="r0:50051", error="Connection refused")),
        "fail router",
        "router r0:50051 does not answer: Connection refused",
    ),
    (
        "a router that is NOT_SERVING",
        install(replace(router(), is_serving=False)),
        "fail router",
        "router r0:50051 answers, but its health says NOT_SERVING, so load balancers leave it out",
    ),
    (
        "a router that drains",
        install(replace(router("r0:50051", is_draining=True, num_in_flight=3), is_serving=False)),
        "warn router",
        "router r0:50051 is shutting down: it finishes 3 requests and takes no new ones",
    ),
    (
        "a router from before GetStatus",
        install(replace(router(), status=None)),
        "warn router",
        "router r0:50051 serves, but is too old to tell its status",
    ),
    (
        "endpoints that are not watched",
        install(router("r0:50051", kubernetes_connected=False, discovery="kubernetes")),
        "fail kubernetes",
        "router r0:50051 cannot watch the endpoints of its workers: new pods are not seen",
    ),
    (
        "a part of a router that fails",
        install(
            router(
                "r0:50051", failing_parts=[admin_pb2.FailingPart(name="tracker", error="ValueError", num_restarts=3)]
            )
        ),
        "fail router",
        "the part 'tracker' of router r0:50051 fails and is started again and again (ValueError, 3 restarts)",
    ),
    (
        "rows in Redis that cannot be read",
        install(redis=redis(pools={"default": replace(rows("w0", "w1"), unreadable=("member 'x': cut short",))})),
        "warn redis",
        "1 row of pool 'default' cannot be read and is skipped: member 'x': cut short",
    ),
    (
        "nodes that are not watched",
        install(prometheus=prometheus(blind_to_nodes=frozenset({("default", "r0")}))),
        "fail kubernetes",
        "router r0 of pool 'default' cannot watch the nodes: their maintenance goes unnoticed",
    ),
    (
        "a pool that nobody serves",
        install(redis=redis(pools={"default": rows("w0", "w1"), "nosuch": rows()})),
        "fail replicas",
        "no router here serves pool 'nosuch', of which Redis has 0 workers; they serve default",
    ),
    (
        "requests that wait",
        install(router("r0:50051", num_waiting=1)),
        "warn queue",
        "1 request waits at router r0:50051 for a replica that takes them",
    ),
    (
        "an index that is frozen",
        install(router(level=FROZEN)),
        "warn knowledge",
        "router r0:50051 has heard of no replica through Redis for a while: its prefix index fades; answers "
        "stay right, but fewer prefixes are reused",
    ),
    (
        "a router without Redis",
        install(router("r0:50051", redis_connected=False)),
        "fail knowledge",
        "router r0:50051 is not connected to Redis",
    ),
    (
        "Redis that is not there",
        install(redis=RedisFacts(where="redis://redis:6379/0", error="ConnectionError: refused")),
        "fail redis",
        "Redis at redis://redis:6379/0 cannot be used: ConnectionError: refused",
    ),
    (
        "Redis that is slow",
        install(redis=redis(latency_s=0.25)),
        "warn redis",
        "Redis at redis://redis:6379/0 takes 250 ms to answer a PING",
    ),
    (
        "Redis that is full and refuses",
        install(redis=redis(memory=Memory(used_bytes=95, max_bytes=100, policy="noeviction", evicted_keys=0))),
        "fail redis",
        "Redis at redis://redis:6379/0 uses 95% of its maxmemory and refuses writes when full (policy noeviction)",
    ),
    (
        "Redis that is full and evicts",
        install(redis=redis(memory=Memory(used_bytes=95, max_bytes=100, policy="allkeys-lru", evicted_keys=0))),
        "warn redis",
        "Redis at redis://redis:6379/0 uses 95% of its maxmemory; then it evicts keys (allkeys-lru)",
    ),
    (
        "Redis that has evicted",
        install(redis=redis(memory=Memory(used_bytes=9, max_bytes=100, policy="allkeys-lru", evicted_keys=7))),
        "warn redis",
        "Redis at redis://redis:6379/0 has evicted 7 keys because its memory was full",
    ),
    (
        "a member with another schema",
        install(redis=redis(rows("w0", "w1", schemas={"w1": 2}))),
        "fail schema",
        "schemas of the shared state differ: 1 (replica w0, replica w1, router r0:50051 and the row of w0 in Redis); "
        "2 (the row of w1 in Redis); they misread each other",
    ),
    (
        "a replica with another schema",
        install(router("r0:50051", replica("w0"), replica("w1", state_schema=2)), redis=None),
        "fail schema",
        "schemas of the shared state differ: 1 (replica w0 and router r0:50051); 2 (replica w1); they misread each "
        "other",
    ),
    (
        "mixed versions",
        install(router("r0:50051", replica("w0"), replica("w1", version="0.2.0"))),
        "warn versions",
        "versions are mixed: 0.1.0: replica w0 and router r0:50051; 0.2.0: replica w1",
    ),
    (
        "a replica that is lost and has no lease",
        install(
            router("r0:50051", replica("w0"), replica("w1", state=LOST)),
            redis=redis(rows("w0", "w1", leased=("w0",))),
        ),
        "fail replicas",
        "replica w1 at w1:50052 is lost (router r0:50051)",
    ),
    (
        "a replica that starts",
        install(router("r0:50051", replica("w0"), replica("w1", state=STARTING))),
        "warn replicas",
        "replica w1 gets no requests: it is starting (router r0:50051)",
    ),
    (
        "a replica that drains",
        install(router("r0:50051", replica("w0"), replica("w1", state=DRAINING))),
        "warn replicas",
        "replica w1 gets no requests: it takes no new work: it is cordoned, drains or ends (router r0:50051)",
    ),
    (
        "a replica without a lease",
        install(router("r0:50051", replica("w0"), replica("w1", holds=["no_lease"]))),
        "fail replicas",
        "replica w1 is held back: its lease in Redis is over, and it does not answer the router (router r0:50051)",
    ),
    (
        "one replica of two that does not renew its lease",
        install(router("r0:50051", replica("w0"), replica("w1", holds=["lease_not_renewed"]))),
        "fail replicas",
        "replica w1 serves, but has no lease in Redis, so nobody learns what it has cached",
    ),
    (
        "Redis that is full",
        install(unrenewed(), redis=redis(rows("w0", "w1", leased=()), memory=FULL)),
        "fail redis",
        "Redis at redis://redis:6379/0 refuses writes: its memory is full (1.2 MiB of 1.0 MiB, policy noeviction)",
    ),
    (
        "Redis that is a replica",
        install(unrenewed(), redis=redis(rows("w0", "w1", leased=()), standing=Standing(master="redis-1:6379"))),
        "fail redis",
        "Redis at redis://redis:6379/0 refuses writes: it is a read-only replica of redis-1:6379",
    ),
    (
        "Redis that wants replicas",
        install(unrenewed(), redis=redis(rows(), standing=Standing(lacks_replicas=True))),
        "fail redis",
        "Redis at redis://redis:6379/0 refuses writes: it may write only while replicas follow it, and none does",
    ),
    (
        "Redis whose disk is full",
        install(unrenewed(), redis=redis(rows(), standing=Standing(is_disk_broken=True))),
        "fail redis",
        "Redis at redis://redis:6379/0 refuses writes: it could not save to its disk",
    ),
    (
        "leases that nobody renews, and Redis is not looked at",
        install(unrenewed(), redis=None),
        "fail redis",
        "Redis refuses writes, or no worker reaches it: of 2 replicas none renews its lease",
    ),
    (
        "a replica whose node has maintenance",
        install(router("r0:50051", replica("w0"), replica("w1", holds=["maintenance"]))),
        "warn replicas",
        "replica w1 is held back: its node has maintenance soon, so long requests go elsewhere (router r0:50051)",
    ),
    (
        "a hold of a newer version",
        install(router("r0:50051", replica("w0"), replica("w1", holds=["eclipse"]))),
        "warn replicas",
        "replica w1 is held back: hold 'eclipse' (router r0:50051)",
    ),
    (
        "a replica that one router does not know",
        install(
            router("r0:50051"),
            router("r1:50051", replica("w0")),
            prometheus=prometheus(routers=frozenset({("default", "r0"), ("default", "r1")})),
        ),
        "fail replicas",
        "replica w1 is known to r0:50051, but not to r1:50051",
    ),
    (
        "a registered replica that no router knows",
        install(router("r0:50051", replica("w0"))),
        "fail replicas",
        "replica w1 is registered in Redis with a live lease, but no router knows it (r0:50051)",
    ),
    (
        "a row that was left behind",
        install(router("r0:50051", replica("w0")), redis=redis(rows("w0", "w1", leased=("w0",)))),
        "warn replicas",
        "replica w1 has left a row in Redis without a lease: its process ended or hangs",
    ),
    (
        "a static replica that cannot reach Redis",
        install(redis=redis(rows("w0"))),
        "fail replicas",
        "replica w1 serves, but has no lease in Redis, so nobody learns what it has cached",
    ),
    (
        "a pool without a replica that takes work",
        install(router("r0:50051", replica("w0", state=STARTING)), redis=redis(rows("w0"))),
        "fail replicas",
        "router r0:50051 has no replica that takes work: requests for pool 'default' wait, then fail",
    ),
    (
        "a replica with other digests",
        install(router("r0:50051", replica("w0"), replica("w1", prefix_credit=False))),
        "warn prefix credit",
        "replica w1 serves, but its cached prefixes are not used for routing: it computes other digests",
    ),
    (
        "a worker's clock that is ahead",
        install(router("r0:50051", replica("w0"), replica("w1", clock_offset_s=4.0))),
        "warn clocks",
        "the clock of replica w1 is 4.0 s ahead of the others",
    ),
    (
        "a Redis clock that is far behind",
        install(redis=redis(clock=Clock(-3600.0, 0.01))),
        "fail clocks",
        "the clock of Redis is 3600.0 s behind the others",
    ),
    (
        "our own clock",
        install(router("r0:50051", offset_s=5.0), redis=redis(clock=Clock(5.0, 0.001))),
        "warn clocks",
        "the clock of this machine is 5.0 s behind the others",
    ),
    (
        "Prometheus that is not there",
        install(prometheus=PrometheusFacts(where="http://prometheus:9090", error="Connection refused")),
        "fail scraping",
        "Prometheus at http://prometheus:9090 cannot be asked: Connection refused",
    ),
    (
        "Prometheus without our jobs",
        install(prometheus=PrometheusFacts(where="http://prometheus:9090", rules=(Rule(name="a", error=""),))),
        "fail scraping",
        "Prometheus at http://prometheus:9090 has no target of the jobs ostrya-router and ostrya-worker",
    ),
    (
        "a target that is down",
        install(prometheus=prometheus(targets=(target("ostrya-worker", "w0", is_up=False),))),
        "fail scraping",
        "Prometheus cannot scrape w0",
    ),
    (
        "samples that are old",
        install(prometheus=prometheus(targets=(target("ostrya-worker", "w0", age_s=200.0),))),
        "fail scraping",
        "the newest samples of w0 are 200 s old",
    ),
    (
        "targets without our labels",
        install(prometheus=prometheus(targets=(target("ostrya-worker", "", pool=""),))),
        "warn scraping",
        "targets lack the labels pool and replica, by which dashboards, rules and this check tell them apart",
    ),
    (
        "a replica that is not scraped",
        install(prometheus=prometheus(workers=frozenset({("default", "w0")}))),
        "fail scraping",
        "Prometheus has no metrics of w1 of pool 'default', which the routers use",
    ),
    (
        "a router that is not scraped",
        install(prometheus=prometheus(routers=frozenset())),
        "fail scraping",
        "1 router of pool 'default' answered here, but Prometheus has the metrics of none",
    ),
    (
        "no rules",
        install(prometheus=prometheus(rules=())),
        "warn rules",
        "Prometheus at http://prometheus:9090 has none of Ostrya's rules, so nothing alerts and some panels stay empty",
    ),
    (
        "a rule that fails",
        install(prometheus=prometheus(rules=(Rule(name="IndexStale", error="many-to-many matching"),))),
        "warn rules",
        "rule IndexStale fails: many-to-many matching",
    ),
    (
        "an alert that pages",
        install(prometheus=prometheus(alerts=(Alert(name="RedisDown", severity="page", summary="gone", runbook="r"),))),
        "fail alerts",
        "RedisDown fires: gone",
    ),
    (
        "an alert for the day",
        install(prometheus=prometheus(alerts=(Alert(name="Queue", severity="ticket", summary="long", runbook=""),))),
        "warn alerts",
        "Queue fires: long",
    ),
    (
        "a certificate that expired",
        install(tls=(tls(after_days=-3),)),
        "fail tls",
        "the certificate of router.example:443 expired 2 days ago",
    ),
    (
        "a certificate that expires soon",
        install(tls=(tls(after_days=13),)),
        "warn tls",
        "the certificate of router.example:443 expires in 13 days",
    ),
    (
        "a certificate that expires today",
        install(tls=(tls(after_days=0.125),)),
        "warn tls",
        "the certificate of router.example:443 expires in 3 hours",
    ),
    (
        "a certificate of tomorrow",
        install(tls=(tls(before_days=1),)),
        "fail tls",
        "the certificate of router.example:443 is not valid yet",
    ),
    (
        "a certificate for others",
        install(tls=(tls(names=("a.example", "b.example")),)),
        "fail tls",
        "the certificate of router.example:443 is for a.example and b.example, not for router.example",
    ),
    (
        "an endpoint without TLS",
        install(tls=(TlsFacts(endpoint="router.example:443", host="router.example", error="WRONG_VERSION_NUMBER"),)),
        "fail tls",
        "router.example:443 showed no certificate: WRONG_VERSION_NUMBER",
    ),
]


@pytest.mark.parametrize(("facts", "kind", "sentence"), [fault[1:] for fault in FAULTS], ids=[one[0] for one in FAULTS])
def test_each_fault_has_its_sentence(facts: Facts, kind: str, sentence: str) -> None:
    found, check = kind.split(" ", 1)
    assert (found, check, sentence) in complaints(facts)


def advice_on(facts: Facts, words: str) -> str:
    (found,) = [one for one in diagnose(facts) if words in one.sentence]
    return found.advice


def test_the_likely_reason_of_a_lost_replica_depends_on_its_lease() -> None:
    lost = router("r0:50051", replica("w0"), replica("w1", state=LOST))
    with_lease = install(lost)
    without = install(lost, redis=redis(rows("w0", "w1", leased=("w0",))))
    unknown = install(lost, redis=None)
    assert "Its lease is alive" in advice_on(with_lease, "is lost")
    assert "no lease in Redis either" in advice_on(without, "is lost")
    assert advice_on(unknown, "is lost").startswith("Its process has ended or hangs")


def test_what_came_of_dialling_a_lost_replica_is_a_part_of_the_reason() -> None:
    lost = router("r0:50051", replica("w0"), replica("w1", state=LOST))
    refused = install(lost, workers={"w1:50052": Dialled.REFUSED})
    answers = install(lost, redis=None, workers={"w1:50052": Dialled.ANSWERS})
    unreachable = install(lost, workers={"w1:50052": Dialled.UNREACHABLE})
    assert advice_on(refused, "is lost").startswith("Nobody listens there, so its process has ended")
    assert advice_on(answers, "is lost").startswith("It answers here, so the process runs")
    assert advice_on(unreachable, "is lost").startswith("Its lease is alive")


@pytest.mark.parametrize("discovery", ["registry", "static"])
def test_a_replica_that_hangs_is_called_so_and_nothing_that_follows_from_it(discovery: str) -> None:
    facts = install(
        router("r0:50051", discovery=discovery),
        router("r1:50051", replica("w0"), discovery=discovery),
        redis=redis(rows("w0", "w1", leased=("w0",))),
        prometheus=None,
        workers={"w0:50052": Dialled.ANSWERS, "w1:50052": Dialled.SILENT},
    )
    sentence = "replica w1 hangs: w1:50052 accepts connections and answers nothing"
    assert complaints(facts) == [("fail", "replicas", sentence)]


def test_a_hung_worker_that_no_router_knows_any_more_is_found_by_its_row() -> None:
    member_address = rows("w1").members["w1"].address
    facts = install(router("r0:50051", replica("w0")), workers={member_address: Dialled.SILENT})
    assert ("fail", "replicas", f"replica w1 hangs: {member_address} accepts connections and answers nothing") in (
        complaints(facts)
    )


def test_a_blind_router_that_has_no_redis_is_told_why_it_is_blind() -> None:
    blind = install(router("r0:50051"), router("r1:50051", replica("w0"), redis_connected=False))
    assert advice_on(blind, "but not to").startswith("Replicas register in Redis, and not connected to it: r1:50051")
    assert "compare the router's --redis-url" in advice_on(blind, "is not connected to Redis")


def test_static_routers_are_not_measured_by_the_registry() -> None:
    facts = install(router("r0:50051", replica("w0"), discovery="static"), redis=redis(rows("w0", "w9", leased=())))
    assert not [one for one in complaints(facts) if one[1] == "replicas"]


def test_pools_are_compared_each_with_its_own_routers() -> None:
    facts = install(
        router("r0:50051", replica("w0"), pool="a"),
        router("r1:50051", replica("w1"), pool="b"),
        redis=redis(pools={"a": rows("w0"), "b": rows("w1")}),
        prometheus=None,
    )
    assert complaints(facts) == []


def test_the_worst_comes_first_and_a_check_that_breaks_spoils_no_other() -> None:
    def broken(facts: Facts) -> list[Finding]:
        raise KeyError("x")

    from ostrya.cli.diagnosis import CHECKS

    findings = diagnose(install(), (*CHECKS, broken))
    assert (findings[0].check, findings[0].status) == ("broken", Status.FAIL)
    assert len(findings) > len(CHECKS)


def test_a_slow_round_trip_is_no_clock_skew() -> None:
    facts = install(router("r0:50051", offset_s=0.0), redis=redis(clock=Clock(3.0, 2.5)))
    assert complaints(facts) == []


def test_names_are_listed_as_people_do() -> None:
    assert [listed(""), listed("a"), listed("ba"), listed("cba")] == ["", "a", "a and b", "a, b and c"]
    assert listed("abcdefg") == "a, b, c, d, e and 2 more"
    assert [counted(0, "key"), counted(1, "key")] == ["0 keys", "1 key"]


@pytest.mark.parametrize("memory", [FULL, replace(FULL, used_bytes=MIB - 1)], ids=["full", "full soon"])
def test_a_redis_that_evicts_nothing_is_to_evict_as_the_charts_own_does(memory: Memory) -> None:
    chart = (Path(__file__).parents[3] / "helm" / "ostrya" / "templates" / "redis.yaml").read_text()
    advice = " ".join(one.advice for one in diagnose(install(redis=redis(rows(), memory=memory))))
    policies = re.findall(r"(?:volatile|allkeys)-\w+", advice)
    assert policies == re.findall(r"--maxmemory-policy (\S+)", chart)


def advice_for_no_work(*replicas: admin_pb2.Replica, discovery: str) -> str:
    found = diagnose(install(router("r0:50051", *replicas, discovery=discovery)))
    (advice,) = {one.advice for one in found if "has no replica that takes work" in one.sentence}
    return advice


@pytest.mark.parametrize("discovery", ["registry", "kubernetes"])
def test_workers_that_are_there_and_not_ready_are_what_to_look_at_and_not_the_settings(discovery: str) -> None:
    held = [replica(f"w{index}", holds=["not_ready"]) for index in range(2)]
    mixed = [*held, replica("w2", state=STARTING), replica("w3", state=LOST, holds=["no_lease"])]
    advice = advice_for_no_work(*held, discovery=discovery)
    assert advice.startswith("2 workers are there, but none is ready: 2 not ready. ")
    advice = advice_for_no_work(*mixed, discovery=discovery)
    assert advice.startswith("4 workers are there, but none is ready: 1 lost, 1 starting and 2 not ready. ")
    for words in ("kubectl describe pod", "kubectl logs", "ostrya_worker_startup_phase_seconds"):
        assert words in advice
    assert "--pool" not in advice
    assert "edis" not in advice
    assert advice_for_no_work(held[0], discovery=discovery).startswith("1 worker is there, but none is ready")
    cordoned = advice_for_no_work(replica("w0", state=DRAINING), discovery=discovery)
    assert cordoned == "1 worker is there, but none takes work: 1 draining. See above what to do with each."


@pytest.mark.parametrize(
    ("discovery", "words"),
    [("registry", "--pool and --redis-url"), ("kubernetes", "--kubernetes-service"), ("static", "--static-workers")],
)
def test_where_no_worker_is_known_first_their_pods_then_how_the_router_looks(discovery: str, words: str) -> None:
    facts = replace(router("r0:50051", discovery=discovery), replicas={})
    found = diagnose(install(facts, redis=redis(rows())))
    (advice,) = {one.advice for one in found if "has no replica that takes work" in one.sentence}
    assert advice.index("kubectl describe pod") < advice.index(words)
