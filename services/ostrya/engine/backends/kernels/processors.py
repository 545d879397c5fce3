"""What a plan's Processors do to logits and weights. Called by sampling.py, which says in which order.

Every function touches the rows that want it and no other, and a row by itself. Shapes: R rows, V vocabulary.
"""

import numpy as np
import torch

from ostrya.engine.plan import Entries, Mask, Processors

_NUM_CANDIDATES = 1024

_ADDED_BY_OCTET = torch.tensor([[0.0 if octet >> bit & 1 else -torch.inf for bit in range(8)] for octet in range(256)])
"""To the logits of eight tokens, by their part of a mask."""


def change_logits_(logits_RV: torch.Tensor, processors: Processors) -> None:
    """Applies masks, adds the bias, then applies the penalties, in place.

    Repetition as in CTRL (Keskar et al. 2019): a positive logit is divided, a negative one multiplied. Frequency and
    presence as OpenAI's API defines them: subtracted, the one as often as the output has the token, the other once.
    """
    if processors.mask is not None:
        _forbid_(logits_RV, processors.mask)
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


def keep_likely_(weights_V: torch.Tensor, min_p: float) -> None:
    """Zeroes weights below min_p times the largest, which must be 1."""
    weights_V.masked_fill_(weights_V < min_p, 0.0)


def keep_typical_(weights_V: torch.Tensor, typical_p: float) -> None:
    """Zeroes all but the tokens whose surprise is closest to the entropy, as many as reach the share typical_p.

    Locally typical sampling (Meister et al. 2023), as TypicalLogitsWarper of `transformers` does it: of equally close
    ones all are kept.
    """
    shares_V = weights_V / weights_V.sum()
    surprise_V = -shares_V.log()
    entropy = (shares_V * surprise_V).nansum()
    distance_V = (surprise_V - entropy).abs_()
    # Sorting all is slow, and what is typical is mostly few tokens.
    for width in sorted({min(_NUM_CANDIDATES, len(weights_V)), len(weights_V)}):
        closest_W, order_W = distance_V.topk(width, largest=False)
        num_below = int((shares_V[order_W].cumsum(0) < typical_p).sum())
        if num_below < width:
            break
    weights_V.masked_fill_(distance_V > closest_W[min(num_below, width - 1)], 0.0)


def _forbid_(logits_RV: torch.Tensor, mask: Mask) -> None:
    # A table and a sum: filling by a mask stumbles over every change of its bits, and takes five times as long.
    octets = torch.from_numpy(mask.words.view(np.uint8).reshape(-1)).int()
    added_GV = _ADDED_BY_OCTET.index_select(0, octets).view(len(mask.row), -1)
    size = min(added_GV.shape[1], logits_RV.shape[1])
    for row, added_V in zip(mask.row.tolist(), added_GV, strict=True):
        logits_RV[row, :size].add_(added_V[:size])
        logits_RV[row, size:] = -torch.inf


def _places(logits_RV: torch.Tensor, entries: Entries) -> torch.Tensor:
    """Of the entries, in the flattened logits."""
    return torch.from_numpy(entries.row).long() * logits_RV.shape[1] + torch.from_numpy(entries.token)
