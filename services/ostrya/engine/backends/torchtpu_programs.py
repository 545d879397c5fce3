"""What a torchtpu process computes: functions of tensors, of which torch.compile makes a program for each shape. The
explicit interpreter: a process has one shard, and functional collectives inside the programs bring shards together.

Nothing is written in place: torch_tpu copies an input back that a program wrote to. The keys and values that a step
returns are the ones to keep.

Shapes: T tokens, R rows, D hidden, v the shard's part of the vocabulary V, n shards, L the largest row bucket, N tokens
whose logits are asked for, A slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from ostrya.engine.backends.static_ops import StaticOps
from ostrya.engine.backends.step_inputs import as_last_tokens, fed_token_ids, packed_size, static_ops, unpacked
from ostrya.engine.models.decoder import DecoderWeights, forward, logits
from ostrya.engine.models.spec import Attention, DecoderSpec
from ostrya.engine.plan import Bucket

Kv = tuple[torch.Tensor, ...]


class Shards:
    """Collectives, for use inside programs."""

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over processes."""
        return x if self.size == 1 else functional.all_reduce(x, "sum", _everyone())

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...]: that of each process."""
        if self.size == 1:
            return x.unsqueeze(0)
        return functional.all_gather_tensor(x.contiguous(), 0, _everyone()).view(self.size, *x.shape)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Of [n, ...] x[i] goes to process i; [n, ...]: what each process had for this one."""
        return functional.all_to_all_single(x, None, None, _everyone())


class FunctionalOps:
    """StaticOps that leave the keys and values they are given as they are."""

    def __init__(self, ops: StaticOps) -> None:
        self.add, self.gate, self.routed, self.rotate = ops.add, ops.gate, ops.routed, ops.rotate
        self._ops = ops

    def attend(
        self, qkv_TXH: torch.Tensor, mixer: Attention, kv_ACH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # In a program the copy and what is written to it become one operator.
        return self._ops.attend(qkv_TXH, mixer, kv_ACH.clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Of one model."""

    spec: DecoderSpec
    """Of the shard."""
    weights: DecoderWeights
    shards: Shards
    page_size: int
    num_last: int
    """L"""

    def step(
        self, values: torch.Tensor, last_tokens_L: torch.Tensor, kv: Kv, bucket: Bucket
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Kv]:
        """last_tokens_L with the token of each row's largest logit, logits_Rv, x_TD and the keys and values."""
        inputs = unpacked(values, bucket)
        ops = FunctionalOps(static_ops(inputs, page_size=self.page_size))
        token_ids_T = fed_token_ids(inputs, last_tokens_L)
        x_TD, kv = forward(ops, self.spec, self.weights, token_ids_T=token_ids_T, kv=kv)
        logits_Rv = logits(self.weights, x_TD, inputs.logits_index_R)
        return as_last_tokens(self._largest(logits_Rv), self.num_last), logits_Rv, x_TD, kv

    def whole(self, logits_Rv: torch.Tensor) -> torch.Tensor:
        """logits_RV."""
        return self.shards.gather(logits_Rv).transpose(0, 1).flatten(1)

    def logits_at(self, x_TD: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        """logits_NV."""
        return self.whole(logits(self.weights, x_TD, index_N))

    def _largest(self, logits_Rv: torch.Tensor) -> torch.Tensor:
        """tokens_R; the first of equals."""
        value_R, index_R = logits_Rv.max(-1)
        if self.shards.size == 1:
            return index_R
        # Two numbers of each part instead of the part; a token id is exact in float32.
        token_R = (index_R + self.shards.rank * self.spec.vocab_size).float()
        values_nR, tokens_nR = self.shards.gather(torch.stack([value_R, token_R])).unbind(1)
        return tokens_nR.gather(0, values_nR.max(0, keepdim=True).indices).squeeze(0).long()


def step_arguments(
    bucket: Bucket, last_tokens_L: torch.Tensor, kv: Kv
) -> tuple[torch.Tensor, torch.Tensor, Kv, Bucket]:
    """Of a step that only touches page 0, which nobody owns."""
    values = torch.zeros(packed_size(bucket), dtype=torch.int32)
    return values.to(last_tokens_L.device), last_tokens_L, kv, bucket


def sizes_of(buckets: Sequence[Bucket]) -> tuple[list[int], list[int]]:
    """Each number of tokens, and of rows, once."""
    return sorted({bucket.tokens for bucket in buckets}), sorted({bucket.rows for bucket in buckets})


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
