"""What stands in Redis is input like any other: read within bounds, one row at a time.

What cannot be read is skipped, counted by kind and named once in the log. Every reader of a shared key goes through
this module, so that one row that somebody broke hurts nobody but its owner.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TypeVar, cast

import msgspec

from ostrya.errors import Unreadable
from ostrya.state.connection import Connection
from ostrya.state.keys import MAX_WORKER_ID

log = logging.getLogger(__name__)

MAX_ROWS = 1_024
"""Of a table in one look, besides the known ones: no pool has more replicas, and each costs a router a connection."""
MAX_FIELD_BYTES = MAX_WORKER_ID
MAX_ROW_BYTES = 4_096
"""Ten times what a worker writes."""
_ROWS_A_TURN = 64
"""Decoded before others get the event loop: well below a millisecond."""
_MAX_NAMED = 1_000
_SHOWN = 64

Row = TypeVar("Row")


class Kind(StrEnum):
    """What kind of thing could not be read."""

    MEMBER = "member"
    LOAD = "load"
    HEAD = "head"
    """Of a journal: how far it is."""
    BATCH = "batch"
    SNAPSHOT = "snapshot"
    SURPLUS = "surplus"
    """A member beyond those that a router takes."""


class Rejects:
    """What could not be read, for one reader of Redis and as long as it lives."""

    def __init__(self) -> None:
        self.counts: Counter[Kind] = Counter()
        """By kind, each time it was looked at."""
        self.named: dict[tuple[Kind, str], str] = {}
        """Kind and name → why, of the first _MAX_NAMED."""
        self.cursors: dict[str, bytes] = {}
        """By table: where its scan goes on, if it has more rows than are read in one look."""

    def add(self, kind: Kind, name: str | bytes, why: object) -> None:
        """Counts it; the first time it is logged. Names and reasons are cut and escaped: they are others' words."""
        self.counts[kind] += 1
        key = (kind, _shown(name))
        if key in self.named or len(self.named) >= _MAX_NAMED:
            return
        self.named[key] = _shown(str(why), longest=3 * _SHOWN)
        fields = {"kind": kind.value, "name": key[1], "why": self.named[key]}
        log.warning("what stands in Redis cannot be read; skipping it", extra={"fields": fields})
        if len(self.named) == _MAX_NAMED:
            log.warning("more of that is counted, and not named any more", extra={"fields": {"named": _MAX_NAMED}})

    def named_rows(self) -> tuple[str, ...]:
        """For people: kind, name and reason of each that was logged."""
        return tuple(f"{kind} {name!r}: {why}" for (kind, name), why in self.named.items())


async def read(
    connection: Connection,
    table: str,
    *,
    kind: Kind,
    decode: Callable[[str, bytes], Row],
    known: Mapping[str, Row | None],
    rejects: Rejects,
) -> dict[str, Row]:
    """The rows of a table by worker id; of one that cannot be read what is `known` of it, if anything is.

    `decode` raises ValueError or a msgspec error. Those of known ids, and MAX_ROWS others; if there are more, the next
    look goes on from there. StateUnavailable, or Unreadable if it is no table at all.
    """
    limits = (MAX_FIELD_BYTES, MAX_ROW_BYTES, MAX_ROWS, rejects.cursors.get(table, b"0"))
    reply = await connection.run("rows", (table,), (*limits, *known))
    flat, too_long, rejects.cursors[table] = cast("tuple[list[bytes], list[bytes], bytes]", reply)
    found: dict[str, Row] = {}
    for position, (field, raw) in enumerate(zip(flat[::2], flat[1::2], strict=True), 1):
        try:
            worker_id = field.decode()
            found[worker_id] = decode(worker_id, raw)
        except (ValueError, msgspec.MsgspecError) as error:
            rejects.add(kind, field, error)
            _keep(found, known, field)
        if position % _ROWS_A_TURN == 0:
            await asyncio.sleep(0)
    for field in too_long:
        rejects.add(kind, field, f"longer than {MAX_FIELD_BYTES} bytes, or its value than {MAX_ROW_BYTES}")
        _keep(found, known, field)
    return found


def integer(text: bytes | None, *, least: int, most: int) -> int:
    """A number that a script wrote. Unreadable if it is none, or out of range."""
    try:
        value = int(text or b"", 10)
    except ValueError:
        raise Unreadable(f"{_shown(text or b'')!r} is no number") from None
    if not least <= value <= most:
        raise Unreadable(f"{value} is not from {least} to {most}")
    return value


def within(name: str, value: float, *, least: float, most: float) -> None:
    """ValueError unless it is; NaN is not."""
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; allowed: {least} to {most}")


def _keep(found: dict[str, Row], known: Mapping[str, Row | None], field: bytes) -> None:
    worker_id = field.decode(errors="replace")
    row = known.get(worker_id)
    if row is not None:
        found[worker_id] = row


def _shown(text: str | bytes, *, longest: int = _SHOWN) -> str:
    """Printable, one line, bounded."""
    text = text[:longest].decode(errors="backslashreplace") if isinstance(text, bytes) else text[:longest]
    return ascii(text)[1:-1]
