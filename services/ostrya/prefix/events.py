"""What a worker publishes about its resume points, and its packed form in the journal.

A resume point is a routing digest from which the worker could continue now. The engine makes these events, the worker's
publisher packs them, the router's follower applies them to the index.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

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

SLICE = 1_024
"""Digests unpacked, applied or swept in one go: half a millisecond, and one more where the index grows."""
MAX_EVENTS = 8_192
"""Of a batch. A worker makes two a step and writes many times a second."""


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


def unpack(raw: bytes, *, most: int = SLICE) -> Iterator[Event]:
    """The events that pack made, each of at most `most` digests, so that whoever applies them can pause in between.

    What a later Cleared makes void is left out. ValueError, at once, if `raw` is not whole events.
    """
    return _events(raw, _places(raw), most)


def _places(raw: bytes) -> list[tuple[int, int, int]]:
    """Kind, count and where its digests begin, of each event."""
    places: list[tuple[int, int, int]] = []
    offset = 0
    while offset < len(raw):
        if len(raw) < offset + _HEAD.size:
            raise ValueError(f"event batch of {len(raw)} bytes is cut short at byte {offset}")
        kind, count = _HEAD.unpack_from(raw, offset)
        offset += _HEAD.size
        if len(raw) < offset + 8 * count:
            raise ValueError(f"event batch of {len(raw)} bytes is cut short at byte {offset - _HEAD.size}")
        if kind == _CLEARED:
            places.clear()
        elif kind not in _KINDS:
            raise ValueError(f"event kind {kind} is unknown; this reader knows 1, 2 and 3")
        places.append((kind, count, offset))
        if len(places) > MAX_EVENTS:
            raise ValueError(f"event batch has more than {MAX_EVENTS} events")
        offset += 8 * count
    return places


def _events(raw: bytes, places: list[tuple[int, int, int]], most: int) -> Iterator[Event]:
    for kind, count, offset in places:
        if kind == _CLEARED:
            yield Cleared()
            continue
        for first in range(0, count, most):
            digests = struct.unpack_from(f">{min(most, count - first)}Q", raw, offset + 8 * first)
            yield _KINDS[kind](cast("tuple[RoutingDigest, ...]", digests))
