"""Load for `ostrya bench`: prompts, arrivals, and what each request saw. Reports nothing itself."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ostrya.errors import ConfigError, InvalidRequest, OstryaError

if TYPE_CHECKING:
    from ostrya.client import AsyncClient, Message

# Bounds what an open loop leaves running when the server is slower than the rate.
MAX_OUTSTANDING = 2048
# Low ids are often special tokens.
FIRST_PLAIN_TOKEN = 256
KINDS = ("text", "messages", "token_ids")
MAX_PROBLEMS = 5
"""Shown of a file; one mistake is often on every line."""


class Prompt(TypedDict, total=False):
    """Exactly one kind, and how long the answer may be."""

    text: str
    messages: "list[Message]"
    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Prompts of random tokens: `prefix_groups` shared beginnings, each followed by something new."""

    prefix_groups: int
    prefix_tokens: int
    suffix_tokens: int
    max_tokens: int
    vocab_size: int
    seed: int

    def prompts(self) -> Iterator[Prompt]:
        """Endless; the same for the same seed."""
        draw = random.Random(self.seed)
        prefixes = [self._tokens(draw, self.prefix_tokens) for _ in range(self.prefix_groups)]
        while True:
            token_ids = draw.choice(prefixes) + self._tokens(draw, self.suffix_tokens)
            yield Prompt(token_ids=token_ids, max_tokens=self.max_tokens)

    def _tokens(self, draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(min(FIRST_PLAIN_TOKEN, self.vocab_size - 1), self.vocab_size) for _ in range(count)]


def from_file(path: Path, *, max_tokens: int) -> Iterator[Prompt]:
    """Prompts of a JSONL file, over and over. ConfigError names the lines that are not prompts."""
    prompts, problems = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            prompts.append(_prompt(line, max_tokens))
        except UnicodeDecodeError:
            problems.append(f"{path}:{number}: not UTF-8")
        except json.JSONDecodeError as error:
            problems.append(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}")
        except InvalidRequest as error:
            problems.append(f"{path}:{number}: {error}")
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"and {len(problems) - MAX_PROBLEMS} more lines"]
    if problems or not prompts:
        raise ConfigError(problems or [f"{path} has no prompts"])
    return _forever(prompts)


def _prompt(line: bytes, max_tokens: int) -> Prompt:
    from ostrya.client.request import generate_request

    fields = json.loads(line.decode())
    kinds = [name for name in KINDS if fields.get(name)] if isinstance(fields, dict) else []
    if len(kinds) != 1:
        raise InvalidRequest(
            "prompt", f"given as {' and '.join(kinds) or 'nothing'}", f"exactly one of {', '.join(KINDS)}"
        )
    prompt: Prompt = {"max_tokens": max_tokens}
    prompt.update({name: fields[name] for name in (*kinds, "max_tokens") if name in fields})  # type: ignore[typeddict-item]
    # Made only to be checked: what cannot be sent is found before anything is.
    given = (prompt.get("text"), prompt.get("messages"), prompt.get("token_ids"))
    generate_request(*given, {"max_tokens": prompt["max_tokens"]})
    return prompt


def _forever(prompts: list[Prompt]) -> Iterator[Prompt]:
    while True:
        yield from prompts


@dataclass(slots=True, kw_only=True)
class Sample:
    """What one request saw. Times in seconds; tokens of a message share the gap before it equally."""

    ttft_s: float = 0.0
    duration_s: float = 0.0
    inter_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    is_simulated: bool = False
    replica: str = ""
    error: str = ""
    """Its class; empty = answered."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How requests arrive: `concurrency` at a time, or Poisson at `rate_per_s`. Ends at the first bound reached."""

    concurrency: int
    rate_per_s: float
    max_requests: int
    max_duration_s: float
    timeout_s: float
    seed: int


async def run(client: "AsyncClient", plan: Plan, prompts: Iterator[Prompt], seen: Callable[[Sample], None]) -> float:
    """Runs the plan, tells `seen` of every finished request, returns the wall time. Cancelled: cancels its requests."""
    began = time.monotonic()
    room = asyncio.Semaphore(MAX_OUTSTANDING if plan.rate_per_s else plan.concurrency)

    async def one(prompt: Prompt) -> None:
        try:
            seen(await measure(client, prompt, timeout_s=plan.timeout_s))
        finally:
            room.release()

    async with asyncio.TaskGroup() as requests:
        async for _ in _arrivals(plan, room):
            requests.create_task(one(next(prompts)))
    return time.monotonic() - began


async def _arrivals(plan: Plan, room: asyncio.Semaphore) -> AsyncIterator[None]:
    """Ticks when the next request may start; each has taken a place in `room`."""
    draw, began = random.Random(plan.seed), time.monotonic()
    due = began
    for _ in range(plan.max_requests):
        if plan.rate_per_s:
            due += draw.expovariate(plan.rate_per_s)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await room.acquire()
        if time.monotonic() - began >= plan.max_duration_s:
            return
        yield


async def measure(client: "AsyncClient", prompt: Prompt, *, timeout_s: float) -> Sample:
    """One request, greedy and to its full length."""
    sample, began = Sample(), time.monotonic()
    try:
        async with client.generate(
            prompt.get("text"),
            messages=prompt.get("messages"),
            token_ids=prompt.get("token_ids"),
            timeout_s=timeout_s,
            max_tokens=prompt["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
        ) as stream:
            arrivals = [(time.monotonic(), len(chunk.token_ids)) async for chunk in stream if chunk.token_ids]
    except OstryaError as error:
        sample.error, sample.message = type(error).__name__, str(error)
        return sample
    sample.duration_s = time.monotonic() - began
    sample.ttft_s = arrivals[0][0] - began if arrivals else sample.duration_s
    for (before, _), (now, count) in pairwise(arrivals):
        sample.inter_token_s += [(now - before) / count] * count
    sample.replica = stream.replica
    if stream.usage is not None:
        sample.prompt_tokens, sample.cached_tokens = stream.usage.prompt_tokens, stream.usage.cached_tokens
        sample.completion_tokens = stream.usage.completion_tokens
        sample.is_simulated = stream.usage.is_simulated
    return sample
