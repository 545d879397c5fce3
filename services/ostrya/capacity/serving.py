"""Requests in time: a prompt in chunks (TTFT), a steady load of prompts and answers (TPOT, throughput), a prefix hit.

Built on step.py; the SLO search asks here.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from ostrya.capacity.chips import Slice
from ostrya.capacity.memory import CHUNK_TOKENS, Placement
from ostrya.capacity.spec import ModelSpec, Phase
from ostrya.capacity.speculation import PLAIN, Drafting, round_time
from ostrya.capacity.step import PEAK, Efficiency, StepTime, Work, step_time
from ostrya.errors import ConfigError

_CHUNK_GROUPS = 16
"""Of more chunks than these, neighbours are timed as one, at their mean context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A prompt computed in equal chunks, one step after another."""

    num_tokens: int
    """Computed: the prompt less what a prefix hit covers."""
    steps: tuple[StepTime, ...]

    @property
    def seconds(self) -> float:
        """The time to first token of a request that does not wait."""
        return sum(step.seconds for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A steady load: every request has a prompt to compute and an answer to decode."""

    num_requests: int
    ttft_s: float
    """Of a request whose prompt is next in line: its chunks, each mixed with the others' decoding."""
    wait_s: float
    """What it waits for the prompts before it, on average, where prompts are what bounds the load; else 0."""
    tpot_s: float
    """Per output token, the chunks of other requests' prompts included; its own ended before it decodes."""
    output_tokens_per_s: float
    requests_per_s: float


