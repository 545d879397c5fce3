"""From a weight source to a decoder's weights: every name and shape a model needs is in here. Called by backends."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol

import torch

from ostrya.engine.models.decoder import (
    AttentionWeights,
    DecoderWeights,
    FfnWeights,
    GatedWeights,
    LayerWeights,
    RoutedWeights,
)
from ostrya.engine.models.ops import Builder, Embedding, Experts, Linear, Matrix, Norm
from ostrya.engine.models.quantized import Quantized, joined
from ostrya.engine.models.sharding import Mesh, Part, Region, Sharding, dims_of
from ostrya.engine.models.source import Wanted, WeightSource, cut
from ostrya.engine.models.spec import Attention, DecoderSpec, LayerSpec, RoutedFfn
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

    def router(self, weight_ED: torch.Tensor) -> Linear:
        return _nothing(weight_ED)

    def experts(self, ffn: RoutedFfn, router: Linear, gate_up: Sequence[Matrix], down: Sequence[Matrix]) -> Experts:
        for matrix in (*gate_up, *down):
            matrix.dense()
        return router

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

    def region(
        self, name: str, shape: tuple[int, ...], *, shard: int | None = None, expert: int | None = None
    ) -> Region:
        """Of a shard, or of any; of all its experts, or of one."""
        region = self._sharding.region(name, shape, self.shards[0] if shard is None else shard)
        return region if expert is None else region.only(expert)

    def read(
        self, shape_of: Mapping[str, tuple[int, ...]], dtype: torch.dtype, *, expert: int | None = None
    ) -> torch.Tensor:
        """Tensors below each other; of tensors with a dimension of experts, one expert's."""
        # All are asked for before memory is set aside.
        for name, shape in shape_of.items():
            self._source.require(name, shape)
        shards = self.shards if any(map(dims_of, shape_of)) else self.shards[:1]
        regions = [
            {name: self.region(name, shape, shard=shard, expert=expert) for name, shape in shape_of.items()}
            for shard in shards
        ]
        first = 0 if expert is None else 1
        num_rows = [region.local_shape[first] for region in regions[0].values()]
        row_shape = next(iter(regions[0].values())).local_shape[first + 1 :]
        out = torch.empty((len(regions), sum(num_rows), *row_shape), dtype=dtype)
        for name, part in zip(shape_of, torch.split(out, num_rows, dim=1), strict=True):
            self._fill(name, part, [of_shard[name] for of_shard in regions])
        return out if self._is_stacked and any(map(dims_of, shape_of)) else out[0]

    def _fill(self, name: str, out: torch.Tensor, regions: Sequence[Region]) -> None:
        """`out` has those of all shards wanted."""
        first = regions[0]
        if len(regions) > 1 and len({region.parts[:-1] for region in regions}) == 1:
            # Divided in its columns: a row of the file has something for every shard, and is read once.
            rows = Region(first.shape, (*first.parts[:-1], Part.whole(first.shape[-1])))
            whole = torch.empty(rows.local_shape, dtype=out.dtype)
            self._source.read_into(name, whole, rows)
            leading = tuple(map(Part.whole, rows.local_shape[:-1]))
            for part, region in zip(out, regions, strict=True):
                part.view(first.local_shape).copy_(cut(whole, (*leading, region.parts[-1])))
            return
        for part, region in zip(out, regions, strict=True):
            self._source.read_into(name, part.view(region.local_shape), region)

    def quantized(self, shape_of: Mapping[str, tuple[int, ...]], *, expert: int | None = None) -> Quantized | None:
        """The same of one shard."""
        parts = []
        for name, shape in shape_of.items():
            part = self._source.quantized(name, self.region(name, shape, expert=expert))
            if part is None:
                return None
            parts.append(part)
        return joined(parts)


class _Matrix:
    """A Matrix: of tensors that are matrices, or of one expert's in those that have a dimension of experts."""

    def __init__(
        self,
        tensors: _Tensors,
        shape_of: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        *,
        expert: int | None = None,
    ) -> None:
        self._tensors, self._shape_of, self._dtype, self._expert = tensors, shape_of, dtype, expert
        regions = [tensors.region(name, shape, expert=expert) for name, shape in shape_of.items()]
        self.shape = sum(region.local_shape[-2] for region in regions), regions[0].local_shape[-1]
        self.is_partial = all((dims := dims_of(name)) is not None and dims[-1] is not None for name in shape_of)

    def dense(self) -> torch.Tensor:
        return self._tensors.read(self._shape_of, self._dtype, expert=self._expert)

    def quantized(self) -> Quantized | None:
        return self._tensors.quantized(self._shape_of, expert=self._expert)


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
        block, ffn = f"blk.{i}", layer.ffn
        return LayerWeights(
            mixer=self._attention(i, layer),
            ffn=FfnWeights(
                norm=self.norm(f"{block}.ffn_norm"),
                network=self._routed(i, ffn) if isinstance(ffn, RoutedFfn) else self._gated(block, ffn.sizes.inner),
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

    def _gated(self, block: str, inner: int, suffix: str = "") -> GatedWeights:
        gate_up = {f"{block}.ffn_gate{suffix}": inner, f"{block}.ffn_up{suffix}": inner}
        return GatedWeights(
            gate_up=self._linear(gate_up, self._hidden),
            down=self._linear({f"{block}.ffn_down{suffix}": self._hidden}, inner),
        )

    def _routed(self, i: int, ffn: RoutedFfn) -> RoutedWeights:
        block, sizes, local = f"blk.{i}", ffn.sizes, self._local.layers[i].ffn
        assert isinstance(local, RoutedFfn)
        places, hidden = range(local.sizes.num_experts), self._hidden
        outer = dict.fromkeys(
            (f"{block}.ffn_gate_exps", f"{block}.ffn_up_exps"), (sizes.num_experts, sizes.inner, hidden)
        )
        inner = {f"{block}.ffn_down_exps": (sizes.num_experts, hidden, sizes.inner)}
        return RoutedWeights(
            experts=self._builder.experts(
                local,
                self._router(f"{block}.ffn_gate_inp", sizes.num_experts),
                [self._expert(place, outer) for place in places],
                [self._expert(place, inner) for place in places],
            ),
            shared=self._gated(block, ffn.shared_inner, "_shexp") if sizes.num_shared else None,
            shared_gate=self._router(f"{block}.ffn_gate_inp_shexp", 1) if sizes.shared_gate else None,
        )

    def _router(self, name: str, num_outputs: int) -> Linear:
        shape_of = {f"{name}.weight": (num_outputs, self._hidden)}
        return self._builder.router(self._tensors.read(shape_of, torch.float32))

    def _expert(self, place: int, shape_of: Mapping[str, tuple[int, ...]]) -> _Matrix:
        """Of the shard's experts the one at that place."""
        named = {f"{name}.weight": shape for name, shape in shape_of.items()}
        return _Matrix(self._tensors, named, self._builder.dtype, expert=place)

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
