"""`ostrya explain`: why a request went where it went."""

from typing import TYPE_CHECKING, Annotated

import typer

from ostrya.cli.report import DEFAULT_TARGET, AsJson, Target, print_json, reported, show

if TYPE_CHECKING:
    from rich.table import Table

    from ostrya.api.v1.admin_pb2 import ExplainRouteResponse


def explain(
    decision_id: Annotated[str, typer.Argument(help="As every answer reports it; kept for ten minutes.")],
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Show the candidates of a routing decision, what each would have cost, and why one won."""
    from rich.text import Text

    from ostrya.client import Client

    with reported(), Client(target) as client:
        decision = client.explain(decision_id)
    if as_json:
        print_json(decision)
        return
    simulated = "simulated: " if decision.simulated else ""
    title = f"{simulated}decision {decision.decision_id}, request {decision.request_id}"
    show(Text(title), table(decision), Text(in_words(decision)))


def table(decision: "ExplainRouteResponse") -> "Table":
    """One row a candidate, cheapest first, terms in milliseconds."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    rows.add_column("replica", overflow="fold")
    for heading in ("cached", "to compute", "wait ms", "prefill ms", "decode ms", "cost ms"):
        rows.add_column(heading, justify="right", overflow="fold")
    for one in sorted(decision.candidates, key=lambda candidate: candidate.cost_s):
        chosen = one.worker_id == decision.chosen
        rows.add_row(
            Text(f"{one.worker_id} ←" if chosen else one.worker_id),
            str(one.cached_tokens),
            str(decision.prompt_tokens - one.cached_tokens),
            *(f"{term * 1e3:.1f}" for term in (one.wait_s, one.prefill_s, one.decode_s, one.cost_s)),
            style="bold" if chosen else None,
        )
    return rows


def in_words(decision: "ExplainRouteResponse") -> str:
    """Why, for a person."""
    from ostrya.api.v1 import admin_pb2

    cached = {one.worker_id: one.cached_tokens for one in decision.candidates}.get(decision.chosen, 0)
    why = {
        "prefix": f"it holds {cached} of the prompt's {decision.prompt_tokens} tokens, which made it the cheapest",
        "load": "it was the least busy; nobody's cached prefix outweighed that",
        "tie": "the candidates cost about the same, and a fixed rule chose between them",
        "fallback": "too little was known to compare costs, so the prompt's hash or a random draw chose",
    }.get(decision.reason, decision.reason)
    words = [f"{decision.chosen} was chosen because {why}."]
    if decision.attempt > 1:
        words.append(f"This was try {decision.attempt}: a replica chosen earlier failed before its first token.")
    if decision.level > admin_pb2.KNOWLEDGE_LEVEL_FRESH:
        words.append(f"The index had heard of no replica through Redis for {decision.index_age_s:.1f} s.")
    if decision.beta > 1.005:
        words.append(f"Requests were queueing, so computing tokens counted {decision.beta:.1f} times.")
    return " ".join(words)
