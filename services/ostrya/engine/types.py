"""What goes into an engine and what comes out of it. Plain values that cross a process boundary; no torch, no I/O."""

from enum import StrEnum
from typing import Literal, NewType

import msgspec

from ostrya.prefix.chain import RoutingDigest

RequestId = NewType("RequestId", str)


class FinishReason(StrEnum):
    """Why a request ended by itself; a cancelled one has no reason because nobody is told."""

    STOP = "stop"
    LENGTH = "length"


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an output; engine/grammar.py reads it."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    """Of a choice: a JSON list of strings."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen; every field decided (defaults are resolved in worker/convert.py)."""

    temperature: float
    top_k: int
    """0 = all."""
    top_p: float
    seed: int
    """u64. The noise of the token at absolute position p depends on (seed, p) alone."""
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that never come to stand in the output."""
    min_tokens: int = 0
    """Before so many nothing but max_tokens ends the output."""
    num_top: int | None = None
    """Log probabilities of the output, with so many of the likeliest tokens beside each; None: none."""
    num_prompt_top: int | None = None
    """The same of the prompt."""
    grammar: Grammar | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue."""

    request_id: RequestId
    token_ids: list[int]
    sampling: Sampling
    cache_namespace: str = ""
    priority: int = 0
    """Higher goes first, and is preempted last."""
    num_output_tokens: int = 0
    """Of the last token_ids: output that another engine has made; the rest is the prompt."""


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """What the model gave one token, before any processor."""

    logprob: float
    """Natural logarithm."""
    top_ids: tuple[int, ...] = ()
    """Likeliest first."""
    top_logprobs: tuple[float, ...] = ()


class SequenceOutput(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one step added to one request. There is one for every row of every step, so what does not change is told
    with the first token only."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    """Includes a stop or end-of-sequence token that ended the request."""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """With the first token: prompt tokens reused at the first admission."""
    queue_s: float = 0.0
    """With the first token: from submit to the first step that had it."""
    prefill_s: float = 0.0
    """With the first token: from that step to now."""
    scores: tuple[TokenScore, ...] = ()
    """One for each of token_ids, if asked for."""
    prompt_scores: tuple[TokenScore, ...] = ()
    """With the first token, if asked for: one for each prompt token but the first."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a step computes, padding not counted."""

    rows: int
    prefill_tokens: int
    """Prompt tokens of chunks; a row of one token counts as a row alone."""
    kv_tokens: int
    """That its rows attend to, the new ones included."""


class StepTime(msgspec.Struct, frozen=True):
    """A step takes base_s plus so much for each row, prompt token and KV token; all 0 = not yet known."""

    base_s: float = 0.0
    row_s: float = 0.0
    prefill_token_s: float = 0.0
    kv_token_s: float = 0.0

    def seconds(self, work: Work) -> float:
        """Of a step that computes `work`."""
        return (
            self.base_s
            + self.row_s * work.rows
            + self.prefill_token_s * work.prefill_tokens
            + self.kv_token_s * work.kv_tokens
        )


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is busy with, and counters since its start. Page counts: free + reusable + referenced = total."""

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    free_pages: int = 0
    reusable_pages: int = 0
    total_pages: int = 0
    prefill_tokens_per_s: float = 0.0
    """Moving average over steps that prefilled; 0 = not yet measured."""
    num_preemptions: int = 0
    queried_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    hit_tokens: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_padded_tokens: int = 0
    """Scheduled plus padding; padding waste = 1 - scheduled / padded."""
    num_shapes: int = 0
    """Distinct buckets executed or compiled so far."""
    num_late_shapes: int = 0
    """Shapes first seen after warm-up: each one is a fault."""
    num_cached_shapes: int = 0
    """Of num_shapes, those found in a compile cache."""
    num_page_leaks: int = 0
    """Looks at the idle engine that found pages lost or referenced: each one is a fault."""
    step_time: StepTime = StepTime()


class Shape(msgspec.Struct, frozen=True):
    """How much a step computes at most: its bucket, padding included."""

    tokens: int
    rows: int
    pages: int
    """A row can address."""


StepKind = Literal["decode", "prefill", "mixed"]
"""Rows of one token, chunks of prompts, or both."""


class StepLimit(msgspec.Struct, frozen=True):
    """The least time in which the hardware could do a step, by what bounds its parts."""

    kind: StepKind
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return self.memory_s + self.compute_s


class Peaks(msgspec.Struct, frozen=True):
    """What the hardware can do at most, all devices together."""

    bytes_per_s: float
    """Of memory."""
    flops_per_s: float
    source: str
    """Where the two are from, for people."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one turn of the engine tells its owner."""

    outputs: tuple[SequenceOutput, ...] = ()
    stored: tuple[RoutingDigest, ...] = ()
    """New resume points, parents before children. Within a report apply `removed` first, then `stored`."""
    removed: tuple[RoutingDigest, ...] = ()
    load: Load = Load()
    step_s: float = 0.0
    """Time of the step, 0 when this report is only a heartbeat."""
    batch_size: int = 0
    shape: Shape | None = None
    """Of the step that ended; in a heartbeat, of the one that runs now. None: none runs."""
    work: Work | None = None
    """Of the step that ended."""
    expected_s: float = 0.0
    """How long it should have taken; 0 = not known, or it compiled."""
    limit: StepLimit | None = None
    """Of the step that ended; None: not known, or it compiled."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in the memory of one device; engine/memory.py counts."""

    limit_bytes: int
    """What there is for weights, scratch and KV pages together; 0 = not known."""
    weights_bytes: int
    scratch_bytes: int
    """Of the largest step's intermediate results; an estimate where the backend cannot measure it."""
    page_bytes: int
    num_pages: int

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def free_bytes(self) -> int:
        """Negative: more is promised than there is. Of no meaning without a limit."""
        return self.limit_bytes - self.weights_bytes - self.scratch_bytes - self.kv_bytes


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine can do."""

    model: str
    backend: str
    dtype: str
    context_tokens: int
    vocab_size: int
    page_size: int
    num_pages: int
    routing_stride: int
    eos_token_ids: tuple[int, ...]
    max_running: int
    load_s: float
    """Reading the weights."""
    weights: str
    """How matrices are kept, and why, for people."""
    warmup_s: float
    """Compiling every bucket."""
    load_bytes: int = 0
    """Read from the checkpoint by this process; 0 = not known."""
    memory: Memory | None = None
    """Of the device with rank 0; None: the backend does not count it."""
    peaks: Peaks | None = None
    """Against which StepReport.limit is; None: not known."""
    is_simulated: bool = False
    """Nothing is computed, and every time is a prediction."""
