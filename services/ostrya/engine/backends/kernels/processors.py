"""What a plan's Processors do to logits and weights. Called by sampling.py, which says in which order.

Every function touches the rows that want it and no other, and a row by itself. Shapes: R rows, V vocabulary.
"""

import torch

from ostrya.engine.plan import Entries, Processors


def change_logits_(logits_RV: torch.Tensor, processors: Processors) -> None:
    """Adds the bias, then applies the penalties, in place.

    Repetition as in CTRL (Keskar et al. 2019): a positive logit is divided, a negative one multiplied. Frequency and
    presence as OpenAI's API defines them: subtracted, the one as often as the output has the token, the other once.
    """
    flat = logits_RV.view(-1)
    if len(processors.bias.row):
        flat.index_add_(0, _places(logits_RV, processors.bias), torch.from_numpy(processors.bias.value))
    seen = processors.seen
    if not len(seen.row):
        return
    places = _places(logits_RV, seen)
    repetition, presence, frequency = (
        torch.from_numpy(of_rows[seen.row])
        for of_rows in (processors.repetition_penalty, processors.presence_penalty, processors.frequency_penalty)
    )
    counts, logits = torch.from_numpy(seen.value), flat[places]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    flat[places] = logits - frequency * counts - presence * (counts > 0)


def keep_likely(weights_RV: torch.Tensor, min_p_R: torch.Tensor) -> torch.Tensor:
    """Zeroes weights below min_p times the row's largest, which must be 1."""
    return weights_RV.where(weights_RV >= min_p_R[:, None], 0.0)


def keep_typical(weights_RV: torch.Tensor, typical_p_R: torch.Tensor) -> torch.Tensor:
    """Zeroes all but the tokens whose surprise is closest to the row's entropy, as many as reach the share typical_p.

    Locally typical sampling (Meister et al. 2023), as TypicalLogitsWarper of `transformers` does it: of equally close
    ones all are kept.
    """
    shares_RV = weights_RV / weights_RV.sum(-1, keepdim=True)
    surprise_RV = -shares_RV.log()
    entropy_R1 = (shares_RV * surprise_RV).nansum(-1, keepdim=True)
    distance_RV = (surprise_RV - entropy_R1).abs()
    ordered_RV, order_RV = distance_RV.sort(-1)
    reached_RV = shares_RV.gather(-1, order_RV).cumsum(-1)
    last_R1 = (reached_RV < typical_p_R[:, None]).sum(-1, keepdim=True).clamp_(max=weights_RV.shape[1] - 1)
    return weights_RV.where(distance_RV <= ordered_RV.gather(-1, last_R1), 0.0)


def _places(logits_RV: torch.Tensor, entries: Entries) -> torch.Tensor:
    """Of the entries, in the flattened logits."""
    return torch.from_numpy(entries.row).long() * logits_RV.shape[1] + torch.from_numpy(entries.token)
