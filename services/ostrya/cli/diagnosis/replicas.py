"""Do all routers see all replicas, and does Redis agree? Who is missing where, and the likely reason. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from ostrya.api.v1 import admin_pb2
from ostrya.cli.diagnosis.facts import Dialled, Facts, PoolRows, RouterFacts
from ostrya.cli.diagnosis.findings import Finding, counted, fail, listed, ok, skipped, warn
from ostrya.cli.diagnosis.writes import NOT_RENEWED, refused

Tell: TypeAlias = Callable[[str, str, str], Finding]
Workers: TypeAlias = Mapping[str, Dialled]

_READY = admin_pb2.REPLICA_STATE_READY
_STALE_S = 60
"""After which rows of a worker that is gone have left Redis by themselves."""

_HOLDS = {
    "not_ready": (
        "its pod is not ready",
        "Read the worker's log; a pod that was cordoned is taken back with `ostrya workers uncordon`.",
    ),
    "terminating": ("its pod is being ended", "Nothing, if it is being replaced."),
    "no_lease": (
        "its lease in Redis is over, and it does not answer the router",
        "The worker hangs, or its host is gone: look at its process and at the end of its log.",
    ),
    "maintenance": ("its node has maintenance soon, so long requests go elsewhere", "Nothing; it is left in time."),
    "termination_impending": ("its node is about to end", "Nothing; requests go elsewhere while they can."),
}
_SERIOUS_HOLDS = {"no_lease"}
_BARRING = {"not_ready", "terminating", "no_lease"}
"""Holds that let no new work through."""
_UNREADY = {"starting", "lost", "not ready"}
"""Words for workers whose own process or pod is where to look."""
_COMPARED = {
    "registry": "their --pool and --redis-url with the router's",
    "kubernetes": "the selector of the Service in the router's --kubernetes-service with their labels",
    "static": "their addresses with the router's --static-workers",
}
_STATES = {
    admin_pb2.REPLICA_STATE_STARTING: (
        "it is starting",
        "Wait; if it stays so, read the worker's log: it serves once the model is loaded and all shapes are compiled.",
    ),
    admin_pb2.REPLICA_STATE_DRAINING: (
        "it takes no new work: it is cordoned, drains or ends",
        "`ostrya workers uncordon` if it should work; nothing if it is being replaced.",
    ),
}


def replicas(facts: Facts) -> Iterator[Finding]:
    """One finding for each replica that somebody misses, one for each pool where nobody does."""
    if not facts.pools:
        yield skipped("replicas", "no router told which replicas it sees")
    for pool in facts.pools:
        routers = {router.target: router for router in facts.answering if router.pool == pool}
        # Where Redis refuses writes nobody has a lease, and the fault is nobody's.
        yield from _pool(pool, routers, _rows(facts, pool), facts.workers, refuses=refused(facts) is not None)
    if facts.pools and facts.redis:
        for pool in sorted(facts.redis.pools.keys() - set(facts.pools)):
            yield fail(
                "replicas",
                f"no router here serves pool {pool!r}, of which Redis has "
                f"{counted(len(facts.redis.pools[pool].members), 'worker')}; they serve {listed(facts.pools)}",
                "Check --pool for a typo, and name the routers of that pool with --target.",
            )


def prefix_credit(facts: Facts) -> Iterator[Finding]:
    """Replicas whose cached prefixes cannot be used."""
    strangers = {
        worker_id
        for router in facts.answering
        for worker_id, replica in router.replicas.items()
        if replica.state == _READY and not replica.prefix_credit
    }
    for worker_id in sorted(strangers):
        yield warn(
            "prefix credit",
            f"replica {worker_id} serves, but its cached prefixes are not used for routing: it computes other digests",
            "Give router and workers the same model, model name and version; the tokenizer is a part of the digests.",
        )


def _rows(facts: Facts, pool: str) -> PoolRows | None:
    return facts.redis.pools.get(pool) if facts.redis else None


def _pool(
    pool: str, routers: Mapping[str, RouterFacts], rows: PoolRows | None, workers: Workers, *, refuses: bool
) -> Iterator[Finding]:
    registers = any(router.status and router.status.discovery == "registry" for router in routers.values())
    registered = set(rows.members) if rows and registers else set()
    known = registered.union(*(router.replicas for router in routers.values()))
    rows = rows if registers else None
    problems = [found for one in sorted(known) for found in _replica(one, routers, rows, workers, refuses=refuses)]
    yield from problems
    for target, router in routers.items():
        if not any(_takes_work(replica) for replica in router.replicas.values()):
            yield fail(
                "replicas",
                f"router {target} has no replica that takes work: requests for pool {pool!r} wait, then fail",
                _why_nobody(router),
            )
    if known and not problems:
        views = [*routers, "Redis"] if rows and not refuses else list(routers)
        yield ok("replicas", f"pool {pool!r} has {counted(len(known), 'ready replica')}, as seen by {listed(views)}")


def _replica(
    worker_id: str, routers: Mapping[str, RouterFacts], rows: PoolRows | None, workers: Workers, *, refuses: bool
) -> Iterator[Finding]:
    """What is wrong with one replica; nothing, if every router would send it work and Redis agrees."""
    check, views = "replicas", {target: router.replicas.get(worker_id) for target, router in routers.items()}
    seen = {target: view for target, view in views.items() if view is not None}
    blind = [target for target, view in views.items() if view is None]
    has_lease = rows is not None and worker_id in rows.leases
    addresses = {view.address for view in seen.values()}
    if rows is not None and worker_id in rows.members:
        addresses.add(rows.members[worker_id].address)
    silent = [address for address in addresses if workers.get(address) is Dialled.SILENT]
    if silent:  # which explains all the rest
        yield fail(
            check,
            f"replica {worker_id} hangs: {listed(silent)} accepts connections and answers nothing",
            "Look at its process (is it stopped, or without CPU or memory?) and at the end of its log; restart it.",
        )
        return
    if not seen:
        yield _unseen(worker_id, has_lease, listed(routers))
        return
    if blind:
        yield fail(
            check,
            f"replica {worker_id} is known to {listed(seen)}, but not to {listed(blind)}",
            _why_blind([routers[target] for target in blind]),
        )
    told: dict[tuple[Tell, str, str], list[str]] = defaultdict(list)
    for target, replica in seen.items():
        for complaint in _complaints(replica, rows, has_lease, workers.get(replica.address)):
            told[complaint].append(target)
    for (tell, what, advice), targets in told.items():
        yield tell(check, f"replica {worker_id} {what} (router {listed(targets)})", advice)
    is_unrenewed = any(NOT_RENEWED in replica.holds for replica in seen.values())
    if (is_unrenewed or (rows is not None and not has_lease and not told)) and not refuses:
        yield fail(
            check,
            f"replica {worker_id} serves, but has no lease in Redis, so nobody learns what it has cached",
            "It cannot reach Redis, or is refused there: check its --redis-url, password and NetworkPolicy, and read "
            "its log.",
        )


def _complaints(
    replica: admin_pb2.Replica, rows: PoolRows | None, has_lease: bool, dialled: Dialled | None
) -> Iterator[tuple[Tell, str, str]]:
    """What keeps one router from sending it work: how bad, what, what to do."""
    if replica.state == admin_pb2.REPLICA_STATE_LOST:
        yield fail, f"at {replica.address} is lost", _why_lost(rows, has_lease, dialled)
    elif replica.state in _STATES:
        why, advice = _STATES[replica.state]
        yield warn, f"gets no requests: {why}", advice
    for hold in replica.holds:
        if hold == NOT_RENEWED:  # which keeps nothing from it
            continue
        why, advice = _HOLDS.get(hold, (f"hold {hold!r}", "Update this program: it does not know that hold."))
        yield fail if hold in _SERIOUS_HOLDS else warn, f"is held back: {why}", advice


def _unseen(worker_id: str, has_lease: bool, targets: str) -> Finding:
    if has_lease:
        return fail(
            "replicas",
            f"replica {worker_id} is registered in Redis with a live lease, but no router knows it ({targets})",
            "Read the router's log: it could not dial the worker's advertised address, or it reads another Redis.",
        )
    return warn(
        "replicas",
        f"replica {worker_id} has left a row in Redis without a lease: its process ended or hangs",
        f"Nothing, if it was removed: the row goes within {_STALE_S} s; otherwise read the worker's log.",
    )


def _why_nobody(router: RouterFacts) -> str:
    """Workers that are there have found the router's pool, so what they lack is elsewhere."""
    look = (
        "in Kubernetes `kubectl describe pod POD` says which probe fails or why it waits, `kubectl logs POD` what it "
        "does. A worker is ready once its weights are loaded and every shape is compiled; "
        "ostrya_worker_startup_phase_seconds has the phases of its start."
    )
    if not router.replicas:
        discovery = router.status.discovery if router.status else "registry"
        compared = _COMPARED.get(discovery, _COMPARED["registry"])
        return f"If workers run, they may not be ready yet: {look} If they are ready, compare {compared}."
    words = [_why_no_work(one) for one in router.replicas.values()]
    there = f"{counted(len(words), 'worker')} {'is' if len(words) == 1 else 'are'} there"
    told = listed(f"{words.count(word)} {word}" for word in set(words))
    if not _UNREADY.intersection(words):
        return f"{there}, but none takes work: {told}. See above what to do with each."
    return f"{there}, but none is ready: {told}. Look at them: {look}"


