"""Follows every worker's journal into the prefix index: one blocking read over all streams, in order or not at all.

For each worker the next id is known. Anything else (a gap, a marker, a trimmed log, another epoch, a head that is not
where it should be) means: take the snapshot, go on after its number. Until a fitting one is there the old knowledge
stays. While Redis is gone the index is frozen; nothing here ever fails a request.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ostrya.errors import StateError, StateUnavailable
from ostrya.prefix.events import Event, unpack
from ostrya.prefix.index import PrefixIndex
from ostrya.router.fleet import Fleet
from ostrya.router.registry import DROP_S
from ostrya.router.settings import RouterSettings
from ostrya.router.types import WorkerId
from ostrya.state.connection import Connection
from ostrya.state.journal import Entry, Head, JournalReader, Position

log = logging.getLogger(__name__)

_NOWHERE = Position(0, 0)
_BLOCK_MS = 200
_HEAL_MS = 50
"""The same while some slot waits for its snapshot."""
_HEAL_FAST_S = 5.0
"""After this a worker without a snapshot has no journal, rather than one in repair."""
_HEADS_S = 0.5
"""How often heads are compared with our positions: finds what no entry would ever tell."""
_MAX_BACKOFF_S = 0.5
_SWEEP_BUDGET = 20_000
"""Digests a slice: about 3 ms of the event loop."""


@dataclass(slots=True)
class _Cursor:
    """Where we are in one worker's journal."""

    slot: int
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


class Tracker:
    """Owns the writing side of the index. `run` in a task, `close` after it ended. Counters are for metrics."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        fleet: Fleet,
        index: PrefixIndex,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_events: Counter[str] = Counter()
        """Digests applied, by kind: stored, removed; cleared counts events."""
        self.num_snapshots = 0
        self.num_gaps = 0
        self.num_corrupt = 0
        """Batches and snapshots that could not be read."""
        self.redis_up = False
        self._fleet, self._index, self._clock = fleet, index, clock
        self._connection = Connection(settings.redis_url)
        self._reader = JournalReader(self._connection, pool=settings.pool)
        self._cursors: dict[WorkerId, _Cursor] = {}
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
            self._index.sweep(_SWEEP_BUDGET)
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
        healing = [name for name, cursor in self._cursors.items() if self._is_healing(cursor)]
        if self._clock() - self._heads_at >= _HEADS_S:
            self._heads_at = self._clock()
            await self._compare_heads(list(self._cursors))
        elif healing:
            await self._compare_heads(healing)
        after: dict[str, Position] = {name: cursor.at for name, cursor in self._cursors.items() if cursor.is_whole}
        block_ms = _HEAL_MS if healing or not self._index.is_swept else _BLOCK_MS
        if not after:
            await self._connection.call("PING")
            await asyncio.sleep(block_ms / 1000)
            return
        found = await self._reader.read(after, block_ms=block_ms)
        for name in after:
            self._cursors[WorkerId(name)].is_drained = name not in found
        for name, entries in found.items():
            self._apply(WorkerId(name), entries)

    def _match_fleet(self) -> None:
        """A cursor for each journal that should be followed. A new slot starts from nothing."""
        followed = self._fleet.followed()
        for worker_id in self._cursors.keys() - followed.keys():
            del self._cursors[worker_id]
        for worker_id, wanted in followed.items():
            cursor, first = self._cursors.get(worker_id), Position(wanted.min_epoch, 0)
            if cursor is None or cursor.slot != wanted.slot:
                self._cursors[worker_id] = _Cursor(wanted.slot, first, self._clock())
            elif wanted.min_epoch > cursor.at.epoch:
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
            if not cursor.is_whole and Position(head.at.epoch, head.snapshot_seq) >= cursor.needs:
                await self._take_snapshot(worker_id, cursor, head)

    async def _take_snapshot(self, worker_id: WorkerId, cursor: _Cursor, head: Head) -> None:
        try:
            snapshot = await self._reader.snapshot(worker_id)
        except StateUnavailable:
            raise
        except StateError as error:
            self._cannot_read("snapshot", worker_id, error)
            self._fall_behind(cursor, needs=Position(head.at.epoch, head.snapshot_seq + 1))
            return
        if snapshot is None or not self._fleet.follows(worker_id, cursor.slot):
            return
        at = Position(snapshot.epoch, snapshot.seq)
        if at >= cursor.needs:
            self._index.replace(cursor.slot, snapshot.digests)
            cursor.at, cursor.is_whole = at, True
            self.num_snapshots += 1

    def _apply(self, worker_id: WorkerId, entries: list[Entry]) -> None:
        cursor = self._cursors[worker_id]
        if not self._fleet.follows(worker_id, cursor.slot):
            return  # replaced while we waited: the slot is no longer ours to write
        for entry in entries:
            epoch, seq = entry.at
            if entry.packed is None or epoch > cursor.at.epoch:
                self._fall_behind(cursor, needs=entry.at)
                return
            if seq != cursor.at.seq + 1:
                self.num_gaps += 1
                self._fall_behind(cursor, needs=Position(epoch, seq - 1))
                return
            try:
                events = unpack(entry.packed)
            except ValueError as error:
                self._cannot_read("batch", worker_id, error)
                self._fall_behind(cursor, needs=entry.at)
                return
            self._index.apply(cursor.slot, events)
            cursor.at = entry.at
            self._count(events)

    def _fall_behind(self, cursor: _Cursor, *, needs: Position) -> None:
        if cursor.is_whole:
            cursor.is_whole, cursor.behind_since = False, self._clock()
        cursor.needs = max(cursor.needs, needs)

    def _is_healing(self, cursor: _Cursor) -> bool:
        return not cursor.is_whole and self._clock() - cursor.behind_since < _HEAL_FAST_S

    def _cannot_read(self, what: str, worker_id: WorkerId, error: Exception) -> None:
        self.num_corrupt += 1
        log.warning(f"{what} cannot be used", extra={"fields": {"worker_id": worker_id, "error": str(error)}})

    def _count(self, events: list[Event]) -> None:
        for event in events:
            self.num_events[type(event).__name__.lower()] += len(getattr(event, "digests", (None,)))

    def _set_up(self, up: bool, why: str = "") -> None:
        if up != self.redis_up:
            log.info("Redis is back" if up else "Redis is gone; the index is frozen", extra={"fields": {"error": why}})
        self.redis_up = up
        self._fleet.set_following(up)
