"""AdminService: what operators and tools ask of a router."""

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from ostrya.router.explain import DecisionLog, candidates
from ostrya.router.fleet import Fleet, ReplicaRow
from ostrya.router.types import Candidate, KnowledgeLevel, Load, ReplicaState
from ostrya.service.status import Context, translated

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


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Shows the fleet and the decisions; changes nothing."""

    def __init__(self, *, fleet: Fleet, decisions: DecisionLog) -> None:
        self._fleet = fleet
        self._decisions = decisions

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
        decision = self._decisions.get(request.decision_id)
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
        )


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
