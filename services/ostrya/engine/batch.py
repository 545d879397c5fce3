"""Rows to a padded StepPlan: array filling and nothing else. Called by the scheduler.

What a running sequence's row says in step after step stands in a table, so that a step of many rows is a few array
operations. A plan copies what it takes: the table changes while steps run.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ostrya.engine import scoring
from ostrya.engine.buckets import Ladder
from ostrya.engine.kv.pool import PageId
from ostrya.engine.noise import uniform
from ostrya.engine.plan import F32, I32, Entries, Mask, Processors, StepPlan
from ostrya.engine.processors import RowProcessors
from ostrya.engine.sequence import Row
from ostrya.engine.types import Sampling

D = TypeVar("D", bound=np.generic)


class RowTable:
    """One slot for each sequence that can run at a time."""

    def __init__(self, *, num_slots: int, pages_per_row: int) -> None:
        self.page_table = np.zeros((num_slots, pages_per_row), np.int32)
        """0 where there is no page."""
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.uint64)
        self._free = list(range(num_slots - 1, -1, -1))

    def take(self, pages: Seq[PageId], sampling: Sampling) -> int:
        """The slot of a sequence that starts to run."""
        slot = self._free.pop()
        self.page_table[slot, : len(pages)] = pages
        self.page_table[slot, len(pages) :] = 0
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.seed[slot] = sampling.seed
        return slot

    def give_back(self, slot: int) -> None:
        """The sequence runs no more."""
        self._free.append(slot)


def assemble(rows: Seq[Row], *, table: RowTable, ladder: Ladder, page_size: int) -> StepPlan:
    """The plan of `rows`, in which rows of one token come first. A token that the host does not know yet was chosen by
    the step before."""
    num_rows = len(rows)
    sequences, *columns = zip(*rows, strict=True)
    starts, counts = (np.array(column, np.int32) for column in columns[:2])
    slots = np.array([sequence.slot for sequence in sequences], np.int32)
    kv_lens = starts + counts
    num_tokens = int(counts.sum())
    bucket = ladder.fit(rows=num_rows, tokens=num_tokens, pages=-(-int(kv_lens.max()) // page_size))

    query_start = np.full(bucket.rows + 1, num_tokens, np.int32)
    query_start[0] = 0
    np.cumsum(counts, out=query_start[1 : num_rows + 1])
    row_of_token = np.repeat(np.arange(num_rows), counts)
    positions = np.arange(num_tokens, dtype=np.int32) + (starts - query_start[:num_rows])[row_of_token]
    page_table = _padded(table.page_table[slots, : bucket.pages], bucket.rows)
    pages = page_table[row_of_token, positions // page_size]
    # Padding tokens take turns over the slots of the scratch page.
    slot_mapping = np.arange(bucket.tokens, dtype=np.int32) % page_size
    slot_mapping[:num_tokens] = pages * page_size + positions % page_size

    token_ids, token_source = _tokens(rows, bucket.tokens)
    # Nearly always; and looking at every row costs as much as all the rest.
    is_plain = all(sequence.is_plain for sequence in sequences)
    return StepPlan(
        bucket=bucket,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_decode_rows=int((counts == 1).sum()),
        token_ids=token_ids,
        token_source=token_source,
        positions=_padded(positions, bucket.tokens),
        slot_mapping=slot_mapping,
        query_start=query_start,
        kv_lens=_padded(kv_lens, bucket.rows),
        page_table=page_table,
        logits_index=_padded(query_start[1 : num_rows + 1] - 1, bucket.rows),
        temperature=_padded(table.temperature[slots], bucket.rows),
        top_k=_padded(table.top_k[slots], bucket.rows),
        top_p=_padded(table.top_p[slots], bucket.rows, fill=1),
        uniform=_padded(uniform(table.seed[slots], kv_lens), bucket.rows),
        wants_token=_padded(np.array(columns[2]), bucket.rows),
        processors=None if is_plain else _processors(rows, num_rows=bucket.rows),
        scoring=None if is_plain else scoring.wanted(rows),
        slots=slots,
    )


def _padded(values: npt.NDArray[D], size: int, *, fill: float = 0) -> npt.NDArray[D]:
    if len(values) == size:
        return values
    out = np.full((size, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out


def _tokens(rows: Seq[Row], size: int) -> tuple[I32, I32]:
    """token_ids and token_source."""
    token_ids, token_source = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    first = 0
    for sequence, start, num_tokens, _ in rows:
        if num_tokens > 1:
            token_ids[first : first + num_tokens] = sequence.token_ids[start : start + num_tokens]
        elif start < len(sequence.token_ids):
            token_ids[first] = sequence.token_ids[start]
        else:
            token_source[first] = sequence.row
        first += num_tokens
    return token_ids, token_source


def _processors(rows: Seq[Row], *, num_rows: int) -> Processors | None:
    asking = [
        (index, row.sequence, row.sequence.processors)
        for index, row in enumerate(rows)
        if row.sequence.processors is not None and row.wants_token
    ]
    if not asking:
        return None
    processors = Processors(
        bias=_entries(
            (index, one.bias(sequence.token_ids, num_generated=sequence.num_tokens - sequence.num_prompt))
            for index, sequence, one in asking
        ),
        seen=_entries((index, one.seen()) for index, _, one in asking),
        repetition_penalty=np.ones(num_rows, np.float32),
        presence_penalty=np.zeros(num_rows, np.float32),
        frequency_penalty=np.zeros(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        typical_p=np.ones(num_rows, np.float32),
        mask=_mask([(index, one) for index, _, one in asking if one.num_mask_words]),
    )
    for index, _, one in asking:
        processors.repetition_penalty[index] = one.sampling.repetition_penalty
        processors.presence_penalty[index] = one.sampling.presence_penalty
        processors.frequency_penalty[index] = one.sampling.frequency_penalty
        processors.min_p[index] = one.sampling.min_p
        processors.typical_p[index] = one.sampling.typical_p
    return processors


def _mask(masked: Seq[tuple[int, RowProcessors]]) -> Mask | None:
    if not masked:
        return None
    words = np.empty((len(masked), masked[0][1].num_mask_words), np.int32)
    for words_W, (_, one) in zip(words, masked, strict=True):
        one.fill_mask(words_W)
    return Mask(row=np.array([index for index, _ in masked], np.int32), words=words)


def _entries(of_rows: Iterable[tuple[int, tuple[I32, F32]]]) -> Entries:
    rows, parts = zip(*of_rows, strict=True)
    tokens, values = zip(*parts, strict=True)
    return Entries(
        row=np.repeat(np.array(rows, np.int32), [len(part) for part in tokens]),
        token=np.concatenate(tokens),
        value=np.concatenate(values),
    )
