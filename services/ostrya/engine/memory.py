"""What a device's memory holds: weights, the programs' scratch, and the KV pages that what is left has room for. Pure.

Called by backends, in this order: require_room before anything is read, accounted before the KV pages are made. Bytes
of weights and scratch are `ostrya capacity`'s own arithmetic (capacity/memory.py, capacity/weights.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import msgspec

from ostrya.capacity.chips import GIB, Chip
from ostrya.capacity.memory import USABLE_RATIO, activation_bytes, logit_bytes
from ostrya.capacity.remedies import smallest_slice
from ostrya.capacity.spec import BF16, FP32, Q4_1, Part, Storage
from ostrya.capacity.weights import weight_bytes
from ostrya.engine.config import AUTO_PAGES, EngineConfig, Weights, weights_problem
from ostrya.engine.models.sharding import Mesh, Sharding, problem_of
from ostrya.engine.models.spec import DecoderSpec
from ostrya.engine.types import Memory
from ostrya.errors import ConfigError

MIN_PAGES = 2
"""Page 0 is scratch."""
MAX_PAGES = 1 << 20
"""The page table of the host takes a second and 100 MB for as many; 16 million tokens at 16 a page."""
_MAX_DEVICES = 1024
_INT8 = Storage("int8", 10, BF16.multiplied_as)
"""Two halves of 4 bits, each with bfloat16 scales and offsets, and an embedding of 8 with float32 ones."""
_STORAGES: Mapping[Weights, Storage] = MappingProxyType({"int4": Q4_1, "int8": _INT8, "bf16": BF16, "f32": FP32})
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def least_weight_bytes(spec: DecoderSpec, config: EngineConfig) -> int:
    """What the weights of a shard take at least. Its matrices may take more: where one does not fit the kernel for few
    bits, where two copies are kept."""
    dense = FP32 if config.dtype == "float32" else BF16
    # With auto a dense copy is always there.
    layers = _STORAGES.get(config.weights, dense)
    head = _INT8 if layers.bits < _INT8.bits else layers
    parts = {Part.NORMS: FP32, Part.ROUTER: FP32, Part.EMBEDDING: head, Part.HEAD: head}
    return round(weight_bytes(replace(spec.model_spec("model"), storage=layers, storage_by_part=parts)))


def page_bytes(spec: DecoderSpec, config: EngineConfig) -> int:
    """Of one KV page of a shard, over all layers."""
    sizes = [layer.mixer.sizes for layer in spec.layers]
    values = sum(2 * size.num_kv_heads * size.head_dim for size in sizes)
    return values * config.page_size * _ITEM_BYTES[config.dtype]


def scratch_bytes(spec: DecoderSpec, config: EngineConfig) -> int:
    """What the largest step of a shard takes beside weights and pages, while nobody has measured it."""
    model = spec.model_spec("model")
    width = _ITEM_BYTES[config.dtype] / _ITEM_BYTES["bfloat16"]
    return round(config.max_step_tokens * activation_bytes(model) * width + config.max_running * logit_bytes(model))


def pages_that_fit(*, limit_bytes: int, weights_bytes: int, scratch_bytes: int, page_bytes: int) -> int:
    """In what weights and scratch leave of the usable part of a device's memory; 0 if nothing is left."""
    room = limit_bytes * USABLE_RATIO - weights_bytes - scratch_bytes
    return max(0, min(MAX_PAGES, int(room // page_bytes)))


def require_room(
    spec: DecoderSpec, config: EngineConfig, mesh: Mesh, *, limit_bytes: int | None, chip: Chip | None = None
) -> None:
    """ConfigError, with what would help, when a shard's weights and the fewest pages cannot lie in `limit_bytes` of a
    device; None: not known, so nothing is refused. Before loading. What is refused could not have worked: scratch is
    an estimate, and the usable part a rule of thumb, so neither counts here."""
    if limit_bytes is None:
        return
    needed = _needed(spec, config, mesh)
    if needed <= limit_bytes:
        return
    weights = least_weight_bytes(Sharding(spec, mesh).local, config)
    devices = "1 device" if mesh.num_shards == 1 else f"each of {mesh.num_shards} devices"
    raise ConfigError(
        [
            f"{config.model_name} needs {_gib(weights)} for weights and {_gib(needed - weights)} for the fewest KV "
            f"pages on {devices}; the limit is {_gib(limit_bytes)}; {_remedies(spec, config, mesh, limit_bytes, chip)}"
        ]
    )


def accounted(
    spec: DecoderSpec,
    config: EngineConfig,
    *,
    limit_bytes: int | None,
    weights_bytes: int,
    scratch_bytes: int,
    least: Callable[[int], int] = lambda num_pages: num_pages,
) -> Memory:
    """A shard's memory, with as many KV pages as are asked for, or as fit on every device: `least` gives the smallest
    of what the processes of a replica found, and is called by all of them or by none. ConfigError if there are none."""
    each = page_bytes(spec, config)
    num_pages = config.num_pages
    if num_pages == AUTO_PAGES:
        if limit_bytes is None:
            known = "how much memory there is is not known here"
            raise ConfigError([f"num_pages is auto, but {known}; set num_pages or memory_limit_bytes"])
        num_pages = least(
            pages_that_fit(
                limit_bytes=limit_bytes, weights_bytes=weights_bytes, scratch_bytes=scratch_bytes, page_bytes=each
            )
        )
        if num_pages < MIN_PAGES:
            held = f"weights take {_gib(weights_bytes)} and the largest step about {_gib(scratch_bytes)}"
            raise ConfigError(
                [
                    f"no KV page of {_gib(each)} has room: {held} of {_gib(limit_bytes)}, of which {USABLE_RATIO:.0%} "
                    "are used; lower max_step_tokens, or take more devices or narrower weights"
                ]
            )
    return Memory(
        limit_bytes=limit_bytes or 0,
        weights_bytes=weights_bytes,
        scratch_bytes=scratch_bytes,
        page_bytes=each,
        num_pages=num_pages,
    )


def rows(memory: Memory) -> dict[str, str]:
    """The parts, for people."""
    parts = {"weights": memory.weights_bytes, "scratch": memory.scratch_bytes, "kv": memory.kv_bytes}
    if not memory.limit_bytes:
        return {name: _gib(value) for name, value in parts.items()}
    parts["free"] = memory.free_bytes
    shown = {name: f"{_gib(value)} ({value / memory.limit_bytes:.0%})" for name, value in parts.items()}
    return shown | {"limit": _gib(memory.limit_bytes)}


def _needed(spec: DecoderSpec, config: EngineConfig, mesh: Mesh) -> int:
    local = Sharding(spec, mesh).local
    return least_weight_bytes(local, config) + MIN_PAGES * page_bytes(local, config)


def _remedies(spec: DecoderSpec, config: EngineConfig, mesh: Mesh, limit_bytes: int, chip: Chip | None) -> str:
    """Each was tried."""
    found = []
    for weights in ("int8", "int4"):
        other = msgspec.structs.replace(config, weights=weights, dtype="bfloat16")
        # Other backends keep what they are given.
        if config.backend == "cpu" and weights != config.weights and not weights_problem(weights, other.dtype):
            needed = _needed(spec, other, mesh)
            if needed <= limit_bytes:
                found.append(f"weights {weights} would do ({_gib(needed)})")
                break
    if config.backend != "cpu" and (enough := _enough_devices(spec, config, mesh, limit_bytes)):
        where = smallest_slice(chip, enough) if chip else None
        found.append(f"tensor_parallel {enough} would do{f', such as on {where.name}' if where else ''}")
    found.append("set memory_limit_bytes if a device has more")
    return ", ".join(found[:-1]) + ("; or " if found[:-1] else "") + found[-1]


def _enough_devices(spec: DecoderSpec, config: EngineConfig, mesh: Mesh, limit_bytes: int) -> int | None:
    larger = replace(mesh, tensor=2 * mesh.tensor)
    while larger.num_shards <= _MAX_DEVICES:
        if problem_of(spec, larger) is None and _needed(spec, config, larger) <= limit_bytes:
            return larger.num_shards
        larger = replace(larger, tensor=2 * larger.tensor)
    return None


def _gib(num_bytes: float) -> str:
    """Of small ones, MiB or KiB."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 1024:.1f} KiB"
