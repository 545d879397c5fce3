"""A router without a model, over a real socket, in a thread of its own; fails and hangs on order."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Self, TypeAlias, TypeVar

import grpc

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from ostrya.errors import InvalidRequest, NotFound, OstryaError
from ostrya.service import status
from ostrya.service.server import GrpcServer

T = TypeVar("T")
Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
START_S = 30.0


class FakeRouter(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Use it as a context manager; `target` is its address."""

    def __init__(self) -> None:
        self.words = ["Iron", "wood ", "is ", "hard."]
        self.failures: list[OstryaError] = []
        """Raised by the next calls, one each, before any message."""
        self.fail_after: tuple[int, OstryaError] | None = None
        """(messages, error): fails in the middle of an answer."""
        self.hang_after: int | None = None
        """Says nothing more after so many messages."""
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.worker_ids = ["worker-0"]
        """Of the replicas it lists."""
        self.holds: list[str] = []
        self.is_simulated = False
        """Its replicas compute nothing."""
        self.orders: list[tuple[str, str, float | None]] = []
        """What was asked of workers: (cordon | uncordon | drain, worker id, timeout)."""
        self.num_cancelled = 0
        """By every drain."""
        self.hanging = threading.Event()
        self.cancelled = threading.Event()
        self.target = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: GrpcServer | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self.target = self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._run(self._server.stop(0))
        self._run(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    async def _start(self) -> str:
        names = ("ostrya.api.v1.InferenceService", "ostrya.api.v1.AdminService")
        self._server = GrpcServer("127.0.0.1", 0, max_message_bytes=1 << 20, services=names)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server.server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server.server)
        port = await self._server.start()
        await self._server.set_serving(True)
        return f"127.0.0.1:{port}"

    @status.translated
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self._fail_if_told()
        if not (request.text or request.messages or request.token_ids):
            raise InvalidRequest("text", "''", "at least one token")
        try:
            async for response in self._answer(request):
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # cancelled while it waits here, or while gRPC sends
            self.cancelled.set()
            raise

    async def _answer(self, request: inference_pb2.GenerateRequest) -> AsyncIterator[inference_pb2.GenerateResponse]:
        request_id = request.request_id or "request-1"
        for position, word in enumerate(self.words):
            if self.hang_after == position:
                self.hanging.set()
                await asyncio.Event().wait()
            if self.fail_after is not None and self.fail_after[0] == position:
                raise self.fail_after[1]
            for choice in range(request.n or 1):
                yield inference_pb2.GenerateResponse(
                    text=word.upper() if choice else word,
                    token_ids=[position],
                    replica="worker-0",
                    decision_id="decision-1",
                    request_id=request_id,
                    choice=choice,
                    logprobs=_logprobs(request, position),
                    prompt_logprobs=_logprobs(request, 100) if position == choice == 0 else [],
                )
        usage = common_pb2.Usage(
            prompt_tokens=7, completion_tokens=len(self.words), cached_tokens=4, simulated=self.is_simulated
        )
        for choice in range(request.n or 1):
            yield inference_pb2.GenerateResponse(
                finish_reason=common_pb2.FINISH_REASON_STOP, usage=usage, choice=choice
            )

    @status.translated
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        self._fail_if_told()
        return inference_pb2.TokenizeResponse(token_ids=list(request.text.encode()))

    @status.translated
    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.Model(name="tiny", context_tokens=2048, vocab_size=1000, num_replicas_ready=2)
        return inference_pb2.ListModelsResponse(models=[model])

    @status.translated
    async def ListReplicas(
        self, request: admin_pb2.ListReplicasRequest, context: Context
    ) -> admin_pb2.ListReplicasResponse:
        load = common_pb2.LoadReport(
            num_running=1,
            free_pages=90,
            reusable_pages=8,
            total_pages=100,
            queried_tokens_total=100,
            hit_tokens_total=25,
        )
        replicas = [
            admin_pb2.Replica(
                worker_id=worker_id,
                address=f"127.0.0.1:{7000 + index}",
                model="tiny",
                state=admin_pb2.REPLICA_STATE_READY,
                load=load,
                in_flight=1,
                indexed_blocks=12,
                prefix_credit=True,
                holds=self.holds,
                simulated=self.is_simulated,
            )
            for index, worker_id in enumerate(self.worker_ids)
        ]
        return admin_pb2.ListReplicasResponse(
            replicas=replicas, level=admin_pb2.KNOWLEDGE_LEVEL_FRESH, redis_connected=True
        )

    @status.translated
    async def ExplainRoute(
        self, request: admin_pb2.ExplainRouteRequest, context: Context
    ) -> admin_pb2.ExplainRouteResponse:
        if request.decision_id != "decision-1":
            raise NotFound(f"decision {request.decision_id!r} is unknown; decisions are kept for ten minutes")
        others = [(name, 0, 0.050) for name in self.worker_ids[1:] or ["worker-1"]]
        rows = ((self.worker_ids[0], 64, 0.010), *others)
        return admin_pb2.ExplainRouteResponse(
            decision_id="decision-1",
            request_id="request-1",
            level=admin_pb2.KNOWLEDGE_LEVEL_FRESH,
            prompt_tokens=80,
            chosen=self.worker_ids[0],
            reason="prefix",
            beta=1.0,
            attempt=1,
            simulated=self.is_simulated,
            candidates=[
                admin_pb2.Candidate(worker_id=name, cached_tokens=cached, prefill_s=cost, cost_s=cost)
                for name, cached, cost in rows
            ],
        )

    @status.translated
    async def CordonReplica(
        self, request: admin_pb2.CordonReplicaRequest, context: Context
    ) -> admin_pb2.CordonReplicaResponse:
        self._order("cordon", request.worker_id)
        return admin_pb2.CordonReplicaResponse()

    @status.translated
    async def UncordonReplica(
        self, request: admin_pb2.UncordonReplicaRequest, context: Context
    ) -> admin_pb2.UncordonReplicaResponse:
        self._order("uncordon", request.worker_id)
        return admin_pb2.UncordonReplicaResponse()

    @status.translated
    async def DrainReplica(
        self, request: admin_pb2.DrainReplicaRequest, context: Context
    ) -> admin_pb2.DrainReplicaResponse:
        self._order("drain", request.worker_id, request.timeout_s if request.HasField("timeout_s") else None)
        return admin_pb2.DrainReplicaResponse(num_cancelled=self.num_cancelled)

    @status.translated
    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(
            version="1.2.3",
            pool="default",
            model="tiny",
            discovery="registry",
            state_schema=1,
            redis_connected=True,
            level=admin_pb2.KNOWLEDGE_LEVEL_FRESH,
            num_in_flight=3,
            num_waiting=2,
        )

    def _order(self, what: str, worker_id: str, timeout_s: float | None = None) -> None:
        self._fail_if_told()
        if worker_id != "worker-0":
            raise NotFound(f"replica {worker_id!r} is not known here; replicas: worker-0")
        self.orders.append((what, worker_id, timeout_s))

    def _fail_if_told(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


async def _end_tasks() -> None:
    """Handlers of calls that the server cancelled as it stopped, which it does not wait for."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _logprobs(request: inference_pb2.GenerateRequest, token_id: int) -> list[common_pb2.TokenLogprobs]:
    """Of one token, if they are asked for."""
    if not request.sampling.HasField("logprobs"):
        return []
    top = list(range(request.sampling.logprobs))
    return [common_pb2.TokenLogprobs(logprob=-token_id, top_token_ids=top, top_logprobs=[-0.5] * len(top))]
