"""How the weights and the cache of a checkpoint are stored, from its config.json.

hf_quantization.py reads the format and hf_modules.py the names of modules; here they meet the model's layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ostrya.capacity.hf_fields import Fields, shown
from ostrya.capacity.hf_modules import Named, Pool, named
from ostrya.capacity.hf_quantization import Quantization, read_quantization
from ostrya.capacity.layers import DenseFfn, MoeFfn, Part
from ostrya.capacity.mixers import GatedDeltaNet
from ostrya.capacity.spec import BF16, FP32, ModelSpec, Storage

_DTYPES = {"bfloat16": BF16, "float16": BF16, "float32": FP32}
"""torch_dtype, or dtype in newer files; float16 is as wide as bfloat16."""
_PARTS = {
    Pool.SELF_ATTENTION: Part.ATTENTION,
    Pool.LINEAR_ATTENTION: Part.ATTENTION,
    Pool.DENSE_FFN: Part.DENSE_FFN,
    Pool.ROUTED_EXPERTS: Part.ROUTED_EXPERTS,
    Pool.SHARED_EXPERTS: Part.SHARED_EXPERTS,
}
"""All else stays as it is in every released checkpoint, listed or not: embedding, head, norms, routers, and the latent
projections of Kimi K3, whose list leaves them out."""


def stored(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """The model as its file says it is stored.

    Where only some layers of a part are quantized, the part gets the mean width, and is multiplied as its narrow ones.
    If one projection of a layer's attention or feed-forward network is kept, all of it counts as kept. ConfigError for
    a module name that is not understood.
    """
    found = read_quantization(fields)
    if found is None:
        return replace(spec, storage=_dtype(fields), storage_by_part=MappingProxyType({}))
    sizes = _sizes(spec)
    narrow = _narrow_shares(found, sizes)
    by_part: dict[Part, Storage] = {}
    for part in dict.fromkeys(_PARTS.values()):
        pools = [pool for pool in sizes if _PARTS[pool] is part]
        total = sum(sizes[pool].num_params for pool in pools)
        if total:
            share = sum(narrow[pool] * sizes[pool].num_params for pool in pools) / total
            by_part[part] = _mean(found.storage, share)
    if found.head:
        by_part[Part.HEAD] = found.storage
    return replace(
        spec,
        storage=BF16,
        storage_by_part=MappingProxyType(by_part),
        kv_storage=found.kv_storage or spec.kv_storage,
    )


def _dtype(fields: Fields) -> Storage:
    # bf16 if the file does not say.
    value = fields.anywhere("torch_dtype", "dtype") or "bfloat16"
    found = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if found is None:
        raise fields.refuse(f"torch_dtype is {shown(value)}; it must be one of {', '.join(_DTYPES)}")
    return found


def _mean(narrow: Storage, share: float) -> Storage:
    if share in (0, 1):
        return narrow if share else BF16
    bits = share * narrow.bits + (1 - share) * BF16.bits
    return Storage(f"{narrow.name}+{BF16.name}", bits, narrow.multiplied_as)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """A pool in this model."""

    layers: range
    """Among which its layers are."""
    num_layers: int
    num_params: int
    num_experts: int = 1


def _sizes(spec: ModelSpec) -> Mapping[Pool, _Size]:
    # In every kind that is read, dense layers come before those with experts.
    num_dense = sum(group.count for group in spec.layers if isinstance(group.ffn, DenseFfn))
    layers, dense, sparse = range(spec.num_layers), range(num_dense), range(num_dense, spec.num_layers)
    sizes = {}
    for pool, linear in ((Pool.SELF_ATTENTION, False), (Pool.LINEAR_ATTENTION, True)):
        groups = [group for group in spec.layers if isinstance(group.mixer, GatedDeltaNet) is linear]
        num_params = sum(group.count * group.mixer.num_params(spec.hidden) for group in groups)
        num_layers = sum(group.count for group in groups)
        sizes[pool] = _Size(layers=layers, num_layers=num_layers, num_params=num_params)
    for pool, where in ((Pool.DENSE_FFN, dense), (Pool.SHARED_EXPERTS, sparse), (Pool.ROUTED_EXPERTS, sparse)):
        num_params = sum(group.count * group.ffn.num_params(spec.hidden).get(_PARTS[pool], 0) for group in spec.layers)
        experts = [group.ffn.num_experts for group in spec.layers if isinstance(group.ffn, MoeFfn)]
        num_experts = experts[0] if experts and pool is Pool.ROUTED_EXPERTS else 1
        sizes[pool] = _Size(layers=where, num_layers=len(where), num_params=num_params, num_experts=num_experts)
    return sizes


def _narrow_shares(found: Quantization, sizes: Mapping[Pool, _Size]) -> Mapping[Pool, float]:
    kept, targets = _all_named(found, found.kept, sizes), _all_named(found, found.targets, sizes)
    shares = {}
    for pool, size in sizes.items():
        narrow = _share(pool, size, targets) if found.targets else 1.0
        if found.experts_only and pool is not Pool.ROUTED_EXPERTS:
            narrow = 0.0
        shares[pool] = max(0.0, narrow - _share(pool, size, kept))
    return shares


def _all_named(found: Quantization, names: Sequence[str], sizes: Mapping[Pool, _Size]) -> list[Named]:
    every: list[Named] = []
    for name in names:
        meant = named(name)
        if meant is None or any(_is_one_of_two(one, sizes) for one in meant):
            raise found.where.refuse(
                f"which modules {shown(name)} means is not clear; leave that entry out or spell it out"
            )
        every += meant
    return every


def _is_one_of_two(one: Named, sizes: Mapping[Pool, _Size]) -> bool:
    # A spec does not say which layers of a hybrid are gated delta nets.
    attention = {Pool.SELF_ATTENTION, Pool.LINEAR_ATTENTION}
    return one.layer in sizes[Pool.SELF_ATTENTION].layers and all(
        pool in one.pools and sizes[pool].num_layers for pool in attention
    )


def _share(pool: Pool, size: _Size, names: Sequence[Named]) -> float:
    """Which share of the pool these names mean."""
    mine = [one for one in names if pool in one.pools]
    if any(one.layer is None for one in mine):
        return 1.0
    layers = {one.layer for one in mine if one.layer in size.layers and one.expert is None}
    experts = {(one.layer, one.expert) for one in mine if one.layer in size.layers and one.layer not in layers}
    whole = len(layers) + len(experts) / size.num_experts
    return min(1.0, whole / size.num_layers) if size.num_layers else 0.0
