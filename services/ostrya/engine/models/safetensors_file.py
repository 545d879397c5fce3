"""The header of a safetensors file: which tensor lies where. Everything it promises is checked against the file.

Format: https://github.com/huggingface/safetensors: u64 length, JSON, then the tensors without gaps. The library's own
reader maps the file and parses the header for every tensor (reading.py says what that costs).
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ostrya.errors import ModelLoadError

_MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Of a value. One of a dtype that is not here may be anything: nobody can ask for it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte in the file."""
    num_bytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """By name. ModelLoadError with one line unless the file holds all that its header says, and nothing else."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            if len(prefix) < 8:
                _refuse(path, f"truncated: it has {file_bytes} bytes, and no header")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > _MAX_HEADER_BYTES:
                _refuse(path, f"corrupt: its header has {header_bytes} bytes; supported: at most {_MAX_HEADER_BYTES}")
            if 8 + header_bytes > file_bytes:
                _refuse(path, f"truncated: its header ends at byte {8 + header_bytes}, the file at {file_bytes}")
            raw = file.read(header_bytes)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    entries = _entries(path, raw, 8 + header_bytes)
    _check_places(path, entries, 8 + header_bytes, file_bytes)
    return entries


def _entries(path: Path, raw: bytes, data_start: int) -> dict[str, Entry]:
    try:
        header = json.loads(raw, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: corrupt: its header cannot be read: {error}; fetch it again") from error
    if not isinstance(header, dict):
        _refuse(path, "corrupt: its header is no JSON object")
    entries = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        # A name goes into messages of one line.
        if not name.isprintable():
            _refuse(path, f"corrupt: a tensor is called {name[:80]!a}")
        entries[name] = _entry(path, name, value, data_start)
    return entries


def _without_twins(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!a} is there twice")
        found[name] = value
    return found


def _entry(path: Path, name: str, value: object, data_start: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            if not all(type(size) is int and size >= 0 for size in shape):
                _refuse(path, f"corrupt: tensor {name} has shape {shape!r:.80}")
            if not 0 <= start <= end:
                _refuse(path, f"corrupt: tensor {name} lies at bytes {start} to {end}")
            expected = math.prod(shape) * _BITS[dtype] if dtype in _BITS else 8 * (end - start)
            if 8 * (end - start) != expected:
                what = f"tensor {name} has {end - start} bytes, which are not those of {dtype} {shape!r:.80}"
                _refuse(path, f"corrupt: {what}")
            return Entry(path, dtype[:16], tuple(shape), data_start + start, end - start)
    _refuse(path, f"corrupt: of tensor {name} its header does not say dtype, shape and data_offsets")


def _check_places(path: Path, entries: dict[str, Entry], data_start: int, file_bytes: int) -> None:
    end, before = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start + entry.num_bytes > file_bytes:
            what = f"tensor {name} ends at byte {entry.start + entry.num_bytes}, the file at {file_bytes}"
            _refuse(path, f"truncated: {what}")
        if entry.start < end:
            _refuse(path, f"corrupt: tensor {name} begins at byte {entry.start}, within {before}, which ends at {end}")
        if entry.start > end:
            _refuse(path, f"corrupt: nothing is said of bytes {end} to {entry.start}, before tensor {name}")
        end, before = entry.start + entry.num_bytes, f"tensor {name}"
    if end != file_bytes:
        _refuse(path, f"corrupt: its tensors end at byte {end}, the file at {file_bytes}")


def _refuse(path: Path, why: str) -> NoReturn:
    raise ModelLoadError(f"{path}: {why}; fetch it again")
