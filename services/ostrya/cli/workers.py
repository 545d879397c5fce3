"""`ostrya workers`: every replica the router knows; `cordon`, `uncordon` and `drain` one of them."""

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from ostrya.cli import report
from ostrya.cli.report import DEFAULT_TARGET, AsJson, Target, print_json, reported

if TYPE_CHECKING:
    from rich.table import Table

    from ostrya.api.v1.admin_pb2 import ListReplicasResponse, Replica

ANSWER_S = 15.0
"""On top of a drain's own time: for the router, and for the worker behind it."""

WorkerName: TypeAlias = Annotated[str, typer.Argument(metavar="WORKER_ID", help="As the list shows it.")]

app = typer.Typer(invoke_without_command=True)


@app.callback()
def workers(context: typer.Context, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Show replicas: state, load, cached blocks, hit ratio. Or keep one from new work.

    The state draining means that the replica says it takes no new work: it is cordoned, or drains. One whose engine
    starts again is starting.
    """
    context.obj = target
    if context.invoked_subcommand is None:
        show(target, as_json)


@app.command("cordon")
def cordon(context: typer.Context, worker_id: WorkerName, target: Target = DEFAULT_TARGET) -> None:
    """Keep new work away from a replica; what it has goes on. Its process stays, and forgets this when it restarts."""
    from ostrya.client import Client

    with reported(), Client(_target(context, target)) as client:
        client.cordon(worker_id)
    print(f"{worker_id} is cordoned: it takes no new work")


@app.command("uncordon")
def uncordon(context: typer.Context, worker_id: WorkerName, target: Target = DEFAULT_TARGET) -> None:
    """Let a replica take new work again, also after a drain."""
    from ostrya.client import Client

    with reported(), Client(_target(context, target)) as client:
        client.uncordon(worker_id)
    print(f"{worker_id} is uncordoned: it takes new work")


@app.command("drain")
def drain(
    context: typer.Context,
    worker_id: WorkerName,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout-s", min=0, help="What still runs then goes on elsewhere. Default: the worker's own."),
    ] = None,
    target: Target = DEFAULT_TARGET,
) -> None:
    """Cordon a replica and wait until it is empty."""
    from ostrya.client import Client

    call_s = None if timeout_s is None else timeout_s + ANSWER_S
    with reported(), Client(_target(context, target)) as client:
        num_cancelled = client.drain(worker_id, drain_timeout_s=timeout_s, timeout_s=call_s)
    match num_cancelled:
        case 0:
            rest = ""
        case 1:
            rest = "; 1 request was still running and goes on elsewhere"
        case _:
            rest = f"; {num_cancelled} requests were still running and go on elsewhere"
    print(f"{worker_id} is drained: it takes no new work and has none{rest}")


def _target(context: typer.Context, target: str) -> str:
    """Given before or after the subcommand."""
    source = context.get_parameter_source("target")
    is_given = source is not None and source.name == "COMMANDLINE"
    return target if is_given or context.obj is None else str(context.obj)


def show(target: str, as_json: bool) -> None:
    """The list; without addresses where a terminal has no room for them."""
    from rich.text import Text

    from ostrya.client import Client

    with reported(), Client(target) as client:
        response = client.replicas()
    if as_json:
        print_json(response)
        return
    rows = table(response, with_address=True)
    report.show(Text(title(response)), rows if report.fits(rows) else table(response, with_address=False))


def title(response: "ListReplicasResponse") -> str:
    """How much the router knows, in a line."""
    from ostrya.api.v1 import admin_pb2

    level = admin_pb2.KnowledgeLevel.Name(response.level).removeprefix("KNOWLEDGE_LEVEL_").lower().replace("_", " ")
    redis = "connected" if response.redis_connected else "not connected"
    models = ", ".join(sorted({one.model for one in response.replicas})) or "no replicas"
    return f"{models}; routing knowledge: {level}; Redis {redis}"


def table(response: "ListReplicasResponse", *, with_address: bool) -> "Table":
    """One row a replica. What is too wide folds: a shortened id could be any of a pool's.

    Pages used are those that requests refer to; cached ones are unused and hold a prefix; blocks are what the router's
    index has of the replica; hits are prompt tokens found in its cache, of all it was asked for.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in ("replica", "address", "state") if with_address else ("replica", "state"):
        rows.add_column(heading, overflow="fold")
    for heading in ("in\nflight", "running", "waiting", "pages\nused", "cached", "blocks", "hits"):
        rows.add_column(heading, justify="right", overflow="fold")
    for one in response.replicas:
        load = one.load
        used = load.total_pages - load.free_pages - load.reusable_pages
        rows.add_row(
            *(Text(name) for name in ((one.worker_id, one.address) if with_address else (one.worker_id,))),
            ", ".join(states(one)),
            str(one.in_flight),
            str(load.num_running),
            str(load.num_waiting),
            ratio(used, load.total_pages),
            str(load.reusable_pages),
            str(one.indexed_blocks),
            ratio(load.hit_tokens_total, load.queried_tokens_total),
        )
    return rows


def states(replica: "Replica") -> list[str]:
    """Where it is in its life, then whatever else keeps work or credit from it."""
    from ostrya.api.v1 import admin_pb2

    state = admin_pb2.ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_").lower()
    holds = [hold.replace("_", " ") for hold in replica.holds]
    notes = {"no prefix credit": not replica.prefix_credit, "simulated": replica.simulated}
    return [state, *holds, *(note for note, is_so in notes.items() if is_so)]


def ratio(part: int, whole: int) -> str:
    """Percent; a dash for nothing yet."""
    return f"{part / whole:.0%}" if whole else "-"
