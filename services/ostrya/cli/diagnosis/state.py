"""Is Redis well, do all speak the same schema and version, do their clocks agree? Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median_low

from ostrya.cli.diagnosis.facts import Clock, Facts, Memory, RedisFacts
from ostrya.cli.diagnosis.findings import Finding, counted, fail, listed, ok, skipped, warn
from ostrya.cli.diagnosis.writes import EVICT, is_full, refused
from ostrya.state.keys import SCHEMA

SLOW_S = 0.1
"""A call of ours may take 1 s, and a lease of 3 s is renewed every second."""
FULL_RATIO = 0.9
CLOCK_WARN_S = 1.0
"""From here on, logs and spans of one request no longer line up."""
CLOCK_FAIL_S = 10.0
"""With a time service no machine is so far off; one without drifts on, and its certificates and windows go wrong."""
DIAL_ERROR_S = 0.1
"""A router learned a worker's clock when it dialled; that took as long as it took."""
HERE = "this machine"


def redis(facts: Facts) -> Iterator[Finding]:
    """Reachable, quick, with room, and taking writes."""
    found = facts.redis
    if refusal := refused(facts):
        yield refusal
    if found is None:
        yield skipped("redis", "not looked at; give --redis-url where Redis can be reached from")
        return
    if found.error:
        yield fail(
            "redis",
            f"Redis at {found.where} cannot be used: {found.error}",
            "Requests are still served, but without shared prefixes. Check that Redis runs, its address, TLS, user and "
            "password, and that a NetworkPolicy lets you and the pool's pods reach it.",
        )
        return
    if found.latency_s > SLOW_S:
        yield warn(
            "redis",
            f"Redis at {found.where} takes {found.latency_s * 1e3:.0f} ms to answer a PING",
            "Move it closer, or find out what keeps it busy: `redis-cli --latency`, SLOWLOG GET.",
        )
    yield from _memory(found)
    for pool, rows in sorted(found.pools.items()):
        if rows.unreadable:
            yield warn(
                "redis",
                f"{counted(len(rows.unreadable), 'row')} of pool {pool!r} cannot be read and "
                f"{'is' if len(rows.unreadable) == 1 else 'are'} skipped: {listed(rows.unreadable)}",
                "A worker writes its own rows anew every second. What stays is of nobody: remove it (HDEL, DEL), and "
                "find out who else writes to this Redis.",
            )


def schema(facts: Facts) -> Iterator[Finding]:
    """Routers and workers must read what the others write."""
    speakers: dict[int, list[str]] = defaultdict(list)
    for router in facts.answering:
        if router.status:
            speakers[router.status.state_schema].append(f"router {router.target}")
        for worker_id, replica in router.replicas.items():
            speakers[replica.state_schema].append(f"replica {worker_id}")
    for rows in facts.redis.pools.values() if facts.redis else ():
        for worker_id, member in rows.members.items():
            speakers[member.schema].append(f"the row of {worker_id} in Redis")
    speakers.pop(0, None)  # lost before it could say
    if not speakers:
        yield skipped("schema", "nobody told which schema of the shared state it uses")
    elif len(speakers) == 1:
        (version,) = speakers
        hint = "" if version == SCHEMA else f"; this program's own is {SCHEMA}"
        yield ok("schema", f"all use schema {version} of the shared state{hint}")
    else:
        sides = (f"{number} ({listed(set(names))})" for number, names in sorted(speakers.items()))
        yield fail(
            "schema",
            f"schemas of the shared state differ: {'; '.join(sides)}; they misread each other",
            "Finish the update: bring all routers and workers of the pool to one version.",
        )


def versions(facts: Facts) -> Iterator[Finding]:
    """Mixed ones are normal during an update only."""
    running: dict[str, set[str]] = defaultdict(set)
    for router in facts.answering:
        if router.status:
            running[router.status.version].add(f"router {router.target}")
        for worker_id, replica in router.replicas.items():
            running[replica.version].add(f"replica {worker_id}")
    running.pop("", None)
    if not running:
        yield skipped("versions", "nobody told its version")
    elif len(running) == 1:
        yield ok("versions", f"all run {next(iter(running))}")
    else:
        sides = "; ".join(f"{version}: {listed(names)}" for version, names in sorted(running.items()))
        yield warn("versions", f"versions are mixed: {sides}", "Nothing during an update; otherwise finish it.")


def clocks(facts: Facts) -> Iterator[Finding]:
    """Each against the middle of all: the one that is off may be ours."""
    readings = _readings(facts)
    if len(readings) < 2:
        yield skipped("clocks", "nobody told its clock")
        return
    middle_s = median_low([clock.offset_s for clock in readings.values()])
    off = {name: clock.offset_s - middle_s for name, clock in readings.items()}
    surely_off = {name: max(0.0, abs(off[name]) - clock.error_s) for name, clock in readings.items()}
    for name, by_s in surely_off.items():
        if by_s <= CLOCK_WARN_S:
            continue
        tell, direction = (fail if by_s > CLOCK_FAIL_S else warn), "ahead of" if off[name] > 0 else "behind"
        yield tell(
            "clocks",
            f"the clock of {name} is {abs(off[name]):.1f} s {direction} the others",
            "Check its time service (chrony, systemd-timesyncd); until then logs and traces do not line up.",
        )
    if max(surely_off.values()) <= CLOCK_WARN_S:
        yield ok("clocks", f"the clocks of {listed(readings)} agree within {CLOCK_WARN_S:g} s")


def _memory(found: RedisFacts) -> Iterator[Finding]:
    memory = found.memory
    answers = f"Redis at {found.where} answers in {found.latency_s * 1e3:.1f} ms"
    if memory is None:
        yield ok("redis", f"{answers}; this user may not ask for its memory")
        return
    used = f"{memory.used_bytes / 2**20:.1f} MiB"
    if not memory.max_bytes:
        yield ok("redis", f"{answers} and uses {used}; no maxmemory bounds it")
    elif memory.used_bytes > FULL_RATIO * memory.max_bytes:
        if not is_full(memory):  # of which writes.py tells
            yield _full(found, memory)
    else:
        yield ok("redis", f"{answers} and uses {used} of {memory.max_bytes / 2**20:.0f} MiB")
    if memory.evicted_keys:
        yield warn(
            "redis",
            f"Redis at {found.where} has evicted {counted(memory.evicted_keys, 'key')} because its memory was full",
            "Raise maxmemory: journals that vanish are rebuilt from snapshots, which costs prefix hits meanwhile.",
        )


def _full(found: RedisFacts, memory: Memory) -> Finding:
    share = f"{memory.used_bytes / memory.max_bytes:.0%} of its maxmemory"
    if memory.policy == "noeviction":
        return fail(
            "redis",
            f"Redis at {found.where} uses {share} and refuses writes when full (policy noeviction)",
            EVICT,
        )
    return warn(
        "redis", f"Redis at {found.where} uses {share}; then it evicts keys ({memory.policy})", "Raise maxmemory."
    )


def _readings(facts: Facts) -> Mapping[str, Clock]:
    found = {HERE: Clock(0.0)}
    if facts.redis and facts.redis.clock:
        found["Redis"] = facts.redis.clock
    for router in facts.answering:
        if router.clock is None:
            continue
        found[f"router {router.target}"] = router.clock
        for worker_id, replica in router.replicas.items():
            if replica.version:  # else it never told
                offset_s = router.clock.offset_s + replica.clock_offset_s
                found.setdefault(f"replica {worker_id}", Clock(offset_s, router.clock.error_s + DIAL_ERROR_S))
    return found
