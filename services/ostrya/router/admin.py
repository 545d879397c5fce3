"""AdminService: what operators and tools ask of a router.

Cordons and drains are the worker's own: the router passes them on and learns by the worker's health, as every router
of the pool does.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import grpc

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc, common_pb2, worker_pb2
from ostrya.api.v1.worker_pb2_grpc import WorkerServiceStub
from ostrya.errors import InvalidRequest, NotFound, OstryaError, Unavailable
from ostrya.router.explain import DecisionLog, candidates
from ostrya.router.fleet import Fleet, ReplicaRow
from ostrya.router.types import Candidate, KnowledgeLevel, Load, ReplicaState, WorkerId
from ostrya.service.bounds import check_drain_s, check_name
from ostrya.service.parts import Failing
from ostrya.service.server import channel
from ostrya.service.status import Context, error_of, innermost, is_ours, translated, with_retry
from ostrya.state.keys import SCHEMA

if TYPE_CHECKING:
    from ostrya.api.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

_STATES = {
    ReplicaState.STARTING: admin_pb2.REPLICA_STATE_STARTING,
    ReplicaState.READY: admin_pb2.REPLICA_STATE_READY,
    ReplicaState.DRAINING: admin_pb2.REPLICA_STATE_DRAINING,
    ReplicaState.LOST: admin_pb2.REPLICA_STATE_LOST,
}
_LEVELS = {
    KnowledgeLevel.FRESH: admin_pb2.KNOWLEDGE_LEVEL_FRESH,
    KnowledgeLevel.FROZEN_INDEX: admin_pb2.KNOWLEDGE_LEVEL_FROZEN_INDEX,
    KnowledgeLevel.NO_INDEX: admin_pb2.KNOWLEDGE_LEVEL_NO_INDEX,
    KnowledgeLevel.NO_LOAD: admin_pb2.KNOWLEDGE_LEVEL_NO_LOAD,
}


_MAX_NAMED = 16

_ANSWER_S = 5.0
"""For what a worker does at once, and on top of the time it may take to drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a router knows of itself."""

    pool: str
    model: str
    discovery: str
    redis_up: bool
    kubernetes_up: bool | None
    """None = not in mode kubernetes."""
    level: KnowledgeLevel
    num_in_flight: int
    num_waiting: int
    is_draining: bool
    failing: Mapping[str, Failing]
    """Parts that fail, by name."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Shows the router, the fleet and the decisions; passes on what is for a worker."""

    def __init__(
        self, *, fleet: Fleet, decisions: DecisionLog, max_message_bytes: int, status: Callable[[], Status]
    ) -> None:
        self._fleet = fleet
        self._decisions = decisions
        self._max_message_bytes = max_message_bytes
        self._status = status

    @translated
    async def ListReplicas(
        self, request: admin_pb2.ListReplicasRequest, context: Context
    ) -> admin_pb2.ListReplicasResponse:
        """Every replica this router knows, routable or not."""
        return admin_pb2.ListReplicasResponse(
            replicas=[_replica(row) for row in self._fleet.replicas()],
            level=_LEVELS[self._fleet.snapshot().level],
            redis_connected=self._fleet.redis_up,
        )

    @translated
    async def ExplainRoute(
        self, request: admin_pb2.ExplainRouteRequest, context: Context
    ) -> admin_pb2.ExplainRouteResponse:
        """One decision with every replica's terms; NOT_FOUND after ten minutes."""
        check_name("decision_id", request.decision_id)
        decision = self._decisions.get(request.decision_id)
        chosen = self._fleet.info(decision.choice.worker_id)
        return admin_pb2.ExplainRouteResponse(
            decision_id=decision.decision_id,
            request_id=decision.request_id,
            time_s=decision.time_s,
            level=_LEVELS[decision.snapshot.level],
            prompt_tokens=decision.num_tokens,
            chosen=decision.choice.worker_id,
            reason=decision.choice.reason,
            beta=decision.choice.beta,
            candidates=[_candidate(row) for row in candidates(decision)],
            index_age_s=decision.snapshot.index_age_s,
            attempt=decision.attempt,
            simulated=chosen is not None and chosen.is_simulated,
        )

    @translated
    async def CordonReplica(
        self, request: admin_pb2.CordonReplicaRequest, context: Context
    ) -> admin_pb2.CordonReplicaResponse:
        """NOT_FOUND for an id this router does not know, UNAVAILABLE if the worker does not answer; so the next two."""
        async with self._worker(request.worker_id) as worker:
            await worker.Cordon(worker_pb2.CordonRequest(), timeout=_ANSWER_S)
        return admin_pb2.CordonReplicaResponse()

    @translated
    async def UncordonReplica(
        self, request: admin_pb2.UncordonReplicaRequest, context: Context
    ) -> admin_pb2.UncordonReplicaResponse:
        """Also after a drain."""
        async with self._worker(request.worker_id) as worker:
            await worker.Uncordon(worker_pb2.UncordonRequest(), timeout=_ANSWER_S)
        return admin_pb2.UncordonReplicaResponse()

    @translated
    async def DrainReplica(
        self, request: admin_pb2.DrainReplicaRequest, context: Context
    ) -> admin_pb2.DrainReplicaResponse:
        """Answers when the worker is empty. If this call ends earlier, the worker stays cordoned."""
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        if timeout_s is not None:
            check_drain_s(timeout_s)
        asked = worker_pb2.DrainRequest(timeout_s=timeout_s)
        async with self._worker(request.worker_id) as worker:
            answer = await worker.Drain(asked, timeout=None if timeout_s is None else timeout_s + _ANSWER_S)
        return admin_pb2.DrainReplicaResponse(num_cancelled=answer.num_cancelled)

    @translated
    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        """What this router is, sees and is busy with."""
        status = self._status()
        return admin_pb2.GetStatusResponse(
            version=version("ostrya"),
            pool=status.pool,
            model=status.model,
            discovery=status.discovery,
            state_schema=SCHEMA,
            time_s=time.time(),
            redis_connected=status.redis_up,
            kubernetes_connected=status.kubernetes_up,
            level=_LEVELS[status.level],
            num_in_flight=status.num_in_flight,
            num_waiting=status.num_waiting,
            is_draining=status.is_draining,
            failing_parts=[
                admin_pb2.FailingPart(name=name, error=part.error, num_restarts=part.num_restarts)
                for name, part in sorted(status.failing.items())
            ],
        )

    @asynccontextmanager
    async def _worker(self, worker_id: str) -> AsyncIterator["WorkerServiceAsyncStub"]:
        """A way to the worker of its own: the fleet's channel may be replaced, and closed, during a long drain."""
        check_name("worker_id", worker_id)
        info = self._fleet.info(WorkerId(worker_id))
        if info is None:
            known = [row.info.worker_id for row in self._fleet.replicas()]
            # Messages travel in headers, which are bounded.
            more = [f"and {len(known) - _MAX_NAMED} more"] if len(known) > _MAX_NAMED else []
            shown = ", ".join([*known[:_MAX_NAMED], *more])
            raise NotFound(f"replica {worker_id[:64]!r} is not known here; replicas: {shown or 'none'}")
        async with channel(info.address, max_message_bytes=self._max_message_bytes) as way:
            stub: WorkerServiceAsyncStub = WorkerServiceStub(way)
            try:
                yield stub
            except grpc.aio.AioRpcError as error:
                raise _refusal(worker_id, error) from error


