"""The header of a GGUF file: its metadata, and which tensors lie where. Standard library only.

Read by text/ for the tokenizer and by engine/models/ for the weights. The `gguf` package's own reader takes two seconds
on a vocabulary, because it wraps every array element in numpy; this one takes tens of milliseconds.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from ostrya.errors import ModelLoadError

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One line of the tensor list."""

    name: str
    shape: tuple[int, ...]
    """In torch's order, outermost first."""
    type_id: int
    """A GGMLQuantizationType, unless the file is newer or damaged."""
    start: int
    """Byte in the file."""


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the tensors' data."""

    metadata: dict[str, Value]
    tensors: tuple[TensorEntry, ...]


def read_header(path: Path) -> Header:
    """ModelLoadError with one line if the file is not a whole GGUF header of version 2 or 3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            return _Reader(path, raw).header()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise ModelLoadError(f"{path} is corrupt or truncated: its GGUF header cannot be read") from error


class _Reader:
    """Reads little-endian values one after another; struct.error where the file ends first."""

    def __init__(self, path: Path, raw: mmap.mmap) -> None:
        self._path, self._raw, self._offset = path, raw, 0

    def header(self) -> Header:
        magic = self._raw[: len(_MAGIC)]
        if magic != _MAGIC:
            raise ModelLoadError(f"{self._path} is not a GGUF file: it begins with {magic!r} instead of {_MAGIC!r}")
        self._offset = len(_MAGIC)
        version = self._int("I")
        if version not in _VERSIONS:
            raise ModelLoadError(f"{self._path} is GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._int("Q"), self._int("Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._strings(1)[0]
            metadata[key] = self._value(self._int("I"))
        entries = [self._tensor() for _ in range(num_tensors)]
        data_start = self._aligned(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        tensors = tuple(TensorEntry(name, shape, kind, data_start + offset) for name, shape, kind, offset in entries)
        return Header(metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._strings(1)[0]
        num_dims = self._int("I")
        # A name goes into messages of one line.
        if not name.isprintable() or num_dims > _MAX_DIMS:
            raise ModelLoadError(f"{self._path} is corrupt: tensor {name!r} has {num_dims} dimensions, at most 4 exist")
        dims = [self._int("Q") for _ in range(num_dims)]
        return name, tuple(reversed(dims)), self._int("I"), self._int("Q")

    def _aligned(self, alignment: Value) -> int:
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelLoadError(f"{self._path}: general.alignment is {alignment!r}; it must be a positive number")
        return -(-self._offset // alignment) * alignment

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind == _ARRAY:
            element, count = self._int("I"), self._int("Q")
            return self._strings(count) if element == _STRING else list(self._scalars(_SCALARS[element], count))
        return self._scalars(_SCALARS[kind], 1)[0]

    def _int(self, kind: str) -> int:
        return int(self._scalars(kind, 1)[0])

    def _scalars(self, kind: str, count: int) -> tuple[int | float | bool, ...]:
        form = f"<{count}{kind}"
        values = struct.unpack_from(form, self._raw, self._offset)
        self._offset += struct.calcsize(form)
        return values

    def _strings(self, count: int) -> list[str]:
        raw, offset, length_of = self._raw, self._offset, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            end = offset + 8 + length_of(raw, offset)[0]
            if end > len(raw):
                raise struct.error("a string runs past the end")
            found.append(raw[offset + 8 : end].decode("utf-8"))
            offset = end
        self._offset = offset
        return found
