"""`ostrya chat`: a conversation. The history goes with every turn, so each turn reuses the cache of the one before."""

import sys
from functools import partial
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

import typer

from ostrya.cli.answering import Sampling
from ostrya.cli.options import build, takes
from ostrya.cli.report import DEFAULT_TARGET, Target, reported

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from ostrya.client import Message, Stream


@takes(Sampling, environment=False)
def chat(
    target: Target = DEFAULT_TARGET,
    system: Annotated[str, typer.Option(help="The system message; absent: what the model's template has.")] = "",
    **values: object,
) -> None:
    """Talk to the model. Ctrl-C cancels the answer that is coming; at the prompt it ends the session, as Ctrl-D and
    /exit do. /reset forgets what was said."""
    from rich.console import Console

    from ostrya.cli.answering import teller
    from ostrya.client import Client

    console, notes = Console(), Console(stderr=True)
    if isinstance(sys.stdin, TextIOWrapper):
        # The client refuses what is not UTF-8, and only that turn fails.
        sys.stdin.reconfigure(errors="surrogateescape")
    options = build(Sampling, values).options()
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    history = opening
    with reported(), Client(target, on_retry=teller(notes)) as client:
        client.models()
        while (line := _ask(console)) is not None:
            if line == "/reset":
                history = opening
            elif line:
                asked = [*history, {"role": "user", "content": line}]
                answer = _answer(partial(client.generate, messages=asked, **options), console, notes)
                history = [*asked, {"role": "assistant", "content": answer}] if answer else history


def _ask(console: "Console") -> str | None:
    """The next line; None at the end of the session."""
    try:
        line = console.input("[bold]you>[/bold] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if line == "/exit" else line


def _answer(ask: "Callable[[], Stream]", console: "Console", notes: "Console") -> str:
    """Prints an answer and returns it; empty if it was cancelled or failed, and then the turn is forgotten."""
    from ostrya.cli.answering import print_answer
    from ostrya.errors import OstryaError

    try:
        return print_answer(ask(), console, notes)
    except KeyboardInterrupt:
        console.print("\n[dim]cancelled[/dim]")
    except OstryaError as error:
        notes.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
    return ""