def prefill(
    spec: ModelSpec,
    where: Slice,
    prompt_tokens: int,
    *,
    cached_tokens: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
    efficiency: Efficiency = PEAK,
    placement: Placement = Placement.SPREAD,
) -> Prefill:
    """One prompt, alone on the slice. The last token is computed even if a prefix hit covers it, for its logits."""
    check_prompt(prompt_tokens, cached_tokens, chunk_tokens)
    start = min(cached_tokens, prompt_tokens - 1)
    chunks = ceil((prompt_tokens - start) / chunk_tokens)
    rows = (prompt_tokens - start) / chunks
    groups = min(chunks, _CHUNK_GROUPS)
    steps: list[StepTime] = []
    for first, after in pairwise(chunks * group // groups for group in range(groups + 1)):
        work = _chunk(start + rows * (first + after - 1) / 2, rows)
        steps += [step_time(spec, where, work, efficiency=efficiency, placement=placement)] * (after - first)
    return Prefill(num_tokens=prompt_tokens - start, steps=tuple(steps))


def prefix_hit_saves_s(
    spec: ModelSpec,
    where: Slice,
    prompt_tokens: int,
    hit_tokens: int,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    efficiency: Efficiency = PEAK,
    placement: Placement = Placement.SPREAD,
) -> float:
    """Seconds of prefill that a prefix hit of `hit_tokens` saves one request."""
    cold, warm = (
        prefill(
            spec,
            where,
            prompt_tokens,
            cached_tokens=cached,
            chunk_tokens=chunk_tokens,
            efficiency=efficiency,
            placement=placement,
        )
        for cached in (0, hit_tokens)
    )
    return cold.seconds - warm.seconds


def serving(
    spec: ModelSpec,
    where: Slice,
    *,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    hit_ratio: float = 0.0,
    drafting: Drafting = PLAIN,
    chunk_tokens: int = CHUNK_TOKENS,
    efficiency: Efficiency = PEAK,
    placement: Placement = Placement.SPREAD,
) -> Serving:
    """`num_requests` at a time, each replaced when it ends; `hit_ratio` of a prompt comes from the prefix cache.

    Every step decodes, or verifies a round's drafts, and carries at most one chunk of one prompt. While a request
    decodes its answer every other one ends once, so the prompts of `num_requests - 1` run beside it; if their chunks
    are more than there are steps, prompts wait in line and fewer requests decode at a time (Little's law gives how
    long they wait).
    """
    check_load(output_tokens, hit_ratio)
    if prompt_tokens + output_tokens > spec.max_context_tokens:
        asked = f"prompt of {prompt_tokens} and output of {output_tokens} tokens"
        raise ConfigError([f"{asked} are longer than the {spec.max_context_tokens} of {spec.name}; ask for less"])
    cached = num_cached_tokens(prompt_tokens, hit_ratio)
    check_prompt(prompt_tokens, cached, chunk_tokens)
    chunks = ceil((prompt_tokens - cached) / chunk_tokens)
    chunk_rows = (prompt_tokens - cached) / chunks
    length = drafting.acceptance_length
    context_tokens = mean_context_tokens(spec, prompt_tokens, output_tokens, drafting.num_draft_tokens)
    # The prompt's last chunk gives the first token, so a request decodes one token less than it has.
    at_most = int((output_tokens - 1) / length / chunks)
    chunk = _chunk(cached + (prompt_tokens - cached - chunk_rows) / 2, chunk_rows)

    def round_s(count: int, beside: Work | None = None) -> float:
        return round_time(
            spec,
            where,
            num_draft_tokens=drafting.num_draft_tokens,
            num_requests=max(1, min(count, at_most)),
            context_tokens=context_tokens,
            beside=beside,
            efficiency=efficiency,
            placement=placement,
        ).seconds

    others = num_requests - 1
    plain_s = round_s(num_requests)
    # The request whose prompt it is does not decode yet.
    if min(others, at_most):
        mixed_s = round_s(others, chunk)
    else:
        mixed_s = (
            prefill(
                spec,
                where,
                prompt_tokens,
                cached_tokens=cached,
                chunk_tokens=chunk_tokens,
                efficiency=efficiency,
                placement=placement,
            ).seconds
            / chunks
        )
    mixed_share = min(1.0, others * chunks * length / output_tokens)
    tpot_s = (mixed_share * mixed_s + (1 - mixed_share) * plain_s) / length
    decode_s, prompt_s = (output_tokens - 1) * tpot_s, chunks * mixed_s
    requests_per_s = min(num_requests / (prompt_s + decode_s), 1 / prompt_s)
    return Serving(
        num_requests=num_requests,
        ttft_s=prompt_s,
        wait_s=max(0.0, num_requests / requests_per_s - prompt_s - decode_s),
        tpot_s=tpot_s,
        output_tokens_per_s=requests_per_s * output_tokens,
        requests_per_s=requests_per_s,
    )


def num_cached_tokens(prompt_tokens: int, hit_ratio: float) -> int:
    """Of a prompt; the last token is computed always."""
    return min(round(prompt_tokens * hit_ratio), prompt_tokens - 1)


def mean_context_tokens(spec: ModelSpec, prompt_tokens: int, output_tokens: int, num_draft_tokens: int) -> float:
    """Of a request while it decodes its answer; with room for the drafts, of which it makes fewer at the very end."""
    return min(prompt_tokens + output_tokens / 2, spec.max_context_tokens - num_draft_tokens)


def check_prompt(prompt_tokens: int, cached_tokens: int, chunk_tokens: int) -> None:
    """ConfigError for sizes that make no sense."""
    problems = []
    if prompt_tokens < 1:
        problems.append(f"prompt is {prompt_tokens} tokens; it must be at least 1")
    if not 0 <= cached_tokens <= max(prompt_tokens, 0):
        problems.append(f"prefix hit is {cached_tokens} tokens; it must be 0 to the prompt's {prompt_tokens}")
    if chunk_tokens < 1:
        problems.append(f"chunk is {chunk_tokens} tokens; it must be at least 1")
    if problems:
        raise ConfigError(problems)


def check_load(output_tokens: int, hit_ratio: float) -> None:
    """ConfigError for a load that makes no sense."""
    problems = []
    if output_tokens < 1:
        problems.append(f"output is {output_tokens} tokens; it must be at least 1")
    if not 0 <= hit_ratio <= 1:
        problems.append(f"hit ratio is {hit_ratio}; it must be 0 to 1")
    if problems:
        raise ConfigError(problems)


def _chunk(context_tokens: float, rows: float) -> Work:
    return Work(num_requests=1, rows_per_request=rows, context_tokens=context_tokens, phase=Phase.PREFILL)
