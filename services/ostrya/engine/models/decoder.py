"""The forward pass of every model: a list of layers, computed by a backend's operations. Mathematics only.

Nothing here writes in place or looks at a value, so a compiling backend can trace it, and can run `layer` over stacked
weights instead of calling `forward`.

Shapes: T tokens (padded), R rows (sequences), D hidden, V vocabulary; the rest in ops.py. The residual stream and the
norms are float32 whatever the weights are. Sizes are those of one shard (sharding.py): heads, inner values and logits
are the shard's, the residual stream is whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ostrya.engine.models.ops import Embedding, Experts, Kv, Linear, Norm, Ops
from ostrya.engine.models.spec import Activation, Attention, DecoderSpec, LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """qkv is fused: fewer, larger products."""

    norm: Norm
    qkv: Linear
    qk_norm: Norm | None
    """Over [.., N + K, H]."""
    output: Linear
    post_norm: Norm | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedWeights:
    """gate_up is fused."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedWeights:
    """A mixture of experts, and what every token goes through beside it."""

    experts: Experts
    shared: GatedWeights | None
    shared_gate: Linear | None
    """To one value a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnWeights:
    norm: Norm
    network: GatedWeights | RoutedWeights
    post_norm: Norm | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    mixer: AttentionWeights
    ffn: FfnWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of a model, as operations of a backend."""

    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Linear


def forward(
    ops: Ops[Kv],
    spec: DecoderSpec,
    weights: DecoderWeights,
    *,
    token_ids_T: torch.Tensor,
    kv: Sequence[Kv],
) -> tuple[torch.Tensor, tuple[Kv, ...]]:
    """x_TD, what `logits` takes, and each layer's keys and values with this step's in them."""
    x_TD = weights.embedding(token_ids_T)
    kept: list[Kv] = []
    for layer_spec, layer_weights, layer_kv in zip(spec.layers, weights.layers, kv, strict=True):
        x_TD, layer_kv_after = layer(ops, layer_spec, layer_weights, x_TD, layer_kv)
        kept.append(layer_kv_after)
    return x_TD, tuple(kept)


def logits(weights: DecoderWeights, x_TD: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """logits_RV in float32 of the tokens at `index_R`."""
    return weights.head(weights.norm(x_TD.index_select(0, index_R))).float()


def layer(ops: Ops[Kv], spec: LayerSpec, weights: LayerWeights, x_TD: torch.Tensor, kv: Kv) -> tuple[torch.Tensor, Kv]:
    """One layer over a ragged batch. x_TD may be overwritten."""
    mixed_TD, kv = _attention(ops, spec.mixer, weights.mixer, x_TD, kv)
    x_TD = ops.add(x_TD, mixed_TD)
    ffn = weights.ffn
    y_TD = _feed_forward(ops, spec.ffn.activation, ffn.network, ffn.norm(x_TD))
    return ops.add(x_TD, _normed(ffn.post_norm, y_TD)), kv


def _attention(
    ops: Ops[Kv], mixer: Attention, weights: AttentionWeights, x_TD: torch.Tensor, kv: Kv
) -> tuple[torch.Tensor, Kv]:
    qkv_TX = weights.qkv(weights.norm(x_TD))
    qkv_TXH = qkv_TX.view(*qkv_TX.shape[:-1], -1, mixer.sizes.head_dim)
    qkv_TXH = ops.rotate(qkv_TXH, mixer, weights.qk_norm)
    out_TE, kv = ops.attend(qkv_TXH, mixer, kv)
    return _normed(weights.post_norm, weights.output(out_TE)), kv


def _feed_forward(
    ops: Ops[Kv], activation: Activation, weights: GatedWeights | RoutedWeights, x_TD: torch.Tensor
) -> torch.Tensor:
    if isinstance(weights, GatedWeights):
        return weights.down(ops.gate(weights.gate_up(x_TD), activation))
    y_TD = ops.routed(weights.experts, x_TD)
    if weights.shared is None:
        return y_TD
    shared_TD = _feed_forward(ops, activation, weights.shared, x_TD)
    if weights.shared_gate is not None:
        shared_TD = shared_TD * weights.shared_gate(x_TD).sigmoid()
    return ops.add(y_TD, shared_TD)


def _normed(norm: Norm | None, y_TD: torch.Tensor) -> torch.Tensor:
    return y_TD if norm is None else norm(y_TD.float())
