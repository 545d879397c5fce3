"""A GGUF file as a weight source. Called by open_source."""

import reprlib
from pathlib import Path

import torch

from ostrya.engine.models.families import BY_ARCHITECTURE
from ostrya.engine.models.gguf_file import GgufFile
from ostrya.engine.models.gguf_metadata import ROPE_DIVISORS, GgufMetadata
from ostrya.engine.models.quantized import Quantized
from ostrya.engine.models.source import checked, pairs_side_by_side
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
        if (found := self._file.tensors[name].shape) != shape:
            raise ModelLoadError(f"{self._path}: tensor {name} has shape {list(found)}; expected {list(shape)}")

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self.require(name, tuple(out.shape))
        self._unread.discard(name)
        out_rows = out.view(-1, out.shape[-1])
        step = self._file.chunk_rows(name)
        for first in range(0, len(out_rows), step):
            last = min(first + step, len(out_rows))
            out_rows[first:last].copy_(torch.from_numpy(self._file.rows(name, first, last)))
        if self._halves_apart:
            out.copy_(pairs_side_by_side(name, out, self.spec))

    def quantized(self, name: str, shape: tuple[int, int]) -> Quantized | None:
        self.require(name, shape)
        blocks = self._file.blocks(name)
        if blocks is None:
            return None
        self._unread.discard(name)
        bits, *arrays = blocks
        parts = [torch.from_numpy(array) for array in arrays]
        if self._halves_apart:
            parts = [pairs_side_by_side(name, part, self.spec) for part in parts]
        q_OI, scale_OG, offset_OG = parts
        return Quantized(q_OI=q_OI, scale_OG=scale_OG, offset_OG=offset_OG, bits=bits)

    def unread(self) -> list[str]:
        return sorted(self._unread)
