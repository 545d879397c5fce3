"""`ostrya generate`: one answer, streamed to stdout; what it cost goes to stderr."""

import sys
from typing import Annotated

import typer

from ostrya.cli.answering import Choices, Form, Sampling
from ostrya.cli.options import build, takes
from ostrya.cli.report import DEFAULT_TARGET, USAGE, Target, fail, reported


@takes(Sampling, Form, Choices, environment=False)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    target: Target = DEFAULT_TARGET,
    system: Annotated[str, typer.Option(help="A system message before the prompt.")] = "",
    begin_with: Annotated[str, typer.Option(help="How the answer begins; the model goes on from there.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    timeout_s: Annotated[float | None, typer.Option(min=0.001, help="Whole time allowed, seconds.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the answer.")] = False,
    **values: object,
) -> None:
    """Ask for one answer and stream it. Ctrl-C cancels the request."""
    from rich.console import Console

    from ostrya.cli.answering import print_answer, print_answers, teller
    from ostrya.client import Client

    for name, message in (("--system", system), ("--begin-with", begin_with)):
        if raw and message:
            fail(f"{name} is a chat message; it cannot go with --raw", USAGE)
    # What is not UTF-8 becomes what it is in an argument; the client refuses both with the same words.
    text = sys.stdin.buffer.read().decode(errors="surrogateescape") if prompt == "-" else prompt
    if not text.strip():
        fail("the prompt is empty", USAGE)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    choices = build(Choices, values).options()
    options = build(Sampling, values).options() | build(Form, values).options() | choices
    if begin_with:
        messages.append({"role": "assistant", "content": begin_with})
        options["continue_final_message"] = True
    notes = None if quiet else Console(stderr=True)
    with reported(), Client(target, on_retry=teller(notes)) as client:
        if raw:
            stream = client.generate(text, timeout_s=timeout_s, **options)
        else:
            stream = client.generate(messages=messages, timeout_s=timeout_s, **options)
        (print_answers if choices else print_answer)(stream, Console(), notes)
