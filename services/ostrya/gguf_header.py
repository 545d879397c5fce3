"""The header of a GGUF file: its metadata, and which tensors lie where. Standard library only.

Read by text/ for the tokenizer and by engine/models/ for the weights. The `gguf` package's own reader takes two seconds
on a vocabulary, because it wraps every array element in numpy; this one takes tens of milliseconds.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ostrya.errors import ModelLoadError

Value = int | float | bool | str | list["Value"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_UINT32, _STRING, _ARRAY, _UINT64 = 4, 8, 9, 10
_MIN_BYTES = {_STRING: 8, _ARRAY: 12}
"""An empty string is its length; an empty array its elements' type and their number."""
_MAX_DIMS = 4
_MAX_NESTING = 8
_MAX_HEADER_BYTES = 64 << 20
"""Three times that of the largest vocabularies. It bounds what a damaged or hostile count costs: seconds."""
_DEFAULT_ALIGNMENT = 32
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.DOTALL)


def part_names(name: str) -> tuple[str, ...]:
    """The files of a split model, in order, one of which has this name; `name` alone if it is not named like a part."""
    match = _part(name)
    if match is None:
        return (name,)
    count = int(match["count"])
    return tuple(f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))


def model_stem(name: str) -> str:
    """A file's name without .gguf and without the mark of a part."""
    match = _part(name)
    return match["stem"] if match else name.removesuffix(".gguf")


def _part(name: str) -> re.Match[str] | None:
    match = _PART.fullmatch(name)
    return match if match and 1 <= int(match["number"]) <= int(match["count"]) else None


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


class Metadata(Mapping[str, Value]):
    """The keys of a file. A value is decoded when it is asked for: what nobody needs may hold anything.

    Asking raises ModelLoadError, which names the key, if a string in it is not UTF-8.
    """

    def __init__(self, path: Path, raw: bytes, places: dict[str, tuple[int, int]]) -> None:
        self._path, self._raw, self._places = path, raw, places

    def __getitem__(self, key: str) -> Value:
        kind, offset = self._places[key]
        try:
            return _Reader(self._path, self._raw, offset).value(kind)
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{self._path}: metadata {key} is not UTF-8; convert the model again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the tensors' data."""

    metadata: Metadata
    tensors: tuple[TensorEntry, ...]


def read_first(path: Path) -> Header:
    """The header that holds a model's metadata, whichever of its parts `path` is. ModelLoadError as of read_parts."""
    first, *others = _parts(path)
    return _read_part(first, 0, 1 + len(others))


def read_parts(path: Path) -> dict[Path, Header]:
    """The headers of all parts of a model, in order: of the file itself, or of each part of a split model.

    ModelLoadError with one line if a part is missing or is not what its name says.
    """
    parts = _parts(path)
    headers = {part: _read_part(part, number, len(parts)) for number, part in enumerate(parts)}
    num_tensors = sum(len(header.tensors) for header in headers.values())
    expected = headers[parts[0]].metadata.get("split.tensors.count", num_tensors)
    if expected != num_tensors:
        what = f"its {len(parts)} parts hold {num_tensors} tensors; split.tensors.count is {expected!r}"
        raise ModelLoadError(f"{parts[0]}: {what}; fetch all parts of one model again")
    return headers


def _parts(path: Path) -> list[Path]:
    return [path.with_name(name) for name in part_names(path.name)]


def _read_part(path: Path, number: int, count: int) -> Header:
    if count > 1 and not path.is_file():
        raise ModelLoadError(f"{path} is missing: it is part {number + 1} of {count} of a split model; fetch it")
    header = read_header(path)
    found = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
    if found != (number, count) and not (count == 1 and found[1] == 0):
        what = f"its header says split.no {found[0]!r} and split.count {found[1]!r}; by its name {number} and {count}"
        raise ModelLoadError(f"{path}: {what} are right; the parts of a model are named like NAME-00001-of-00002.gguf")
    return header


