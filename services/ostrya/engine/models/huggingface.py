"""A Hugging Face directory (config.json, *.safetensors, sharded or not) as a weight source. Called by open_source.

Values are brought into the form that WeightSource promises while they are read.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from ostrya.engine.models.families import BY_KIND
from ostrya.engine.models.huggingface_config import JsonConfig
from ostrya.engine.models.sharding import Region
from ostrya.engine.models.source import checked, cut, pairs_side_by_side
from ostrya.errors import ModelLoadError

_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_BESIDE_VISION = ("model.language_model.", "language_model.model.")
"""How the text model's tensors begin where there is a vision tower; elsewhere with "model."."""
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_DTYPES = ("F32", "F16", "BF16")


class _Header(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _SafeFile(Protocol):
    """What is used of safetensors' own class, which has no types."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Header: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class HuggingFaceSource:
    """Weights of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        config = JsonConfig(directory)
        family = BY_KIND.get(config.kind) if isinstance(config.kind, str) else None
        if family is None:
            raise config.error(f"model_type {config.kind!r} is not supported; supported: {', '.join(BY_KIND)}")
        self._layer_names, self._norm_offset = family.layer_names, family.norm_offset
        self.spec = checked(family.from_config(config), directory)
        self._shard_of = _shards(directory)
        beside_vision = (prefix for prefix in _BESIDE_VISION if any(name.startswith(prefix) for name in self._shard_of))
        self._prefix = next(beside_vision, "model.")
        # Computed from the configuration, not for text, or a copy of the embedding: harmless when nobody reads them.
        ignored = {name for name in self._shard_of if name.endswith("rotary_emb.inv_freq") or _VISION.match(name)}
        if self.spec.tied_embeddings:
            ignored.add("lm_head.weight")
        self._unread = set(self._shard_of) - ignored
        self._stacks: set[tuple[str, int]] = set()
        """Those of which some experts were read, and how many there are."""

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) == 3:
            # Each has a tensor of its own here, and is looked at when it is read.
            return self.require(_of_expert(name, 0), shape[1:])
        stored_name = self._stored_name(name)
        shard = self._shard(stored_name)
        with _opened(shard) as file:
            header = file.get_slice(stored_name)
            found, dtype = tuple(header.get_shape()), header.get_dtype()
        if found != shape:
            raise ModelLoadError(f"{shard}: tensor {stored_name} has shape {list(found)}; expected {list(shape)}")
        if dtype not in _DTYPES:
            raise ModelLoadError(f"{shard}: tensor {stored_name} has dtype {dtype}; supported: {', '.join(_DTYPES)}")

    def read_into(self, name: str, out: torch.Tensor, region: Region) -> None:
        if len(region.shape) == 3:
            return self._read_experts(name, out, region)
        self.require(name, region.shape)
        stored_name = self._stored_name(name)
        with _opened(self._shard(stored_name)) as file:
            stored = cut(file.get_tensor(stored_name), region.parts)
        out.copy_(pairs_side_by_side(name, stored, self.spec))
        if name.endswith("_norm.weight"):
            out.add_(self._norm_offset)
        self._unread.discard(stored_name)

    def quantized(self, name: str, region: Region) -> None:
        self.require(name, region.shape)

    def unread(self) -> list[str]:
        elsewhere = {self._stored_name(_of_expert(name, i)) for name, count in self._stacks for i in range(count)}
        return sorted(self._unread - elsewhere)

    def _read_experts(self, name: str, out: torch.Tensor, region: Region) -> None:
        """Into [E, O, I]."""
        experts, *parts = region.parts
        self._stacks.add((name, region.shape[0]))
        for at, start, stop in experts.ranges:
            for expert in range(start, stop):
                of_one = Region(region.shape[1:], tuple(parts))
                self.read_into(_of_expert(name, expert), out[at + expert - start], of_one)

    def _stored_name(self, name: str) -> str:
        stem, kind = name.rsplit(".", 1)
        if stem == "output":
            return f"lm_head.{kind}"
        if stem in _TOP_NAMES:
            return f"{self._prefix}{_TOP_NAMES[stem]}.{kind}"
        _, layer, part, *expert = stem.split(".")
        return f"{self._prefix}layers.{layer}.{self._layer_names[part].format(*expert)}.{kind}"

    def _shard(self, stored_name: str) -> Path:
        if stored_name not in self._shard_of:
            raise ModelLoadError(f"{self._directory}: tensor {stored_name} is missing")
        return self._shard_of[stored_name]


def _of_expert(name: str, expert: int) -> str:
    """blk.0.ffn_up_exps.weight -> blk.0.ffn_up_exps.7.weight"""
    stem, kind = name.rsplit(".", 1)
    return f"{stem}.{expert}.{kind}"


@contextmanager
def _opened(shard: Path) -> Iterator[_SafeFile]:
    try:
        with safe_open(shard, framework="pt") as file:
            yield cast("_SafeFile", file)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{shard}: truncated or corrupt: {error}") from error


def _shards(directory: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return _indexed_shards(index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{directory}: no *.safetensors file")
    shards: dict[str, Path] = {}
    for file in files:
        with _opened(file) as opened:
            shards.update(dict.fromkeys(opened.keys(), file))
    return shards


def _indexed_shards(index: Path) -> dict[str, Path]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        shards = {name: index.parent / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: corrupt: {error!r}; a weight_map of tensor names to files is needed") from error
    for file in sorted(set(shards.values())):
        if not file.is_file():
            raise ModelLoadError(f"{file}: missing, though {index.name} names it")
    return shards
