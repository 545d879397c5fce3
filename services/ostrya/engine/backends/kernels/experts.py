"""Experts on CPU: the tokens of each, one after another. Called by backends/cpu_weights.py.

An expert without tokens is not read, which is what a step of few tokens lives from. A group of rows is padded to the
sizes at which oneDNN prepares itself anyway, and to MIN_ROWS, from which on a row has the same bits whatever stands
beside it (linear.py).

Shapes: T tokens, k experts of a token, M = T * k, D hidden, E experts, I inner, F = 2I (gate, then up).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ostrya.engine.buckets import MIN_ROWS
from ostrya.engine.models.ops import Linear

_ROW_MULTIPLE = 16

Gate = Callable[[torch.Tensor], torch.Tensor]
"""x_TF -> x_TI."""


class GroupedExperts:
    """weights_Tk * experts_Tk(x_TD), summed over those experts that are here: first, first + 1, ..."""

    exact_rows = 0
    """Up to so many rows the products need no padding."""

    def __init__(self, gate_up: Sequence[Linear], down: Sequence[Linear], gate: Gate, *, first: int) -> None:
        self._gate_up, self._down, self._gate, self._first = gate_up, down, gate, first

    def __call__(self, x_TD: torch.Tensor, weights_Tk: torch.Tensor, experts_Tk: torch.Tensor) -> torch.Tensor:
        num_tokens, top_k = experts_Tk.shape
        experts_M = experts_Tk.flatten()
        order_M = experts_M.argsort(stable=True)
        token_M = order_M // top_k
        counts = experts_M.bincount(minlength=self._first + len(self._down)).tolist()
        y_MD = x_TD.new_zeros((len(order_M), x_TD.shape[-1]), dtype=torch.float32)
        stop = sum(counts[: self._first])
        for expert, count in enumerate(counts[self._first : self._first + len(self._down)]):
            start, stop = stop, stop + count
            if count:
                rows_ND = x_TD.index_select(0, token_M[start:stop])
                y_MD.index_copy_(0, order_M[start:stop], self._expert(expert, rows_ND).float())
        return (y_MD.view(num_tokens, top_k, -1) * weights_Tk.unsqueeze(-1)).sum(1)

    def _expert(self, expert: int, x_ND: torch.Tensor) -> torch.Tensor:
        num_rows = len(x_ND)
        if num_rows > self.exact_rows:
            x_ND = F.pad(x_ND, (0, 0, 0, _padded(num_rows) - num_rows))
        return self._down[expert](self._gate(self._gate_up[expert](x_ND)))[:num_rows]


def experts_plain(
    x_TD: torch.Tensor,
    weights_Tk: torch.Tensor,
    experts_Tk: torch.Tensor,
    gate_up_EDF: torch.Tensor,
    down_EID: torch.Tensor,
    gate: Gate,
) -> torch.Tensor:
    """The same of all experts, as plain as can be: the reference of every backend's."""
    y_TD = torch.zeros_like(x_TD)
    for token, (weights_k, experts_k) in enumerate(zip(weights_Tk, experts_Tk, strict=True)):
        for weight, expert in zip(weights_k, experts_k.tolist(), strict=True):
            y_TD[token] += weight * (gate(x_TD[token] @ gate_up_EDF[expert]) @ down_EID[expert])
    return y_TD


def _padded(num_rows: int) -> int:
    if num_rows <= _ROW_MULTIPLE:
        return max(MIN_ROWS, 1 << (num_rows - 1).bit_length())
    return -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
