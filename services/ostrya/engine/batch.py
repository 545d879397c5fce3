"""Rows to a padded StepPlan: array filling and nothing else. Called by the scheduler."""

from collections.abc import Sequence as Seq

import numpy as np

from ostrya.engine.buckets import Ladder
from ostrya.engine.noise import uniform
from ostrya.engine.plan import StepPlan
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
