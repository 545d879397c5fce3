"""Tokens and log probabilities chosen on the host. Called by the CPU backend, and by backends that compile for steps
with a row that wants more than its largest logit, which they find themselves.

Shapes: R rows, V vocabulary, N tokens.
"""

from collections.abc import Callable

import numpy as np
import torch

from ostrya.engine.backends.kernels.sampling import sample
from ostrya.engine.backends.kernels.scores import joined, score
from ostrya.engine.plan import I32, Scores, StepPlan

SCORED_AT_ONCE = 32
"""Prompt tokens whose logits exist at a time: 32 MB with 250,000 tokens in the vocabulary."""


def is_greedy(plan: StepPlan) -> bool:
    """Every row wants the token of its largest logit, and nothing else is asked for."""
    return plan.processors is None and plan.scoring is None and not (plan.temperature[plan.wants_token] > 0).any()


def choose(
    plan: StepPlan, logits_RV: torch.Tensor, logits_at: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[I32, Scores | None]:
    """Of a plan that is fed forward. `logits_RV` is changed; `logits_at` gives those after SCORED_AT_ONCE tokens of the
    step, by their index."""
    scoring = plan.scoring
    if scoring is None:
        return _sampled(logits_RV, plan), None
    num_top = int(scoring.num_top.max())
    logprobs_NV = logits_RV[torch.from_numpy(scoring.row)].log_softmax(-1)
    tokens_R = _sampled(logits_RV, plan)
    parts = [score(logprobs_NV, torch.from_numpy(tokens_R[scoring.row]), num_top=num_top)]
    for first in range(0, len(scoring.index), SCORED_AT_ONCE):
        targets_N = torch.from_numpy(scoring.target[first : first + SCORED_AT_ONCE])
        # Whole slices only: a device has one shape of it, and on CPU oneDNN prepares itself for each number of rows.
        index = np.zeros(SCORED_AT_ONCE, np.int32)
        index[: len(targets_N)] = scoring.index[first : first + SCORED_AT_ONCE]
        logprobs_NV = logits_at(torch.from_numpy(index))[: len(targets_N)].log_softmax(-1)
        parts.append(score(logprobs_NV, targets_N, num_top=num_top))
    return tokens_R, joined(parts)


def _sampled(logits_RV: torch.Tensor, plan: StepPlan) -> I32:
    tokens_R: I32 = sample(logits_RV, plan).int().numpy()
    return tokens_R
