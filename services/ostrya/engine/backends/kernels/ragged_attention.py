"""Attention of a ragged batch by a kernel that reads what a row has and no more: torch_xla's `ragged_paged_attention`
on TPU. Its plain reference is attention.py; block_attention.py does the same where there is no such kernel.

Called by backend xla. The kernel wants pages [P, page_size, 2K, H] with each key beside its value, which is what
block_attention.write_ makes.

Shapes: T tokens (padded), R rows, P pages of a row, S shards, N query heads, H head dim, A slots, C = 2K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ostrya.engine.backends.kernels.block_attention import write_
from ostrya.engine.backends.static_ops import TokenInputs
from ostrya.engine.models.spec import Attention
from ostrya.engine.plan import I32, Bucket, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """A batch, as the kernel wants it; int32."""

    kv_lens_R: torch.Tensor
    page_table_RP: torch.Tensor
    query_start: torch.Tensor
    """[R + 1]"""
    num_rows: torch.Tensor
    """[1]"""


class RaggedKernel(Protocol):
    """Of one shard, or of all, each with its own."""

    def __call__(
        self,
        q_STNH: torch.Tensor,
        kv_ASCH: torch.Tensor,
        batch: Ragged,
        *,
        page_size: int,
        scale: float,
        window_tokens: int | None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """AttentionInputs."""

    bucket: Bucket
    page_size: int
    kernel: RaggedKernel

    @property
    def sizes(self) -> list[int]:
        return [self.bucket.rows, self.bucket.rows + 1, 1]

    def packed(self, plan: StepPlan) -> list[I32]:
        return [plan.kv_lens, plan.query_start, np.array([plan.num_rows], np.int32)]

    def attention(self, tokens: TokenInputs, parts: Sequence[torch.Tensor]) -> "RaggedAttention":
        kv_lens_R, query_start, num_rows = parts
        batch = Ragged(
            kv_lens_R=kv_lens_R, page_table_RP=tokens.page_table_RP, query_start=query_start, num_rows=num_rows
        )
        return RaggedAttention(self, batch, tokens.slots_T)


@dataclass(frozen=True, slots=True)
class RaggedAttention:
    """A StaticAttention."""

    rows: RaggedRows
    batch: Ragged
    slots_T: torch.Tensor

    def __call__(
        self, q_STNH: torch.Tensor, kv_STCH: torch.Tensor, mixer: Attention, kv_ASCH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out_STE; keeps the keys and values in place."""
        write_(kv_ASCH, self.slots_T, kv_STCH)
        out_STNH = self.rows.kernel(
            q_STNH,
            kv_ASCH,
            self.batch,
            page_size=self.rows.page_size,
            scale=mixer.scale,
            window_tokens=mixer.sizes.window_tokens,
        )
        return out_STNH.flatten(-2), kv_ASCH
