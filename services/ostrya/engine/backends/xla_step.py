"""What backend xla compiles: one step as a function of a few tensors. Called by xla.py; plain torch, so that it runs
eagerly too.

Shapes: T tokens (padded), R rows, P pages of a row, L rows of the largest bucket, S shards, V a shard's vocabulary,
D hidden, A slots, C = 2K, H head dim; the rest in kernels/.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ostrya.engine.backends.step_inputs import Layout, as_last_tokens
from ostrya.engine.models.decoder import DecoderWeights, forward, logits
from ostrya.engine.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is the same in every step."""

    spec: DecoderSpec
    """Of one shard."""
    weights: DecoderWeights
    page_size: int
    num_last: int
    """L"""
    marked: Callable[[torch.Tensor, int | None], torch.Tensor]
    """The tensor, divided among the devices along that dimension, or whole on each: a result that is not marked lies as
    the compiler likes, and the next program reads something else."""


def step_of(model: Model, layout: Layout) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The step of a bucket: (packed, last_tokens_L, *kv_ASCH) -> greedy tokens_L, logits_SRV, x_TD. Keys and values are
    written in place."""

    def step(packed: torch.Tensor, last_tokens_L: torch.Tensor, *kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ops, token_ids_T, index_R = layout.begun(packed, last_tokens_L)
        x_TD, _ = forward(ops, model.spec, model.weights, token_ids_T=token_ids_T, kv=kv)
        logits_SRV = logits(model.weights, x_TD, index_R)
        tokens_L = as_last_tokens(greedy(logits_SRV), model.num_last)
        return model.marked(tokens_L, None), model.marked(logits_SRV, 0), model.marked(x_TD, None)

    return step


def head_of(model: Model) -> Callable[..., tuple[torch.Tensor, ...]]:
    """x_ND -> logits_NV: of any token of a step."""

    def head(x_ND: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (model.marked(_whole_vocabulary(model.weights.head(model.weights.norm(x_ND)).float()), None),)

    return head


def whole_of(model: Model) -> Callable[..., tuple[torch.Tensor, ...]]:
    """logits_SRV -> logits_RV. What lies divided is not fetched: torch_xla compiles a program for that, each time."""
    return lambda logits_SRV: (model.marked(_whole_vocabulary(logits_SRV), None),)


def greedy(logits_SRV: torch.Tensor) -> torch.Tensor:
    """tokens_R, int32: the first of the largest logits; of each shard only its best goes to the others."""
    best_SR, index_SR = logits_SRV.max(dim=-1)
    shard_R = best_SR.argmax(dim=0)
    local_R = index_SR.gather(0, shard_R[None])[0]
    return (local_R + shard_R * logits_SRV.shape[-1]).int()


def _whole_vocabulary(logits_SRV: torch.Tensor) -> torch.Tensor:
    """logits_RV of the whole model."""
    return logits_SRV.transpose(0, 1).flatten(1)
