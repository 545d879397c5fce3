"""The fast attention equals the reference on random ragged batches of decode rows and prefill chunks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.capacity.mixers import GroupedAttention
from ostrya.engine.backends.kernels.attention import PagedAttention, paged_attention_reference
from ostrya.engine.models.spec import Attention, Rope
from ostrya.engine.plan import StepPlan
from tests.numerics.driver import Running, make_plan

PAGE_SIZE, NUM_PAGES, HEAD_DIM = 4, 256, 16

# float32: the same products summed in another order, 1e-6 a term. bfloat16: the kernel rounds weights and output to 8
# bits,
# 2^-8 of values near 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

decode_rows = st.lists(st.integers(1, 70), max_size=5)
prefill_rows = st.lists(st.tuples(st.integers(0, 40), st.integers(2, 60)), max_size=3)


def ragged(decode: list[int], prefill: list[tuple[int, int]], *, seed: int = 0) -> StepPlan:
    """Decode rows by length, prefill rows as (already computed, new); every row on random pages of its own."""
    shuffled = np.random.default_rng(seed).permutation(np.arange(1, NUM_PAGES)).tolist()
    batch = []
    for computed, new in [(length - 1, 1) for length in decode] + prefill:
        num_pages = -(-(computed + new) // PAGE_SIZE)
        pages, shuffled = shuffled[:num_pages], shuffled[num_pages:]
        batch.append((Running([0] * (computed + new), pages, computed), new))
    return make_plan(batch, page_size=PAGE_SIZE, pages_per_row=64)


def both(
    plan: StepPlan,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    q_TNH = torch.randn(plan.bucket.tokens, num_heads, HEAD_DIM, generator=generator).to(dtype)
    kv_pages_PSCH = torch.randn(NUM_PAGES, PAGE_SIZE, 2 * num_kv_heads, HEAD_DIM, generator=generator).to(dtype)
    sizes = GroupedAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, window_tokens=window)
    mixer = Attention(sizes=sizes, rope=Rope(theta=10000.0), scale=0.2)
    fast = PagedAttention(plan, mixer, num_tokens=plan.bucket.tokens, page_size=PAGE_SIZE, dtype=dtype)
    return fast(q_TNH, kv_pages_PSCH), paged_attention_reference(q_TNH, kv_pages_PSCH, plan, mixer).flatten(1)


@given(
    decode=decode_rows,
    prefill=prefill_rows,
    heads=st.sampled_from([(4, 4), (6, 2), (4, 1)]),
    window=st.none() | st.integers(1, 80),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_fast_equals_reference(
    decode: list[int], prefill: list[tuple[int, int]], heads: tuple[int, int], window: int | None, seed: int
) -> None:
    if decode or prefill:
        plan = ragged(decode, prefill, seed=seed)
        fast, reference = both(plan, num_heads=heads[0], num_kv_heads=heads[1], window=window)
        torch.testing.assert_close(fast, reference, atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50, 150])
def test_long_chunks_are_taken_in_parts_and_equal_the_reference(window: int | None, dtype: torch.dtype) -> None:
    plan = ragged([3, 90], [(17, 110), (0, 300 - 45)])
    fast, reference = both(plan, num_heads=6, num_kv_heads=2, window=window, dtype=dtype)
    torch.testing.assert_close(fast.float(), reference, atol=TOLERANCE[dtype], rtol=0)


def test_a_row_is_the_same_whatever_stands_beside_it() -> None:
    alone, _ = both(ragged([33], []), num_heads=6, num_kv_heads=2)
    # The same pages for row 0, because the order of pages is drawn from the seed.
    beside, _ = both(ragged([33, 70, 5], []), num_heads=6, num_kv_heads=2)
    torch.testing.assert_close(alone[0], beside[0], atol=TOLERANCE[torch.float32], rtol=0)


def test_padding_tokens_get_zero() -> None:
    plan = ragged([9], [(0, 4)])
    fast, _ = both(plan, num_heads=6, num_kv_heads=2)
    assert plan.bucket.tokens > plan.num_tokens
    assert not fast[plan.num_tokens :].any()
