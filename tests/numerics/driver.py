"""Drives a runner without scheduler or engine: makes StepPlans by hand for sequences that each own a run of pages.

Used by tests of the mathematics and by the benchmark's raw-runner mode. Bucket sizes are powers of two from 4 up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostrya.engine.backends.base import Runner
from ostrya.engine.plan import Bucket, StepPlan


@dataclass(slots=True)
class Running:
    """One sequence: all its tokens, how many of them have keys and values, and its pages."""

    token_ids: list[int]
    pages: list[int]
    num_computed: int = 0


class Driver:
    """Greedy decoding straight on a runner."""

    def __init__(self, runner: Runner, *, page_size: int, context_tokens: int) -> None:
        self._runner = runner
        self._page_size = page_size
        self._pages_per_row = -(-context_tokens // page_size)
        self._next_page = 1

    def sequence(self, token_ids: Sequence[int], *, num_new: int) -> Running:
        """A sequence with pages for its prompt and `num_new` tokens more."""
        num_pages = -(-(len(token_ids) + num_new) // self._page_size)
        first = self._next_page
        self._next_page += num_pages
        return Running(list(token_ids), list(range(first, first + num_pages)))

    def release_all(self) -> None:
        """Hands every page out anew."""
        self._next_page = 1

    def step(self, batch: Sequence[tuple[Running, int]]) -> None:
        """Computes that many more tokens of each sequence; one that reaches its end gains a token. Single tokens come
        first."""
        plan = self.plan(batch)
        tokens = self._runner.execute(plan).tokens()
        for row, (sequence, num_tokens) in enumerate(batch):
            sequence.num_computed += num_tokens
            if plan.wants_token[row]:
                sequence.token_ids.append(int(tokens[row]))

    def generate(self, prompts: Sequence[Sequence[int]], *, num_new: int, chunk: int = 512) -> list[list[int]]:
        """Prefills prompt after prompt in chunks, then decodes all together; the new tokens of each."""
        sequences = [self.sequence(prompt, num_new=num_new) for prompt in prompts]
        for sequence in sequences:
            self.prefill(sequence, chunk=chunk)
        for _ in range(num_new - 1):
            self.step([(sequence, 1) for sequence in sequences])
        return [s.token_ids[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]

    def prefill(self, sequence: Running, *, chunk: int = 512) -> None:
        """Computes all tokens of the sequence and chooses the next."""
        end = len(sequence.token_ids)
        while sequence.num_computed < end:
            self.step([(sequence, min(chunk, end - sequence.num_computed))])

    def plan(self, batch: Sequence[tuple[Running, int]]) -> StepPlan:
        """The step that computes `n` more tokens of each sequence."""
        return make_plan(batch, page_size=self._page_size, pages_per_row=self._pages_per_row)


def row_plan(token_ids: Sequence[int], *, page_size: int) -> StepPlan:
    """One whole prompt in one step, in pages 1, 2, ..."""
    num_pages = -(-len(token_ids) // page_size)
    row = Running(list(token_ids), list(range(1, num_pages + 1)))
    return make_plan([(row, len(token_ids))], page_size=page_size, pages_per_row=num_pages)


def make_plan(batch: Sequence[tuple[Running, int]], *, page_size: int, pages_per_row: int) -> StepPlan:
    """The step that computes `n` more tokens of each sequence; single tokens must come first."""
    num_tokens, num_rows = sum(n for _, n in batch), len(batch)
    bucket = Bucket(_power_of_two(num_tokens), _power_of_two(num_rows), pages_per_row)
    token_ids, positions, slots = (np.zeros(bucket.tokens, np.int32) for _ in range(3))
    query_start = np.full(bucket.rows + 1, num_tokens, np.int32)
    kv_lens, logits_index = (np.zeros(bucket.rows, np.int32) for _ in range(2))
    wants_token = np.zeros(bucket.rows, np.bool_)
    page_table = np.zeros((bucket.rows, bucket.pages), np.int32)
    first = 0
    for row, (sequence, n) in enumerate(batch):
        start, end = sequence.num_computed, sequence.num_computed + n
        at, pages = np.arange(start, end), np.array(sequence.pages, np.int32)
        token_ids[first : first + n] = sequence.token_ids[start:end]
        positions[first : first + n] = at
        slots[first : first + n] = pages[at // page_size] * page_size + at % page_size
        query_start[row], kv_lens[row] = first, end
        page_table[row, : len(pages)] = pages
        logits_index[row] = first + n - 1
        wants_token[row] = end == len(sequence.token_ids)
        first += n
    return StepPlan(
        bucket=bucket,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_decode_rows=next((row for row, (_, n) in enumerate(batch) if n != 1), num_rows),
        token_ids=token_ids,
        token_source=np.full(bucket.tokens, -1, np.int32),
        positions=positions,
        slot_mapping=slots,
        query_start=query_start,
        kv_lens=kv_lens,
        page_table=page_table,
        logits_index=logits_index,
        temperature=np.zeros(bucket.rows, np.float32),
        top_k=np.zeros(bucket.rows, np.int32),
        top_p=np.ones(bucket.rows, np.float32),
        uniform=np.zeros(bucket.rows, np.float32),
        wants_token=wants_token,
    )


def _power_of_two(n: int) -> int:
    return max(4, 1 << (n - 1).bit_length())
