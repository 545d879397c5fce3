"""From a weight source to a decoder's weights: every name and shape a model needs is in here. Called by backends."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from ostrya.engine.models.decoder import AttentionWeights, DecoderWeights, FfnWeights, LayerWeights
from ostrya.engine.models.ops import Builder, Linear, Norm
from ostrya.engine.models.quantized import Quantized, joined
from ostrya.engine.models.source import WeightSource
from ostrya.engine.models.spec import Attention, LayerSpec
from ostrya.errors import ModelLoadError


def read_weights(source: WeightSource, builder: Builder) -> DecoderWeights:
    """ModelLoadError if a tensor is missing or has another shape, or if the checkpoint holds one that is not used."""
    spec = source.spec
    reader = _Reader(source, builder)
    table = _ReadOnce(reader.matrix({"token_embd": spec.vocab_size}, spec.hidden))
    weights = DecoderWeights(
        embedding=builder.embedding(table, spec.embedding_scale),
        layers=tuple(reader.layer(i, layer) for i, layer in enumerate(spec.layers)),
        norm=reader.norm("output_norm"),
        head=builder.head(table if spec.tied_embeddings else reader.matrix({"output": spec.vocab_size}, spec.hidden)),
    )
    if unread := source.unread():
        # A bias or a query norm, say: another model than the one computed here.
        raise ModelLoadError(
            f"{len(unread)} tensors of the checkpoint are not part of a model of its kind, first {unread[0]}"
        )
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """A Matrix."""

    source: WeightSource
    rows_of: Mapping[str, int]
    """Tensor -> how many rows it has, in the order in which they stand below each other."""
    num_inputs: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.rows_of.values()), self.num_inputs

    def dense(self) -> torch.Tensor:
        return _stacked(self.source, "weight", self.rows_of, (self.num_inputs,), self.dtype)

    def quantized(self) -> Quantized | None:
        parts = []
        for name, num_rows in self.rows_of.items():
            part = self.source.quantized(f"{name}.weight", (num_rows, self.num_inputs))
            if part is None:
                return None
            parts.append(part)
        return joined(parts)


class _ReadOnce:
    """A Matrix for several operations."""

    def __init__(self, matrix: _Matrix) -> None:
        self.shape = matrix.shape
        self.dense, self.quantized = cache(matrix.dense), cache(matrix.quantized)


class _Reader:
    def __init__(self, source: WeightSource, builder: Builder) -> None:
        self._source = source
        self._builder = builder
        self._hidden, self._eps = source.spec.hidden, source.spec.norm_eps

    def layer(self, i: int, layer: LayerSpec) -> LayerWeights:
        inner, block = layer.ffn.sizes.inner, f"blk.{i}"
        return LayerWeights(
            mixer=self._attention(block, layer),
            ffn=FfnWeights(
                norm=self.norm(f"{block}.ffn_norm"),
                gate_up=self._linear({f"{block}.ffn_gate": inner, f"{block}.ffn_up": inner}, self._hidden),
                down=self._linear({f"{block}.ffn_down": self._hidden}, inner),
                post_norm=self.norm(f"{block}.post_ffw_norm") if layer.post_norms else None,
            ),
        )

    def norm(self, name: str) -> Norm:
        return self._builder.norm(self._norm_weight(name, self._hidden), self._eps)

    def matrix(self, rows_of: Mapping[str, int], num_inputs: int) -> _Matrix:
        return _Matrix(source=self._source, rows_of=rows_of, num_inputs=num_inputs, dtype=self._builder.dtype)

    def _norm_weight(self, name: str, size: int) -> torch.Tensor:
        return _stacked(self._source, "weight", {name: size}, (), torch.float32)

    def _attention(self, block: str, layer: LayerSpec) -> AttentionWeights:
        sizes = layer.mixer.sizes
        q_size, kv_size = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        rows_of = {f"{block}.attn_q": q_size, f"{block}.attn_k": kv_size, f"{block}.attn_v": kv_size}
        return AttentionWeights(
            norm=self.norm(f"{block}.attn_norm"),
            qkv=self._linear(rows_of, self._hidden, biased=sizes.qkv_bias),
            qk_norm=self._qk_norm(block, layer.mixer) if sizes.qk_norm else None,
            output=self._linear({f"{block}.attn_output": self._hidden}, q_size),
            post_norm=self.norm(f"{block}.post_attention_norm") if layer.post_norms else None,
        )

    def _qk_norm(self, block: str, mixer: Attention) -> Norm:
        """One norm over queries and keys together: an operator costs more than its arithmetic."""
        sizes = mixer.sizes
        q_H, k_H = (self._norm_weight(f"{block}.attn_{which}_norm", sizes.head_dim) for which in "qk")
        weight_CH = torch.cat([q_H.expand(sizes.num_heads, -1), k_H.expand(sizes.num_kv_heads, -1)])
        return self._builder.norm(weight_CH, self._eps)

    def _linear(self, rows_of: dict[str, int], num_inputs: int, *, biased: bool = False) -> Linear:
        """The matrices of that many rows each, as one."""
        bias_O = _stacked(self._source, "bias", rows_of, (), self._builder.dtype) if biased else None
        return self._builder.linear(self.matrix(rows_of, num_inputs), bias_O)


def _stacked(
    source: WeightSource, kind: str, rows_of: Mapping[str, int], row_shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    # All are asked for before memory is set aside.
    for name, num_rows in rows_of.items():
        source.require(f"{name}.{kind}", (num_rows, *row_shape))
    out = torch.empty((sum(rows_of.values()), *row_shape), dtype=dtype)
    first = 0
    for name, num_rows in rows_of.items():
        source.read_into(f"{name}.{kind}", out[first : first + num_rows])
        first += num_rows
    return out
