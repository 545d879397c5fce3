"""Matrices at 4 and 8 bits, as checkpoints hold them. No kernel.

Shapes: O outputs, I inputs, G = I / GROUP groups of a row, g = GROUP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

GROUP = 32
"""Neighbours in a row that share a scale and an offset: the blocks of GGUF's Q4_0, Q4_1 and Q8_0."""

Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """weight_OI = scale * q + offset."""

    q_OI: torch.Tensor
    """int8, within -8..7 at 4 bits."""
    scale_OG: torch.Tensor
    """float32"""
    offset_OG: torch.Tensor
    """float32"""
    bits: Bits

    @property
    def nbytes(self) -> int:
        return self.q_OI.nbytes + self.scale_OG.nbytes + self.offset_OG.nbytes

    def dense(self) -> torch.Tensor:
        """weight_OI in float32."""
        q_OGg = self.q_OI.float().view(*self.scale_OG.shape, GROUP)
        return q_OGg.mul_(self.scale_OG[..., None]).add_(self.offset_OG[..., None]).flatten(1)

    def rows(self, index_N: torch.Tensor) -> "Quantized":
        """These rows of it."""
        return replace(
            self, q_OI=self.q_OI[index_N], scale_OG=self.scale_OG[index_N], offset_OG=self.offset_OG[index_N]
        )


def joined(parts: Sequence[Quantized]) -> Quantized:
    """Their rows one after another, in the bits of the widest."""
    return Quantized(
        q_OI=torch.cat([part.q_OI for part in parts]),
        scale_OG=torch.cat([part.scale_OG for part in parts]),
        offset_OG=torch.cat([part.offset_OG for part in parts]),
        bits=max(part.bits for part in parts),
    )


def rounded(weight_OI: torch.Tensor, bits: Bits) -> Quantized:
    """The nearest such matrix: at 4 bits between each group's smallest and largest value, at 8 bits around 0."""
    groups_OGg = weight_OI.float().view(len(weight_OI), -1, GROUP)
    if bits == 4:
        low_OG, high_OG = groups_OGg.aminmax(dim=-1)
        scale_OG = (high_OG - low_OG) / 15
        offset_OG = low_OG + 8 * scale_OG
    else:
        scale_OG = groups_OGg.abs().amax(-1) / 127
        offset_OG = torch.zeros_like(scale_OG)
    # A group of equal values has scale 0; whatever it is divided by, its q does not matter.
    divisor_OG1 = scale_OG.where(scale_OG > 0, 1.0)[..., None]
    half = 2 ** (bits - 1)
    q_OGg = ((groups_OGg - offset_OG[..., None]) / divisor_OG1).round_().clamp_(-half, half - 1)
    return Quantized(q_OI=q_OGg.flatten(1).to(torch.int8), scale_OG=scale_OG, offset_OG=offset_OG, bits=bits)