def _why_no_work(replica: admin_pb2.Replica) -> str:
    if replica.state != _READY:
        return admin_pb2.ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_").lower()
    return next((hold.replace("_", " ") for hold in replica.holds if hold in _BARRING), "ready")


def _why_blind(routers: list[RouterFacts]) -> str:
    cut_off = [router.target for router in routers if router.status and not router.status.redis_connected]
    if cut_off:
        return f"Replicas register in Redis, and not connected to it: {listed(cut_off)}; see 'knowledge'."
    discovery = sorted({router.status.discovery for router in routers if router.status})
    return (
        f"They find replicas by {listed(discovery)}: compare the routers' --discovery, --pool, --redis-url and "
        "--static-workers; a router that has just started needs a few seconds."
    )


def _why_lost(rows: PoolRows | None, has_lease: bool, dialled: Dialled | None) -> str:
    if dialled is Dialled.REFUSED:
        return "Nobody listens there, so its process has ended: look at its state, and at the end of its log."
    if has_lease or dialled is Dialled.ANSWERS:
        return (
            f"{'Its lease is alive' if has_lease else 'It answers here'}, so the process runs, but the router cannot "
            "talk to it: check the worker's --advertise-address and the NetworkPolicy between them."
        )
    lease = "It has no lease in Redis either, so its" if rows is not None else "Its"
    return f"{lease} process has ended or hangs: look at the pod's or process's state and the end of the worker's log."


def _takes_work(replica: admin_pb2.Replica) -> bool:
    return replica.state == _READY and not _BARRING.intersection(replica.holds)
