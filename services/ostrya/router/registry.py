"""Who is registered in Redis, whose lease is over, and the load board, as a router reads them.

Redis being away, emptied or back decides nothing: only a lease that stays away while Redis is there does. What follows
from a lease that is over depends on the mode of discovery and is decided there.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ostrya.errors import StateUnavailable
from ostrya.router.fleet import Fleet
from ostrya.router.settings import RouterSettings
from ostrya.router.types import Load, ReplicaState, WorkerId
from ostrya.state import board, keys, lease, members
from ostrya.state.board import LoadRow
from ostrya.state.connection import Connection
from ostrya.state.members import Member

log = logging.getLogger(__name__)

_MEMBERS_EVERY = 2
"""Polls per look at members and leases; the load board is read at each."""
_AWAY_S = 1.25
"""How long a lease stays away before it is over: 3 s lease + 1.25 + 0.5 between looks is below 5 s."""
_GRACE_S = keys.LEASE_MS / 1000 + 2.0
"""After Redis came back, workers have this long to renew or register again."""
_FORGET_S = 30.0
"""After this a member without a lease is removed from Redis."""


@dataclass(slots=True)
class _Known:
    """One member as Redis last showed it."""

    member: Member
    row_at: float
    """When the row was last there."""
    lease_until: float
    """When the lease ends, or ended."""
    is_over: bool = False


class Registry:
    """Tells the fleet epochs and loads; `poll` four times a second, `close` at the end."""

    def __init__(self, settings: RouterSettings, *, fleet: Fleet, clock: Callable[[], float]) -> None:
        self.is_up = False
        self.num_over = 0
        """How often a lease was found to be over."""
        self._fleet, self._clock, self._pool = fleet, clock, settings.pool
        self._connection = Connection(settings.redis_url)
        self._known: dict[WorkerId, _Known] = {}
        self._turn = 0
        self._back_at = clock()
        """Since when Redis has been there without a break."""

    @property
    def addresses(self) -> set[str]:
        """Of the members whose lease is not over."""
        return {known.member.address for known in self._known.values() if not known.is_over}

    @property
    def over(self) -> set[WorkerId]:
        """Members whose lease is over, as long as the fleet knows them or Redis has their row."""
        return {worker_id for worker_id, known in self._known.items() if known.is_over}

    async def poll(self) -> None:
        """Reads what is due."""
        try:
            if self._turn % _MEMBERS_EVERY == 0 or not self.is_up:
                await self._read_members()
            self._turn += 1
            rows = await board.read(self._connection, self._pool)
        except StateUnavailable as error:
            if self.is_up:
                log.warning("Redis is gone; keeping the replicas", extra={"fields": {"error": str(error)}})
            self.is_up = self._fleet.redis_up = False
            return
        for worker_id, row in rows.items():
            self._fleet.board(WorkerId(worker_id), _load(row), stamp=row.stamp)

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()

    async def _read_members(self) -> None:
        rows = await members.read(self._connection, self._pool)
        leases = await lease.remaining_s(self._connection, self._pool, list(rows))
        now = self._clock()
        if not self.is_up:
            self._back_at = now
            self.is_up = self._fleet.redis_up = True
            # What was over before Redis went away may have registered meanwhile, in a Redis that is now empty.
            self._known = {key: known for key, known in self._known.items() if not known.is_over or key in rows}
        for name, member in rows.items():
            self._see(WorkerId(name), member, leases.get(name), now)
        for worker_id, known in list(self._known.items()):
            await self._judge(worker_id, known, now)

    def _see(self, worker_id: WorkerId, member: Member, remaining_s: float | None, now: float) -> None:
        known = self._known.get(worker_id)
        if known is None:
            known = self._known[worker_id] = _Known(member, now, now)
        known.member, known.row_at = member, now
        if remaining_s is not None:
            known.lease_until, known.is_over = now + remaining_s, False
        replica = self._fleet.info(worker_id)
        # While its stream holds it is the same process, registered anew. Otherwise the link asks who is there.
        if replica is not None and replica.address == member.address and self._is_connected(worker_id):
            self._fleet.registered(worker_id, member.epoch)

    async def _judge(self, worker_id: WorkerId, known: _Known, now: float) -> None:
        """Says that its lease is over, later that nobody needs to know, and in the end removes its rows."""
        has_row = known.row_at == now
        since = max(known.lease_until if has_row else known.row_at, self._back_at)
        # Redis just returned, or lost this row although the worker is plainly there: it will register again.
        is_excused = self._back_at == since or (not has_row and self._is_connected(worker_id))
        away_s = now - since
        if not known.is_over and away_s >= (_GRACE_S if is_excused else _AWAY_S):
            known.is_over = True
            self.num_over += 1
            fields = {"fields": {"worker_id": worker_id, "had_row": has_row}}
            if has_row or is_excused:
                log.warning("lease is over", extra=fields)
            else:
                log.info("worker has left", extra=fields)
        elif known.is_over and not has_row and self._fleet.info(worker_id) is None:
            del self._known[worker_id]
        elif known.is_over and has_row and away_s >= _FORGET_S:
            await members.forget(self._connection, self._pool, known.member)

    def _is_connected(self, worker_id: WorkerId) -> bool:
        return self._fleet.state(worker_id) in (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING)


def _load(row: LoadRow) -> Load:
    return Load(
        num_running=row.num_running,
        num_waiting=row.num_waiting,
        queued_tokens=row.queued_tokens,
        free_pages=row.free_pages,
        reusable_pages=row.reusable_pages,
        total_pages=row.total_pages,
        prefill_tokens_per_s=row.prefill_tokens_per_s,
        queried_tokens=row.queried_tokens,
        hit_tokens=row.hit_tokens,
    )
