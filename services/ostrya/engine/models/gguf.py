"""A GGUF file as a weight source. Called by open_source."""

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ostrya.engine.models.families import BY_ARCHITECTURE
from ostrya.engine.models.gguf_file import GgufFile
from ostrya.engine.models.gguf_metadata import ROPE_DIVISORS, GgufMetadata
from ostrya.engine.models.quantized import GROUP, Bits, Quantized
from ostrya.engine.models.reading import Block, shifted, skips_rows
from ostrya.engine.models.sharding import Part, Region
from ostrya.engine.models.source import Wanted, checked, cut, pairs_side_by_side, rotated_rows
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

    @property
    def num_bytes_read(self) -> int:
        return self._file.reader.num_bytes

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._file.tensors:
            raise ModelLoadError(f"{self._path}: tensor {name} is missing")
        # What the file has as a vector may be asked for as a matrix of one row.
        if (found := self._file.tensors[name].shape) != shape and (1, *found) != shape:
            raise ModelLoadError(f"{self._path}: tensor {name} has shape {list(found)}; expected {list(shape)}")
        self._unread.discard(name)

    def ahead(self, expected: Sequence[Wanted]) -> AbstractContextManager[None]:
        return self._file.reader.ahead([block for one in expected for block in self._blocks(*one)])

    def read_into(self, name: str, out: torch.Tensor, region: Region) -> None:
        self.require(name, region.shape)
        out_rows = out.view(-1, out.shape[-1])
        if skips_rows(region):
            out_rows.zero_()
        elements, _ = self._file.tensors[name].quantum
        columns = shifted(region.parts[-1], of=elements)
        for block in self._blocks(name, region):
            values = torch.from_numpy(self._file.values(name, self._file.reader.read(block)))
            values = cut(values, (Part.whole(len(values)), columns))
            if len(region.shape) == 1:
                out.copy_(self._in_order(name, values[0]))
            else:
                out_rows[block.at : block.at + len(values)].copy_(self._in_order(name, values))

    def quantized(self, name: str, region: Region) -> Quantized | None:
        self.require(name, region.shape)
        rows, columns = region.rows, region.parts[-1]
        if columns.in_units_of(GROUP) is None or not self._file.tensors[name].is_packed:
            return None
        within = shifted(columns, of=GROUP)
        groups = within.in_units_of(GROUP)
        assert groups is not None, "its edges are"
        bits: Bits = 4
        q_OI = torch.zeros(rows.size, columns.size, dtype=torch.int8)
        scale_OG, offset_OG = (torch.zeros(rows.size, groups.size) for _ in range(2))
        for block in self._blocks(name, region):
            bits, *arrays = self._file.packed(name, self._file.reader.read(block))
            outs, parts = (q_OI, scale_OG, offset_OG), (within, groups, groups)
            for out, values, part in zip(outs, map(torch.from_numpy, arrays), parts, strict=True):
                wanted = cut(values, (Part.whole(len(values)), part))
                out[block.at : block.at + len(wanted)] = self._in_order(name, wanted)
        return Quantized(q_OI=q_OI, scale_OG=scale_OG, offset_OG=offset_OG, bits=bits)

    def unread(self) -> list[str]:
        return sorted(self._unread)

    def _blocks(self, name: str, region: Region) -> Iterator[Block]:
        unit = rotated_rows(name, self.spec) if self._halves_apart and len(region.shape) > 1 else 1
        return self._file.blocks(name, region.rows, region.parts[-1], unit=unit)

    def _in_order(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return pairs_side_by_side(name, values, self.spec) if self._halves_apart else values
