"""Attention in blocks, which compiling backends trace, equals the reference on random ragged batches, one shard or
several stacked."""

import numpy as np
import pytest
import torch

from ostrya.capacity.mixers import GroupedAttention
from ostrya.engine.backends.kernels.attention import paged_attention_reference
from ostrya.engine.backends.kernels.block_attention import Blocks
from ostrya.engine.backends.static_ops import TokenInputs
from ostrya.engine.models.spec import Attention, Rope
from ostrya.engine.plan import StepPlan
from tests.unit.engine.backends.test_attention import PAGE_SIZE, ragged

CASES = 6
NUM_PAGES, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 256, 16, 6, 2
Case = tuple[StepPlan, Attention, torch.Tensor, torch.Tensor, torch.Tensor, int]


def case(number: int, *, num_shards: int = 1) -> Case:
    """A batch of decode rows, of chunks, or both; with a window each second time."""
    decode = [[], [1, 33, 70, 5], [9, 64, 2]][number % 3]
    prefill = [[(0, 60), (17, 2), (40, 33)], [], [(13, 21), (0, 3)]][number % 3]
    plan = ragged(decode, prefill, seed=number)
    window = None if number < CASES // 2 else 20
    sizes = GroupedAttention(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, window_tokens=window)
    generator = torch.Generator().manual_seed(number)
    num_tokens = plan.bucket.tokens
    q_STNH = torch.randn(num_shards, num_tokens, NUM_HEADS, HEAD_DIM, generator=generator)
    kv_STCH = torch.randn(num_shards, num_tokens, 2 * NUM_KV_HEADS, HEAD_DIM, generator=generator)
    kv_ASCH = torch.randn(NUM_PAGES * PAGE_SIZE, num_shards, 2 * NUM_KV_HEADS, HEAD_DIM, generator=generator)
    mixer = Attention(sizes=sizes, rope=Rope(theta=10000.0), scale=0.2)
    return plan, mixer, q_STNH, kv_STCH, kv_ASCH, PAGE_SIZE


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("number", range(CASES))
def test_blocks_equal_the_reference(number: int, num_shards: int) -> None:
    plan, mixer, q_STNH, kv_STCH, kv_ASCH, page_size = case(number, num_shards=num_shards)
    blocks = Blocks(plan.bucket, page_size)
    parts = blocks.packed(plan)
    assert [len(part) for part in parts] == blocks.sizes
    tokens = TokenInputs(
        positions_T=torch.from_numpy(plan.positions),
        slots_T=torch.from_numpy(plan.slot_mapping).long(),
        page_table_RP=torch.from_numpy(plan.page_table),
    )
    attention = blocks.attention(tokens, [torch.from_numpy(part) for part in parts])
    out_STE, kept_ASCH = attention(q_STNH, kv_STCH, mixer, kv_ASCH)
    # Written in place, each key beside its value.
    slot = plan.slot_mapping[0]
    torch.testing.assert_close(kept_ASCH[slot, :, 0::2], kv_STCH[:, 0, :NUM_KV_HEADS])
    for shard in range(num_shards):
        pages = kept_ASCH[:, shard].view(NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, 2, HEAD_DIM)
        kv_pages_PSCH = torch.cat([pages[..., 0, :], pages[..., 1, :]], dim=2)
        expected_TNH = paged_attention_reference(q_STNH[shard], kv_pages_PSCH, plan, mixer)
        torch.testing.assert_close(
            out_STE[shard, : plan.num_tokens], expected_TNH.flatten(1)[: plan.num_tokens], atol=1e-5, rtol=0
        )


def test_every_mix_of_rows_fits_the_blocks_of_its_bucket() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        decode = generator.integers(1, 60, generator.integers(0, 6)).tolist()
        prefill = [(int(a), int(b)) for a, b in generator.integers(2, 40, (generator.integers(0, 4), 2))]
        if decode or prefill:
            plan = ragged(decode, prefill)
            blocks = Blocks(plan.bucket, PAGE_SIZE)
            place_T, row_B, token_BQ = blocks.packed(plan)
            real_T = np.arange(plan.num_tokens)
            assert (token_BQ[place_T[real_T]] == real_T).all()
            row_T = np.searchsorted(plan.query_start[1:], real_T, side="right")
            assert (row_B[place_T[real_T] // blocks.num_queries] == row_T).all()
