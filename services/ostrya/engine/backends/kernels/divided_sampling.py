"""Chooses tokens where each process has the logits of a part of the vocabulary. Called by explicit backends.

Rows that are greedy or want a small top-k need only the largest logits of each part; for anything else the logits are
gathered. Every process gets the same tokens, those that sample() chooses from the whole.

Shapes: R rows, v the part of the vocabulary V, n parts, W candidates of a part.
"""

import numpy as np
import torch

from ostrya.engine.backends.collectives import Collectives
from ostrya.engine.backends.kernels.sampling import sample
from ostrya.engine.plan import StepPlan

_MAX_CANDIDATES = 256
"""Above, more would be sorted and sent than is saved."""


def sample_divided(logits_Rv: torch.Tensor, plan: StepPlan, collectives: Collectives) -> torch.Tensor:
    """tokens_R, int64."""
    width = num_candidates(plan)
    if width is None or width > logits_Rv.shape[1]:
        return sample(gathered(logits_Rv, collectives), plan)
    keys_RW = _keys(logits_Rv, collectives.rank * logits_Rv.shape[1]).topk(width, dim=-1).values
    keys_RnW = collectives.gather(keys_RW).transpose(0, 1).flatten(1)
    ids_RW, order_RW = _token_ids(keys_RnW).sort(dim=-1)
    places_R = sample(_logits(keys_RnW).gather(-1, order_RW), plan)
    return ids_RW.gather(-1, places_R[:, None]).squeeze(-1)


def gathered(logits_Rv: torch.Tensor, collectives: Collectives) -> torch.Tensor:
    """logits_RV."""
    return collectives.gather(logits_Rv).transpose(0, 1).flatten(1)


def num_candidates(plan: StepPlan) -> int | None:
    """How many of a part's largest logits decide every row's token; None: all of them."""
    is_random_R = (plan.temperature > 0) & plan.wants_token
    if plan.processors is not None or (is_random_R & (plan.top_k < 1)).any():
        return None
    width = int(np.where(is_random_R, plan.top_k, 1).max())
    return width if width <= _MAX_CANDIDATES else None


def _keys(logits_Rv: torch.Tensor, first: int) -> torch.Tensor:
    """Ordered as the logits, and of equal ones the lower token id is the larger: no two are equal."""
    bits_Rv = logits_Rv.view(torch.int32).long()
    # Without -0, whose bits differ from those of an equal 0; negative numbers' bits run backwards.
    bits_Rv = torch.where(logits_Rv == 0, 0, bits_Rv)
    ordered_Rv = torch.where(bits_Rv < 0, -(bits_Rv & 0x7FFFFFFF), bits_Rv)
    return ordered_Rv * (1 << 32) + (0xFFFFFFFF - torch.arange(first, first + logits_Rv.shape[1]))


def _token_ids(keys: torch.Tensor) -> torch.Tensor:
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def _logits(keys: torch.Tensor) -> torch.Tensor:
    ordered = keys >> 32
    return torch.where(ordered < 0, -ordered - (1 << 31), ordered).int().view(torch.float32)
