"""Chooses one token a row from its logits. Called by backends after the model.

A row's token depends on its own logits, settings and noise alone, never on its neighbours. The order, which is vLLM's
with typical-p of `transformers` at its end; each sees what the one before has left:

 1. grammar: -inf for what it does not allow
 2. bias: logit_bias, and -inf for bad words and, while the output is shorter than min_tokens, for what would end it
 3. penalties: repetition (prompt and output), then frequency and presence (output)
 4. temperature 0: the largest logit, and nothing more
 5. temperature
 6. min-p
 7. top-k, then top-p
 8. typical-p
 9. the inverse of the cumulative distribution over the vocabulary order at `uniform`

Shapes: R rows, V vocabulary, W candidates.
"""

from collections.abc import Callable

import torch

from ostrya.engine.backends.kernels.processors import change_logits_, keep_likely_, keep_typical_
from ostrya.engine.plan import F32, StepPlan

_Keep = Callable[[torch.Tensor, float], None]

# Sorted first when a row wants top-k or top-p; a nucleus is rarely larger, and when it is everything is sorted.
_NUM_CANDIDATES = 1024


def sample(logits_RV: torch.Tensor, plan: StepPlan) -> torch.Tensor:
    """tokens_R, int64. Temperature 0 takes the largest logit (the first of equals). Changes the logits."""
    processors = plan.processors
    if processors is not None:
        change_logits_(logits_RV, processors)
    tokens_R = logits_RV.argmax(-1)
    random_rows = torch.from_numpy((plan.temperature > 0) & plan.wants_token).nonzero().flatten()
    if not len(random_rows):
        return tokens_R
    temperature_R = torch.from_numpy(plan.temperature)[random_rows].double()
    # float64 throughout: a float32 running sum over the vocabulary could end below a uniform close to 1.
    weights_RV = logits_RV[random_rows].double().div_(temperature_R[:, None])
    # Where everything is forbidden, the largest is -inf, and a difference of two of them is no number.
    weights_RV.sub_(weights_RV.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float64).min)).exp_()
    if processors is not None:
        _filter_(weights_RV, processors.min_p[random_rows.numpy()], keep_likely_, none=0)
    top_k_R = torch.from_numpy(plan.top_k)[random_rows].long()
    top_p_R = torch.from_numpy(plan.top_p)[random_rows].double()
    filtered = ((top_k_R > 0) | (top_p_R < 1)).nonzero().flatten()
    if len(filtered):
        weights_RV[filtered] = keep_nucleus(weights_RV[filtered], top_k_R[filtered], top_p_R[filtered])
    if processors is not None:
        _filter_(weights_RV, processors.typical_p[random_rows.numpy()], keep_typical_, none=1)
    tokens_R[random_rows] = _invert(weights_RV, torch.from_numpy(plan.uniform)[random_rows].double())
    return tokens_R


def keep_nucleus(weights_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Zeroes all but the top_k largest weights (0 = all), and of those all but the fewest that reach the share top_p.

    Among equal weights the lower token id is kept first.
    """
    vocab_size = weights_RV.shape[1]
    limit_R = torch.where(top_k_R > 0, top_k_R.clamp(max=vocab_size), vocab_size)
    width = min(_NUM_CANDIDATES, vocab_size)
    threshold_R, num_kept_R, known_R = _nucleus(weights_RV, limit_R, top_p_R, width)
    if len(wide := (~known_R).nonzero().flatten()):
        threshold_R[wide], num_kept_R[wide], _ = _nucleus(weights_RV[wide], limit_R[wide], top_p_R[wide], vocab_size)
    above_RV = weights_RV > threshold_R[:, None]
    equal_RV = weights_RV == threshold_R[:, None]
    room_R = num_kept_R - above_RV.sum(-1)
    kept_RV = above_RV | (equal_RV & (equal_RV.cumsum(-1) <= room_R[:, None]))
    return weights_RV.where(kept_RV, 0.0)


def _filter_(weights_RV: torch.Tensor, setting_R: F32, keep_: _Keep, *, none: float) -> None:
    """Applies `keep_` where the setting is not `none`."""
    for row in (setting_R != none).nonzero()[0].tolist():
        keep_(weights_RV[row], float(setting_R[row]))


def _nucleus(
    weights_RV: torch.Tensor, limit_R: torch.Tensor, top_p_R: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Smallest weight kept, number kept, and whether `width` candidates were enough to know; of each row."""
    candidates_RW = weights_RV.topk(width, dim=-1).values
    in_limit_RW = torch.arange(width) < limit_R[:, None]
    candidates_RW = candidates_RW.where(in_limit_RW, 0.0)
    sums_RW = candidates_RW.cumsum(-1)
    unlimited_R = limit_R == weights_RV.shape[1]
    total_R = torch.where(unlimited_R, weights_RV.sum(-1), sums_RW[:, -1])
    before_RW = sums_RW - candidates_RW
    kept_RW = in_limit_RW & (before_RW < top_p_R[:, None] * total_R[:, None])
    num_kept_R = kept_RW.sum(-1).clamp(min=1)
    known_R = (limit_R <= width) | (unlimited_R & (num_kept_R < width))
    return candidates_RW.gather(1, num_kept_R[:, None] - 1).squeeze(1), num_kept_R, known_R


def _invert(weights_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The first token whose running sum exceeds the share `uniform` of the whole; never one of weight 0, unless all
    are."""
    sums_RV = weights_RV.cumsum(-1)
    targets_R = uniform_R * sums_RV[:, -1]
    return torch.searchsorted(sums_RV, targets_R[:, None], right=True).squeeze(1).clamp_(max=sums_RV.shape[1] - 1)
