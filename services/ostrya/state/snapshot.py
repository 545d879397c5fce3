"""All resume points of a worker at one sequence number, as one blob with a checksum.

Written at once, read in parts: a blob may be as large as somebody made it, so its header is looked at before the rest
is asked for, and nothing here takes longer than a part does.
"""

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from ostrya.errors import Unreadable
from ostrya.prefix.chain import RoutingDigest

_HEAD = struct.Struct(">4sQQII")
_MAGIC = b"OSN1"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a worker held after batch `seq` of `epoch`."""

    epoch: int
    seq: int
    parts: tuple["array[int]", ...]
    """RoutingDigests, parents before children; in parts, as one array would be moved whenever it grows."""

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def slices(self, most: int) -> Iterator[Sequence[RoutingDigest]]:
        """All of them, at most so many at a time."""
        for part in self.parts:
            for first in range(0, len(part), most):
                yield cast("list[RoutingDigest]", part[first : first + most].tolist())


def pack(epoch: int, seq: int, digests: Iterable[RoutingDigest]) -> bytes:
    """Magic, epoch (u64), seq (u64), count (u32), CRC-32 of the rest, then the digests (u64), all big-endian."""
    body = _swapped(array("Q", digests)).tobytes()
    return _HEAD.pack(_MAGIC, epoch, seq, len(body) // 8, zlib.crc32(body)) + body


def unpack(raw: bytes, *, most: int) -> Snapshot:
    """The inverse of pack. Unreadable if a byte is missing or wrong, or if there are more than `most` digests."""
    reader = Reader(most=most)
    reader.feed(raw, num_bytes=len(raw))
    return reader.snapshot()


class Reader:
    """Takes a snapshot part by part: feed what `wanted` names until that is None."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._head: tuple[int, int, int, int] | None = None
        """Epoch, seq, count, checksum."""
        self._checksum = 0
        self._parts: list[array[int]] = []
        self._num_bytes = 0
        self._taken = 0

    def wanted(self, longest: int) -> tuple[int, int] | None:
        """First and last byte of the next part; None = all is there. `longest` is a multiple of 8."""
        if self._head is None:
            return 0, _HEAD.size + longest - 1
        return (self._taken, min(self._taken + longest, self._num_bytes) - 1) if self._taken < self._num_bytes else None

    def feed(self, part: bytes, *, num_bytes: int) -> None:
        """The next part of a blob that has `num_bytes` now. Unreadable as soon as that is certain."""
        body = memoryview(part)
        if self._head is None:
            self._begin(part, num_bytes)
            body = body[_HEAD.size :]
        elif num_bytes != self._num_bytes:
            raise Unreadable("snapshot was replaced while it was read")
        if not part or len(body) % 8:
            raise Unreadable(f"snapshot ends after {self._taken + len(part)} of {self._num_bytes} bytes")
        self._taken += len(part)
        self._checksum = zlib.crc32(body, self._checksum)
        numbers = array("Q")
        numbers.frombytes(body)
        self._parts.append(_swapped(numbers))

    def snapshot(self) -> Snapshot:
        """All of it. Unreadable if a byte was wrong."""
        if self._head is None or self._taken < self._num_bytes:
            raise Unreadable(f"snapshot ends after {self._taken} of {self._num_bytes} bytes")
        epoch, seq, _, checksum = self._head
        if self._checksum != checksum:
            raise Unreadable(
                f"snapshot {epoch}-{seq} is corrupt: its CRC-32 is {self._checksum:08x}, not {checksum:08x}"
            )
        return Snapshot(epoch, seq, tuple(self._parts))

    def _begin(self, part: bytes, num_bytes: int) -> None:
        if len(part) < _HEAD.size:
            raise Unreadable(f"snapshot has {len(part)} bytes; its header alone has {_HEAD.size}")
        magic, epoch, seq, count, checksum = _HEAD.unpack_from(part)
        if magic != _MAGIC:
            raise Unreadable(f"snapshot starts with {magic!r}; this reader knows {_MAGIC!r}")
        if count > self._most:
            raise Unreadable(f"snapshot has {count} digests; its worker can hold {self._most}")
        if num_bytes != _HEAD.size + 8 * count:
            raise Unreadable(
                f"snapshot of {count} digests has {num_bytes} bytes; it must have {_HEAD.size + 8 * count}"
            )
        self._head, self._num_bytes = (epoch, seq, count, checksum), num_bytes


def _swapped(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
