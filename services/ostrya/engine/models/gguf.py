"""A GGUF file as a weight source. Called by open_source."""

import reprlib
from pathlib import Path

import torch

from ostrya.engine.models.families import BY_ARCHITECTURE
from ostrya.engine.models.gguf_file import GgufFile
from ostrya.engine.models.gguf_metadata import ROPE_DIVISORS, GgufMetadata
from ostrya.engine.models.quantized import GROUP, Quantized
from ostrya.engine.models.sharding import Part, Region
from ostrya.engine.models.source import checked, cut, pairs_side_by_side
from ostrya.errors import ModelLoadError


class GgufSource:
    """Weights of a GGUF file, whole or split. Its names are already the ones WeightSource asks for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GgufFile(path)
        self._unread = set(self._file.tensors) - {ROPE_DIVISORS}
        metadata = GgufMetadata(self._file)
        family = BY_ARCHITECTURE.get(metadata.architecture) if isinstance(metadata.architecture, str) else None
        if family is None:
            found, supported = reprlib.repr(metadata.architecture), ", ".join(BY_ARCHITECTURE)
            raise metadata.error(f"architecture {found} is not supported; supported: {supported}")
        self._halves_apart = family.gguf_halves_apart
        self.spec = checked(family.from_gguf(metadata), path)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._file.tensors:
            raise ModelLoadError(f"{self._path}: tensor {name} is missing")
        # What the file has as a vector may be asked for as a matrix of one row.
        if (found := self._file.tensors[name].shape) != shape and (1, *found) != shape:
            raise ModelLoadError(f"{self._path}: tensor {name} has shape {list(found)}; expected {list(shape)}")

    def read_into(self, name: str, out: torch.Tensor, region: Region) -> None:
        self.require(name, region.shape)
        self._unread.discard(name)
        columns = region.parts[-1]
        out_rows = out.view(-1, out.shape[-1])
        if not region.is_whole:
            out_rows.zero_()
        step = self._file.chunk_rows(name)
        for at, start, stop in region.rows.ranges:
            for first in range(start, stop, step):
                last = min(first + step, stop)
                values = torch.from_numpy(self._file.rows(name, first, last))
                out_rows[at + first - start : at + last - start].copy_(cut(values, (Part.whole(last - first), columns)))
        if self._halves_apart:
            out.copy_(pairs_side_by_side(name, out, self.spec))

    def quantized(self, name: str, region: Region) -> Quantized | None:
        self.require(name, region.shape)
        rows, columns = region.rows, region.parts[-1]
        groups = columns.in_units_of(GROUP)
        # Of experts only those that are here are unpacked.
        first = min((one.start for one in rows.ranges), default=0)
        last = max((one.stop for one in rows.ranges), default=0)
        blocks = None if groups is None else self._file.blocks(name, first, last)
        if blocks is None or groups is None:
            return None
        self._unread.discard(name)
        bits, *arrays = blocks
        rows = Part(rows.size, tuple(one.moved(-first) for one in rows.ranges))
        parts = [
            cut(torch.from_numpy(array), (rows, part))
            for array, part in zip(arrays, (columns, groups, groups), strict=True)
        ]
        if self._halves_apart:
            parts = [pairs_side_by_side(name, part, self.spec) for part in parts]
        q_OI, scale_OG, offset_OG = parts
        return Quantized(q_OI=q_OI, scale_OG=scale_OG, offset_OG=offset_OG, bits=bits)

    def unread(self) -> list[str]:
        return sorted(self._unread)
