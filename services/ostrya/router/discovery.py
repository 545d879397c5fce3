"""Which replicas there are, from two sources: the members in Redis and the addresses in the settings.

A Link per address finds out who is there and whether it serves; this module decides which addresses deserve one and
when a replica is gone. Redis being away, emptied or back decides nothing: only a lease that stays away while Redis is
there does. Workers of the settings live by their health stream alone.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ostrya.errors import StateUnavailable
from ostrya.prefix.chain import ChainKey
from ostrya.router.fleet import Fleet
from ostrya.router.link import Link
from ostrya.router.settings import RouterSettings
from ostrya.router.types import Load, ReplicaState, WorkerId
from ostrya.state import board, keys, lease, members
from ostrya.state.board import LoadRow
from ostrya.state.connection import Connection
from ostrya.state.members import Member

log = logging.getLogger(__name__)

_POLL_S = 0.25
_MEMBERS_EVERY = 2
"""Polls per look at members and leases; the load board is read at each."""
_AWAY_S = 1.25
"""How long a lease stays away before its replica is gone: 3 s lease + 1.25 + 0.5 between looks is below 5 s."""
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


class Discovery:
    """Keeps the fleet true. `run` in a task, `close` after it ended."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        fleet: Fleet,
        chain: ChainKey,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.redis_up = False
        self.num_removed = 0
        """Replicas removed because they left or their lease ended."""
        self._settings, self._fleet, self._chain, self._clock = settings, fleet, chain, clock
        self._connection = Connection(settings.redis_url)
        self._known: dict[WorkerId, _Known] = {}
        self._links: dict[str, asyncio.Task[None]] = {}
        self._back_at = clock()
        """Since when Redis has been there without a break."""

    async def run(self) -> None:
        """Until cancelled; then no link is left, the fleet keeps what it knows."""
        turn = 0
        try:
            while True:
                await self._poll(with_members=turn % _MEMBERS_EVERY == 0)
                await self._match_links()
                turn += 1
                await asyncio.sleep(_POLL_S)
        finally:
            await self._end(list(self._links))

    async def close(self) -> None:
        """Closes the connection to Redis."""
        await self._connection.close()

    async def _poll(self, *, with_members: bool) -> None:
        try:
            if with_members or not self.redis_up:
                await self._read_members()
            rows = await board.read(self._connection, self._settings.pool)
        except StateUnavailable as error:
            if self.redis_up:
                log.warning("Redis is gone; keeping the replicas", extra={"fields": {"error": str(error)}})
            self.redis_up = self._fleet.redis_up = False
            return
        for worker_id, row in rows.items():
            self._fleet.board(WorkerId(worker_id), _load(row), stamp=row.stamp)

    async def _read_members(self) -> None:
        rows = await members.read(self._connection, self._settings.pool)
        leases = await lease.remaining_s(self._connection, self._settings.pool, list(rows))
        now = self._clock()
        if not self.redis_up:
            self._back_at = now
            self.redis_up = self._fleet.redis_up = True
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
        """Removes the replica whose time is over, and in the end its rows."""
        has_row = known.row_at == now
        since = max(known.lease_until if has_row else known.row_at, self._back_at)
        # Redis just returned, or lost this row although the worker is plainly there: it will register again.
        is_excused = self._back_at == since or (not has_row and self._is_connected(worker_id))
        away_s = now - since
        if not known.is_over and away_s >= (_GRACE_S if is_excused else _AWAY_S):
            known.is_over = True
            self.num_removed += 1
            log.warning("replica is gone", extra={"fields": {"worker_id": worker_id, "had_row": has_row}})
            await self._drop(worker_id, known.member.address)
        if known.is_over and not has_row:
            del self._known[worker_id]
        elif known.is_over and away_s >= _FORGET_S:
            await members.forget(self._connection, self._settings.pool, known.member)

    async def _drop(self, worker_id: WorkerId, address: str) -> None:
        if address not in self._settings.static_workers:
            await self._end([address])
            self._fleet.remove(worker_id)

    def _is_connected(self, worker_id: WorkerId) -> bool:
        return self._fleet.state(worker_id) in (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING)

    async def _match_links(self) -> None:
        """A running link for every address that deserves one, and no other."""
        wanted = {known.member.address for known in self._known.values() if not known.is_over}
        wanted |= set(self._settings.static_workers)
        for address, task in list(self._links.items()):
            if task.done():
                log.error("link ended by a fault of ours; starting it again", exc_info=task.exception())
                del self._links[address]
        await self._end([address for address in self._links if address not in wanted])
        for address in wanted - self._links.keys():
            link = Link(
                address=address,
                pool=self._settings.pool,
                chain=self._chain,
                fleet=self._fleet,
                max_message_bytes=self._settings.max_message_bytes,
            )
            self._links[address] = asyncio.create_task(link.run(), name=f"link {address}")

    async def _end(self, addresses: list[str]) -> None:
        tasks = [self._links.pop(address) for address in addresses if address in self._links]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


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
