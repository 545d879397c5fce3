"""Fleet snapshots for tests of choices."""

from dataclasses import replace

from ostrya.router.types import FleetSnapshot, KnowledgeLevel, Load, ReplicaView, WorkerId

LOAD = Load(free_pages=1_000, total_pages=1_000, prefill_tokens_per_s=1_000.0)


def view(number: int, *, own_requests: int = 0, own_prefill_tokens: int = 0, load: Load = LOAD) -> ReplicaView:
    """Replica `w<number>` in slot `number`: blocks of 32 tokens, 1,000 tokens a second, idle."""
    return ReplicaView(
        worker_id=WorkerId(f"w{number}"),
        slot=number,
        max_running=16,
        page_size=16,
        routing_stride=2,
        load=load,
        load_age_s=0.0,
        own_requests=own_requests,
        own_prefill_tokens=own_prefill_tokens,
    )


def snapshot(
    *views: ReplicaView, level: KnowledgeLevel = KnowledgeLevel.FRESH, index_age_s: float = 0.0
) -> FleetSnapshot:
    return FleetSnapshot(replicas=views, level=level, index_age_s=index_age_s)


def with_load(original: ReplicaView, *, age_s: float = 0.0, **changes: float) -> ReplicaView:
    """The same replica with other load figures."""
    return replace(original, load=replace(original.load, **changes), load_age_s=age_s)  # type: ignore[arg-type]
