"""The one mutable registry of replicas in a router: who there is, how busy, and the channel to each.

Discovery writes states and loads, the tracker writes how well the index is followed, the proxy counts its requests and
reports what rides on responses; a pick reads `snapshot()`. One event loop, no locks, no awaits but for waiting.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc

from ostrya.api.v1.common_pb2 import LoadReport
from ostrya.errors import Unavailable
from ostrya.prefix.index import PrefixIndex
from ostrya.router import figures
from ostrya.router.pick import Avoided
from ostrya.router.replica import Connection, InFlight, Replica, ReplicaInfo, is_routable
from ostrya.router.types import FleetSnapshot, Hold, KnowledgeLevel, Load, ReplicaState, WorkerId

if TYPE_CHECKING:
    from ostrya.api.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

# `load_age_s` in a snapshot is at most this old; rows that changed are always exact.
_REFRESH_S = 0.1
# A board row is up to a write and a poll old when it arrives; it must not replace what a response said since.
_BOARD_LAG_S = 0.45


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """One replica for operators: routable or not."""

    info: ReplicaInfo
    state: ReplicaState
    load: Load
    load_age_s: float
    in_flight: int
    indexed_blocks: int
    holds: tuple[Hold, ...]
    """What keeps new work away from it; empty = nothing."""

    @property
    def is_routable(self) -> bool:
        """Whether it is in snapshots."""
        return is_routable(self.state, self.holds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A journal the tracker should follow into the index."""

    slot: int
    min_epoch: int
    """Older journals of this worker id belong to a process that is gone."""
    num_pages: int
    """It cannot hold more resume points; 0 = it did not say."""


