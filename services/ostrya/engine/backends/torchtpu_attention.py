"""How a torchtpu process attends: on a TPU by the kernel that jax ships, through torch_tpu; where that cannot run, by
block_attention.py, which reads every page of a bucket. Called by torchtpu_runner.py and, inside programs, by
torchtpu_programs.py.

Nothing is written in place: torch_tpu copies an input back that a program wrote to. The keys and values that come back
are the ones to keep, each key beside its value.

Shapes: see kernels/pallas_attention.py and block_attention.py.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from typing import Protocol

import numpy as np
import torch

from ostrya.engine.backends import torchtpu_bridge as bridge
from ostrya.engine.backends.kernels.block_attention import Blocks
from ostrya.engine.backends.static_ops import StaticAttention, TokenInputs
from ostrya.engine.backends.step_inputs import AttentionInputs
from ostrya.engine.models.spec import Attention, DecoderSpec
from ostrya.engine.plan import I32, Bucket, StepPlan

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
        log.warning("attention reads whole buckets of pages: jax, which has the kernel for TPUs, is not installed")
        return None
    if odd := sorted(size for size in head_dims if size % _LANES):
        log.warning(
            "attention reads whole buckets of pages: heads have %d values, and the kernel for TPUs takes multiples "
            "of %d",
            *(odd[0], _LANES),
        )
        return None
    from ostrya.engine.backends.kernels.pallas_attention import write_and_attend

    return bridge.jax_op("ostrya::write_and_attend", write_and_attend, donated=[0])


@dataclass(frozen=True, slots=True)
class KernelRows:
    """AttentionInputs of the kernel."""

    bucket: Bucket
    page_size: int
    kernel: Kernel

    @property
    def sizes(self) -> list[int]:
        return [self.bucket.rows, self.bucket.rows + 1, 1]

    def packed(self, plan: StepPlan) -> list[I32]:
        return [plan.kv_lens, plan.query_start, np.array([plan.num_rows], np.int32)]

    def attention(self, tokens: TokenInputs, parts: Sequence[torch.Tensor]) -> StaticAttention:
        kv_lens_R, query_start, num_rows = parts

        def attend(
            q_TNH: torch.Tensor, kv_TCH: torch.Tensor, mixer: Attention, kv_ACH: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            out_TNH, kv_ACH = self.kernel(
                kv_ACH,
                q_TNH.contiguous(),
                kv_TCH.contiguous(),
                tokens.slots_T.int(),
                kv_lens_R,
                tokens.page_table_RP,
                query_start,
                num_rows,
                self.page_size,
                mixer.scale,
                mixer.sizes.window_tokens,
            )
            return out_TNH.flatten(-2), kv_ACH

        return attend


@dataclass(frozen=True, slots=True)
class BlockRows:
    """AttentionInputs of block_attention.py, for one shard alone."""

    blocks: Blocks

    @property
    def sizes(self) -> list[int]:
        return self.blocks.sizes

    def packed(self, plan: StepPlan) -> list[I32]:
        return self.blocks.packed(plan)

    def attention(self, tokens: TokenInputs, parts: Sequence[torch.Tensor]) -> StaticAttention:
        of_shards = self.blocks.attention(tokens, parts)

        def attend(
            q_TNH: torch.Tensor, kv_TCH: torch.Tensor, mixer: Attention, kv_ACH: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # In a program the copy and what is written to it become one operator.
            kv_ASCH = kv_ACH.clone().unsqueeze(1)
            out_STE, kv_ASCH = of_shards(q_TNH.unsqueeze(0), kv_TCH.unsqueeze(0), mixer, kv_ASCH)
            return out_STE.squeeze(0), kv_ASCH.squeeze(1)

        return attend


def attention_inputs(bucket: Bucket, *, page_size: int, kernel: Kernel | None) -> AttentionInputs:
    """Of a bucket."""
    return BlockRows(Blocks(bucket, page_size)) if kernel is None else KernelRows(bucket, page_size, kernel)
