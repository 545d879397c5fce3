"""Products with matrices at 4 and 8 bits on CPU, by torch's own weight-only kernel. Called by backends/cpu_weights.py.

The kernel takes 4 bits in bfloat16 and sums in float32; a row has the same bits whatever stands beside it, or nothing.
A matrix of 8 bits goes through it as two of 4, side by side over the inputs twice: q = 16 * high + low. That keeps each
group's scale, where torch's kernel for 8 bits knows one a row, and takes 1.1 to 1.3 times as long as that (Xeon, 2
threads, 1 to 4 rows).

Shapes: T tokens, O outputs, I inputs, G groups of a row.
"""

import torch

from ostrya.engine.models.ops import Linear
from ostrya.engine.models.quantized import GROUP, Bits, Quantized

_PACKED_ROWS = 4096
"""Packed at once, because packing takes an int32 for every value. A multiple of the kernel's blocks of rows."""


def fits_kernel(shape: tuple[int, int]) -> bool:
    """Whether a matrix [O, I] can be multiplied here."""
    num_outputs, num_inputs = shape
    return num_outputs % 16 == 0 and num_inputs % GROUP == 0


def packed_bits(bits: Bits) -> float:
    """Memory that a value of a matrix at `bits` takes here, its share of scale and offset in bfloat16 included."""
    return (4 + 2 * 16 / GROUP) * (bits // 4)


def make_quantized_linear(matrix: Quantized, bias_O: torch.Tensor | None = None) -> Linear:
    """x_TI -> x_TI @ weight_OI.T + bias_O in bfloat16; keeps a packed copy of the matrix."""
    scale_OG, offset_OG = matrix.scale_OG, matrix.offset_OG
    is_double = matrix.bits == 8
    if is_double:
        # Factors that are powers of two: rounding to bfloat16 rounds all three alike.
        offset_OG = torch.cat([torch.zeros_like(offset_OG), offset_OG + 8 * scale_OG], dim=1)
        scale_OG = torch.cat([16 * scale_OG, scale_OG], dim=1)
    packed = torch.cat([_packed(q_OI, is_double=is_double) for q_OI in torch.split(matrix.q_OI, _PACKED_ROWS)])
    scale_and_offset_GO2 = torch.stack([scale_OG.T, offset_OG.T], dim=-1).bfloat16()

    def multiply(x_TI: torch.Tensor) -> torch.Tensor:
        x_TI = x_TI if x_TI.dtype is torch.bfloat16 else x_TI.bfloat16()
        if is_double:
            x_TI = torch.cat([x_TI, x_TI], dim=1)
        y_TO = torch._weight_int4pack_mm_for_cpu(x_TI, packed, GROUP, scale_and_offset_GO2)
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    return multiply


def _packed(q_OI: torch.Tensor, *, is_double: bool) -> torch.Tensor:
    q_OI = q_OI.int()
    nibbles_OI = torch.cat([(q_OI >> 4) + 8, q_OI & 15], dim=1) if is_double else q_OI + 8
    return torch._convert_weight_to_int4pack_for_cpu(nibbles_OI, 1)
