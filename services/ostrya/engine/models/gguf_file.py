"""The tensors of a GGUF file: where each lies, and its values dequantized. Knows nothing of models."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ostrya.errors import ModelLoadError
from ostrya.gguf_header import TensorEntry, read_header

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

# Bounds the float32 copy that dequantizing makes: about 16 MB at a hidden size of 4,096.
_CHUNK_ELEMENTS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in the file. Shape in torch's order, outermost first."""

    shape: tuple[int, ...]
    type_name: str
    start: int
    num_bytes: int


class GgufFile:
    """An open GGUF file: `metadata`, `tensors` by name, `rows` to read values. ModelLoadError if it is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.metadata = header.metadata
        # Copy-on-write, because torch warns of arrays it may not write; a plain view, because memmap slices slowly.
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="c").view(np.ndarray)
        self.tensors = {entry.name: self._place(entry) for entry in header.tensors}

    def rows(self, name: str, first: int, last: int) -> npt.NDArray[np.float32]:
        """Rows [first, last) of a tensor seen as a matrix over its last dimension, dequantized."""
        info = self.tensors[name]
        num_rows = math.prod(info.shape[:-1])
        row_bytes = info.num_bytes // num_rows
        raw = self._bytes[info.start + first * row_bytes : info.start + last * row_bytes].reshape(-1, row_bytes)
        values: npt.NDArray[np.float32] = dequantize(raw, GGMLQuantizationType[info.type_name])
        return values

    def chunk_rows(self, name: str) -> int:
        """How many rows to read at once."""
        return max(1, _CHUNK_ELEMENTS // self.tensors[name].shape[-1])

    def _place(self, entry: TensorEntry) -> TensorInfo:
        known = {kind.value: kind for kind in GGMLQuantizationType}
        type_name = known[entry.type_id].name if entry.type_id in known else f"number {entry.type_id}"
        what = f"{self.path}: tensor {entry.name}"
        if type_name not in SUPPORTED:
            raise ModelLoadError(f"{what} has quantization {type_name}; supported: {', '.join(SUPPORTED)}")
        block_elements, block_bytes = GGML_QUANT_SIZES[known[entry.type_id]]
        shape = entry.shape
        if not shape or 0 in shape or shape[-1] % block_elements:
            raise ModelLoadError(
                f"{what} has shape {list(shape)}; rows of {type_name} are multiples of {block_elements}"
            )
        num_bytes = math.prod(shape) // block_elements * block_bytes
        if entry.start + num_bytes > len(self._bytes):
            raise ModelLoadError(
                f"{what} is truncated: it ends at byte {entry.start + num_bytes}, the file at {len(self._bytes)}"
            )
        return TensorInfo(shape, type_name, entry.start, num_bytes)
