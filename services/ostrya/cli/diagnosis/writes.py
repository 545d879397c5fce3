"""Does Redis take what workers write? From what it says of itself, and what routers see of leases. Pure."""

from ostrya.api.v1 import admin_pb2
from ostrya.cli.diagnosis.facts import Facts, Memory, RedisFacts
from ostrya.cli.diagnosis.findings import Finding, counted, fail

NOT_RENEWED = "lease_not_renewed"
"""A replica that has no lease and answers, as routers call it."""

EVICT = (
    "Raise maxmemory, and let it evict (maxmemory-policy volatile-lru, as the chart does): all keys of Ostrya expire "
    "and are written anew."
)


def refused(facts: Facts) -> Finding | None:
    """Why no worker can write, if so; it explains why leases are not renewed."""
    if facts.redis is not None:
        why, advice = _reason(facts.redis)
        if why:
            return fail("redis", f"Redis at {facts.redis.where} refuses writes: {why}", advice)
    ready = {
        worker_id: NOT_RENEWED in replica.holds
        for router in facts.answering
        for worker_id, replica in router.replicas.items()
        if replica.state == admin_pb2.REPLICA_STATE_READY
    }
    if not ready or not all(ready.values()):
        return None
    where = "" if facts.redis else "Run this again with --redis-url. "
    return fail(
        "redis",
        f"Redis refuses writes, or no worker reaches it: of {counted(len(ready), 'replica')} none renews its lease",
        f"{where}Read the end of a worker's log; ostrya_worker_redis_refusals_total says what Redis answers.",
    )


def is_full(memory: Memory) -> bool:
    """It has no room and makes none."""
    return 0 < memory.max_bytes <= memory.used_bytes and memory.policy == "noeviction"


def _reason(redis: RedisFacts) -> tuple[str, str]:
    """Why this Redis refuses, and what to do; empty = it says nothing of the kind."""
    standing, memory = redis.standing, redis.memory
    if standing and standing.master:
        return (
            f"it is a read-only replica of {standing.master}",
            "Point the name in --redis-url at the master, or finish the failover; workers and routers follow by "
            "themselves within seconds.",
        )
    if standing and standing.lacks_replicas:
        return (
            "it may write only while replicas follow it, and none does",
            "Bring its replicas back, or lower min-replicas-to-write.",
        )
    if memory and is_full(memory):
        used, limit = (f"{number / 2**20:.1f} MiB" for number in (memory.used_bytes, memory.max_bytes))
        return f"its memory is full ({used} of {limit}, policy noeviction)", EVICT
    if standing and standing.is_disk_broken:
        return (
            "it could not save to its disk",
            "Make room on its disk; Ostrya needs nothing there: save '' and appendonly no turn it off.",
        )
    return "", ""
