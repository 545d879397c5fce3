"""From a weight source to a decoder's weights: every name and shape a model needs is in here. Called by backends."""

import torch

from ostrya.engine.models.decoder import AttentionWeights, DecoderWeights, FfnWeights, LayerWeights
from ostrya.engine.models.ops import Builder, Linear, Norm
from ostrya.engine.models.source import WeightSource
from ostrya.engine.models.spec import Attention, LayerSpec
from ostrya.errors import ModelLoadError


def read_weights(source: WeightSource, builder: Builder) -> DecoderWeights:
    """ModelLoadError if a tensor is missing or has another shape, or if the checkpoint holds one that is not used."""
    spec = source.spec
    reader = _Reader(source, builder)
    vocab_VD = (spec.vocab_size, spec.hidden)
    table_VD = reader.values("token_embd.weight", vocab_VD)
    weights = DecoderWeights(
        embedding=builder.embedding(table_VD, spec.embedding_scale),
        layers=tuple(reader.layer(i, layer) for i, layer in enumerate(spec.layers)),
        norm=reader.norm("output_norm"),
        head=builder.linear(table_VD if spec.tied_embeddings else reader.values("output.weight", vocab_VD)),
    )
    if unread := source.unread():
        # A bias or a query norm, say: another model than the one computed here.
        raise ModelLoadError(
            f"{len(unread)} tensors of the checkpoint are not part of a model of its kind, first {unread[0]}"
        )
    return weights


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
        return self._builder.norm(self.values(f"{name}.weight", (self._hidden,), torch.float32), self._eps)

    def values(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor; in the builder's dtype unless told otherwise."""
        self._source.require(name, shape)
        out = torch.empty(shape, dtype=dtype or self._builder.dtype)
        self._source.read_into(name, out)
        return out

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
        q_H, k_H = (
            self.values(f"{block}.attn_{which}_norm.weight", (sizes.head_dim,), torch.float32) for which in "qk"
        )
        weight_CH = torch.cat([q_H.expand(sizes.num_heads, -1), k_H.expand(sizes.num_kv_heads, -1)])
        return self._builder.norm(weight_CH, self._eps)

    def _linear(self, rows_of: dict[str, int], num_inputs: int, *, biased: bool = False) -> Linear:
        """The matrices of that many rows each, as one."""
        weight_OI = self._joined("weight", rows_of, (num_inputs,))
        return self._builder.linear(weight_OI, self._joined("bias", rows_of, ()) if biased else None)

    def _joined(self, kind: str, rows_of: dict[str, int], row_shape: tuple[int, ...]) -> torch.Tensor:
        # All are asked for before memory is set aside.
        for name, num_rows in rows_of.items():
            self._source.require(f"{name}.{kind}", (num_rows, *row_shape))
        out = torch.empty((sum(rows_of.values()), *row_shape), dtype=self._builder.dtype)
        first = 0
        for name, num_rows in rows_of.items():
            self._source.read_into(f"{name}.{kind}", out[first : first + num_rows])
            first += num_rows
        return out
