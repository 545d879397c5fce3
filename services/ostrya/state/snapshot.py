"""All resume points of a worker at one sequence number, as one blob with a checksum."""

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from ostrya.errors import StateError
from ostrya.prefix.chain import RoutingDigest

_HEAD = struct.Struct(">4sQQII")
_MAGIC = b"OSN1"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a worker held after batch `seq` of `epoch`."""

    epoch: int
    seq: int
    digests: tuple[RoutingDigest, ...]
    """Parents before children."""


def pack(epoch: int, seq: int, digests: Iterable[RoutingDigest]) -> bytes:
    """Magic, epoch (u64), seq (u64), count (u32), CRC-32 of the rest, then the digests (u64), all big-endian."""
    body = _swapped(array("Q", digests)).tobytes()
    return _HEAD.pack(_MAGIC, epoch, seq, len(body) // 8, zlib.crc32(body)) + body


def unpack(raw: bytes) -> Snapshot:
    """The inverse of pack. StateError if a byte is missing or wrong."""
    if len(raw) < _HEAD.size:
        raise StateError(f"snapshot has {len(raw)} bytes; its header alone has {_HEAD.size}")
    magic, epoch, seq, count, checksum = _HEAD.unpack_from(raw)
    body = raw[_HEAD.size :]
    if magic != _MAGIC:
        raise StateError(f"snapshot starts with {magic!r}; this reader knows {_MAGIC!r}")
    if len(body) != 8 * count:
        raise StateError(f"snapshot of {count} digests has {len(body)} bytes of them; it must have {8 * count}")
    if zlib.crc32(body) != checksum:
        raise StateError(f"snapshot {epoch}-{seq} is corrupt: its CRC-32 is {zlib.crc32(body):08x}, not {checksum:08x}")
    numbers = array("Q")
    numbers.frombytes(body)
    return Snapshot(epoch, seq, tuple(map(RoutingDigest, _swapped(numbers))))


def _swapped(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
