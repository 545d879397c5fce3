"""A StepPlan as one array of integers, and what a traced program makes of it. Called by backends with fixed shapes.

One array, because each small one costs a transfer of its own. What only the host needs (sampling, scoring) is not in
it.

Shapes: T tokens (padded), R rows, P pages of a row, L the largest row bucket.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ostrya.engine.backends.static_ops import StaticOps
from ostrya.engine.plan import I32, Bucket, StepPlan

_NUM_PER_TOKEN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Of one step, int32; views of the packed array."""

    token_ids_T: torch.Tensor
    token_source_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    row_of_T: torch.Tensor
    """Padding tokens belong to the last row."""
    logits_index_R: torch.Tensor
    page_table_RP: torch.Tensor


def packed(plan: StepPlan) -> I32:
    """[packed_size(plan.bucket)]"""
    tokens, rows = plan.bucket.tokens, plan.bucket.rows
    row_of_T = np.searchsorted(plan.query_start[1:], np.arange(tokens, dtype=np.int32), side="right")
    parts = (
        plan.token_ids,
        plan.token_source,
        plan.positions,
        plan.slot_mapping,
        np.minimum(row_of_T, rows - 1).astype(np.int32),
        plan.logits_index,
        plan.page_table.reshape(-1),
    )
    return np.concatenate(parts)


def packed_size(bucket: Bucket) -> int:
    return _NUM_PER_TOKEN * bucket.tokens + bucket.rows * (1 + bucket.pages)


def unpacked(values: torch.Tensor, bucket: Bucket) -> StepInputs:
    """Of what `packed` made; can be traced."""
    tokens, rows, pages = bucket.tokens, bucket.rows, bucket.pages
    *of_tokens, logits_index_R, page_table = torch.split(values, [tokens] * _NUM_PER_TOKEN + [rows, rows * pages])
    token_ids_T, token_source_T, positions_T, slots_T, row_of_T = of_tokens
    return StepInputs(
        token_ids_T=token_ids_T,
        token_source_T=token_source_T,
        positions_T=positions_T,
        slots_T=slots_T,
        row_of_T=row_of_T,
        logits_index_R=logits_index_R,
        page_table_RP=page_table.view(rows, pages),
    )


def fed_token_ids(inputs: StepInputs, last_tokens_L: torch.Tensor) -> torch.Tensor:
    """token_ids_T with the tokens of the step before where token_source asks for them; plan.fed_forward on a device."""
    source_T = inputs.token_source_T
    return torch.where(source_T < 0, inputs.token_ids_T, last_tokens_L[source_T.clamp(min=0)])


def as_last_tokens(tokens_R: torch.Tensor, num_last: int) -> torch.Tensor:
    """last_tokens_L: of one size after steps of any bucket, so that no pair of buckets is a shape of its own."""
    return F.pad(tokens_R.int(), (0, num_last - tokens_R.shape[-1]))


def static_ops(inputs: StepInputs, *, page_size: int) -> StaticOps:
    """The operations of the step."""
    return StaticOps(
        positions_T=inputs.positions_T,
        slots_T=inputs.slots_T.long(),
        row_of_T=inputs.row_of_T,
        page_table_RP=inputs.page_table_RP,
        page_size=page_size,
    )
