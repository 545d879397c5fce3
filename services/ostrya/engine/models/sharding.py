"""How a model is divided among the devices of a replica: tables over names, and the arithmetic of one shard. No torch.

A layer is always computed as the layer of *one shard*: fewer heads, a narrower network, a part of the vocabulary, in
`Sharding.local` described like any model. Two interpreters run it. The explicit one has a shard a process, and adds up
by collectives what shards have computed in part. The annotated one has all shards in a leading dimension S that lies
across devices, and the compiler makes a collective of a sum over S. Which of the two is a Builder's to say (ops.py).

Called by weights.py (what to read) and by backends (what a shard computes).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from ostrya.capacity.mixers import GroupedAttention
from ostrya.engine.models.spec import DecoderSpec, GatedFfn, LayerSpec, RoutedFfn
from ostrya.errors import ConfigError

_MAX_SUGGESTED = 64


class Axis(StrEnum):
    """Of the mesh of a replica's devices. What lies along `data` elsewhere is replicas here: the router's business."""

    EXPERT = "expert"
    TENSOR = "tensor"


class Dim(StrEnum):
    """Dimensions that can be divided."""

    VOCAB = "vocab"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    INNER = "inner"
    EXPERTS = "experts"
    EXPERT_INNER = "expert_inner"


AXES: dict[Dim, tuple[Axis, ...]] = {
    Dim.VOCAB: (Axis.EXPERT, Axis.TENSOR),
    Dim.HEADS: (Axis.EXPERT, Axis.TENSOR),
    Dim.KV_HEADS: (Axis.EXPERT, Axis.TENSOR),
    Dim.INNER: (Axis.EXPERT, Axis.TENSOR),
    Dim.EXPERTS: (Axis.EXPERT,),
    Dim.EXPERT_INNER: (Axis.TENSOR,),
}
"""Over which axes each is divided. KV pages are divided as KV_HEADS."""

PARAMETERS: tuple[tuple[str, tuple[Dim | None, ...]], ...] = (
    (r"(token_embd|output)\.weight", (Dim.VOCAB, None)),
    (r"blk\.\d+\.attn_q\.weight", (Dim.HEADS, None)),
    (r"blk\.\d+\.attn_[kv]\.weight", (Dim.KV_HEADS, None)),
    (r"blk\.\d+\.attn_q\.bias", (Dim.HEADS,)),
    (r"blk\.\d+\.attn_[kv]\.bias", (Dim.KV_HEADS,)),
    (r"blk\.\d+\.attn_output\.weight", (None, Dim.HEADS)),
    (r"blk\.\d+\.ffn_(gate|up)(_shexp)?\.weight", (Dim.INNER, None)),
    (r"blk\.\d+\.ffn_down(_shexp)?\.weight", (None, Dim.INNER)),
    (r"blk\.\d+\.ffn_(gate|up)_exps\.weight", (Dim.EXPERTS, Dim.EXPERT_INNER, None)),
    (r"blk\.\d+\.ffn_down_exps\.weight", (Dim.EXPERTS, None, Dim.EXPERT_INNER)),
)
"""Names as in source.py; what matches none is whole on every device. A product whose inputs are divided gives partial
sums: there, and after the embedding, shards are added up, and the residual stream is whole everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The devices of a replica; shard s stands at (s // tensor, s % tensor)."""

    expert: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, num_shards: int, *, num_groups: int) -> "Mesh":
        """Groups that divide the experts among them. ConfigError when they do not come out even."""
        if num_shards % num_groups:
            raise ConfigError([f"expert_parallel is {num_groups}; it must divide the {num_shards} processes"])
        return cls(expert=num_groups, tensor=num_shards // num_groups)

    @property
    def num_shards(self) -> int:
        return self.expert * self.tensor

    def place(self, axes: Iterable[Axis], shard: int) -> tuple[int, int]:
        """Of a dimension divided over `axes`: which part a shard has, and of how many."""
        at = {Axis.EXPERT: (shard // self.tensor, self.expert), Axis.TENSOR: (shard % self.tensor, self.tensor)}
        index, count = 0, 1
        for axis in axes:
            index, count = index * at[axis][1] + at[axis][0], count * at[axis][1]
        return index, count


class Range(NamedTuple):
    """Values [start, stop) of a whole dimension stand from `at` in a shard's."""

    at: int
    start: int
    stop: int

    def moved(self, by: int) -> "Range":
        """The same values, counted from elsewhere."""
        return self._replace(start=self.start + by, stop=self.stop + by)


@dataclass(frozen=True, slots=True)
class Part:
    """One dimension of a shard. What no range covers is 0."""

    size: int
    ranges: tuple[Range, ...]

    @classmethod
    def whole(cls, size: int) -> "Part":
        return cls(size, (Range(0, 0, size),))

    def times(self, unit: int) -> "Part":
        """The same of a dimension that has `unit` values for each of this one's."""
        return Part(self.size * unit, tuple(Range(*(edge * unit for edge in one)) for one in self.ranges))

    def only(self, place: int) -> "Part":
        """Of its values the one that stands at `place`."""
        found = next(one for one in self.ranges if one.at <= place < one.at + one.stop - one.start)
        start = found.start + place - found.at
        return Part(1, (Range(0, start, start + 1),))

    def in_units_of(self, unit: int) -> "Part | None":
        """The other way round; None where it cuts a unit."""
        edges = [self.size, *(edge for one in self.ranges for edge in one)]
        if any(edge % unit for edge in edges):
            return None
        return Part(self.size // unit, tuple(Range(*(edge // unit for edge in one)) for one in self.ranges))


@dataclass(frozen=True, slots=True)
class Region:
    """What a shard has of a tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Region":
        return cls(shape, tuple(map(Part.whole, shape)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(part.size for part in self.parts)

    @property
    def is_whole(self) -> bool:
        return self == Region.whole(self.shape)

    def only(self, place: int) -> "Region":
        """Of the shard's first dimension one value."""
        first, *rest = self.parts
        return Region(self.shape, (first.only(place), *rest))

    @property
    def rows(self) -> Part:
        """Of the tensor seen as a matrix over its last dimension."""
        rows = Part.whole(1)
        for size, part in zip(self.shape[:-1], self.parts[:-1], strict=True):
            rows = _within(rows, part, size)
        return rows


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer's heads are divided. A query head stands with its KV head; where there are more shards than KV heads,
    several have copies of one. What does not come out even is filled with heads of zeros, which add nothing."""

    num_heads: int
    """Of a shard, as below."""
    num_kv_heads: int
    queries: tuple[tuple[int | None, ...], ...]
    """Of each shard, each place: the head of the whole; None = empty."""
    keys: tuple[tuple[int | None, ...], ...]


@cache
def divide_heads(num_heads: int, num_kv_heads: int, num_shards: int) -> Heads:
    """At most num_heads shards."""
    group = num_heads // num_kv_heads
    copies = max(1, num_shards // num_kv_heads)
    groups_each = -(-num_kv_heads * copies // num_shards)
    queries_each = -(-group // copies)
    queries: list[tuple[int | None, ...]] = []
    keys: list[tuple[int | None, ...]] = []
    for shard in range(num_shards):
        mine = range(shard * groups_each, (shard + 1) * groups_each)
        kv_heads = [place // copies if place < num_kv_heads * copies else None for place in mine]
        keys.append(tuple(kv_heads))
        within = range(shard % copies * queries_each, (shard % copies + 1) * queries_each)
        queries.append(
            tuple(
                None if kv_head is None or place >= group else kv_head * group + place
                for kv_head in kv_heads
                for place in within
            )
        )
    return Heads(queries_each * groups_each, groups_each, tuple(queries), tuple(keys))


class Sharding:
    """A model on a mesh. ConfigError when it cannot be divided so."""

    def __init__(self, spec: DecoderSpec, mesh: Mesh) -> None:
        if problem := problem_of(spec, mesh):
            raise ConfigError([problem])
        self.mesh = mesh
        self._spec = spec
        self.local = _local(spec, mesh)
        """What one shard computes; equal layers stay equal objects."""

    def region(self, name: str, shape: tuple[int, ...], shard: int) -> Region:
        """What the shard has of a tensor, whose whole shape is given."""
        dims = dims_of(name) or (None,) * len(shape)
        return Region(shape, tuple(self._part(name, dim, size, shard) for dim, size in zip(dims, shape, strict=True)))

    def _part(self, name: str, dim: Dim | None, size: int, shard: int) -> Part:
        if dim is None:
            return Part.whole(size)
        index, count = self.mesh.place(AXES[dim], shard)
        if dim in (Dim.HEADS, Dim.KV_HEADS):
            sizes = self._spec.layers[int(name.split(".")[1])].mixer.sizes
            heads = divide_heads(sizes.num_heads, sizes.num_kv_heads, count)
            return _picked((heads.queries if dim is Dim.HEADS else heads.keys)[index]).times(sizes.head_dim)
        each = size // count
        return Part(each, (Range(0, index * each, (index + 1) * each),))


def dims_of(name: str) -> tuple[Dim | None, ...] | None:
    """How a tensor is divided; None: not at all."""
    return next((dims for pattern, dims in PARAMETERS if re.fullmatch(pattern, name)), None)


def problem_of(spec: DecoderSpec, mesh: Mesh) -> str | None:
    """Why the model cannot be divided so, and how it can."""
    if found := _first_problem(spec, mesh.num_shards):
        fitting = [n for n in range(1, _MAX_SUGGESTED + 1) if _first_problem(spec, n) is None]
        return f"tensor_parallel is {mesh.num_shards}; {found}; possible here: {', '.join(map(str, fitting))}"
    if found := _expert_problem(spec, mesh):
        meshes = [Mesh(expert=n, tensor=mesh.num_shards // n) for n in _divisors(mesh.num_shards)]
        possible = [str(one.expert) for one in meshes if _expert_problem(spec, one) is None]
        at = f"at tensor_parallel {mesh.num_shards}: {', '.join(possible) or 'none; choose another tensor_parallel'}"
        return f"expert_parallel is {mesh.expert}; {found}; possible {at}"
    return None


def _first_problem(spec: DecoderSpec, num_shards: int) -> str | None:
    if spec.vocab_size % num_shards:
        return f"{spec.vocab_size} tokens of the vocabulary do not divide by it"
    for layer in dict.fromkeys(spec.layers):
        if layer.mixer.sizes.num_heads < num_shards:
            return f"that is more than the {layer.mixer.sizes.num_heads} attention heads"
        inner = layer.ffn.sizes.inner if isinstance(layer.ffn, GatedFfn) else layer.ffn.shared_inner
        if inner % num_shards:
            return f"{inner} inner values of a layer do not divide by it"
    return None


def _expert_problem(spec: DecoderSpec, mesh: Mesh) -> str | None:
    routed = [layer.ffn for layer in dict.fromkeys(spec.layers) if isinstance(layer.ffn, RoutedFfn)]
    if not routed and mesh.expert > 1:
        return "the model has no experts"
    for ffn in routed:
        if ffn.sizes.num_experts % mesh.expert:
            return f"{ffn.sizes.num_experts} experts of a layer do not divide by it"
        if ffn.sizes.inner % mesh.tensor:
            return f"{ffn.sizes.inner} inner values of an expert do not divide by the {mesh.tensor} devices it then has"
    return None


def _divisors(n: int) -> list[int]:
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]


def _local(spec: DecoderSpec, mesh: Mesh) -> DecoderSpec:
    @cache
    def local_layer(layer: LayerSpec) -> LayerSpec:
        mixer = replace(layer.mixer, sizes=_local_attention(layer.mixer.sizes, mesh.num_shards))
        return replace(layer, mixer=mixer, ffn=_local_ffn(layer.ffn, mesh))

    layers = tuple(local_layer(layer) for layer in spec.layers)
    return replace(spec, layers=layers, vocab_size=spec.vocab_size // mesh.num_shards)


def _local_ffn(ffn: GatedFfn | RoutedFfn, mesh: Mesh) -> GatedFfn | RoutedFfn:
    if isinstance(ffn, GatedFfn):
        return replace(ffn, sizes=replace(ffn.sizes, inner=ffn.sizes.inner // mesh.num_shards))
    sizes = replace(
        ffn.sizes,
        num_experts=ffn.sizes.num_experts // mesh.expert,
        inner=ffn.sizes.inner // mesh.tensor,
        num_shared=min(1, ffn.sizes.num_shared),
        shared_inner=ffn.shared_inner // mesh.num_shards or None,
    )
    return replace(ffn, sizes=sizes)


def _local_attention(sizes: GroupedAttention, num_shards: int) -> GroupedAttention:
    heads = divide_heads(sizes.num_heads, sizes.num_kv_heads, num_shards)
    return replace(sizes, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads)


def _picked(places: tuple[int | None, ...]) -> Part:
    """Neighbours together, so that they are read at once."""
    ranges: list[Range] = []
    for at, index in enumerate(places):
        if index is None:
            continue
        last = ranges[-1] if ranges else None
        if last is not None and last.stop == index and last.at + last.stop - last.start == at:
            ranges[-1] = last._replace(stop=index + 1)
        else:
            ranges.append(Range(at, index, index + 1))
    return Part(len(places), tuple(ranges))


def _within(outer: Part, inner: Part, size: int) -> Part:
    """Of a dimension of outer * size values: in each value of `outer`, `inner` of `size`."""
    if inner == Part.whole(size):
        return outer.times(size)
    ranges = [
        Range((one.at + step) * inner.size + at, (one.start + step) * size + start, (one.start + step) * size + stop)
        for one in outer.ranges
        for step in range(one.stop - one.start)
        for at, start, stop in inner.ranges
    ]
    return Part(outer.size * inner.size, tuple(ranges))
