"""What is packed on the host is what a program reads, for any batch."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostrya.engine.backends.step_inputs import as_last_tokens, fed_token_ids, packed, packed_size, unpacked
from ostrya.engine.plan import fed_forward
from tests.numerics.driver import Running, make_plan


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9).map(sorted), st.integers(1, 5))
def test_a_program_reads_the_plan(lengths: list[int], pages: int) -> None:
    page_size = 4 * max(lengths)
    batch = [(Running(list(range(1, n + 3)), [row + 1] * pages), n) for row, n in enumerate(lengths)]
    plan = make_plan(batch, page_size=page_size, pages_per_row=pages)
    last = np.arange(100, 132, dtype=np.int32)
    plan.token_source[: len(lengths)] = np.arange(len(lengths))[::-1]
    values = packed(plan)
    assert values.dtype == np.int32
    assert values.shape == (packed_size(plan.bucket),)
    inputs = unpacked(torch.from_numpy(values), plan.bucket)
    assert fed_token_ids(inputs, torch.from_numpy(last)).tolist() == fed_forward(plan, last).token_ids.tolist()
    assert inputs.positions_T.tolist() == plan.positions.tolist()
    assert inputs.slots_T.tolist() == plan.slot_mapping.tolist()
    assert inputs.logits_index_R.tolist() == plan.logits_index.tolist()
    assert inputs.page_table_RP.tolist() == plan.page_table.tolist()
    rows = [row for row, n in enumerate(lengths) for _ in range(n)]
    padding = plan.bucket.tokens - plan.num_tokens
    # Those behind the last real token belong to whatever row is last: they write to page 0 and nobody reads them.
    assert inputs.row_of_T.tolist() == rows + [plan.bucket.rows - 1] * padding


def test_tokens_of_any_bucket_are_fed_forward_in_one_size() -> None:
    assert as_last_tokens(torch.tensor([5, 6, 7, 8]), 8).tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert as_last_tokens(torch.tensor([5, 6, 7, 8]), 4).dtype == torch.int32
