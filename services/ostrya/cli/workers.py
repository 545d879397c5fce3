"""`ostrya workers`: every replica the router knows."""

from typing import TYPE_CHECKING

from ostrya.cli.report import DEFAULT_TARGET, AsJson, Target, print_json, reported

if TYPE_CHECKING:
    from rich.table import Table

    from ostrya.api.v1.admin_pb2 import ListReplicasResponse

WIDE = 110
"""Terminal columns from which addresses are shown too."""


def workers(target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Show replicas: state, load, cached blocks, hit ratio."""
    from rich.console import Console

    from ostrya.client import Client

    with reported(), Client(target) as client:
        response = client.replicas()
    if as_json:
        print_json(response)
    else:
        console = Console()
        console.print(table(response, with_address=console.width >= WIDE))


def table(response: "ListReplicasResponse", *, with_address: bool) -> "Table":
    """One row a replica; the title says how much the router knows.

    Pages used are those that requests refer to; cached ones are unused and hold a prefix; blocks are what the router's
    index has of the replica; hits are prompt tokens found in its cache, of all it was asked for.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ostrya.api.v1 import admin_pb2

    level = admin_pb2.KnowledgeLevel.Name(response.level).removeprefix("KNOWLEDGE_LEVEL_").lower().replace("_", " ")
    redis = "connected" if response.redis_connected else "not connected"
    models = ", ".join(sorted({one.model for one in response.replicas})) or "no replicas"
    title = f"{models}; routing knowledge: {level}; Redis {redis}"
    rows = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("replica", "address", "state") if with_address else ("replica", "state"):
        rows.add_column(heading, no_wrap=True)
    for heading in ("in\nflight", "running", "waiting", "pages\nused", "cached", "blocks", "hits"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for one in response.replicas:
        load = one.load
        state = admin_pb2.ReplicaState.Name(one.state).removeprefix("REPLICA_STATE_").lower()
        used = load.total_pages - load.free_pages - load.reusable_pages
        rows.add_row(
            *((one.worker_id, one.address) if with_address else (one.worker_id,)),
            state if one.prefix_credit else f"{state}, no prefix credit",
            str(one.in_flight),
            str(load.num_running),
            str(load.num_waiting),
            ratio(used, load.total_pages),
            str(load.reusable_pages),
            str(one.indexed_blocks),
            ratio(load.hit_tokens_total, load.queried_tokens_total),
        )
    return rows


def ratio(part: int, whole: int) -> str:
    """Percent; a dash for nothing yet."""
    return f"{part / whole:.0%}" if whole else "-"
