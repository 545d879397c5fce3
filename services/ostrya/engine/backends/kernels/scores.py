"""Log probabilities of single tokens. Called by backends after the model. Shapes: N tokens, V vocabulary."""

import numpy as np
import torch

from ostrya.engine.plan import Scores


def score(logprobs_NV: torch.Tensor, targets_N: torch.Tensor, *, num_top: int) -> Scores:
    """Of the targets, and the `num_top` likeliest tokens beside each."""
    top = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]), dim=-1)
    return Scores(
        logprob=logprobs_NV.gather(-1, targets_N[:, None].long()).squeeze(-1).numpy(),
        top_ids=top.indices.int().numpy(),
        top_logprobs=top.values.numpy(),
    )


def joined(parts: list[Scores]) -> Scores:
    """One after the other."""
    return Scores(
        logprob=np.concatenate([part.logprob for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )
