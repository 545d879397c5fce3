"""Which experts a token goes to. Mathematics only, for every backend; called by its experts (Builder.experts).

Shapes: T tokens, E experts of the whole model, k experts of a token.
"""

import torch

from ostrya.engine.models.spec import RoutedFfn


def route(scores_TE: torch.Tensor, ffn: RoutedFfn) -> tuple[torch.Tensor, torch.Tensor]:
    """weights_Tk in float32 and experts_Tk, int64, from a router's products in float32."""
    weights_Tk, experts_Tk = scores_TE.softmax(-1).topk(ffn.sizes.top_k, dim=-1)
    if ffn.renormalized:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return weights_Tk, experts_Tk
