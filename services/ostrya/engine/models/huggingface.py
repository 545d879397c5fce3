"""A Hugging Face directory (config.json, *.safetensors, sharded or not) as a weight source. Called by open_source.

Values are brought into the form that WeightSource promises while they are read.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ostrya.engine.models.families import BY_KIND
from ostrya.engine.models.huggingface_config import JsonConfig
from ostrya.engine.models.reading import NUM_THREADS, Block, Place, Reader, blocks, shifted, skips_rows, span
from ostrya.engine.models.safetensors_file import Entry, read_header
from ostrya.engine.models.sharding import Part, Region
from ostrya.engine.models.source import Wanted, checked, cut, pairs_side_by_side, rotated_rows
from ostrya.errors import ModelLoadError

_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_BESIDE_VISION = ("model.language_model.", "language_model.model.")
"""How the text model's tensors begin where there is a vision tower; elsewhere with "model."."""
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
        self._entries = _tensors(directory)
        self._reader = Reader()
        beside_vision = (prefix for prefix in _BESIDE_VISION if any(name.startswith(prefix) for name in self._entries))
        self._prefix = next(beside_vision, "model.")
        # Computed from the configuration, not for text, or a copy of the embedding: harmless when nobody reads them.
        ignored = {name for name in self._entries if name.endswith("rotary_emb.inv_freq") or _VISION.match(name)}
        if self.spec.tied_embeddings:
            ignored.add("lm_head.weight")
        self._unread = set(self._entries) - ignored
        self._stacks: set[tuple[str, tuple[int, ...]]] = set()
        """Those of which all experts were found to be there."""

    @property
    def num_bytes_read(self) -> int:
        return self._reader.num_bytes

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) == 3:
            return self._require_experts(name, shape)
        entry = self._entry(stored_name := self._stored_name(name))
        if entry.shape != shape:
            raise ModelLoadError(
                f"{entry.file}: tensor {stored_name} has shape {list(entry.shape)}; expected {list(shape)}"
            )
        if entry.dtype not in _DTYPES:
            supported = ", ".join(_DTYPES)
            raise ModelLoadError(f"{entry.file}: tensor {stored_name} has dtype {entry.dtype}; supported: {supported}")
        self._unread.discard(stored_name)

    def ahead(self, expected: Sequence[Wanted]) -> AbstractContextManager[None]:
        return self._reader.ahead([block for one in expected for block in self._blocks(*one)])

    def read_into(self, name: str, out: torch.Tensor, region: Region) -> None:
        self.require(name, region.shape)
        if len(region.shape) == 3:
            return self._read_experts(name, out, region)
        dtype = _DTYPES[self._entry(self._stored_name(name)).dtype]
        out_rows = out.view(-1, out.shape[-1])
        if skips_rows(region):
            out_rows.zero_()
        columns = shifted(region.parts[-1])
        for block in self._blocks(name, region):
            stored = torch.from_numpy(self._reader.read(block)).view(dtype)
            stored = cut(stored, (Part.whole(len(stored)), columns))
            if len(region.shape) == 1:
                out.copy_(pairs_side_by_side(name, stored[0], self.spec))
            else:
                part = out_rows[block.at : block.at + len(stored)]
                part.copy_(pairs_side_by_side(name, stored, self.spec))
        if name.endswith("_norm.weight"):
            out.add_(self._norm_offset)

    def quantized(self, name: str, region: Region) -> None:
        self.require(name, region.shape)

    def unread(self) -> list[str]:
        return sorted(self._unread)

    def _require_experts(self, name: str, shape: tuple[int, ...]) -> None:
        """Each has a tensor of its own here."""
        if (name, shape) not in self._stacks:
            for expert in range(shape[0]):
                self.require(_of_expert(name, expert), shape[1:])
            self._stacks.add((name, shape))

    def _read_experts(self, name: str, out: torch.Tensor, region: Region) -> None:
        """Into [E, O, I]."""
        for at, expert, of_one in _experts(name, region):
            self.read_into(expert, out[at], of_one)

    def _blocks(self, name: str, region: Region) -> Iterator[Block]:
        if len(region.shape) == 3:
            for _, expert, of_one in _experts(name, region):
                yield from self._blocks(expert, of_one)
            return
        entry = self._entry(self._stored_name(name))
        value_bytes = _DTYPES[entry.dtype].itemsize
        place = Place(entry.file, entry.start, region.shape[-1] * value_bytes)
        low, high = span(region.parts[-1])
        unit = rotated_rows(name, self.spec) if len(region.shape) > 1 else 1
        yield from blocks(place, region.rows, low=low * value_bytes, high=high * value_bytes, unit=unit)

    def _stored_name(self, name: str) -> str:
        stem, kind = name.rsplit(".", 1)
        if stem == "output":
            return f"lm_head.{kind}"
        if stem in _TOP_NAMES:
            return f"{self._prefix}{_TOP_NAMES[stem]}.{kind}"
        _, layer, part, *expert = stem.split(".")
        return f"{self._prefix}layers.{layer}.{self._layer_names[part].format(*expert)}.{kind}"

    def _entry(self, stored_name: str) -> Entry:
        if stored_name not in self._entries:
            raise ModelLoadError(f"{self._directory}: tensor {stored_name} is missing")
        return self._entries[stored_name]


def _of_expert(name: str, expert: int) -> str:
    """blk.0.ffn_up_exps.weight -> blk.0.ffn_up_exps.7.weight"""
    stem, kind = name.rsplit(".", 1)
    return f"{stem}.{expert}.{kind}"


def _experts(name: str, region: Region) -> Iterator[tuple[int, str, Region]]:
    """Of each that a shard has: where it stands, what it is called, and what of it."""
    experts, *parts = region.parts
    of_one = Region(region.shape[1:], tuple(parts))
    for at, start, stop in experts.ranges:
        for expert in range(start, stop):
            yield at + expert - start, _of_expert(name, expert), of_one


def _tensors(directory: Path) -> dict[str, Entry]:
    """Of all files, whose headers are read at once: one after another they take a second a file on some storage."""
    index = directory / "model.safetensors.index.json"
    file_of = _indexed(index) if index.exists() else None
    files = sorted(set(file_of.values())) if file_of is not None else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{directory}: no *.safetensors file")
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        headers = dict(zip(files, pool.map(read_header, files), strict=True))
    if file_of is None:
        return _joined(headers)
    for name, file in file_of.items():
        if name not in headers[file]:
            raise ModelLoadError(f"{file}: tensor {name} is missing, though {index.name} says it is there")
    return {name: headers[file][name] for name, file in file_of.items()}


def _joined(headers: Mapping[Path, Mapping[str, Entry]]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file, header in headers.items():
        for name, entry in header.items():
            if name in entries:
                raise ModelLoadError(f"{file}: tensor {name} is in {entries[name].file.name} too")
            entries[name] = entry
    return entries


def _indexed(index: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        file_of = {name: index.parent / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: corrupt: {error!r}; a weight_map of tensor names to files is needed") from error
    for file in sorted(set(file_of.values())):
        if not file.is_file():
            raise ModelLoadError(f"{file}: missing, though {index.name} names it")
    return file_of
