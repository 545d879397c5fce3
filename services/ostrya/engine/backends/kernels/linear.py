"""Matrix products on CPU. Called by backends/cpu_weights.py.

oneDNN with weights reordered once at load. Measured (AMD EPYC, 2 threads, [576 -> 3072], 4 rows): float32 F.linear
920 us, oneDNN on plain weights 535 us, on reordered weights 230 us; bfloat16 332 and 119 us. From 4 rows up to 512
every row has the same bits whatever stands beside it (fewer rows take another kernel), which is why the smallest row
bucket is 4.
"""

from typing import Protocol, cast

import torch
import torch.nn.functional as F

from ostrya.engine.models.ops import Linear

# oneDNN picks a layout for about this many rows; layouts for 4 and for 512 were equally fast at every row count, the
# one for 1 was not.
_ROWS_HINT = 8


class _Reorder(Protocol):
    def __call__(self, weight: torch.Tensor, batch_size: int | None) -> torch.Tensor: ...


class _Pointwise(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        attr: str,
        scalars: list[float],
        algorithm: str,
    ) -> torch.Tensor: ...


def make_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> Linear:
    """x_TI -> x_TI @ weight_OI.T + bias_O; keeps only the reordered copy of the weight."""
    dtype = weight_OI.dtype
    # To ask for a dtype that is already there takes an operator's time.
    if not has_onednn():
        return lambda x_TI: F.linear(x_TI if x_TI.dtype is dtype else x_TI.to(dtype), weight_OI, bias_O)
    reorder = cast("_Reorder", torch.ops.mkldnn._reorder_linear_weight)
    multiply = cast("_Pointwise", torch.ops.mkldnn._linear_pointwise)
    packed = reorder(weight_OI, _ROWS_HINT)
    return lambda x_TI: multiply(x_TI if x_TI.dtype is dtype else x_TI.to(dtype), packed, bias_O, "none", [], "")


def has_onednn() -> bool:
    """Whether this torch build has the oneDNN operators used here."""
    return (
        torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
