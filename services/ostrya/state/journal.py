"""A worker's ordered log of resume-point events, and its followers' way to read it.

One writer per worker, fenced by an epoch; one script per batch, so a batch is in the log once and in order or not at
all. Whoever misses anything, on either side, goes on from a snapshot.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import NamedTuple, cast

from ostrya.errors import StateError
from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import Event, pack
from ostrya.state import keys, snapshot
from ostrya.state.connection import Connection

# Four times the batches between two snapshots: a follower that is a whole snapshot behind still finds its place.
LOG_LENGTH = 4_096
_READ_COUNT = 512


class Answer(StrEnum):
    """What Redis says to a writer."""

    OK = "OK"
    GAP = "GAP"
    """Batches before this one are missing there: write a snapshot with the next number."""
    NOEPOCH = "NOEPOCH"
    """This registration is unknown there: register above it, then write a snapshot."""
    FENCED = "FENCED"
    """A younger process has this worker id: stop."""


class Position(NamedTuple):
    """A place in a journal; a later one is greater."""

    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch, or `packed` None: what was here is only in the snapshot."""

    at: Position
    packed: bytes | None


@dataclass(frozen=True, slots=True)
class Head:
    """How far a journal is."""

    at: Position
    snapshot_seq: int
    """-1: the first snapshot of this epoch is still to come."""


class JournalWriter:
    """The writing end for one worker id. StateUnavailable when Redis does not answer; it may have done it."""

    def __init__(self, connection: Connection, *, pool: str, worker_id: str) -> None:
        self._connection = connection
        self._keys = astuple(keys.worker_keys(pool, worker_id))

    async def register(self, *, floor: int = 0) -> int:
        """A new epoch above `floor` and every earlier one; the journal is empty, the lease runs. Snapshot next."""
        return int(cast("bytes", await self._run("register", floor, 0)))

    async def append(self, epoch: int, seq: int, events: Iterable[Event]) -> Answer:
        """Batch number `seq`; repeating one is harmless. Renews the lease."""
        return await self._answer("append", epoch, seq, pack(events), LOG_LENGTH)

    async def renew(self, epoch: int, seq: int) -> Answer:
        """The lease for another LEASE_MS; `seq` is the last batch appended."""
        return await self._answer("renew", epoch, seq)

    async def write_snapshot(self, epoch: int, seq: int, digests: Iterable[RoutingDigest]) -> Answer:
        """Everything the worker holds. The last number appended compacts; the next one replaces lost batches."""
        return await self._answer("snapshot", epoch, seq, snapshot.pack(epoch, seq, digests), LOG_LENGTH)

    async def leave(self, epoch: int) -> Answer:
        """The lease ends now and the journal goes."""
        return await self._answer("leave", epoch, 0)

    async def _answer(self, name: str, epoch: int, seq: int, *more: bytes | int) -> Answer:
        return Answer(cast("bytes", await self._run(name, epoch, seq, *more)).decode())

    async def _run(self, name: str, epoch: int, seq: int, *more: bytes | int) -> object:
        return await self._connection.run(name, self._keys, (epoch, seq, keys.LEASE_MS, keys.KEPT_MS, *more))


class JournalReader:
    """The reading end for all workers of a pool, over one connection."""

    def __init__(self, connection: Connection, *, pool: str) -> None:
        self._connection = connection
        self._pool = pool

    async def read(self, after: Mapping[str, Position], *, block_ms: int) -> dict[str, list[Entry]]:
        """What each worker's journal has after its position, in order; waits up to `block_ms` for the first."""
        streams = {keys.worker_keys(self._pool, worker_id).journal: worker_id for worker_id in after}
        places = [f"{at.epoch}-{at.seq}" for at in after.values()]
        reply = await self._connection.call(
            "XREAD", "COUNT", _READ_COUNT, "BLOCK", block_ms, "STREAMS", *streams, *places
        )
        found = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply or [])
        return {streams[name.decode()]: [_entry(*raw) for raw in entries] for name, entries in found}

    async def heads(self, worker_ids: Sequence[str]) -> dict[str, Head]:
        """How far each journal is; workers without one are not in the answer."""
        commands = [("HMGET", keys.worker_keys(self._pool, worker_id).meta, "e", "s", "ss") for worker_id in worker_ids]
        replies = cast("list[list[bytes | None]]", await self._connection.all(commands) if commands else [])
        return {
            worker_id: Head(Position(int(epoch), int(seq)), int(snapshot_seq))
            for worker_id, (epoch, seq, snapshot_seq) in zip(worker_ids, replies, strict=True)
            if epoch is not None and seq is not None and snapshot_seq is not None
        }

    async def snapshot(self, worker_id: str) -> snapshot.Snapshot | None:
        """The newest snapshot; None if there is none. StateError if it is corrupt."""
        raw = await self._connection.call("GET", keys.worker_keys(self._pool, worker_id).snapshot)
        return None if raw is None else snapshot.unpack(cast("bytes", raw))


def _entry(raw_id: bytes, fields: dict[bytes, bytes]) -> Entry:
    epoch, _, seq = raw_id.decode().partition("-")
    if not seq.isdigit():
        raise StateError(f"journal entry {raw_id!r} is not epoch-seq")
    return Entry(Position(int(epoch), int(seq)), fields.get(b"b"))
