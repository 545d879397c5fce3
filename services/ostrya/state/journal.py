"""A worker's ordered log of resume-point events, and its followers' way to read it.

One writer per worker, fenced by an epoch; one script per batch, so a batch is in the log once and in order or not at
all. Whoever misses anything, on either side, goes on from a snapshot.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import NamedTuple, cast

from ostrya.errors import Unreadable
from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import Event, pack
from ostrya.state import keys, rows, snapshot
from ostrya.state.connection import Connection
from ostrya.state.rows import Kind, Rejects

# Four times the batches between two snapshots: a follower that is a whole snapshot behind still finds its place.
LOG_LENGTH = 4_096
_READ_COUNT = 16
"""Entries of each journal a read: a worker writes at most a hundred a second."""
MAX_BATCH_BYTES = 1 << 20
"""Of an entry: more than a publisher lets pending events become before it writes a snapshot instead."""
_SLICE_BYTES = 1 << 18
"""Of a snapshot, a round trip: 32,768 resume points; many are shorter."""
_MAX_SEQ = 2**64 - 1
"""Of a stream's ids."""


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
    """One batch, or `packed` None: what was here is only in the snapshot. The batch is as Redis has it, unchecked."""

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
        try:
            return Answer(cast("bytes", await self._run(name, epoch, seq, *more)).decode())
        except Unreadable:
            # Somebody has put something else under one of our keys. To register removes it.
            return Answer.NOEPOCH

    async def _run(self, name: str, epoch: int, seq: int, *more: bytes | int) -> object:
        return await self._connection.run(name, self._keys, (epoch, seq, keys.LEASE_MS, keys.KEPT_MS, *more))


class JournalReader:
    """The reading end for all workers of a pool, over one connection. What cannot be read goes to `rejects`."""

    def __init__(self, connection: Connection, *, pool: str, rejects: Rejects | None = None) -> None:
        self._connection = connection
        self._pool = pool
        self._rejects = rejects or Rejects()

    async def read(self, after: Mapping[str, Position], *, block_ms: int) -> dict[str, list[Entry]]:
        """What each worker's journal has after its position, in order; waits up to `block_ms` for the first.

        Unreadable if one of them is no journal; `unreadable` says which.
        """
        streams = {keys.worker_keys(self._pool, worker_id).journal: worker_id for worker_id in after}
        places = [f"{at.epoch}-{at.seq}" for at in after.values()]
        reply = await self._connection.call(
            "XREAD", "COUNT", _READ_COUNT, "BLOCK", block_ms, "STREAMS", *streams, *places
        )
        found = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply or [])
        return {streams[name.decode()]: [_entry(*raw) for raw in entries] for name, entries in found}

    async def unreadable(self, worker_ids: Sequence[str]) -> list[str]:
        """Those under whose journal's key something else stands."""
        commands = (("TYPE", keys.worker_keys(self._pool, worker_id).journal) for worker_id in worker_ids)
        kinds = await self._connection.all(commands)
        wrong = [name for name, kind in zip(worker_ids, kinds, strict=True) if kind not in (b"stream", b"none")]
        for worker_id in wrong:
            self._rejects.add(Kind.BATCH, worker_id, "its journal is no stream")
        return wrong

    async def heads(self, worker_ids: Sequence[str]) -> dict[str, Head]:
        """How far each journal is; workers without one, or with one that cannot be read, are not in the answer."""
        commands = (("HMGET", keys.worker_keys(self._pool, worker_id).meta, "e", "s", "ss") for worker_id in worker_ids)
        found = {}
        for worker_id, reply in zip(worker_ids, await self._connection.all(commands), strict=True):
            try:
                head = _head(reply)
            except Unreadable as error:
                self._rejects.add(Kind.HEAD, worker_id, error)
            else:
                if head is not None:
                    found[worker_id] = head
        return found

    async def snapshot(self, worker_id: str, *, most: int) -> snapshot.Snapshot | None:
        """The newest snapshot; None if there is none. Unreadable if it is corrupt, or has more than `most` digests.

        Fetched in slices, after its length is known to be possible.
        """
        key = keys.worker_keys(self._pool, worker_id).snapshot
        reader = snapshot.Reader(most=most)
        while (wanted := reader.wanted(_SLICE_BYTES)) is not None:
            first, last = wanted
            length, part = await self._connection.all([("STRLEN", key), ("GETRANGE", key, first, last)])
            for reply in (length, part):
                if isinstance(reply, Unreadable):
                    raise reply
            if length == 0:
                return None
            reader.feed(cast("bytes", part), num_bytes=cast("int", length))
        return reader.snapshot()


def _head(reply: object) -> Head | None:
    """None: there is none."""
    if isinstance(reply, Unreadable):
        raise reply
    epoch, seq, snapshot_seq = cast("list[bytes | None]", reply)
    if epoch is None or seq is None or snapshot_seq is None:
        return None
    return Head(
        Position(
            rows.integer(epoch, least=0, most=keys.MAX_EPOCH),
            rows.integer(seq, least=0, most=_MAX_SEQ),
        ),
        rows.integer(snapshot_seq, least=-1, most=_MAX_SEQ),
    )


def _entry(raw_id: bytes, fields: dict[bytes, bytes]) -> Entry:
    """Redis itself makes sure that an id is two numbers."""
    epoch, _, seq = raw_id.partition(b"-")
    return Entry(Position(int(epoch), int(seq)), fields.get(b"b"))
