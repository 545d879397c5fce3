"""Attention of a ragged batch over pages with fixed shapes: what a compiler without a kernel for it traces. Called by
backends whose device reads every page it is told of; its test is equality with attention.py's reference.

The tokens of each row stand in blocks of Q queries, so that a row's keys are gathered once a block, not once a token.
Keys and values lie as [A, S, 2K, H], a key beside its value: the slots lead, so that writing is a scatter along the
first dimension (along another one XLA:CPU copies the whole pool twice), and a shard's part [A, 1, 2K, H] is what the
ragged kernel on TPU reads.

Shapes: T tokens (padded), R rows, B blocks, Q queries of a block, P pages of a row, L keys of a row, A slots of the
pool, S shards, N query heads, K KV heads, G = N / K, H head dim, C = 2K.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ostrya.engine.backends.static_ops import TokenInputs
from ostrya.engine.models.spec import Attention
from ostrya.engine.plan import I32, Bucket, StepPlan

_MIN_QUERIES, _MAX_BLOCKS = 4, 16
_HIDDEN = -1e30
"""Finite: a difference of two is a number."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """AttentionInputs: how the tokens of a bucket stand in blocks."""

    bucket: Bucket
    page_size: int

    @property
    def num_queries(self) -> int:
        """1 where each token is a row, or as good as: then any mix of rows fits."""
        tokens, rows, _ = self.bucket.tokens, self.bucket.rows, self.bucket.pages
        return 1 if tokens <= rows else max(_MIN_QUERIES, tokens // _MAX_BLOCKS)

    @property
    def num_blocks(self) -> int:
        """Enough for any mix: each row has one block that is not full."""
        tokens, rows = self.bucket.tokens, self.bucket.rows
        return tokens if self.num_queries == 1 else tokens // self.num_queries + rows

    @property
    def sizes(self) -> list[int]:
        """Of the parts of `packed`."""
        return [self.bucket.tokens, self.num_blocks, self.num_blocks * self.num_queries]

    def packed(self, plan: StepPlan) -> list[I32]:
        """place_T, row_B, token_BQ; what is padding points to the first row, block or token."""
        tokens, size = self.bucket.tokens, self.num_queries
        starts_R = plan.query_start[: plan.num_rows]
        counts_R = plan.query_start[1 : plan.num_rows + 1] - starts_R
        blocks_R = -(-counts_R // size)
        first_block_R = np.cumsum(blocks_R) - blocks_R
        row_of_T = np.repeat(np.arange(plan.num_rows), counts_R)
        offset_T = np.arange(plan.num_tokens) - starts_R[row_of_T]
        place_T = np.zeros(tokens, np.int32)
        place_T[: plan.num_tokens] = first_block_R[row_of_T] * size + offset_T
        row_of_block = np.repeat(np.arange(plan.num_rows), blocks_R)
        row_B = np.zeros(self.num_blocks, np.int32)
        row_B[: len(row_of_block)] = row_of_block
        token_BQ = np.zeros(self.num_blocks * size, np.int32)
        token_BQ[place_T[: plan.num_tokens]] = np.arange(plan.num_tokens)
        return [place_T, row_B, token_BQ]

    def attention(self, tokens: TokenInputs, parts: Sequence[torch.Tensor]) -> "BlockAttention":
        place_T, row_B, token_BQ = parts
        return BlockAttention(blocks=self, tokens=tokens, place_T=place_T, row_B=row_B, token_BQ=token_BQ)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAttention:
    """A StaticAttention; made of what `Blocks.packed` said."""

    blocks: Blocks
    tokens: TokenInputs
    place_T: torch.Tensor
    row_B: torch.Tensor
    token_BQ: torch.Tensor
    """[B * Q]"""

    def __call__(
        self, q_STNH: torch.Tensor, kv_STCH: torch.Tensor, mixer: Attention, kv_ASCH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out_STE; keeps the keys and values in place."""
        write_(kv_ASCH, self.tokens.slots_T, kv_STCH)
        k_BLSKH, v_BLSKH = (part.float() for part in self._keys(kv_ASCH))
        num_blocks, num_queries = self.blocks.num_blocks, self.blocks.num_queries
        q_SBQKGH = (
            (q_STNH.float() * mixer.scale)
            .index_select(1, self.token_BQ)
            .view(q_STNH.shape[0], num_blocks, num_queries, k_BLSKH.shape[3], -1, q_STNH.shape[-1])
        )
        scores_SBKGQL = torch.einsum("sbqkgh,blskh->sbkgql", q_SBQKGH, k_BLSKH)
        hidden_BQL = self._hidden(k_BLSKH.shape[1], mixer)
        weights_SBKGQL = scores_SBKGQL.masked_fill(hidden_BQL[:, None, None], _HIDDEN).softmax(-1)
        out_SBQKGH = torch.einsum("sbkgql,blskh->sbqkgh", weights_SBKGQL, v_BLSKH)
        out_SXE = out_SBQKGH.reshape(q_STNH.shape[0], num_blocks * num_queries, -1)
        return out_SXE.index_select(1, self.place_T).to(q_STNH.dtype), kv_ASCH

    def _keys(self, kv_ASCH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the row of each block."""
        num_slots, num_shards, num_heads, head_dim = kv_ASCH.shape
        page_size = self.blocks.page_size
        pages = self.tokens.page_table_RP.index_select(0, self.row_B).view(-1)
        picked = kv_ASCH.view(num_slots // page_size, page_size, num_shards, num_heads, head_dim)
        kv_BLSK2H = picked.index_select(0, pages).view(
            self.blocks.num_blocks, -1, num_shards, num_heads // 2, 2, head_dim
        )
        return kv_BLSK2H[..., 0, :], kv_BLSK2H[..., 1, :]

    def _hidden(self, num_keys: int, mixer: Attention) -> torch.Tensor:
        """Whether a key is ahead of the query, or behind its window."""
        position_BQ = self.tokens.positions_T.index_select(0, self.token_BQ).view(self.blocks.num_blocks, -1)
        key_L = torch.arange(num_keys, dtype=torch.int32, device=position_BQ.device)
        behind_BQL = position_BQ[..., None] - key_L
        hidden_BQL = behind_BQL < 0
        if mixer.sizes.window_tokens is not None:
            hidden_BQL = hidden_BQL | (behind_BQL >= mixer.sizes.window_tokens)
        return hidden_BQL


def write_(kv_ASCH: torch.Tensor, slots_T: torch.Tensor, kv_STCH: torch.Tensor) -> None:
    """Puts keys, then values, of each token in its slot, each key beside its value."""
    k_STKH, v_STKH = kv_STCH.chunk(2, dim=-2)
    new_TSCH = torch.stack([k_STKH, v_STKH], dim=-2).flatten(-3, -2).transpose(0, 1)
    kv_ASCH.index_copy_(0, slots_T, new_TSCH)
