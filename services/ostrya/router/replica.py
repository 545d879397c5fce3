"""One replica as a router keeps it: what it said of itself, the connection to it, and this router's requests there.

The fleet owns these; nobody else changes them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from ostrya.api.v1.worker_pb2_grpc import WorkerServiceStub
from ostrya.router.types import ABSOLUTE_HOLDS, Hold, Load, ReplicaState, ReplicaView, WorkerId

if TYPE_CHECKING:
    from ostrya.api.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What a replica said about itself when it was dialled."""

    worker_id: WorkerId
    address: str
    epoch: int
    """0 = not registered in Redis (yet)."""
    model: str
    page_size: int
    routing_stride: int
    max_running: int
    context_tokens: int
    vocab_size: int
    prefix_credit: bool
    """Its digest chain is ours."""
    num_pages: int = 0
    """Of its cache, so that it cannot hold more resume points; 0 = it did not say."""
    clock_offset_s: float = 0.0
    """Its clock minus ours when it was dialled; good to half a round trip."""
    state_schema: int = 0
    """Of what it writes to Redis; 0 = it did not say."""
    version: str = ""
    is_simulated: bool = False
    """It computes nothing, and its times are predictions."""


class Connection:
    """A channel that `when_unused` may close: it was replaced and its last request has ended."""

    def __init__(self, channel: grpc.aio.Channel, *, when_unused: Callable[[grpc.aio.Channel], None]) -> None:
        self.channel = channel
        self.stub: WorkerServiceAsyncStub = WorkerServiceStub(channel)
        self._when_unused = when_unused
        self._num_users = 0
        self._is_replaced = False

    def use(self) -> None:
        """A request begins on it."""
        self._num_users += 1

    def release(self) -> None:
        """A request has ended on it."""
        self._num_users -= 1
        self._tell_if_unused()

    def replace(self) -> None:
        """No request begins on it any more."""
        self._is_replaced = True
        self._tell_if_unused()

    def _tell_if_unused(self) -> None:
        if self._is_replaced and self._num_users == 0:
            self._when_unused(self.channel)


@dataclass(slots=True, eq=False)
class Replica:
    """What changes about it; `view` is its row in a snapshot, None when that must be built anew."""

    info: ReplicaInfo
    connection: Connection
    slot: int
    min_epoch: int
    state: ReplicaState = ReplicaState.STARTING
    has_served: bool = False
    """It was READY before, so when it is not, it drains."""
    holds: tuple[Hold, ...] = ()
    load: Load = field(default_factory=Load)
    load_at: float = -math.inf
    board_stamp: int = 0
    own_requests: int = 0
    own_prefill_tokens: int = 0
    unheard_since: float = math.inf
    """When it last renewed its lease; inf = it does."""
    view: ReplicaView | None = None

    def see(self, now: float) -> ReplicaView:
        """Builds and keeps the view."""
        self.view = ReplicaView(
            worker_id=self.info.worker_id,
            slot=self.slot,
            max_running=self.info.max_running,
            page_size=self.info.page_size,
            routing_stride=self.info.routing_stride,
            load=self.load,
            load_age_s=now - self.load_at,
            own_requests=self.own_requests,
            own_prefill_tokens=self.own_prefill_tokens,
            index_age_s=max(0.0, now - self.unheard_since),
        )
        return self.view


class InFlight:
    """One request of this router on a replica, counted until `end`."""

    def __init__(self, replica: Replica, *, prefill_tokens: int) -> None:
        self._replica, self._connection = replica, replica.connection
        self._prefill_tokens = prefill_tokens
        self._is_running = True
        self._connection.use()
        self._count(requests=1, tokens=prefill_tokens)

    def first_token(self) -> None:
        """The prompt is computed. Again, or after `end`: nothing."""
        tokens, self._prefill_tokens = self._prefill_tokens, 0
        self._count(requests=0, tokens=-tokens)

    def end(self) -> None:
        """The request is over, however. Again: nothing."""
        if self._is_running:
            self._is_running = False
            self.first_token()
            self._count(requests=-1, tokens=0)
            self._connection.release()

    def _count(self, *, requests: int, tokens: int) -> None:
        self._replica.own_requests += requests
        self._replica.own_prefill_tokens += tokens
        self._replica.view = None


def is_routable(state: ReplicaState, holds: tuple[Hold, ...]) -> bool:
    """It says it serves, and nothing holds it absolutely."""
    return state is ReplicaState.READY and ABSOLUTE_HOLDS.isdisjoint(holds)
