"""Rows to a padded StepPlan: array filling and nothing else. Called by the scheduler.

What a running sequence's row says in step after step stands in a table, so that a step of many rows is a few array
operations. A plan copies what it takes: the table changes while steps run.
"""

from collections.abc import Sequence as Seq
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ostrya.engine.buckets import Ladder
from ostrya.engine.kv.pool import PageId
from ostrya.engine.noise import uniform
from ostrya.engine.plan import I32, StepPlan
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
    slots = np.array([sequence.slot for sequence in sequences])
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
