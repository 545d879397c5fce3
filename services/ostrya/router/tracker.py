"""Follows every worker's journal into the prefix index: one blocking read over all streams, in order or not at all.

For each worker the next id is known. Anything else (a gap, a marker, a trimmed log, another epoch, a head that is not
where it should be) means: take the snapshot, go on after its number. Until a fitting one is there the old knowledge
stays. While Redis is gone the index is frozen; nothing here ever fails a request.

Whatever stands in Redis, decisions do not wait for it: batches and snapshots are bounded by what a worker can hold and
are applied in slices, a snapshot beside the old knowledge until it is whole.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ostrya.errors import StateUnavailable, Unreadable
from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import SLICE, Event, unpack
from ostrya.prefix.index import PrefixIndex
from ostrya.router.fleet import Fleet
from ostrya.router.registry import DROP_S
from ostrya.router.settings import RouterSettings
from ostrya.router.types import WorkerId
from ostrya.state.connection import Connection
from ostrya.state.journal import MAX_BATCH_BYTES, Entry, Head, JournalReader, Position
from ostrya.state.rows import Kind, Rejects

log = logging.getLogger(__name__)

_NOWHERE = Position(0, 0)
_BLOCK_MS = 200
_HEAL_MS = 50
"""The same while some slot waits for its snapshot."""
_HEAL_FAST_S = 5.0
"""After this a worker without a snapshot has no journal, rather than one in repair."""
_HEADS_S = 0.5
"""How often heads are compared with our positions: finds what no entry would ever tell."""
_STRAY_S = 10.0
"""After so long without the place that somebody promised, the promise was wrong and what Redis says now counts."""
_MAX_BACKOFF_S = 0.5
_SLICES = 32
"""Of a snapshot, or of what dead replicas held, a turn; between two, everybody else gets the event loop."""


@dataclass(slots=True)
class _Cursor:
    """Where we are in one worker's journal."""

    slot: int
    most: int
    """Resume points its worker can hold."""
    min_epoch: int
    """Older ones belong to a process that is gone."""
    needs: Position
    """The earliest snapshot that would make the slot whole again."""
    behind_since: float
    at: Position = _NOWHERE
    """The last entry applied; always a real id."""
    promised: Position = _NOWHERE
    """Where the head was when it was last looked at."""
    is_drained: bool = False
    """The last read found nothing more."""
    is_whole: bool = False
    """The slot holds what the worker held at `at`. Otherwise a snapshot is due."""


@dataclass(slots=True)
class _Filling:
    """A snapshot on its way into the index."""

    worker_id: WorkerId
    slot: int
    draft: int
    """The index's slot that it fills."""
    at: Position
    slices: Iterator[Sequence[RoutingDigest]]


