"""Tells the routers, through Redis, what this worker could reuse and how busy it is.

The engine's events come in through `publish`, which never blocks and never fails; `run` writes them, keeps the lease
and heals. It holds the whole set of resume points, so whatever Redis lost, a snapshot brings back. Losing Redis, or one
that refuses writes, loses nothing else: the worker serves on, and routers ask it for the sign of life they miss.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from ostrya.engine.types import Load
from ostrya.errors import Fenced, StateUnavailable
from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import Event, Removed, Stored
from ostrya.state import board, members
from ostrya.state.connection import Connection
from ostrya.state.journal import Answer, JournalWriter
from ostrya.state.lease import RENEW_S
from ostrya.state.members import Member
from ostrya.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

_BATCH_S = 0.01
_LOAD_S = 0.2
_MAX_PENDING = 65_536
"""Digests waiting to be appended. More: one snapshot says it all."""
_SNAPSHOT_BATCHES = 1_000
_SNAPSHOT_S = 60.0
_MAX_BACKOFF_S = 0.5
_MAX_REFUSED_BACKOFF_S = 2.0
"""It answers, so it is not news within the second; each try is a connection to a server that has trouble already."""
_MAX_JITTER_S = 1.0
"""So that the workers of a pool do not all return to an emptied Redis in the same instant."""


class Publisher:
    """One worker's registration, journal and load row. `run` in a task; `close` when it has ended."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        member: Member,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`refused` hears of each write that Redis refused, by Refusal."""
        self.epoch = 0
        """Of this engine in Redis; 0 = not registered yet."""
        self._floor = 0
        """Every epoch this worker had is below or at it."""
        self.fenced: asyncio.Future[Fenced] = asyncio.get_running_loop().create_future()
        """Done when another process has taken this worker id; `run` has ended then."""
        self.num_snapshots = 0
        self.num_batches = 0
        self.num_overflows = 0
        self.redis_up = False
        self.refusal = ""
        """What Redis answered to the last try to write; empty = it took it, or did not answer."""
        self.worker_id = settings.worker_id
        self._pool = settings.pool
        self._member = member
        self._connection = Connection(settings.redis_url)
        self._writer = JournalWriter(self._connection, pool=settings.pool, worker_id=settings.worker_id)
        self._clock, self._jitter, self._refused = clock, jitter, refused
        self._live: dict[RoutingDigest, None] = {}
        self._pending: list[Event] = []
        self._num_pending = 0
        self._load = Load()
        self._wake = asyncio.Event()
        self._seq = 0
        self._is_registered = self._is_writing = False
        self._snapshot_due = True
        self._batches_since_snapshot = 0
        self._snapshot_at = self._renew_at = self._load_at = 0.0

    @property
    def num_live(self) -> int:
        """Resume points this worker has now."""
        return len(self._live)

    @property
    def is_flushed(self) -> bool:
        """Nothing is left to write: Redis has it all."""
        return self._is_registered and not (self._pending or self._snapshot_due or self._is_writing)

    @property
    def is_registered(self) -> bool:
        """Redis has this worker's lease, as of the last word with it."""
        return self._is_registered and self.redis_up

    def live(self) -> tuple[RoutingDigest, ...]:
        """All of them, parents before children."""
        return tuple(self._live)

    def publish(self, stored: Sequence[RoutingDigest], removed: Sequence[RoutingDigest], load: Load) -> None:
        """What one engine step changed: `removed` first, then `stored`, parents before children. Returns at once."""
        self._load = load
        for digest in removed:
            self._live.pop(digest, None)
        self._live.update(dict.fromkeys(stored))
        if self._snapshot_due or not (stored or removed):
            return  # a snapshot that is still to be taken covers this
        if removed:
            self._pending.append(Removed(tuple(removed)))
        if stored:
            self._pending.append(Stored(tuple(stored)))
        self._num_pending += len(removed) + len(stored)
        if self._num_pending > _MAX_PENDING:
            self.num_overflows += 1
            self._need_snapshot()
        self._wake.set()

    def start_anew(self) -> None:
        """The engine's process was lost, and all it held: a new epoch, so that nobody credits this worker with it."""
        self._floor = max(self._floor, self.epoch)
        self.epoch, self._is_registered, self._load = 0, False, Load()
        self._live.clear()
        self._need_snapshot()
        self._wake.set()

    async def run(self) -> None:
        """Publishes until cancelled or fenced. Redis may come and go meanwhile.

        It may be run again after a failure: what that lost shows as a gap in the journal, which heals.
        """
        self.redis_up = False
        backoff_s = 0.05
        told: set[tuple[str, str]] = set()
        while not self.fenced.done():
            try:
                await self._turn()
                self.redis_up, self.refusal, backoff_s = True, "", 0.05
                told.clear()
                await self._idle()
            except StateUnavailable as error:
                self.redis_up, self.refusal = False, error.refusal
                if error.refusal:
                    self._refused(error.refusal)
                # Each kind once: what comes first, a time-out say, is often not what is wrong.
                reason = error.refusal, type(error.__cause__).__name__
                if reason not in told:
                    told.add(reason)
                    what = "Redis refuses writes; serving on" if error.refusal else "Redis is gone; serving on"
                    log.warning(what, extra={"fields": {"refusal": error.refusal, "error": str(error)}})
                self._need_snapshot()  # whether the last batch arrived is unknown
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_REFUSED_BACKOFF_S if error.refusal else _MAX_BACKOFF_S)

    async def close(self) -> None:
        """Leaves: routers see lease, member and load row go now, not when they expire. Call after `run` has ended."""
        try:
            if self._is_registered:
                await self._writer.leave(self.epoch)
                await members.forget(self._connection, self._pool, self._row())
        except StateUnavailable:
            log.info("Redis takes no goodbye; the lease will expire by itself")
        finally:
            self._is_registered = False
            await self._connection.close()

    async def _turn(self) -> None:
        """Whatever is due, once."""
        self._is_writing = True  # stays so if a write fails, until one succeeds
        if not self._is_registered:
            await self._register()
        if self._snapshot_due or self._compaction_due():
            await self._snapshot()
        elif self._pending:
            await self._append()
        if self._is_registered and self._clock() >= self._renew_at:
            await self._renew()
        if self._is_registered and self._clock() >= self._load_at:
            await self._write_load()
        self._is_writing = False

    async def _idle(self) -> None:
        """Until something is due; then a moment more, for a batch to gather."""
        due_at = self._clock() if self._snapshot_due or not self._is_registered else min(self._renew_at, self._load_at)
        try:
            async with asyncio.timeout(max(0.0, due_at - self._clock())):
                await self._wake.wait()
                await asyncio.sleep(_BATCH_S)
        except TimeoutError:
            pass
        self._wake.clear()

    async def _register(self) -> None:
        self._floor = self.epoch = await self._writer.register(floor=max(self._floor, self.epoch))
        self._seq, self._is_registered = 0, True
        self._need_snapshot()
        log.info("registered", extra={"fields": {"epoch": self.epoch}})
        self._renew_at = 0.0

    async def _append(self) -> None:
        events, self._pending, self._num_pending = self._pending, [], 0
        self._seq += 1
        self.num_batches += 1
        self._batches_since_snapshot += 1
        await self._heed(await self._writer.append(self.epoch, self._seq, events))

    async def _snapshot(self) -> None:
        if self._snapshot_due:
            self._seq += 1  # followers must not take this number for a batch they have
        live = tuple(self._live)
        self._snapshot_due = False
        self.num_snapshots += 1
        self._batches_since_snapshot, self._snapshot_at = 0, self._clock()
        await self._heed(await self._writer.write_snapshot(self.epoch, self._seq, live))

    async def _renew(self) -> None:
        self._renew_at = self._clock() + RENEW_S
        await self._heed(await self._writer.renew(self.epoch, self._seq))
        if self._is_registered:
            await self._connection.all(members.put(self._pool, self._row()))

    async def _write_load(self) -> None:
        self._load_at = self._clock() + _LOAD_S
        row = _load_row(self._load, stamp=time.time_ns() // 1_000_000)
        await self._connection.all(board.put(self._pool, self._member.worker_id, row))

    async def _heed(self, answer: Answer) -> None:
        if answer is Answer.GAP:
            self._need_snapshot()
        elif answer is Answer.NOEPOCH:
            log.warning("Redis does not know this registration; registering again")
            self._is_registered = False
            self._need_snapshot()
            await asyncio.sleep(self._jitter() * _MAX_JITTER_S)
        elif answer is Answer.FENCED:
            log.error("another process has this worker id", extra={"fields": {"epoch": self.epoch}})
            self._is_registered = False
            self.fenced.set_result(
                Fenced(
                    f"worker id {self._member.worker_id} was taken by a younger process; epoch {self.epoch} has ended"
                )
            )

    def _need_snapshot(self) -> None:
        self._snapshot_due = True
        self._pending, self._num_pending = [], 0

    def _compaction_due(self) -> bool:
        # What is still pending may already be in it: applying that again changes nothing.
        is_old = self._clock() - self._snapshot_at > _SNAPSHOT_S
        return self._batches_since_snapshot >= (1 if is_old else _SNAPSHOT_BATCHES)

    def _row(self) -> Member:
        return msgspec.structs.replace(self._member, epoch=self.epoch)


def _load_row(load: Load, *, stamp: int) -> board.LoadRow:
    return board.LoadRow(
        stamp=stamp,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_tokens=load.queued_tokens,
        free_pages=load.free_pages,
        reusable_pages=load.reusable_pages,
        total_pages=load.total_pages,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        queried_tokens=load.queried_tokens,
        hit_tokens=load.hit_tokens,
        step_base_s=load.step_time.base_s,
        step_row_s=load.step_time.row_s,
        step_prefill_token_s=load.step_time.prefill_token_s,
        step_kv_token_s=load.step_time.kv_token_s,
    )