def read_header(path: Path) -> Header:
    """ModelLoadError with one line if the file is not a whole GGUF header of version 2 or 3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            return _Reader(path, raw, 0).header()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise ModelLoadError(f"{path} is corrupt or truncated: its GGUF header cannot be read") from error


class _Reader:
    """Reads little-endian values one after another; struct.error where the file ends first."""

    def __init__(self, path: Path, raw: mmap.mmap | bytes, offset: int) -> None:
        self._path, self._raw, self._offset = path, raw, offset
        self._end = min(len(raw), _MAX_HEADER_BYTES)

    def header(self) -> Header:
        magic = self._raw[: len(_MAGIC)]
        if magic != _MAGIC:
            raise ModelLoadError(f"{self._path} is not a GGUF file: it begins with {magic!r} instead of {_MAGIC!r}")
        self._offset = len(_MAGIC)
        version = self._int(_UINT32)
        if version not in _VERSIONS:
            raise ModelLoadError(f"{self._path} is GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._int(_UINT64), self._int(_UINT64)
        places: dict[str, tuple[int, int]] = {}
        for _ in range(num_keys):
            key = self._bytes().decode("utf-8", "backslashreplace")
            if key in places:
                self._refuse_twice(f"metadata {key[:80]!r}")
            kind = self._int(_UINT32)
            places[key] = kind, self._offset
            self._skip(kind)
        metadata = Metadata(self._path, self._raw[: self._offset], places)
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name, shape, kind, offset = self._tensor()
            if name in entries:
                self._refuse_twice(f"tensor {name[:80]!r}")
            entries[name] = shape, kind, offset
        data_start = self._aligned(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        tensors = (
            TensorEntry(name, shape, kind, data_start + offset) for name, (shape, kind, offset) in entries.items()
        )
        return Header(metadata, tuple(tensors))

    def _refuse_twice(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self._path}: {what} is there twice; convert the model again")

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._bytes().decode()
        num_dims = self._int(_UINT32)
        # A name goes into messages of one line.
        if not name.isprintable() or num_dims > _MAX_DIMS:
            raise ModelLoadError(f"{self._path} is corrupt: tensor {name!r} has {num_dims} dimensions, at most 4 exist")
        dims = [self._int(_UINT64) for _ in range(num_dims)]
        return name, tuple(reversed(dims)), self._int(_UINT32), self._int(_UINT64)

    def _aligned(self, alignment: Value) -> int:
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
            raise ModelLoadError(f"{self._path}: general.alignment is {alignment!r}; it must be a positive number")
        return -(-self._offset // alignment) * alignment

    def _skip(self, kind: int, depth: int = 0) -> None:
        """Past one value, whatever its strings hold."""
        if kind == _STRING:
            self._take(self._int(_UINT64))
        elif kind == _ARRAY:
            element, count = self._array(depth)
            if element == _STRING:
                self._skip_strings(count)
            elif element == _ARRAY:
                for _ in range(count):
                    self._skip(_ARRAY, depth + 1)
            else:
                self._take(count * _SCALARS[element].size)
        else:
            self._take(_SCALARS[kind].size)

    def _skip_strings(self, count: int) -> None:
        raw, offset, end, length_of = self._raw, self._offset, self._end, struct.Struct("<Q").unpack_from
        for _ in range(count):
            offset += 8 + length_of(raw, offset)[0]
            if offset > end:
                break
        self._take(offset - self._offset)

    def value(self, kind: int) -> Value:
        """The value that lies here, which was skipped before. UnicodeDecodeError if a string in it is not UTF-8."""
        if kind == _STRING:
            return self._bytes().decode()
        if kind != _ARRAY:
            return self._scalar(kind)
        element, count = self._array(0)
        if element == _STRING:
            return self._strings(count)
        if element == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        form = _SCALARS[element]
        start = self._take(count * form.size)
        return [value for (value,) in form.iter_unpack(self._raw[start : self._offset])]

    def _strings(self, count: int) -> list[Value]:
        raw, offset, length_of = self._raw, self._offset, struct.Struct("<Q").unpack_from
        found: list[Value] = []
        for _ in range(count):
            start = offset + 8
            offset = start + length_of(raw, offset)[0]
            found.append(raw[start:offset].decode())
        self._offset = offset
        return found

    def _array(self, depth: int) -> tuple[int, int]:
        """Type and number of the elements of an array, which all have room before the end."""
        element, count = self._int(_UINT32), self._int(_UINT64)
        if depth >= _MAX_NESTING:
            raise ModelLoadError(f"{self._path}: metadata is nested more than {_MAX_NESTING} arrays deep")
        smallest = _MIN_BYTES[element] if element in _MIN_BYTES else _SCALARS[element].size
        if count * smallest > self._end - self._offset:
            self._run_out()
        return element, count

    def _int(self, kind: int) -> int:
        return int(self._scalar(kind))

    def _scalar(self, kind: int) -> int | float | bool:
        form = _SCALARS[kind]
        value: int | float | bool = form.unpack_from(self._raw, self._take(form.size))[0]
        return value

    def _bytes(self) -> bytes:
        start = self._take(self._int(_UINT64))
        return self._raw[start : self._offset]

    def _take(self, num_bytes: int) -> int:
        """Where the next bytes begin; goes past them."""
        start = self._offset
        if num_bytes > self._end - start:
            self._run_out()
        self._offset = start + num_bytes
        return start

    def _run_out(self) -> NoReturn:
        if self._end < len(self._raw):
            limit = f"{_MAX_HEADER_BYTES >> 20} MiB"
            raise ModelLoadError(
                f"{self._path}: its header is longer than {limit}, the most that is read; it is corrupt"
            )
        raise struct.error("a value runs past the end of the file")