class Tracker:
    """Owns the writing side of the index. `run` in a task, `close` after it ended. Counters are for metrics."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        fleet: Fleet,
        index: PrefixIndex,
        clock: Callable[[], float] = time.monotonic,
        rejects: Rejects | None = None,
    ) -> None:
        self.num_events: Counter[str] = Counter()
        """Digests applied, by kind: stored, removed; cleared counts events."""
        self.num_snapshots = 0
        self.num_gaps = 0
        self.num_corrupt = 0
        """Batches and snapshots that could not be read."""
        self.redis_up: bool | None = None
        """None = not known yet."""
        self._fleet, self._index, self._clock = fleet, index, clock
        self._connection = Connection(settings.redis_url)
        self._rejects = rejects or Rejects()
        self._reader = JournalReader(self._connection, pool=settings.pool, rejects=self._rejects)
        self._cursors: dict[WorkerId, _Cursor] = {}
        self._filling: _Filling | None = None
        """One at a time, which bounds the memory."""
        self._num_at_a_stretch = 0
        """Digests applied since others had the event loop: after a pause every journal has many small batches."""
        self._heads_at = float("-inf")
        self._dropped_at = clock()

    def staleness_s(self) -> dict[WorkerId, float]:
        """For each followed worker: seconds since its part of the index was whole; 0 = it is."""
        now = self._clock()
        return {
            worker_id: 0.0 if cursor.is_whole else now - cursor.behind_since
            for worker_id, cursor in self._cursors.items()
        }

    async def run(self) -> None:
        """Follows until cancelled; the index is left as it is."""
        backoff_s = 0.05
        while True:
            self._index.expire(self._clock())
            await self._sweep()
            self._match_fleet()
            try:
                await self._doubt()
                await self._turn()
                self._set_up(True)
                backoff_s = 0.05
            except StateUnavailable as error:
                self._set_up(False, str(error))
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()

    async def _doubt(self) -> None:
        """Replicas answer and Redis hears nothing of them: it may no longer be the one that they write to."""
        if self._fleet.has_unheard and self._clock() - self._dropped_at >= DROP_S:
            self._dropped_at = self._clock()
            await self._connection.drop()

    async def _turn(self) -> None:
        """Heads now and then, snapshots where due, then whatever the journals have."""
        await self._fill()
        healing = [name for name, cursor in self._cursors.items() if self._is_healing(cursor)]
        if self._clock() - self._heads_at >= _HEADS_S:
            self._heads_at = self._clock()
            await self._compare_heads(list(self._cursors))
        elif healing:
            await self._compare_heads(healing)
        after: dict[str, Position] = {name: cursor.at for name, cursor in self._cursors.items() if cursor.is_whole}
        block_ms = _HEAL_MS if healing or not self._index.is_swept else _BLOCK_MS
        if self._filling is not None:
            block_ms = 1
        if not after:
            await self._connection.call("PING")
            await asyncio.sleep(block_ms / 1000)
            return
        try:
            found = await self._reader.read(after, block_ms=block_ms)
        except Unreadable:
            for name in await self._reader.unreadable(list(after)):
                cursor = self._cursors[WorkerId(name)]
                self._fall_behind(cursor, needs=Position(cursor.at.epoch, cursor.at.seq + 1))
            return
        for name in after:
            self._cursors[WorkerId(name)].is_drained = name not in found
        for name, entries in found.items():
            await self._apply(WorkerId(name), entries)

    async def _sweep(self) -> None:
        for _ in range(_SLICES):
            if self._index.sweep(SLICE):
                return
            await asyncio.sleep(0)

    def _match_fleet(self) -> None:
        """A cursor for each journal that should be followed. A new slot starts from nothing."""
        followed = self._fleet.followed()
        for worker_id in self._cursors.keys() - followed.keys():
            del self._cursors[worker_id]
        for worker_id, wanted in followed.items():
            cursor, first = self._cursors.get(worker_id), Position(wanted.min_epoch, 0)
            if cursor is None or cursor.slot != wanted.slot:
                most = min(wanted.num_pages or self._index.max_entries, self._index.max_entries)
                self._cursors[worker_id] = _Cursor(wanted.slot, most, wanted.min_epoch, first, self._clock())
                continue
            cursor.min_epoch = wanted.min_epoch
            if wanted.min_epoch > cursor.at.epoch:
                self._fall_behind(cursor, needs=first)

    async def _compare_heads(self, worker_ids: list[WorkerId]) -> None:
        """Heads against positions: finds what no entry would tell, and fetches the snapshots that are due."""
        for name, head in (await self._reader.heads(worker_ids)).items():
            worker_id = WorkerId(name)
            cursor = self._cursors[worker_id]
            if head.at.epoch > cursor.at.epoch:
                self._fall_behind(cursor, needs=Position(head.at.epoch, 0))
            elif head.at < cursor.at:
                # A failover lost the tail; the worker hears of the gap and writes a snapshot beyond it.
                self._fall_behind(cursor, needs=cursor.at)
            elif cursor.at < cursor.promised and cursor.is_drained:
                # Entries that were there at the last look never came: the log was trimmed behind us.
                self._fall_behind(cursor, needs=cursor.promised)
            cursor.promised = head.at
            self._forget_strays(cursor, head)
            is_due = not cursor.is_whole and Position(head.at.epoch, head.snapshot_seq) >= cursor.needs
            if is_due and self._filling is None:
                await self._take_snapshot(worker_id, cursor, head)

    def _forget_strays(self, cursor: _Cursor, head: Head) -> None:
        """A place that was promised and never came was a stray write: waiting for it would last for ever."""
        is_long_ago = not cursor.is_whole and self._clock() - cursor.behind_since > _STRAY_S
        if is_long_ago and max(head.at, cursor.at) < cursor.needs and head.at.epoch >= cursor.min_epoch:
            cursor.needs = Position(head.at.epoch, 0)

    async def _take_snapshot(self, worker_id: WorkerId, cursor: _Cursor, head: Head) -> None:
        """Fetches it and begins to fill it in."""
        try:
            snapshot = await self._reader.snapshot(worker_id, most=cursor.most)
            is_promised = snapshot is None or (snapshot.epoch, snapshot.seq) == (head.at.epoch, head.snapshot_seq)
            if not is_promised and (await self._reader.heads([worker_id])).get(worker_id) == head:
                # Nothing in a snapshot says that its numbers are right, and with wrong ones we would never go on.
                raise Unreadable("snapshot is not the one that its journal names")
        except Unreadable as error:
            self._cannot_read(Kind.SNAPSHOT, worker_id, error)
            self._fall_behind(cursor, needs=Position(head.at.epoch, head.snapshot_seq + 1))
            return
        if snapshot is not None and is_promised and self._fleet.follows(worker_id, cursor.slot):
            at, slices = Position(snapshot.epoch, snapshot.seq), snapshot.slices(SLICE)
            self._filling = _Filling(worker_id, cursor.slot, self._index.add_draft(), at, slices)
            await self._fill()

    async def _fill(self) -> None:
        """Some slices of the snapshot that is being filled in; when it is whole, it is what its slot holds."""
        filling = self._filling
        if filling is None:
            return
        try:
            for _ in range(_SLICES):
                cursor = self._cursors.get(filling.worker_id)
                is_wanted = cursor is not None and cursor.slot == filling.slot and filling.at >= cursor.needs
                if cursor is None or not is_wanted or not self._fleet.follows(filling.worker_id, filling.slot):
                    self._filling = None
                    return
                digests = next(filling.slices, None)
                if digests is not None:
                    self._index.store(filling.draft, digests)
                else:
                    self._filling = None
                    self._index.become(filling.slot, filling.draft)
                    cursor.at, cursor.is_whole = filling.at, True
                    self.num_snapshots += 1
                    return
                await asyncio.sleep(0)
        finally:
            if self._filling is None:
                self._index.retire(filling.draft)  # nothing, if it has become the slot's

    async def _apply(self, worker_id: WorkerId, entries: list[Entry]) -> None:
        cursor = self._cursors[worker_id]
        for entry in entries:
            epoch, seq = entry.at
            if not self._fleet.follows(worker_id, cursor.slot):
                return  # replaced while we waited: the slot is no longer ours to write
            if entry.packed is None or epoch > cursor.at.epoch:
                self._fall_behind(cursor, needs=entry.at)
                return
            if seq != cursor.at.seq + 1:
                self.num_gaps += 1
                self._fall_behind(cursor, needs=Position(epoch, seq - 1))
                return
            try:
                await self._apply_batch(worker_id, cursor, entry.packed)
            except ValueError as error:
                self._cannot_read(Kind.BATCH, worker_id, error)
                self._fall_behind(cursor, needs=entry.at)
                return
            cursor.at = entry.at

    async def _apply_batch(self, worker_id: WorkerId, cursor: _Cursor, packed: bytes) -> None:
        """In slices. ValueError if it is none, or too large; what of it was applied is right, as far as it goes."""
        if len(packed) > MAX_BATCH_BYTES:
            raise ValueError(f"event batch has {len(packed)} bytes; no worker writes more than {MAX_BATCH_BYTES}")
        for event in unpack(packed):
            if self._num_at_a_stretch >= SLICE:
                self._num_at_a_stretch = 0
                await asyncio.sleep(0)
            if not self._fleet.follows(worker_id, cursor.slot):
                return
            self._index.apply(cursor.slot, [event])
            self._num_at_a_stretch += self._count(event)
            if self._index.num_blocks(cursor.slot) > cursor.most:
                raise ValueError(f"more resume points are stored than the {cursor.most} that the worker can hold")

    def _fall_behind(self, cursor: _Cursor, *, needs: Position) -> None:
        if cursor.is_whole:
            cursor.is_whole, cursor.behind_since = False, self._clock()
        cursor.needs = max(cursor.needs, needs)

    def _is_healing(self, cursor: _Cursor) -> bool:
        return not cursor.is_whole and self._clock() - cursor.behind_since < _HEAL_FAST_S

    def _cannot_read(self, kind: Kind, worker_id: WorkerId, error: Exception) -> None:
        self.num_corrupt += 1
        self._rejects.add(kind, worker_id, error)

    def _count(self, event: Event) -> int:
        """The digests in it."""
        digests = getattr(event, "digests", None)
        self.num_events[type(event).__name__.lower()] += 1 if digests is None else len(digests)
        return 1 if digests is None else len(digests)

    def _set_up(self, up: bool, why: str = "") -> None:
        is_normal_start = up and self.redis_up is None
        if up != self.redis_up and not is_normal_start:
            log.info("Redis is back" if up else "Redis is gone; the index is frozen", extra={"fields": {"error": why}})
        self.redis_up = up
        self._fleet.set_following(up)
