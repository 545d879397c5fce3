"""Plans of which only the sizes matter."""

from collections.abc import Sequence

import numpy as np

from ostrya.engine.plan import Bucket, StepPlan


def sized_plan(decode: Sequence[int] = (), chunks: Sequence[tuple[int, int]] = ()) -> StepPlan:
    """Decode rows that see so many tokens, their own included; chunks of (tokens before it, tokens)."""
    counts = [1] * len(decode) + [tokens for _, tokens in chunks]
    num_rows, num_tokens = len(counts), sum(counts)
    query_start = np.zeros(num_rows + 1, np.int32)
    query_start[1:] = np.cumsum(counts)
    zeros_T, zeros_R = np.zeros(num_tokens, np.int32), np.zeros(num_rows, np.int32)
    return StepPlan(
        bucket=Bucket(num_tokens, num_rows, 1),
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_decode_rows=len(decode),
        token_ids=zeros_T,
        token_source=np.full(num_tokens, -1, np.int32),
        positions=zeros_T,
        slot_mapping=zeros_T,
        query_start=query_start,
        kv_lens=np.array([*decode, *(before + tokens for before, tokens in chunks)], np.int32),
        page_table=np.zeros((num_rows, 1), np.int32),
        logits_index=query_start[1:] - 1,
        temperature=zeros_R.astype(np.float32),
        top_k=zeros_R,
        top_p=np.ones(num_rows, np.float32),
        uniform=zeros_R.astype(np.float32),
        wants_token=np.ones(num_rows, np.bool_),
    )
