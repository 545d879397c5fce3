"""What is packed on the host is what a program reads, for any batch."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostrya.engine.backends.static_ops import StaticAttention, TokenInputs
from ostrya.engine.backends.step_inputs import Layout, as_last_tokens, fed_token_ids
from ostrya.engine.plan import I32, StepPlan, fed_forward
from tests.numerics.driver import Running, make_plan


class Lengths:
    """AttentionInputs."""

    def __init__(self, rows: int) -> None:
        self.sizes = [rows, 1]

    def packed(self, plan: StepPlan) -> list[I32]:
        return [plan.kv_lens, np.array([plan.num_rows], np.int32)]

    def attention(self, tokens: TokenInputs, parts: Sequence[torch.Tensor]) -> StaticAttention:
        raise NotImplementedError


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9).map(sorted), st.integers(1, 5))
def test_a_program_reads_the_plan(lengths: list[int], pages: int) -> None:
    page_size = 4 * max(lengths)
    batch = [(Running(list(range(1, n + 3)), [row + 1] * pages), n) for row, n in enumerate(lengths)]
    plan = make_plan(batch, page_size=page_size, pages_per_row=pages)
    last = np.arange(100, 132, dtype=np.int32)
    plan.token_source[: len(lengths)] = np.arange(len(lengths))[::-1]
    layout = Layout(plan.bucket, Lengths(plan.bucket.rows))
    values = layout.packed(plan)
    assert values.dtype == np.int32
    assert values.shape == (sum(layout.sizes),)
    ids, source, positions, slots, index, table, kv_lens, num_rows = layout.unpacked(torch.from_numpy(values))
    assert fed_token_ids(ids, source, torch.from_numpy(last)).tolist() == fed_forward(plan, last).token_ids.tolist()
    assert positions.tolist() == plan.positions.tolist()
    assert slots.tolist() == plan.slot_mapping.tolist()
    assert index.tolist() == plan.logits_index.tolist()
    assert table.view(plan.page_table.shape).tolist() == plan.page_table.tolist()
    assert (kv_lens.tolist(), num_rows.tolist()) == (plan.kv_lens.tolist(), [len(lengths)])


def test_tokens_of_any_bucket_are_fed_forward_in_one_size() -> None:
    assert as_last_tokens(torch.tensor([5, 6, 7, 8]), 8).tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert as_last_tokens(torch.tensor([5, 6, 7, 8]), 4).dtype == torch.int32
