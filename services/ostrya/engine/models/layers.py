"""The parts decoders share, free of devices and parallelism; matrices come in as callables that a backend made.

Shapes: T tokens (padded), D hidden, H head dim, C heads of any kind.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x_TI -> y_TO, in the dtype of the weights."""

MakeLinear = Callable[[torch.Tensor], Linear]
"""Takes over weight_OI."""


class RmsNorm:
    """Root-mean-square norm in float32: x * weight / sqrt(mean(x^2) + eps).

    Written as x * weight * sqrt(D) / hypot(|x|, sqrt(D * eps)), which is four operators instead of the seven of
    F.rms_norm on CPU; at one row an operator costs 5-10 us, more than its arithmetic.
    """

    def __init__(self, weight_D: torch.Tensor, eps: float) -> None:
        size = weight_D.shape[0]
        self._weight_D = weight_D * size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        length_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True)
        return torch.div(x_TD, torch.hypot(length_T1, self._floor)).mul_(self._weight_D)


def silu_gate(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)


def rotary_table(
    *, num_positions: int, head_dim: int, theta: float, divisors: tuple[float, ...] | None
) -> torch.Tensor:
    """[num_positions, 1, H/2] complex64: what each pair of a head is multiplied with at each position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    if divisors is not None:
        frequencies = frequencies / torch.tensor(divisors)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos(), angles.sin()).unsqueeze(1)


def rotate_(x_TCH: torch.Tensor, rotation_T1h: torch.Tensor) -> None:
    """Rotary positions in place, in float32; the pairs of a head lie side by side."""
    num_tokens, num_heads, head_dim = x_TCH.shape
    exact_TCH = x_TCH.float()
    torch.view_as_complex(exact_TCH.view(num_tokens, num_heads, head_dim // 2, 2)).mul_(rotation_T1h)
    if exact_TCH is not x_TCH:
        x_TCH.copy_(exact_TCH)
