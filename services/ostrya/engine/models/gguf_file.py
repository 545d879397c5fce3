"""The tensors of a GGUF file, whole or split: where each lies, and its values dequantized. Knows nothing of models."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ostrya.engine.models.reading import BLOCK_BYTES, Block, Bytes, Place, Reader, blocks, span
from ostrya.engine.models.sharding import Part
from ostrya.errors import ModelLoadError
from ostrya.gguf_header import TensorEntry, read_parts

SUPPORTED = (
    *("F32", "F16", "BF16"),
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)

_BLOCKS = {
    "Q4_0": np.dtype([("scale", "<f2"), ("q", "u1", 16)]),
    "Q4_1": np.dtype([("scale", "<f2"), ("low", "<f2"), ("q", "u1", 16)]),
    "Q8_0": np.dtype([("scale", "<f2"), ("q", "i1", 32)]),
}
"""Those whose blocks of 32 values have a scale and integers of 4 or 8 bits, packed."""

# Bounds the float32 copy that dequantizing makes: about 16 MB at a hidden size of 4,096.
_CHUNK_ELEMENTS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file. Shape in torch's order, outermost first."""

    file: Path
    shape: tuple[int, ...]
    type_name: str
    start: int
    num_bytes: int

    @property
    def quantum(self) -> tuple[int, int]:
        """What is packed together: so many neighbours in a row, in so many bytes."""
        elements, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type_name]]
        return elements, num_bytes

    @property
    def is_packed(self) -> bool:
        """Held as integers of 4 or 8 bits with a scale for 32 of them."""
        return self.type_name in _BLOCKS


_F32 = npt.NDArray[np.float32]
_Packed = tuple[Literal[4, 8], npt.NDArray[np.int8], _F32, _F32]


class GgufFile:
    """An open GGUF file, or all parts of a split one: `metadata`, `tensors` by name, `reader` and `blocks` to read rows
    of them, `values` and `packed` of what was read.

    ModelLoadError if it is not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = Reader()
        headers = read_parts(path)
        # The other parts say nothing of the model.
        self.metadata = next(iter(headers.values())).metadata
        self.tensors: dict[str, TensorInfo] = {}
        for file, header in headers.items():
            file_bytes = file.stat().st_size
            for entry in header.tensors:
                if entry.name in self.tensors:
                    raise ModelLoadError(f"{file}: tensor {entry.name} is in {self.tensors[entry.name].file.name} too")
                self.tensors[entry.name] = self._place(file, entry, file_bytes)

    def blocks(self, name: str, rows: Part, columns: Part, *, unit: int = 1) -> Iterator[Block]:
        """Of a tensor seen as a matrix over its last dimension; columns from the first to the last that are wanted, at
        whole quanta."""
        info = self.tensors[name]
        elements, quantum_bytes = info.quantum
        low, high = (edge // elements * quantum_bytes for edge in span(columns, of=elements))
        max_bytes = min(BLOCK_BYTES, _CHUNK_ELEMENTS // elements * quantum_bytes)
        place = Place(info.file, info.start, info.shape[-1] // elements * quantum_bytes)
        return blocks(place, rows, low=low, high=high, unit=unit, max_bytes=max_bytes)

    def vector(self, name: str) -> _F32:
        """The values of a small tensor."""
        whole = Part.whole(self.tensors[name].shape[-1])
        (block,) = self.blocks(name, Part.whole(1), whole)
        values: _F32 = self.values(name, self.reader.read(block))[0]
        return values

    def values(self, name: str, raw: Bytes) -> _F32:
        """Rows of a tensor, dequantized."""
        kind = GGMLQuantizationType[self.tensors[name].type_name]
        values: _F32 = dequantize(np.ascontiguousarray(raw), kind)
        return values

    def packed(self, name: str, raw: Bytes) -> _Packed:
        """Rows of a packed tensor as the file holds them: bits, q [rows, I], and scale and offset [rows, I / 32] of
        value = scale * q + offset."""
        type_name, num_rows = self.tensors[name].type_name, len(raw)
        held = np.ascontiguousarray(raw).view(_BLOCKS[type_name])
        scale = held["scale"].astype(np.float32)
        if type_name == "Q8_0":
            return 8, held["q"].reshape(num_rows, -1), scale, np.zeros_like(scale)
        # A byte holds a value of the block's first half, and above it one of its second half.
        nibbles = np.concatenate([held["q"] & 15, held["q"] >> 4], axis=-1).reshape(num_rows, -1)
        offset = held["low"].astype(np.float32) + 8 * scale if type_name == "Q4_1" else np.zeros_like(scale)
        return 4, nibbles.view(np.int8) - np.int8(8), scale, offset

    def _place(self, file: Path, entry: TensorEntry, file_bytes: int) -> TensorInfo:
        known = {kind.value: kind for kind in GGMLQuantizationType}
        type_name = known[entry.type_id].name if entry.type_id in known else f"number {entry.type_id}"
        what = f"{file}: tensor {entry.name}"
        if type_name not in SUPPORTED:
            raise ModelLoadError(f"{what} has quantization {type_name}; supported: {', '.join(SUPPORTED)}")
        block_elements, block_bytes = GGML_QUANT_SIZES[known[entry.type_id]]
        shape = entry.shape
        if not shape or 0 in shape or shape[-1] % block_elements:
            raise ModelLoadError(
                f"{what} has shape {list(shape)}; rows of {type_name} are multiples of {block_elements}"
            )
        num_bytes = math.prod(shape) // block_elements * block_bytes
        if entry.start + num_bytes > file_bytes:
            raise ModelLoadError(
                f"{what} is truncated: it ends at byte {entry.start + num_bytes}, the file at {file_bytes}"
            )
        return TensorInfo(file, shape, type_name, entry.start, num_bytes)
