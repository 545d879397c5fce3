"""Which kernel a torchtpu process attends by: on a TPU the one that jax ships, through torch_tpu; elsewhere none, and
the plain operations of static_ops.py gather every page of a bucket. Asked by torchtpu_runner.py.

Shapes: see kernels/pallas_attention.py.
"""

import logging
from importlib import util
from typing import Protocol

import torch

from ostrya.engine.backends import torchtpu_bridge as bridge
from ostrya.engine.models.spec import DecoderSpec

log = logging.getLogger(__name__)

_LANES = 128
"""A head of the kernel fills a whole number of vector registers."""


class Kernel(Protocol):
    """See kernels/pallas_attention.py. The first tensor is donated: what comes back is in its place."""

    def __call__(
        self,
        kv_ACH: torch.Tensor,
        q_TNH: torch.Tensor,
        kv_TCH: torch.Tensor,
        slots_T: torch.Tensor,
        kv_lens_R: torch.Tensor,
        page_table_RP: torch.Tensor,
        query_start: torch.Tensor,
        num_rows: torch.Tensor,
        page_size: int,
        scale: float,
        window_tokens: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def kernel_for(spec: DecoderSpec, device: torch.device) -> Kernel | None:
    """None where it cannot run; says why, once."""
    head_dims = {layer.mixer.sizes.head_dim for layer in spec.layers}
    if device.type != "tpu":
        return None
    if util.find_spec("jax") is None:
        log.warning("attention gathers whole buckets of pages: jax, which has the kernel for TPUs, is not installed")
        return None
    if odd := sorted(size for size in head_dims if size % _LANES):
        log.warning(
            "attention gathers whole buckets of pages: heads have %d values, and the kernel for TPUs takes multiples "
            "of %d",
            *(odd[0], _LANES),
        )
        return None
    from ostrya.engine.backends.kernels.pallas_attention import write_and_attend

    return bridge.jax_op("ostrya::write_and_attend", write_and_attend, donated=[0])
