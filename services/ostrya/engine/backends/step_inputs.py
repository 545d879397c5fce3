"""A StepPlan as one array of integers, and what a traced program makes of it. Called by backends that compile.

What only the host needs (sampling, scoring) is not in it.

Shapes: T tokens (padded), R rows, L the largest row bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from ostrya.engine.backends.static_ops import StaticAttention, StaticOps, TokenInputs
from ostrya.engine.plan import I32, Bucket, StepPlan


class AttentionInputs(Protocol):
    """What one kind of attention wants of a plan besides."""

    @property
    def sizes(self) -> Sequence[int]:
        """Of the parts."""

    def packed(self, plan: StepPlan) -> list[I32]: ...

    def attention(self, tokens: TokenInputs, parts: Sequence[torch.Tensor]) -> StaticAttention:
        """From the parts on the device; can be traced."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Of the one array that is sent in a step, because each small one costs a transfer of its own."""

    bucket: Bucket
    attention: AttentionInputs

    @property
    def sizes(self) -> list[int]:
        tokens, rows, pages = self.bucket.tokens, self.bucket.rows, self.bucket.pages
        return [tokens, tokens, tokens, tokens, rows, rows * pages, *self.attention.sizes]

    def packed(self, plan: StepPlan) -> I32:
        """Token ids and sources, positions, slots, index of the logits, page table, and what attention wants."""
        return np.concatenate(
            [
                plan.token_ids,
                plan.token_source,
                plan.positions,
                plan.slot_mapping,
                plan.logits_index,
                plan.page_table.reshape(-1),
                *self.attention.packed(plan),
            ]
        )

    def unpacked(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Slices: torch_xla's index_select dies of a part that `split` has made."""
        sizes = self.sizes
        return [packed[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def begun(self, packed: torch.Tensor, last_tokens_L: torch.Tensor) -> tuple[StaticOps, torch.Tensor, torch.Tensor]:
        """What a step computes with: its operations, token_ids_T and index_R of the logits."""
        ids_T, source_T, positions_T, slots_T, index_R, page_table, *parts = self.unpacked(packed)
        page_table_RP = page_table.view(self.bucket.rows, self.bucket.pages)
        tokens = TokenInputs(positions_T=positions_T, slots_T=slots_T.long(), page_table_RP=page_table_RP)
        ops = StaticOps(positions_T=positions_T, attention=self.attention.attention(tokens, parts))
        return ops, fed_token_ids(ids_T, source_T, last_tokens_L), index_R


def fed_token_ids(ids_T: torch.Tensor, source_T: torch.Tensor, last_tokens_L: torch.Tensor) -> torch.Tensor:
    """token_ids_T with the tokens of the step before where their source says so; plan.fed_forward on a device."""
    return torch.where(source_T < 0, ids_T, last_tokens_L.index_select(0, source_T.clamp(min=0)))


def as_last_tokens(tokens_R: torch.Tensor, num_last: int) -> torch.Tensor:
    """last_tokens_L: of one size after steps of any bucket, so that no pair of buckets is a shape of its own."""
    return F.pad(tokens_R.int(), (0, num_last - tokens_R.shape[-1]))
