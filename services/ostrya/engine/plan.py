"""One step, as plain padded arrays: what the scheduler decides and a backend executes. No torch, no device.

Rows are sequences; decode rows (one token) come first, then prefill chunks. Everything is padded to the bucket, so that
a backend sees few shapes. Padding tokens write to page 0, which no sequence owns; padding rows have kv_lens 0.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A compiled shape. tokens T, rows R, pages a row can address P."""

    tokens: int
    rows: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Numbers for single tokens of single rows: [N] each, not padded (a backend with fixed shapes pads them)."""

    row: I32
    """Ascending."""
    token: I32
    value: F32

    def plus_one(self, rows: I32, tokens: I32) -> "Entries":
        """With 1 more for each of these tokens, at most one a row."""
        value, new = self.value.copy(), []
        begins, ends = (np.searchsorted(self.row, rows, side=side) for side in ("left", "right"))
        for index, (begin, end, token) in enumerate(zip(begins.tolist(), ends.tolist(), tokens.tolist(), strict=True)):
            here = np.flatnonzero(self.token[begin:end] == token)
            value[begin + here] += 1
            if not len(here):
                new.append(index)
        at = ends[new]
        return Entries(
            row=np.insert(self.row, at, rows[new]),
            token=np.insert(self.token, at, tokens[new]),
            value=np.insert(value, at, 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """What grammars allow: G rows have one."""

    row: I32
    """[G]"""
    words: I32
    """[G, W] bit t % 32 of word t // 32: whether token t is allowed. Tokens beyond 32 W are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """What changes logits and weights besides temperature, top_k and top_p; kernels/sampling.py says in which order."""

    bias: Entries
    """Added to logits; -inf forbids the token."""
    seen: Entries
    """The tokens that penalties are about, each once a row; value: how often the output has it, 0 = only the prompt."""
    repetition_penalty: F32
    """[R] 1 = none."""
    presence_penalty: F32
    """[R] 0 = none."""
    frequency_penalty: F32
    """[R] 0 = none."""
    min_p: F32
    """[R] 0 = none."""
    typical_p: F32
    """[R] 1 = none."""
    mask: Mask | None = None

    @property
    def has_penalty(self) -> npt.NDArray[np.bool_]:
        """[R] whether `seen` changes anything."""
        has_one: npt.NDArray[np.bool_] = (
            (self.repetition_penalty != 1) | (self.presence_penalty != 0) | (self.frequency_penalty != 0)
        )
        return has_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Tokens whose log probabilities are wanted: first those that rows of this step choose, then prompt tokens."""

    row: I32
    """[N] rows whose own token is scored."""
    index: I32
    """[M] in [0, T): after which token ..."""
    target: I32
    """[M] ... this one stands."""
    num_top: I32
    """[N + M] how many of the likeliest tokens are wanted beside each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The answer to a Scoring: N + M tokens in its order, K = the largest num_top."""

    logprob: F32
    """[N + M]"""
    top_ids: I32
    """[N + M, K] likeliest first."""
    top_logprobs: F32
    """[N + M, K]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """T = bucket.tokens, R = bucket.rows, P = bucket.pages. The first num_tokens / num_rows entries are real."""

    bucket: Bucket
    num_tokens: int
    num_rows: int
    num_decode_rows: int
    """Rows [0, num_decode_rows) have exactly one token."""

    token_ids: I32
    """[T] 0 where token_source says where the token comes from."""
    token_source: I32
    """[T] -1, or the row of the step before whose sampled token stands here: fed forward on the device."""
    positions: I32
    """[T] absolute position of each token."""
    slot_mapping: I32
    """[T] page * page_size + offset where the token's keys and values go."""
    query_start: I32
    """[R + 1] row r has tokens [query_start[r], query_start[r + 1])."""
    kv_lens: I32
    """[R] tokens each row attends to, the new ones included; 0 = padding row."""
    page_table: I32
    """[R, P] pages of each row in order; 0 where there is none."""
    logits_index: I32
    """[R] index in [0, T) of the token whose logits choose the row's next token."""

    temperature: F32
    """[R] 0 = greedy."""
    top_k: I32
    """[R] 0 = all."""
    top_p: F32
    """[R]"""
    uniform: F32
    """[R] in [0, 1): the noise of (seed, position), drawn on the host so that no device needs a generator."""
    wants_token: npt.NDArray[np.bool_]
    """[R] false for a chunk that does not end its prompt: its token is ignored."""

    processors: Processors | None = None
    """None: no row wants any."""
    scoring: Scoring | None = None
    """None: no row wants any."""
    slots: I32 | None = None
    """[num_rows] which row of the scheduler's table each row is: what it says there changes little from step to step.
    None: the plan comes from no scheduler."""


def fed_forward(plan: StepPlan, last_tokens: I32) -> StepPlan:
    """The plan with the tokens [R] of the step before put where token_source asks for them, and counted as seen."""
    if (plan.token_source < 0).all():
        return plan
    token_ids = np.where(plan.token_source < 0, plan.token_ids, last_tokens[plan.token_source])
    processors = plan.processors
    if processors is not None:
        own_source = plan.token_source[plan.logits_index]
        rows = np.flatnonzero(processors.has_penalty & (own_source >= 0)).astype(np.int32)
        processors = replace(processors, seen=processors.seen.plus_one(rows, last_tokens[own_source[rows]]))
    return replace(plan, token_ids=token_ids, token_source=np.full_like(plan.token_source, -1), processors=processors)


def scratch_plan(bucket: Bucket, num_tokens: int = 1) -> StepPlan:
    """One row of `num_tokens` tokens in page 0; the rest is padding."""
    kv_lens = np.zeros(bucket.rows, np.int32)
    kv_lens[0] = num_tokens
    query_start = np.full(bucket.rows + 1, num_tokens, np.int32)
    query_start[0] = 0
    zeros_T, zeros_R = np.zeros(bucket.tokens, np.int32), np.zeros(bucket.rows, np.int32)
    return StepPlan(
        bucket=bucket,
        num_tokens=num_tokens,
        num_rows=1,
        num_decode_rows=int(num_tokens == 1),
        token_ids=zeros_T,
        token_source=np.full(bucket.tokens, -1, np.int32),
        positions=zeros_T,
        slot_mapping=zeros_T,
        query_start=query_start,
        kv_lens=kv_lens,
        page_table=np.zeros((bucket.rows, bucket.pages), np.int32),
        logits_index=zeros_R,
        temperature=np.zeros(bucket.rows, np.float32),
        top_k=zeros_R,
        top_p=np.ones(bucket.rows, np.float32),
        uniform=np.zeros(bucket.rows, np.float32),
        wants_token=np.zeros(bucket.rows, np.bool_),
    )
