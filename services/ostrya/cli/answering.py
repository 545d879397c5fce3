"""What `generate`, `chat` and `up` share: how to answer, and an answer printed as it comes."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

from ostrya.cli.report import USAGE, fail
from ostrya.errors import OstryaError

if TYPE_CHECKING:
    from ostrya.client import GenerateOptions, Stream
    from ostrya.client.answer import Answer
    from ostrya.client.attempts import OnRetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of one answer; what is absent takes the server's default."""

    model: str = ""
    """Empty: the pool's only model."""
    temperature: float | None = None
    """0 = greedy."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 = all."""
    top_p: float | None = None
    """Keep the likeliest tokens up to this probability."""
    min_p: float | None = None
    """Drop tokens less likely than this times the likeliest."""
    typical_p: float | None = None
    """Keep the tokens of the most usual surprise up to this probability."""
    repetition_penalty: float | None = None
    """Above 1: what was said, also in the prompt, becomes less likely."""
    presence_penalty: float | None = None
    """Taken from the logits of tokens that the answer has."""
    frequency_penalty: float | None = None
    """Taken as often as the answer has the token."""
    logit_bias: tuple[str, ...] = ()
    """TOKEN_ID=VALUE, added to the token's logit; may be given again."""
    bad_words: tuple[str, ...] = ()
    """Never say this; may be given again."""
    min_tokens: int | None = None
    """Nothing ends the answer before."""
    seed: int | None = None
    """Repeats an answer on any replica."""
    max_tokens: int | None = None
    """Longest answer; absent = what the context has left."""
    stop: tuple[str, ...] = ()
    """End before this text; may be given again."""
    priority: int | None = None
    """Higher goes before others where requests wait; from -100 to 100."""

    def options(self) -> "GenerateOptions":
        """For the client."""
        options = {name: value for name, value in asdict(self).items() if value is not None}
        return cast("GenerateOptions", options | {"logit_bias": dict(map(_bias, self.logit_bias))})


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        fail(f"--logit-bias is {text!r}; allowed: TOKEN_ID=VALUE, as in 42=-3.5", USAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of an answer; at most one."""

    json_schema: str | None = None
    """A JSON schema, or @FILE with one."""
    regex: str | None = None
    """An expression that the whole answer matches, or @FILE."""
    choice: tuple[str, ...] = ()
    """One of these; may be given again."""
    lark: str | None = None
    """A Lark grammar with a rule `start`, or @FILE."""

    def options(self) -> "GenerateOptions":
        """For the client."""
        given = {name: _text(name, value) for name, value in asdict(self).items() if value}
        if len(given) > 1:
            fail(f"--{' and --'.join(given).replace('_', '-')} cannot go together", USAGE)
        return cast("GenerateOptions", {"structured": given} if given else {})


def _text(name: str, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(value, tuple) or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        fail(f"--{name.replace('_', '-')} {value}: {error}", USAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How many answers, and what is told of them."""

    n: int | None = None
    """Answers to the one prompt, printed when all are there."""
    logprobs: int | None = None
    """Log probabilities of the answer's tokens and of so many of the likeliest beside each, on stderr."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens but the first."""

    def options(self) -> "GenerateOptions":
        """For the client."""
        return cast("GenerateOptions", {name: value for name, value in asdict(self).items() if value is not None})


def print_answers(stream: "Stream", console: Console, notes: Console | None) -> None:
    """Prints each of n answers, then the log probabilities of their tokens, if they were asked for, to `notes`."""
    from ostrya.client.answer import joined

    began = time.monotonic()
    with stream:
        chunks = list(stream)
    first_s = time.monotonic() - began
    for choice, text in enumerate(joined(chunks)):
        if len(stream.ends) > 1:
            console.print(f"[{choice}] ", end="", style="dim", markup=False)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if notes is None:
        return
    scored = [(f"prompt, token {number}", one) for number, one in enumerate(stream.prompt_logprobs, start=2)]
    for chunk in chunks:
        pairs = zip(chunk.token_ids, chunk.logprobs, strict=False)
        scored += [(f"[{chunk.choice}] token {token_id}", one) for token_id, one in pairs]
    for what, one in scored:
        top = ", ".join(f"{other} {logprob:.4f}" for other, logprob in one.top)
        line = f"{what} {one.logprob:.4f}" + (f"; likeliest {top}" if top else "")
        notes.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
    notes.print(cost_line(stream, first_s, first_s), style="dim", highlight=False, soft_wrap=True)


def print_answer(stream: "Stream", console: Console, notes: Console | None) -> str:
    """Streams the text to `console`, then what it cost to `notes`. Returns the text."""
    began, first_s, parts = time.monotonic(), 0.0, []
    with stream:
        try:
            for chunk in stream:
                first_s = first_s or time.monotonic() - began
                parts.append(chunk.text)
                console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
                console.file.flush()
        except OstryaError:
            if parts:
                console.print()  # what is said of it must not stand in the middle of the answer's line
            raise
    console.print()
    if notes is not None:
        notes.print(cost_line(stream, first_s, time.monotonic() - began), style="dim", highlight=False, soft_wrap=True)
    return "".join(parts)


def teller(notes: Console | None) -> "OnRetry":
    """Says on `notes` why there is nothing to see yet."""

    def tell(error: Exception, delay_s: float) -> None:
        if notes is not None:
            notes.print(f"{error}; trying again in {delay_s:.1f} s", markup=False, highlight=False, soft_wrap=True)

    return tell


def cost_line(stream: "Answer", first_s: float, total_s: float) -> str:
    """One line about a finished answer."""
    usage = stream.usage
    if usage is None:
        return f"no usage reported; decision {stream.decision_id}"
    rate = (usage.completion_tokens - 1) / (total_s - first_s) if total_s > first_s else 0.0
    return (
        f"{'simulated: ' if usage.is_simulated else ''}"
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated, "
        f"{stream.finish_reason}; first token {first_s * 1e3:.0f} ms, then {rate:.0f} tok/s; "
        f"{stream.replica}, decision {stream.decision_id}"
    )
