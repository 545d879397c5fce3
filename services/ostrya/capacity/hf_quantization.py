"""The quantization_config of a config.json: in which format weights and cache are stored, and which modules are not.

hf_storage.py applies it to a spec.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ostrya.capacity.chips import Dtype
from ostrya.capacity.hf_fields import Fields, bare, shown
from ostrya.capacity.spec import FP8, INT8, MXFP4, NVFP4, Storage

_EXPERTS_ONLY = "mxfp4"
"""gpt-oss's method: whoever loads it takes only routed experts as quantized, whether or not the file lists the rest."""
_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
_FLOAT_FORMATS = {"float-quantized": FP8, "nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}
_NUMBER_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
"""Formats of compressed-tensors in which every group says of how many bits its numbers are, and of which type."""
_ALGORITHMS = {"FP8": FP8, "NVFP4": NVFP4}
_CACHES = {("float", 8): FP8, ("int", 8): INT8}
_SCALE_BITS = 16
_SMALLEST_GROUP = 8
"""Values that share a scale: 16 at least in released files; a scale for each would be wider than bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """What a quantization_config says."""

    where: Fields
    storage: Storage
    kept: tuple[str, ...] = ()
    """Modules, by name or pattern, that are not quantized."""
    targets: tuple[str, ...] = ()
    """Modules that are; empty: every matrix."""
    experts_only: bool = False
    head: bool = False
    """The output head too (GPTQ's lm_head)."""
    kv_storage: Storage | None = None


def read_quantization(fields: Fields) -> Quantization | None:
    """None if the checkpoint is not quantized. ConfigError for a method or format that is not known."""
    found = fields.anywhere("quantization_config", "compression_config")
    if found is None:
        return None
    config = fields.within("quantization_config", found)
    method, known = config.text("quant_method"), f"known: {', '.join(sorted(_METHODS))}"
    if method is None:
        raise config.refuse(f"quant_method is missing; {known}")
    read = _METHODS.get(method.lower())
    if read is None:
        raise config.refuse(
            f"quant_method {shown(method)} is not known; {known}; or give --dtype and leave quantization_config out"
        )
    return Quantization(
        where=config,
        storage=read(config),
        kept=_kept(config),
        targets=_targets(config),
        head=config.flag("lm_head"),
        experts_only=method.lower() == _EXPERTS_ONLY,
        kv_storage=_kv_storage(config),
    )


def _groups(config: Fields) -> tuple[Fields, ...]:
    if not config.has("config_groups"):
        return ()
    found = config.anywhere("config_groups")
    groups = config.within("config_groups", found)
    return tuple(groups.within(bare(name), group) for name, group in found.items()) if isinstance(found, dict) else ()


def _kept(config: Fields) -> tuple[str, ...]:
    listed = [entry for name in _LISTS for entry in config.names(name)]
    if config.has("dynamic"):
        # GPTQModel: "-:" and a pattern for what is not quantized; with other numbers of bits the format is mixed.
        dynamic = config.anywhere("dynamic")
        config.within("dynamic", dynamic)
        for pattern, change in dynamic.items() if isinstance(dynamic, dict) else ():
            if pattern.startswith("-:"):
                listed.append(pattern.removeprefix("-:"))
            elif change:
                raise config.refuse(f"dynamic changes {shown(pattern)}; mixed formats cannot be expressed")
    return tuple(listed)


def _targets(config: Fields) -> tuple[str, ...]:
    named = {target for group in _groups(config) for target in group.names("targets")}
    return () if "Linear" in named else tuple(sorted(named))


def _kv_storage(config: Fields) -> Storage | None:
    if config.has("kv_cache_scheme"):
        scheme = config.within("kv_cache_scheme", config.anywhere("kv_cache_scheme"))
        kind, bits = scheme.text("type"), scheme.size("num_bits")
        storage = _CACHES.get((str(kind), bits))
        if storage is None:
            raise scheme.refuse(f"{bits} bits of type {shown(kind)} are not known; known: float and int of 8 bits")
        return storage
    algorithm = config.text("kv_cache_quant_algo")
    if algorithm is not None and algorithm.upper() != "FP8":
        raise config.refuse(f"kv_cache_quant_algo {shown(algorithm)} is not known; known: FP8")
    return None if algorithm is None else FP8


def _compressed_tensors(config: Fields) -> Storage:
    groups = _groups(config)
    forms = {form for form in (config.text("format"), *(group.text("format") for group in groups)) if form}
    form = min(forms, default=None)
    if form in _FLOAT_FORMATS and len(forms) == 1:
        return _FLOAT_FORMATS[form]
    if form not in _NUMBER_FORMATS or len(forms) != 1:
        what = " and ".join(shown(form) for form in sorted(forms)) or "None"
        known = ", ".join((*_FLOAT_FORMATS, *_NUMBER_FORMATS))
        raise config.refuse(f"format of compressed-tensors is {what}; known: one of {known}")
    weights = [group.part("weights") for group in groups]
    if not weights:
        raise config.refuse(f"config_groups is missing, which has the bits of format {form}")
    storages = {_weights(one, form) for one in weights}
    if len(storages) > 1:
        raise config.refuse("config_groups mixes formats, which cannot be expressed")
    return storages.pop()


def _weights(weights: Fields, form: str) -> Storage:
    kind = weights.text("type") or "int"
    if kind == "float" and form == "naive-quantized" and weights.size("num_bits") == FP8.bits:
        return FP8
    if kind != "int":
        raise weights.refuse(f"type {shown(kind)} of format {form} is not known; known: int")
    return _whole_numbers(weights, zero_points=not weights.flag("symmetric", default=True))


def _whole_numbers(config: Fields, *, zero_points: bool) -> Storage:
    names = ("num_bits", "bits", "w_bit")
    bits = config.size(*names)
    if bits == INT8.bits:
        return INT8
    if bits != 4:
        raise config.refuse(f"{next(name for name in names if config.has(name))} is {bits}; 4 and 8 are known")
    group_size = config.size("group_size", "q_group_size", default=-1, lowest=-1)
    if group_size == -1:
        # One scale per channel: nothing beside the values.
        return Storage("int4", bits, Dtype.BF16)
    group_size = config.size("group_size", "q_group_size", lowest=_SMALLEST_GROUP)
    return Storage("int4", bits + (_SCALE_BITS + zero_points * bits) / group_size, Dtype.BF16)


def _zero_pointed(config: Fields) -> Storage:
    # AWQ and GPTQ checkpoints always have zero points beside their scales.
    return _whole_numbers(config, zero_points=True)


def _model_optimizer(config: Fields) -> Storage:
    algorithm = config.text("quant_algo")
    storage = _ALGORITHMS.get(str(algorithm).upper())
    if storage is None:
        raise config.refuse(f"quant_algo of modelopt is {shown(algorithm)}; known: {', '.join(_ALGORITHMS)}")
    return storage


_METHODS: Mapping[str, Callable[[Fields], Storage]] = MappingProxyType(
    {
        "fp8": lambda _: FP8,
        "fbgemm_fp8": lambda _: FP8,
        _EXPERTS_ONLY: lambda _: MXFP4,
        "awq": _zero_pointed,
        "gptq": _zero_pointed,
        "compressed-tensors": _compressed_tensors,
        "modelopt": _model_optimizer,
        "modelopt_fp4": _model_optimizer,
    }
)
