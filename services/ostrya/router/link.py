"""The router's tie to one address: dial, ask who is there, then watch its health for as long as the stream holds.

One task per address, owned by discovery. The channel is handed to the fleet, so that what health says is said of the
very connection that requests take. A broken stream makes the replica unroutable at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2

from ostrya.api.v1 import worker_pb2
from ostrya.api.v1.worker_pb2_grpc import WorkerServiceStub
from ostrya.prefix.chain import ChainKey, self_test
from ostrya.router import figures
from ostrya.router.fleet import Fleet
from ostrya.router.pace import Pace
from ostrya.router.replica import ReplicaInfo
from ostrya.router.types import ReplicaState, WorkerId
from ostrya.service.cancelling import is_cancelled
from ostrya.service.server import channel as open_channel
from ostrya.state.keys import MAX_WORKER_ID, is_worker_id

log = logging.getLogger(__name__)

_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_DIAL_TIMEOUT_S = 2.0
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 0.5
_UNUSABLE_BACKOFF_S = 5.0
"""Before asking again somebody who answered, but is of another pool or model, or has been replaced; and somebody who
did not answer at all _NOBODY times."""
_NOBODY = 60
"""Half a minute of tries."""
_MAX_SELF_TEST_TOKENS = 1 << 16
"""What we are willing to hash for a peer's page size and stride: three milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """`run` until cancelled; then the replica, if this link brought it, is LOST but still known."""

    address: str
    pool: str
    chain: ChainKey
    fleet: Fleet
    pace: Pace
    """Of all links together."""
    max_message_bytes: int
    wall: Callable[[], float] = time.time

    async def run(self) -> None:
        """Sessions, one after the other, with a short pause that grows while the address does not answer."""
        backoff_s, num_silent = _MIN_BACKOFF_S, 0
        worker_id: WorkerId | None = None
        try:
            while True:
                try:
                    num_silent += 1
                    worker_id = await self._dial(worker_id)
                    num_silent = 0
                    if worker_id is None:
                        backoff_s = _UNUSABLE_BACKOFF_S
                    else:
                        backoff_s = _MIN_BACKOFF_S
                        await self._watch(worker_id)
                except grpc.aio.AioRpcError as error:
                    log.debug("link broke", extra={"fields": {"address": self.address, "code": error.code().name}})
                except asyncio.CancelledError:
                    # grpc.aio also cancels whoever waits on a channel that the fleet closes.
                    if is_cancelled():
                        raise
                self._lost(worker_id)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S) if num_silent < _NOBODY else _UNUSABLE_BACKOFF_S
        finally:
            self._lost(worker_id)

    async def _dial(self, known: WorkerId | None) -> WorkerId | None:
        """Who is at the address; the fleet knows it then. None: nobody this router can use."""
        channel = self.fleet.channel(known, self.address) if known is not None else None
        is_ours = channel is None  # until the fleet has it
        if channel is None:
            await self.pace.turn()
            channel = open_channel(self.address, max_message_bytes=self.max_message_bytes)
        try:
            sent = self.wall()
            answer = await WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=_DIAL_TIMEOUT_S)
            if not self._is_usable(answer):
                return None
            info = self._info(answer, at=(sent + self.wall()) / 2)
            if not self._is_same_process(info):
                if not is_ours:
                    channel = open_channel(self.address, max_message_bytes=self.max_message_bytes)
                is_ours = False
                self._forget_others(info.worker_id)
                self.fleet.add(info, channel)
            self.fleet.set_state(info.worker_id, ReplicaState.STARTING)
            self.fleet.report(info.worker_id, answer.load)
            return info.worker_id
        finally:
            if is_ours:
                await channel.close()

    async def _watch(self, worker_id: WorkerId) -> None:
        """Health into the fleet, until the stream ends, a request could not reach it, or it is ours no more."""
        channel = self.fleet.channel(worker_id, self.address)
        if channel is None:
            return
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        call = watch(health_pb2.HealthCheckRequest(service=_SERVICE))
        reading: asyncio.Task[object] = asyncio.ensure_future(call.read())
        changed = asyncio.ensure_future(self.fleet.wait_changed())
        try:
            while True:
                await asyncio.wait({reading, changed}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    answer = reading.result()
                    if not isinstance(answer, health_pb2.HealthCheckResponse):
                        return  # the server ended the stream
                    state = _state(answer, has_served=self.fleet.has_served(worker_id))
                    self.fleet.set_state(worker_id, state)
                    reading = asyncio.ensure_future(call.read())
                if changed.done():
                    if self._must_redial(worker_id, channel):
                        return
                    changed = asyncio.ensure_future(self.fleet.wait_changed())
        finally:
            call.cancel()
            changed.cancel()
            await asyncio.gather(reading, changed, return_exceptions=True)

    def _must_redial(self, worker_id: WorkerId, channel: grpc.aio.Channel) -> bool:
        is_ours = self.fleet.channel(worker_id, self.address) is channel
        return not is_ours or self.fleet.state(worker_id) is ReplicaState.LOST

    def _forget_others(self, worker_id: WorkerId) -> None:
        """Who was at this address before has ended; what holds it must not hold the new one."""
        for row in self.fleet.replicas():
            if row.info.address == self.address and row.info.worker_id != worker_id:
                self.fleet.remove(row.info.worker_id)

    def _lost(self, worker_id: WorkerId | None) -> None:
        if worker_id is not None and self.fleet.channel(worker_id, self.address) is not None:
            self.fleet.set_state(worker_id, ReplicaState.LOST)

    def _is_usable(self, answer: worker_pb2.GetInfoResponse | None) -> bool:
        """False for another pool's or model's worker, for one that no request could go to, and for the id that a
        younger process has elsewhere."""
        if answer is None:  # gRPC's stand-in for bytes that do not decode; its types do not say so
            where = {"address": self.address}
            log.warning("what a worker says of itself does not decode; not used", extra={"fields": where})
            return False
        limits = answer.limits
        if not is_worker_id(answer.worker_id) or min(limits.max_running, limits.context_tokens, limits.vocab_size) < 1:
            fields = {
                "address": self.address,
                "worker_id": answer.worker_id[:MAX_WORKER_ID],
                "max_running": limits.max_running,
                "context_tokens": limits.context_tokens,
                "vocab_size": limits.vocab_size,
            }
            log.warning("what a worker says of itself cannot be; not used", extra={"fields": fields})
            return False
        if answer.model != self.chain.model or answer.pool != self.pool:
            fields = {"address": self.address, "pool": answer.pool, "model": answer.model, "serves": self.chain.model}
            log.warning("worker is of another pool or model; not used", extra={"fields": fields})
            return False
        other = self.fleet.info(WorkerId(answer.worker_id))
        if other is None or other.address == self.address or answer.epoch > other.epoch:
            return True
        return self.fleet.state(other.worker_id) is ReplicaState.LOST and answer.epoch in (0, other.epoch)

    def _is_same_process(self, info: ReplicaInfo) -> bool:
        known = self.fleet.info(info.worker_id)
        return known is not None and known.address == self.address and 0 < info.epoch == known.epoch

    def _info(self, answer: worker_pb2.GetInfoResponse, *, at: float) -> ReplicaInfo:
        credit = self._has_our_chain(answer)
        if not credit:
            fields = {"worker_id": answer.worker_id, "address": self.address}
            log.warning("worker's digest chain is not ours; no prefix credit", extra={"fields": fields})
        return ReplicaInfo(
            worker_id=WorkerId(answer.worker_id),
            address=self.address,
            epoch=answer.epoch,
            model=answer.model,
            page_size=answer.page_size,
            routing_stride=answer.routing_stride,
            max_running=answer.limits.max_running,
            context_tokens=answer.limits.context_tokens,
            vocab_size=answer.limits.vocab_size,
            prefix_credit=credit,
            num_pages=answer.limits.num_pages,
            clock_offset_s=figures.clock_offset_s(answer.time_s, at),
            state_schema=answer.state_schema,
            version=answer.version,
            is_simulated=answer.simulated,
        )

    def _has_our_chain(self, answer: worker_pb2.GetInfoResponse) -> bool:
        page, stride = answer.page_size, answer.routing_stride
        if not 0 < page * stride * 4 <= _MAX_SELF_TEST_TOKENS:
            return False
        return answer.chain_self_test == self_test(self.chain, page_size=page, stride=stride)


def _state(answer: health_pb2.HealthCheckResponse, *, has_served: bool) -> ReplicaState:
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ReplicaState.READY
    return ReplicaState.DRAINING if has_served else ReplicaState.STARTING
