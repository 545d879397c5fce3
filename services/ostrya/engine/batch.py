"""Rows to a padded StepPlan: array filling and nothing else. Called by the scheduler."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from ostrya.engine import scoring
from ostrya.engine.buckets import Ladder
from ostrya.engine.noise import uniform
from ostrya.engine.plan import F32, I32, Entries, Mask, Processors, StepPlan
from ostrya.engine.processors import RowProcessors
from ostrya.engine.sequence import Row


def assemble(rows: Seq[Row], *, ladder: Ladder, page_size: int) -> StepPlan:
    """The plan of `rows`, in which rows of one token come first."""
    num_tokens = sum(row.num_tokens for row in rows)
    bucket = ladder.fit(
        rows=len(rows), tokens=num_tokens, pages=max(_num_pages(row, page_size=page_size) for row in rows)
    )
    plan = StepPlan(
        bucket=bucket,
        num_tokens=num_tokens,
        num_rows=len(rows),
        num_decode_rows=sum(row.num_tokens == 1 for row in rows),
        token_ids=np.zeros(bucket.tokens, np.int32),
        positions=np.zeros(bucket.tokens, np.int32),
        # Padding tokens take turns over the slots of the scratch page.
        slot_mapping=np.arange(bucket.tokens, dtype=np.int32) % page_size,
        query_start=np.full(bucket.rows + 1, num_tokens, np.int32),
        kv_lens=np.zeros(bucket.rows, np.int32),
        page_table=np.zeros((bucket.rows, bucket.pages), np.int32),
        logits_index=np.zeros(bucket.rows, np.int32),
        temperature=np.zeros(bucket.rows, np.float32),
        top_k=np.zeros(bucket.rows, np.int32),
        top_p=np.ones(bucket.rows, np.float32),
        uniform=np.zeros(bucket.rows, np.float32),
        wants_token=np.zeros(bucket.rows, np.bool_),
        processors=_processors(rows, num_rows=bucket.rows),
        scoring=scoring.wanted(rows),
    )
    first = 0
    for index, row in enumerate(rows):
        _fill_tokens(plan, row, index=index, first=first, page_size=page_size)
        _fill_sampling(plan, row, index=index)
        first += row.num_tokens
    return plan


def _num_pages(row: Row, *, page_size: int) -> int:
    return -(-(row.sequence.num_computed + row.num_tokens) // page_size)


def _fill_tokens(plan: StepPlan, row: Row, *, index: int, first: int, page_size: int) -> None:
    sequence = row.sequence
    start, end = sequence.num_computed, sequence.num_computed + row.num_tokens
    num_pages = _num_pages(row, page_size=page_size)
    pages = np.array(sequence.pages[:num_pages], np.int32)
    positions = np.arange(start, end, dtype=np.int32)
    tokens = slice(first, first + row.num_tokens)
    plan.token_ids[tokens] = sequence.token_ids[start:end]
    plan.positions[tokens] = positions
    plan.slot_mapping[tokens] = pages[positions // page_size] * page_size + positions % page_size
    plan.query_start[index] = first
    plan.kv_lens[index] = end
    plan.page_table[index, :num_pages] = pages
    plan.logits_index[index] = first + row.num_tokens - 1


def _fill_sampling(plan: StepPlan, row: Row, *, index: int) -> None:
    sampling = row.sequence.request.sampling
    plan.temperature[index] = sampling.temperature
    plan.top_k[index] = sampling.top_k
    plan.top_p[index] = sampling.top_p
    plan.wants_token[index] = row.wants_token
    if row.wants_token and sampling.temperature > 0:
        plan.uniform[index] = uniform(sampling.seed, len(row.sequence.token_ids))


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
            (index, one.bias(sequence.token_ids, num_generated=sequence.num_generated))
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
