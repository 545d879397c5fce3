"""What a worker publishes about its resume points, and its packed form in the journal.

A resume point is a routing digest from which the worker could continue now. The engine makes these events, the worker's
publisher packs them, the router's follower applies them to the index.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from ostrya.prefix.chain import RoutingDigest


@dataclass(frozen=True, slots=True)
class Stored:
    """These became resume points, parents before children."""

    digests: tuple[RoutingDigest, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """These are resume points no longer."""

    digests: tuple[RoutingDigest, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """No resume point is left."""


Event = Stored | Removed | Cleared

_KINDS: dict[int, type[Stored] | type[Removed]] = {1: Stored, 2: Removed}
_CLEARED = 3
_HEAD = struct.Struct(">BI")


def pack(events: Iterable[Event]) -> bytes:
    """Each event as kind (u8), count (u32), count digests (u64), big-endian."""
    parts = []
    for event in events:
        if isinstance(event, Cleared):
            parts.append(_HEAD.pack(_CLEARED, 0))
        else:
            kind = 1 if isinstance(event, Stored) else 2
            parts.append(_HEAD.pack(kind, len(event.digests)) + struct.pack(f">{len(event.digests)}Q", *event.digests))
    return b"".join(parts)


def unpack(raw: bytes) -> list[Event]:
    """The inverse of pack. ValueError if `raw` is not whole events."""
    events: list[Event] = []
    offset = 0
    while offset < len(raw):
        try:
            kind, count = _HEAD.unpack_from(raw, offset)
            digests = struct.unpack_from(f">{count}Q", raw, offset + _HEAD.size)
        except struct.error as error:
            raise ValueError(f"event batch of {len(raw)} bytes is cut short at byte {offset}") from error
        offset += _HEAD.size + 8 * count
        if kind == _CLEARED:
            events.append(Cleared())
        elif kind in _KINDS:
            events.append(_KINDS[kind](tuple(RoutingDigest(digest) for digest in digests)))
        else:
            raise ValueError(f"event kind {kind} is unknown; this reader knows 1, 2 and 3")
    return events
