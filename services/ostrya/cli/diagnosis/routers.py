"""Do routers answer, take work, and know enough to route well? Pure: facts in, findings out."""

from collections.abc import Iterator

from ostrya.api.v1 import admin_pb2
from ostrya.cli.diagnosis.facts import Facts, RouterFacts
from ostrya.cli.diagnosis.findings import Finding, counted, fail, listed, ok, skipped, warn

_LEVELS = {
    admin_pb2.KNOWLEDGE_LEVEL_FROZEN_INDEX: "has heard of no replica through Redis for a while: its prefix index fades",
    admin_pb2.KNOWLEDGE_LEVEL_NO_INDEX: "has no prefix index: it spreads requests by their first tokens",
    admin_pb2.KNOWLEDGE_LEVEL_NO_LOAD: "knows no prefixes and no loads: it draws replicas at random",
}


def routers(facts: Facts) -> Iterator[Finding]:
    """One finding a router, and what it does not see of Kubernetes."""
    for router in facts.routers:
        yield _router(router)
    for router in facts.answering:
        if router.status and router.status.HasField("kubernetes_connected") and not router.status.kubernetes_connected:
            yield fail(
                "kubernetes",
                f"router {router.target} cannot watch the endpoints of its workers: new pods are not seen",
                "Look for 'forbidden' or a connection error in its log: its service account needs get, list and watch "
                "on endpointslices in its namespace, and a NetworkPolicy must let it reach the API server.",
            )
        for part in router.status.failing_parts if router.status else ():
            yield fail(
                "router",
                f"the part {part.name!r} of router {router.target} fails and is started again and again "
                f"({part.error}, {counted(part.num_restarts, 'restart')})",
                "Requests go on, by what the router knew before. Its log has 'a part broke' with a "
                "traceback: please report that. What stands in Redis may be the cause (see there).",
            )
    # Of the nodes routers tell in their metrics alone.
    for pool, replica in sorted(facts.prometheus.blind_to_nodes) if facts.prometheus else ():
        yield fail(
            "kubernetes",
            f"router {replica} of pool {pool!r} cannot watch the nodes: their maintenance goes unnoticed",
            "Look for 'forbidden' or a connection error in its log: its service account needs a ClusterRole with get, "
            "list and watch on nodes (chart: maintenance.enabled).",
        )


def waiting(facts: Facts) -> Iterator[Finding]:
    """Whether requests queue for want of a replica."""
    known = [router for router in facts.answering if router.status]
    if not known:
        yield skipped("queue", "no router told whether requests wait")
        return
    queues = {router.target: router.status.num_waiting for router in known if router.status}
    for target, num_waiting in queues.items():
        if num_waiting:
            verb = "waits" if num_waiting == 1 else "wait"
            yield warn(
                "queue",
                f"{counted(num_waiting, 'request')} {verb} at router {target} for a replica that takes them",
                "Bring replicas back (see above), or add some; requests that wait too long fail with UNAVAILABLE.",
            )
    if not any(queues.values()):
        in_flight = sum(router.status.num_in_flight for router in known if router.status)
        yield ok("queue", f"no request waits for a replica; {in_flight} in flight")


def knowledge(facts: Facts) -> Iterator[Finding]:
    """Whether routers see Redis, and what they know without."""
    for router in facts.answering:
        if router.level in _LEVELS:
            yield warn(
                "knowledge",
                f"router {router.target} {_LEVELS[router.level]}; answers stay right, but fewer prefixes are reused",
                "It heals by itself when Redis and the workers' registrations are back.",
            )
        if router.status and not router.status.redis_connected:
            yield fail("knowledge", f"router {router.target} is not connected to Redis", _why_no_redis(facts))
    fresh = [router.target for router in facts.answering if router.level == admin_pb2.KNOWLEDGE_LEVEL_FRESH]
    if fresh and len(fresh) == len(facts.answering):
        yield ok("knowledge", f"the prefix index and the loads are current at {listed(fresh)}")


def _router(router: RouterFacts) -> Finding:
    check, status = "router", router.status
    if router.error:
        return fail(
            check,
            f"router {router.target} does not answer: {router.error}",
            "Check that its process or pod runs, that this is its gRPC address, and that nothing between blocks it; "
            "then read the end of its log.",
        )
    if status is not None and status.is_draining:
        return warn(
            check,
            f"router {router.target} is shutting down: it finishes {counted(status.num_in_flight, 'request')} "
            "and takes no new ones",
            "Nothing, if it is being replaced; otherwise find out who sent it SIGTERM.",
        )
    if not router.is_serving:
        return fail(
            check,
            f"router {router.target} answers, but its health says NOT_SERVING, so load balancers leave it out",
            "Read the end of its log; restart it if it does not recover.",
        )
    if status is None:
        return warn(
            check,
            f"router {router.target} serves, but is too old to tell its status",
            "Update it, so that pool, schema, clock and queue can be checked.",
        )
    return ok(
        check,
        f"router {router.target} serves pool {status.pool!r} ({status.model}), discovery {status.discovery}, "
        f"version {status.version}",
    )


def _why_no_redis(facts: Facts) -> str:
    if facts.redis is None:
        return "Run this again with --redis-url to see whether Redis is there."
    if facts.redis.error:
        return "Bring Redis back (see there)."
    return (
        "Redis answers here, so compare the router's --redis-url (host, TLS, user, password) with the one given here, "
        "and check that a NetworkPolicy lets the router reach it."
    )
