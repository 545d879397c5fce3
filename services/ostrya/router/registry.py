"""Who is registered in Redis, whose lease is over, and the load board, as a router reads them.

Redis being away, emptied or back decides nothing, and neither does one that can be read and not written: a lease that
stays away while Redis is there is a question to the replica (question.py). Only if that gets no answer is the lease
over; what follows then depends on the mode of discovery and is decided there.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ostrya.errors import StateUnavailable, Unreadable
from ostrya.router import figures
from ostrya.router.fleet import Fleet
from ostrya.router.question import Questions
from ostrya.router.settings import RouterSettings
from ostrya.router.types import Load, ReplicaState, WorkerId
from ostrya.state import board, keys, lease, members
from ostrya.state.board import LoadRow
from ostrya.state.connection import Connection
from ostrya.state.members import Member
from ostrya.state.rows import MAX_ROWS, Kind, Rejects

log = logging.getLogger(__name__)

_MEMBERS_EVERY = 2
"""Polls per look at members and leases; the load board is read at each."""
_AWAY_S = 1.25
"""How long a lease stays away before it is over: 3 s lease + 1.25 + 0.5 between looks is below 5 s."""
_GRACE_S = keys.LEASE_MS / 1000 + 2.0
"""After Redis came back, workers have this long to renew or register again."""
_ROWS_A_TURN = 64
"""Of a look, before others get the event loop: half a millisecond."""
_LOOKS = 4
"""How often a row must say the same epoch before it counts: its worker writes it every second, so this long no stray
write lasts, and an epoch that is too high would never be corrected."""
_FORGET_S = 30.0
"""After this a member without a lease is removed from Redis."""
_REMEMBER_S = 600.0
"""A replica that answered without a lease is asked for this much longer, even if nothing in Redis names it any more:
while writes are refused nothing else would bring it back after a break in the network."""
_ASK_BELOW_S = 1.0
"""Two renewals are missing from a lease that has less left: asked now, the replica has answered when it ends."""
DROP_S = 2.0
"""While a replica answers and its lease stays away: who knows whether this Redis is still the one that workers write
to? Connections are dropped this often, so that the name is resolved again."""


@dataclass(slots=True)
class _Known:
    """One member as Redis last showed it."""

    member: Member
    row_at: float
    """When the row was last there."""
    lease_until: float
    """When the lease ends, or ended."""
    was_live: bool = False
    """It had a lease."""
    is_over: bool = False
    is_unrenewed: bool = False
    """It would be over, but the replica answers."""
    answered_at: float = -math.inf
    """When that was last so."""
    num_looks: int = 0
    """How often in a row its epoch was this one."""


class Registry:
    """Tells the fleet epochs and loads; `poll` four times a second, `close` at the end."""

    def __init__(
        self, settings: RouterSettings, *, fleet: Fleet, clock: Callable[[], float], rejects: Rejects | None = None
    ) -> None:
        self.is_up = False
        """Redis tells who is there."""
        self.num_over = 0
        """How often a lease was found to be over."""
        self._fleet, self._clock, self._pool = fleet, clock, settings.pool
        self._connection = Connection(settings.redis_url)
        self._questions = Questions(pool=settings.pool, max_message_bytes=settings.max_message_bytes)
        self._dropped_at = clock()
        self._known: dict[WorkerId, _Known] = {}
        self._turn = 0
        self._rejects = rejects or Rejects()
        self._back_at = clock()
        """Since when Redis has been there without a break."""

    @property
    def addresses(self) -> set[str]:
        """Of the members whose lease is not over."""
        return {known.member.address for known in self._known.values() if not known.is_over}

    @property
    def over(self) -> set[WorkerId]:
        """Members whose lease is over, as long as the fleet knows them, Redis has their row, or they may come back."""
        return {worker_id for worker_id, known in self._known.items() if known.is_over}

    @property
    def unrenewed(self) -> set[WorkerId]:
        """Members without a lease that answer for themselves."""
        return {worker_id for worker_id, known in self._known.items() if known.is_unrenewed}

    async def poll(self) -> None:
        """Reads what is due."""
        try:
            if self._turn % _MEMBERS_EVERY == 0 or not self.is_up:
                await self._read_members()
            self._turn += 1
            rows = await self._read_board()
        except StateUnavailable as error:
            if self._fleet.redis_up:
                log.warning("Redis is gone; keeping the replicas", extra={"fields": {"error": str(error)}})
            self._learn_nothing(redis_up=False)
            return
        except Unreadable as error:
            self._rejects.add(Kind.MEMBER, keys.members(self._pool), error)
            self._learn_nothing(redis_up=True)
            return
        for worker_id, row in rows.items():
            self._fleet.board(WorkerId(worker_id), _load(row), stamp=row.stamp)

    async def close(self) -> None:
        """Asks nobody any more and closes the connection."""
        await self._questions.close()
        await self._connection.close()

    def _learn_nothing(self, *, redis_up: bool) -> None:
        """Redis does not tell who is there now, so nobody's lease is over; nor for a while after it does again."""
        self.is_up, self._fleet.redis_up = False, redis_up
        self._questions.ask({})

    async def _read_board(self) -> dict[str, LoadRow]:
        fleet = [row.info.worker_id for row in self._fleet.replicas()]
        try:
            return await board.read(self._connection, self._pool, first=fleet, rejects=self._rejects)
        except Unreadable as error:
            self._rejects.add(Kind.LOAD, keys.load(self._pool), error)
            return {}

    async def _read_members(self) -> None:
        there = {str(worker_id): known.member for worker_id, known in self._known.items() if not known.is_over}
        rows = await members.read(self._connection, self._pool, known=there, rejects=self._rejects)
        leases = await lease.remaining_s(self._connection, self._pool, list(rows))
        now = self._clock()
        if not self.is_up:
            self._back_at = now
            self.is_up = self._fleet.redis_up = True
            # What was over before Redis went away may have registered meanwhile, in a Redis that is now empty.
            self._known = {
                worker_id: known
                for worker_id, known in self._known.items()
                if not known.is_over or worker_id in rows or _is_remembered(known, now)
            }
        await self._heed(rows, leases, now)

    async def _heed(self, rows: Mapping[str, Member], leases: Mapping[str, float], now: float) -> None:
        """What was read; others get the event loop in between, as there may be many."""
        room = MAX_ROWS - sum(not known.is_over for known in self._known.values())
        for number, (name, member) in enumerate(rows.items(), 1):
            if number % _ROWS_A_TURN == 0:
                await asyncio.sleep(0)
            if name not in self._known:
                room -= 1
                if room < 0:
                    self._rejects.add(Kind.SURPLUS, keys.members(self._pool), f"has more than {MAX_ROWS} members")
                    continue
            self._see(WorkerId(name), member, leases.get(name), now)
        doubtful = {worker_id: self._address(worker_id, known) for worker_id, known in self._doubtful(now)}
        strangers = {worker_id for worker_id in doubtful if self._fleet.info(worker_id) is None}
        self._questions.ask(doubtful, strangers=strangers)
        forgotten = []
        for number, (worker_id, known) in enumerate(list(self._known.items()), 1):
            if number % _ROWS_A_TURN == 0:
                await asyncio.sleep(0)
            if self._judge(worker_id, known, now):
                forgotten.append(known.member)
        renew_s = keys.LEASE_MS / 1000
        self._fleet.set_unheard({one: self._known[one].lease_until - renew_s for one in self.unrenewed})
        if self.unrenewed and now - self._dropped_at >= DROP_S:
            self._dropped_at = now
            await self._connection.drop()
        # It may refuse writes, or hang from now on: then the first of them is enough to wait for.
        with suppress(StateUnavailable):
            for member in forgotten:
                await members.forget(self._connection, self._pool, member)

    def _doubtful(self, now: float) -> list[tuple[WorkerId, _Known]]:
        """Who is to be asked. A row alone, without a lease ever, is no reason to dial its address."""
        return [
            (worker_id, known)
            for worker_id, known in self._known.items()
            if (known.lease_until - now < _ASK_BELOW_S or known.row_at < now)
            and (known.was_live or self._fleet.info(worker_id) is not None)
        ]

    def _address(self, worker_id: WorkerId, known: _Known) -> str:
        replica = self._fleet.info(worker_id)
        return replica.address if replica is not None else known.member.address

    def _see(self, worker_id: WorkerId, member: Member, remaining_s: float | None, now: float) -> None:
        known = self._known.get(worker_id)
        if known is None:
            known = self._known[worker_id] = _Known(member, now, now)
        if member is not known.member:  # else its row could not be read, and says nothing new
            known.num_looks = known.num_looks + 1 if known.member.epoch == member.epoch else 1
        known.member, known.row_at = member, now
        if remaining_s is not None:
            if known.is_unrenewed:
                log.info("lease is back", extra={"fields": {"worker_id": worker_id}})
            known.lease_until, known.was_live, known.is_over, known.is_unrenewed = now + remaining_s, True, False, False
        replica = self._fleet.info(worker_id)
        # While its stream holds it is the same process, registered anew. Otherwise the link asks who is there. A row
        # without a lease may be that of the process before it, and one seen but once a stray write.
        is_same = replica is not None and replica.address == member.address and self._is_connected(worker_id)
        if is_same and remaining_s is not None and known.num_looks >= _LOOKS:
            self._fleet.registered(worker_id, member.epoch)

    def _judge(self, worker_id: WorkerId, known: _Known, now: float) -> bool:
        """Says that its lease is over, unless the replica answers; later that nobody needs to know. True: its rows have
        stood there for long enough."""
        has_row = known.row_at == now
        since = max(known.lease_until if has_row else known.row_at, self._back_at)
        # Redis just returned, or lost this row although the worker is plainly there: it will register again.
        is_excused = self._back_at == since or (not has_row and self._is_connected(worker_id))
        away_s = now - since
        is_away = away_s >= (_GRACE_S if is_excused else _AWAY_S)
        fields = {"fields": {"worker_id": worker_id, "had_row": has_row}}
        if is_away and self._questions.answers(worker_id):
            if not known.is_unrenewed:
                log.warning("lease is not renewed, but the replica answers; using it", extra=fields)
            known.is_over, known.is_unrenewed, known.answered_at = False, True, now
        elif is_away and not known.is_over and not self._questions.is_pending(worker_id):
            known.is_over, known.is_unrenewed = True, False
            self.num_over += 1
            if self._fleet.info(worker_id) is None:
                log.debug("a member that is not in the fleet has left", extra=fields)  # there may be a thousand
            elif has_row or is_excused:
                log.warning("lease is over", extra=fields)
            else:
                log.info("worker has left", extra=fields)
        elif known.is_over and not has_row and self._fleet.info(worker_id) is None and not _is_remembered(known, now):
            del self._known[worker_id]
        return known.is_over and has_row and away_s >= _FORGET_S

    def _is_connected(self, worker_id: WorkerId) -> bool:
        return self._fleet.state(worker_id) in (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING)


def _is_remembered(known: _Known, now: float) -> bool:
    return now - known.answered_at < _REMEMBER_S


def _load(row: LoadRow) -> Load:
    return figures.load(
        num_running=row.num_running,
        num_waiting=row.num_waiting,
        queued_tokens=row.queued_tokens,
        free_pages=row.free_pages,
        reusable_pages=row.reusable_pages,
        total_pages=row.total_pages,
        prefill_tokens_per_s=row.prefill_tokens_per_s,
        queried_tokens=row.queried_tokens,
        hit_tokens=row.hit_tokens,
        step_base_s=row.step_base_s,
        step_row_s=row.step_row_s,
        step_prefill_token_s=row.step_prefill_token_s,
        step_kv_token_s=row.step_kv_token_s,
    )
