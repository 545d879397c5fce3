"""What a torchtpu process computes: functions of tensors, of which torch.compile makes a program for each shape. The
explicit interpreter: a process has one shard, and functional collectives inside the programs bring shards together.

Shapes: T tokens, R rows, D hidden, v the shard's part of the vocabulary V, n shards, L the largest row bucket, N tokens
whose logits are asked for, A slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from ostrya.engine.backends.step_inputs import Layout, as_last_tokens
from ostrya.engine.backends.torchtpu_attention import Kernel, attention_inputs
from ostrya.engine.models.decoder import DecoderWeights, forward, logits
from ostrya.engine.models.spec import DecoderSpec
from ostrya.engine.plan import Bucket

Kv = tuple[torch.Tensor, ...]
StepArguments = tuple[torch.Tensor, torch.Tensor, Kv, Bucket]


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
    kernel: Kernel | None = None
    """None: block_attention.py."""

    def layout(self, bucket: Bucket) -> Layout:
        """Of what a step is sent."""
        return Layout(bucket, attention_inputs(bucket, page_size=self.page_size, kernel=self.kernel))

    def step(
        self, values: torch.Tensor, last_tokens_L: torch.Tensor, kv: Kv, bucket: Bucket
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Kv]:
        """last_tokens_L with the token of each row's largest logit, logits_Rv, x_TD and the keys and values to keep."""
        ops, token_ids_T, index_R = self.layout(bucket).begun(values, last_tokens_L)
        x_TD, kv = forward(ops, self.spec, self.weights, token_ids_T=token_ids_T, kv=kv)
        logits_Rv = logits(self.weights, x_TD, index_R)
        return as_last_tokens(self._largest(logits_Rv), self.num_last), logits_Rv, x_TD, kv

    def step_arguments(self, bucket: Bucket, last_tokens_L: torch.Tensor, kv: Kv) -> StepArguments:
        """Of a step that only touches page 0, which nobody owns."""
        values = torch.zeros(sum(self.layout(bucket).sizes), dtype=torch.int32)
        return values.to(last_tokens_L.device), last_tokens_L, kv, bucket

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


def sizes_of(buckets: Sequence[Bucket]) -> tuple[list[int], list[int]]:
    """Each number of tokens, and of rows, once."""
    return sorted({bucket.tokens for bucket in buckets}), sorted({bucket.rows for bucket in buckets})


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
