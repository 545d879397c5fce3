"""The tensors of a GGUF file, whole or split: where each lies, and its values dequantized. Knows nothing of models."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

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


_F32 = npt.NDArray[np.float32]
_Blocks = tuple[Literal[4, 8], npt.NDArray[np.int8], _F32, _F32]


class GgufFile:
    """An open GGUF file, or all parts of a split one: `metadata`, `tensors` by name, `rows` to read values.

    ModelLoadError if it is not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        headers = read_parts(path)
        # The other parts say nothing of the model.
        self.metadata = next(iter(headers.values())).metadata
        # Copy-on-write, because torch warns of arrays it may not write; a plain view, because memmap slices slowly.
        self._bytes: dict[Path, npt.NDArray[np.uint8]] = {
            file: np.memmap(file, dtype=np.uint8, mode="c").view(np.ndarray) for file in headers
        }
        self.tensors: dict[str, TensorInfo] = {}
        for file, header in headers.items():
            for entry in header.tensors:
                if entry.name in self.tensors:
                    raise ModelLoadError(f"{file}: tensor {entry.name} is in {self.tensors[entry.name].file.name} too")
                self.tensors[entry.name] = self._place(file, entry)

    def rows(self, name: str, first: int, last: int) -> npt.NDArray[np.float32]:
        """Rows [first, last) of a tensor seen as a matrix over its last dimension, dequantized."""
        info = self.tensors[name]
        raw = self._raw(info, first, last)
        values: npt.NDArray[np.float32] = dequantize(raw, GGMLQuantizationType[info.type_name])
        return values

    def blocks(self, name: str, first: int, last: int) -> _Blocks | None:
        """Rows as `rows` has them, as the file holds them: bits, q [rows, I], and scale and offset [rows, I / 32] of
        value = scale * q + offset; None unless they are Q4_0, Q4_1 or Q8_0."""
        info = self.tensors[name]
        if info.type_name not in _BLOCKS:
            return None
        num_rows, row_size = last - first, info.shape[-1]
        raw = self._raw(info, first, last).view(_BLOCKS[info.type_name])
        scale = raw["scale"].astype(np.float32)
        if info.type_name == "Q8_0":
            return 8, raw["q"].reshape(num_rows, row_size), scale, np.zeros_like(scale)
        # A byte holds a value of the block's first half, and above it one of its second half.
        nibbles = np.concatenate([raw["q"] & 15, raw["q"] >> 4], axis=-1).reshape(num_rows, row_size)
        offset = raw["low"].astype(np.float32) + 8 * scale if info.type_name == "Q4_1" else np.zeros_like(scale)
        return 4, nibbles.view(np.int8) - np.int8(8), scale, offset

    def chunk_rows(self, name: str) -> int:
        """How many rows to read at once."""
        return max(1, _CHUNK_ELEMENTS // self.tensors[name].shape[-1])

    def _raw(self, info: TensorInfo, first: int, last: int) -> npt.NDArray[np.uint8]:
        """[rows, bytes]"""
        row_bytes = info.num_bytes // math.prod(info.shape[:-1])
        raw = self._bytes[info.file][info.start + first * row_bytes : info.start + last * row_bytes]
        return raw.reshape(-1, row_bytes)

    def _place(self, file: Path, entry: TensorEntry) -> TensorInfo:
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
        file_bytes = len(self._bytes[file])
        if entry.start + num_bytes > file_bytes:
            raise ModelLoadError(
                f"{what} is truncated: it ends at byte {entry.start + num_bytes}, the file at {file_bytes}"
            )
        return TensorInfo(file, shape, type_name, entry.start, num_bytes)