def _refusal(worker_id: str, error: grpc.aio.AioRpcError) -> OstryaError:
    """The worker's own words about the request; for the rest it is enough to know that it did not do it."""
    failure = error_of(error)
    if is_ours(error) and isinstance(failure, InvalidRequest | Unavailable):
        failure.args = (f"replica {worker_id}: {failure}",)
        return failure
    # Who asks has more use for the reason at once than for another wait.
    return with_retry(Unavailable(f"replica {worker_id} did not answer: {innermost(failure)}"), None)


def _replica(row: ReplicaRow) -> admin_pb2.Replica:
    return admin_pb2.Replica(
        worker_id=row.info.worker_id,
        address=row.info.address,
        model=row.info.model,
        state=_STATES[row.state],
        epoch=row.info.epoch,
        load=_load(row.load),
        in_flight=row.in_flight,
        indexed_blocks=row.indexed_blocks,
        prefix_credit=row.info.prefix_credit,
        holds=row.holds,
        clock_offset_s=row.info.clock_offset_s,
        state_schema=row.info.state_schema,
        version=row.info.version,
        simulated=row.info.is_simulated,
    )


def _load(load: Load) -> common_pb2.LoadReport:
    return common_pb2.LoadReport(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_tokens=load.queued_tokens,
        free_pages=load.free_pages,
        reusable_pages=load.reusable_pages,
        total_pages=load.total_pages,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        queried_tokens_total=load.queried_tokens,
        hit_tokens_total=load.hit_tokens,
        step_base_s=load.step_base_s,
        step_row_s=load.step_row_s,
        step_prefill_token_s=load.step_prefill_token_s,
        step_kv_token_s=load.step_kv_token_s,
    )


def _candidate(row: Candidate) -> admin_pb2.Candidate:
    return admin_pb2.Candidate(
        worker_id=row.worker_id,
        cached_tokens=row.cached_tokens,
        wait_s=row.wait_s,
        prefill_s=row.prefill_s,
        decode_s=row.decode_s,
        cost_s=row.cost_s,
    )
