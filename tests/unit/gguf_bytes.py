"""GGUF headers byte by byte, for what no writer would write."""

import struct
from pathlib import Path

UINT32, STRING, ARRAY = 4, 8, 9
_PREAMBLE_BYTES = 24
_ALIGNMENT = 32


def string(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(element: int, *values: bytes, count: int | None = None) -> bytes:
    """`count` may be a lie."""
    return struct.pack("<IQ", element, len(values) if count is None else count) + b"".join(values)


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """One line of metadata."""
    return string(key.encode() if isinstance(key, str) else key) + struct.pack("<I", kind) + value


def header(*entries: bytes, num_tensors: int = 0, num_keys: int | None = None) -> bytes:
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, num_tensors, len(entries) if num_keys is None else num_keys)
        + b"".join(entries)
    )


def insert(path: Path, *entries: bytes) -> Path:
    """Puts lines of metadata before those of a file; its tensors stay aligned."""
    raw = path.read_bytes()
    num_tensors, num_keys = struct.unpack_from("<QQ", raw, 8)
    empty = entry("test.padding", STRING, string(b""))
    missing = -(len(b"".join(entries)) + len(empty)) % _ALIGNMENT
    lines = b"".join([*entries, entry("test.padding", STRING, string(bytes(missing)))])
    start = raw[:8] + struct.pack("<QQ", num_tensors, num_keys + len(entries) + 1)
    path.write_bytes(start + lines + raw[_PREAMBLE_BYTES:])
    return path