class Fleet:
    """All replicas of one pool that this router knows."""

    def __init__(self, *, index: PrefixIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._replicas: dict[WorkerId, Replica] = {}
        self._ready: list[Replica] = []
        self._holds: Mapping[str, tuple[Hold, ...]] = {}
        self._avoided: dict[bool, Avoided] = {False: (), True: ()}
        """What long (True) and other requests avoid."""
        self._refreshed_at = -math.inf
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._unheard: Mapping[WorkerId, float] = {}
        self._is_followed = False
        self._followed_at = -math.inf
        self.redis_up = False
        """As discovery last saw it."""

    # -- what a request needs ------------------------------------------------------------------------------------

    def snapshot(self) -> FleetSnapshot:
        """The routable replicas, ordered by worker id. Cheap: only rows that changed are built anew."""
        now = self._clock()
        if now - self._refreshed_at > _REFRESH_S:
            self._refreshed_at = now
            for replica in self._ready:
                replica.view = None
        views = tuple(replica.view or replica.see(now) for replica in self._ready)
        return FleetSnapshot(replicas=views, level=self._level(), index_age_s=self._index_age_s(now))

    def avoided(self, *, is_long: bool) -> Avoided:
        """Which of the routable replicas a long, or any other, request should keep away from."""
        return self._avoided[is_long]

    def begin(self, worker_id: WorkerId, *, prefill_tokens: int) -> InFlight:
        """Counts a request with that many uncached prompt tokens. Unavailable if the replica is gone."""
        return InFlight(self._known(worker_id), prefill_tokens=prefill_tokens)

    def stub(self, worker_id: WorkerId) -> "WorkerServiceAsyncStub":
        """The way to the replica; good for a request begun before any await. Unavailable if it is gone."""
        return self._known(worker_id).connection.stub

    def report(self, worker_id: WorkerId, load: LoadReport) -> None:
        """What rode on a response: true now."""
        replica = self._replicas.get(worker_id)
        if replica is not None:
            replica.load, replica.load_at, replica.view = load_of(load), self._clock(), None

    def failed(self, worker_id: WorkerId) -> None:
        """It could not be reached: unroutable until its health says SERVING again."""
        self.set_state(worker_id, ReplicaState.LOST)

    def wait_changed(self) -> Awaitable[object]:
        """Done at the next change, after this call, of who is routable or followed. Callers bound the wait."""
        return self._changed.wait()

    # -- what operators see --------------------------------------------------------------------------------------

    def replicas(self) -> list[ReplicaRow]:
        """Every known replica, ordered by worker id."""
        now = self._clock()
        return [
            ReplicaRow(
                info=replica.info,
                state=replica.state,
                load=replica.load,
                load_age_s=now - replica.load_at,
                in_flight=replica.own_requests,
                indexed_blocks=self._index.num_blocks(replica.slot),
                holds=replica.holds,
            )
            for _, replica in sorted(self._replicas.items())
        ]

    # -- what discovery and the tracker write --------------------------------------------------------------------

    def add(self, info: ReplicaInfo, channel: grpc.aio.Channel) -> None:
        """A dialled replica, STARTING. Takes the place of an older one of the same id, with a fresh index slot."""
        old = self._replicas.get(info.worker_id)
        min_epoch = info.epoch or (max(old.min_epoch, old.info.epoch + 1) if old else 0)
        if old is not None:
            self._let_go(old)
        self._replicas[info.worker_id] = Replica(
            info=info,
            connection=Connection(channel, when_unused=self._close),
            slot=self._index.add_slot() if info.prefix_credit else -1,
            min_epoch=min_epoch,
            holds=self._holds.get(info.address, ()),
            unheard_since=self._unheard.get(info.worker_id, math.inf),
        )
        self._routable_changed()

    def channel(self, worker_id: WorkerId, address: str) -> grpc.aio.Channel | None:
        """The open channel to a known replica, if it is at that address."""
        replica = self._replicas.get(worker_id)
        return replica.connection.channel if replica is not None and replica.info.address == address else None

    def info(self, worker_id: WorkerId) -> ReplicaInfo | None:
        """What is known of one replica; None = not known."""
        replica = self._replicas.get(worker_id)
        return replica.info if replica is not None else None

    def state(self, worker_id: WorkerId) -> ReplicaState | None:
        """None = not known."""
        replica = self._replicas.get(worker_id)
        return replica.state if replica is not None else None

    def has_served(self, worker_id: WorkerId) -> bool:
        """Whether this process was READY before."""
        replica = self._replicas.get(worker_id)
        return replica is not None and replica.has_served

    def set_state(self, worker_id: WorkerId, state: ReplicaState) -> None:
        """Unknown ids are ignored: a late word about a replica that was removed."""
        replica = self._replicas.get(worker_id)
        if replica is not None and replica.state is not state:
            replica.state = state
            replica.has_served |= state is ReplicaState.READY
            self._routable_changed()

    def set_holds(self, holds: Mapping[str, tuple[Hold, ...]]) -> None:
        """What keeps new work away, by address, also from replicas that come later. Who is not named is not held."""
        if holds != self._holds:
            self._holds = dict(holds)
            for replica in self._replicas.values():
                replica.holds = self._holds.get(replica.info.address, ())
            self._routable_changed()

    def set_unheard(self, since: Mapping[WorkerId, float]) -> None:
        """Who is not heard of through Redis although it can be read, and since when: that part of the index fades."""
        if since != self._unheard:
            self._unheard = dict(since)
            for worker_id, replica in self._replicas.items():
                replica.unheard_since, replica.view = self._unheard.get(worker_id, math.inf), None

    @property
    def has_unheard(self) -> bool:
        """Whether there is somebody who answers and is not heard of through Redis."""
        return bool(self._unheard)

    def registered(self, worker_id: WorkerId, epoch: int) -> None:
        """The same process has a newer epoch in Redis. Keeps channel, slot and credit: its cache is what it was.

        A row may still be that of the process before, or of its engine: its epoch is the one before min_epoch. One that
        is lower still is of this process, from an emptied Redis whose clock went back.
        """
        replica = self._replicas.get(worker_id)
        if replica is not None and epoch > replica.info.epoch and epoch != replica.min_epoch - 1:
            replica.info = replace(replica.info, epoch=epoch)
            replica.min_epoch = epoch
            self._notify()

    def board(self, worker_id: WorkerId, load: Load, *, stamp: int) -> None:
        """A row of the load board. `stamp` grows with every write; a row that was seen before says nothing new."""
        replica = self._replicas.get(worker_id)
        if replica is None or stamp == replica.board_stamp:
            return
        replica.board_stamp = stamp
        now = self._clock()
        if now - replica.load_at > _BOARD_LAG_S:
            replica.load, replica.load_at, replica.view = load, now, None

    def remove(self, worker_id: WorkerId) -> None:
        """Forgets a replica: its credit ends now, its channel when its last request has."""
        replica = self._replicas.pop(worker_id, None)
        if replica is not None:
            self._let_go(replica)
            self._routable_changed()

    def followed(self) -> dict[WorkerId, Followed]:
        """The journals that belong in the index."""
        return {
            worker_id: Followed(slot=replica.slot, min_epoch=replica.min_epoch, num_pages=replica.info.num_pages)
            for worker_id, replica in self._replicas.items()
            if replica.slot >= 0
        }

    def follows(self, worker_id: WorkerId, slot: int) -> bool:
        """Whether the slot still belongs to that replica."""
        replica = self._replicas.get(worker_id)
        return replica is not None and replica.slot == slot

    def set_following(self, following: bool) -> None:
        """Whether the index hears from Redis; called often enough to date its last word."""
        if following or self._is_followed:
            self._followed_at = self._clock()
        self._is_followed = following

    async def close(self) -> None:
        """Forgets all replicas and closes every channel; requests that still run are cancelled."""
        replicas, self._replicas = list(self._replicas.values()), {}
        self._routable_changed()
        for replica in replicas:
            self._index.retire(replica.slot)
            await replica.connection.channel.close()
        await asyncio.gather(*self._closing)

    # ------------------------------------------------------------------------------------------------------------

    def _known(self, worker_id: WorkerId) -> Replica:
        replica = self._replicas.get(worker_id)
        if replica is None:
            raise Unavailable(f"replica {worker_id} has left; choose another")
        return replica

    def _let_go(self, replica: Replica) -> None:
        self._index.retire(replica.slot)
        replica.connection.replace()

    def _close(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _routable_changed(self) -> None:
        ordered = sorted(self._replicas.items())
        self._ready = [replica for _, replica in ordered if is_routable(replica.state, replica.holds)]
        ending, soon = self._held(Hold.TERMINATION_IMPENDING), self._held(Hold.MAINTENANCE)
        self._avoided = {
            False: tuple(filter(None, (ending,))),
            True: tuple(filter(None, (ending, soon))),
        }
        self._notify()

    def _held(self, hold: Hold) -> frozenset[WorkerId]:
        return frozenset(replica.info.worker_id for replica in self._ready if hold in replica.holds)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _level(self) -> KnowledgeLevel:
        if self._ready and all(replica.load_at == -math.inf for replica in self._ready):
            return KnowledgeLevel.NO_LOAD
        if not any(replica.slot >= 0 for replica in self._ready):
            return KnowledgeLevel.NO_INDEX
        if self._is_followed and self._heard_at() == math.inf:
            return KnowledgeLevel.FRESH
        return KnowledgeLevel.FROZEN_INDEX if self._index.num_entries else KnowledgeLevel.NO_INDEX

    def _index_age_s(self, now: float) -> float:
        return max(0.0, now - (self._heard_at() if self._is_followed else self._followed_at))

    def _heard_at(self) -> float:
        """When the index last heard of any routable replica; inf = it does now."""
        if not self._unheard:
            return math.inf  # every snapshot asks
        return max((replica.unheard_since for replica in self._ready if replica.slot >= 0), default=math.inf)


def load_of(report: LoadReport) -> Load:
    """The wire's load as the router's own value."""
    return figures.load(
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        queued_tokens=report.queued_tokens,
        free_pages=report.free_pages,
        reusable_pages=report.reusable_pages,
        total_pages=report.total_pages,
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        queried_tokens=report.queried_tokens_total,
        hit_tokens=report.hit_tokens_total,
        step_base_s=report.step_base_s,
        step_row_s=report.step_row_s,
        step_prefill_token_s=report.step_prefill_token_s,
        step_kv_token_s=report.step_kv_token_s,
    )
