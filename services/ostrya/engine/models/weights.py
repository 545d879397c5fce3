"""From a weight source to a decoder's weights: every name and shape a model needs is in here. Called by backends."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol

import torch

from ostrya.engine.models.decoder import AttentionWeights, DecoderWeights, FfnWeights, LayerWeights
from ostrya.engine.models.ops import Builder, Embedding, Linear, Matrix, Norm
from ostrya.engine.models.quantized import Quantized, joined
from ostrya.engine.models.sharding import Mesh, Region, Sharding, dims_of
from ostrya.engine.models.source import Wanted, WeightSource, cut
from ostrya.engine.models.spec import Attention, DecoderSpec, LayerSpec
from ostrya.errors import ModelLoadError


def read_weights(source: WeightSource, builder: Builder, sharding: Sharding | None = None) -> DecoderWeights:
    """What the builder's shard has of a model, or all of it. ModelLoadError, before anything is read, if a tensor is
    missing or has another shape, or if the checkpoint holds one that is not used."""
    sharding = sharding or Sharding(source.spec, Mesh())
    order = _Order(source)
    with torch.device("meta"):
        _read(order, _Dry(builder), sharding)
    if unread := source.unread():
        # A bias or a query norm, say: another model than the one computed here.
        raise ModelLoadError(
            f"{len(unread)} tensors of the checkpoint are not part of a model of its kind, first {unread[0]}"
        )
    with source.ahead(order.wanted):
        return _read(source, builder, sharding)


class _Source(Protocol):
    """What of a WeightSource is needed to read."""

    @property
    def spec(self) -> DecoderSpec: ...
    def require(self, name: str, shape: tuple[int, ...]) -> None: ...
    def read_into(self, name: str, out: torch.Tensor, region: Region) -> None: ...
    def quantized(self, name: str, region: Region) -> Quantized | None: ...


class _Order:
    """Reads nothing, and writes down what would be read, in order."""

    def __init__(self, source: WeightSource) -> None:
        self.spec, self.require = source.spec, source.require
        self.wanted: list[Wanted] = []

    def read_into(self, name: str, out: torch.Tensor, region: Region) -> None:
        self.wanted.append(Wanted(name, region))

    def quantized(self, name: str, region: Region) -> Quantized | None:
        return None


class _Dry:
    """A Builder that asks for every matrix once and builds nothing."""

    def __init__(self, builder: Builder) -> None:
        self.dtype, self.shard = builder.dtype, builder.shard

    def linear(self, matrix: Matrix, bias_O: torch.Tensor | None = None) -> Linear:
        return _nothing(matrix.dense())

    def head(self, matrix: Matrix) -> Linear:
        return _nothing(matrix.dense())

    def embedding(self, table: Matrix, scale: float) -> Embedding:
        return _nothing(table.dense())

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return _nothing(weight)


def _nothing(of: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x


def _read(source: _Source, builder: Builder, sharding: Sharding) -> DecoderWeights:
    spec = source.spec
    reader = _Reader(source, builder, sharding)
    table = _ReadOnce(reader.matrix({"token_embd": spec.vocab_size}, spec.hidden))
    return DecoderWeights(
        embedding=builder.embedding(table, spec.embedding_scale),
        layers=tuple(reader.layer(i, layer) for i, layer in enumerate(spec.layers)),
        norm=reader.norm("output_norm"),
        head=builder.head(table if spec.tied_embeddings else reader.matrix({"output": spec.vocab_size}, spec.hidden)),
    )


class _Tensors:
    """Whose parts a builder wants: of one shard, or of all in a leading dimension."""

    def __init__(self, source: _Source, sharding: Sharding, shard: int | None) -> None:
        self._source, self._sharding = source, sharding
        self._is_stacked = shard is None
        self.shards = range(sharding.mesh.num_shards) if shard is None else range(shard, shard + 1)

    def region(self, name: str, shape: tuple[int, ...], shard: int | None = None) -> Region:
        """Of a shard, or of any."""
        return self._sharding.region(name, shape, self.shards[0] if shard is None else shard)

    def read(self, shape_of: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> torch.Tensor:
        """Tensors below each other."""
        # All are asked for before memory is set aside.
        for name, shape in shape_of.items():
            self._source.require(name, shape)
        shards = self.shards if any(map(dims_of, shape_of)) else self.shards[:1]
        regions = [{name: self.region(name, shape, shard) for name, shape in shape_of.items()} for shard in shards]
        num_rows = [region.local_shape[0] for region in regions[0].values()]
        _, *row_shape = next(iter(regions[0].values())).local_shape
        out = torch.empty((len(regions), sum(num_rows), *row_shape), dtype=dtype)
        for name, part in zip(shape_of, torch.split(out, num_rows, dim=1), strict=True):
            self._fill(name, part, [of_shard[name] for of_shard in regions])
        return out if self._is_stacked and any(map(dims_of, shape_of)) else out[0]

    def _fill(self, name: str, out: torch.Tensor, regions: Sequence[Region]) -> None:
        """`out` has those of all shards wanted."""
        if len(regions) > 1 and len({region.parts[0] for region in regions}) == 1:
            # Divided in its columns: a row of the file has something for every shard, and is read once.
            whole = torch.empty(regions[0].shape, dtype=out.dtype)
            self._source.read_into(name, whole, Region.whole(regions[0].shape))
            for part, region in zip(out, regions, strict=True):
                part.copy_(cut(whole, region.parts))
            return
        for part, region in zip(out, regions, strict=True):
            self._source.read_into(name, part, region)

    def quantized(self, shape_of: Mapping[str, tuple[int, int]]) -> Quantized | None:
        """The same of one shard."""
        parts = []
        for name, shape in shape_of.items():
            part = self._source.quantized(name, self.region(name, shape))
            if part is None:
                return None
            parts.append(part)
        return joined(parts)


class _Matrix:
    """A Matrix."""

    def __init__(self, tensors: _Tensors, shape_of: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> None:
        self._tensors, self._shape_of, self._dtype = tensors, shape_of, dtype
        regions = [tensors.region(name, shape) for name, shape in shape_of.items()]
        self.shape = sum(region.local_shape[0] for region in regions), regions[0].local_shape[1]
        self.is_partial = all((dims := dims_of(name)) is not None and dims[-1] is not None for name in shape_of)

    def dense(self) -> torch.Tensor:
        return self._tensors.read(self._shape_of, self._dtype)

    def quantized(self) -> Quantized | None:
        return self._tensors.quantized(self._shape_of)


class _ReadOnce:
    """A Matrix for several operations."""

    def __init__(self, matrix: _Matrix) -> None:
        self.shape, self.is_partial = matrix.shape, matrix.is_partial
        self.dense, self.quantized = cache(matrix.dense), cache(matrix.quantized)


class _Reader:
    def __init__(self, source: _Source, builder: Builder, sharding: Sharding) -> None:
        self._tensors = _Tensors(source, sharding, builder.shard)
        self._builder = builder
        self._local = sharding.local
        self._hidden, self._eps = source.spec.hidden, source.spec.norm_eps

    def layer(self, i: int, layer: LayerSpec) -> LayerWeights:
        inner, block = layer.ffn.sizes.inner, f"blk.{i}"
        return LayerWeights(
            mixer=self._attention(i, layer),
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
        """Of tensors with that many rows each, below each other."""
        shape_of = {f"{name}.weight": (num_rows, num_inputs) for name, num_rows in rows_of.items()}
        return _Matrix(self._tensors, shape_of, self._builder.dtype)

    def _norm_weight(self, name: str, size: int) -> torch.Tensor:
        return self._tensors.read({f"{name}.weight": (size,)}, torch.float32)

    def _attention(self, i: int, layer: LayerSpec) -> AttentionWeights:
        block, sizes = f"blk.{i}", layer.mixer.sizes
        q_size, kv_size = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        rows_of = {f"{block}.attn_q": q_size, f"{block}.attn_k": kv_size, f"{block}.attn_v": kv_size}
        return AttentionWeights(
            norm=self.norm(f"{block}.attn_norm"),
            qkv=self._linear(rows_of, self._hidden, biased=sizes.qkv_bias),
            qk_norm=self._qk_norm(block, self._local.layers[i].mixer) if sizes.qk_norm else None,
            output=self._linear({f"{block}.attn_output": self._hidden}, q_size),
            post_norm=self.norm(f"{block}.post_attention_norm") if layer.post_norms else None,
        )

    def _qk_norm(self, block: str, mixer: Attention) -> Norm:
        """One norm over a shard's queries and keys together: an operator costs more than its arithmetic."""
        sizes = mixer.sizes
        q_H, k_H = (self._norm_weight(f"{block}.attn_{which}_norm", sizes.head_dim) for which in "qk")
        weight_CH = torch.cat([q_H.expand(sizes.num_heads, -1), k_H.expand(sizes.num_kv_heads, -1)])
        return self._builder.norm(weight_CH, self._eps)

    def _linear(self, rows_of: Mapping[str, int], num_inputs: int, *, biased: bool = False) -> Linear:
        """The matrices of that many rows each, as one."""
        biases: Mapping[str, tuple[int, ...]] = {f"{name}.bias": (num_rows,) for name, num_rows in rows_of.items()}
        bias_O = self._tensors.read(biases, self._builder.dtype) if biased else None
        return self._builder.linear(self.matrix(rows_of, num_inputs), bias_O)
