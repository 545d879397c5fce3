"""WorkerService: token ids in, token ids out, load on every message. No code here chooses a gRPC status."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from importlib.metadata import version

from ostrya.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from ostrya.engine.process import EngineProcess
from ostrya.engine.types import EngineRequest, RequestId
from ostrya.errors import EngineDied, Unavailable
from ostrya.service import status
from ostrya.service.tracing import NO_TRACER, Tracer
from ostrya.state import keys
from ostrya.worker import convert
from ostrya.worker.lasting import LastingEngine
from ostrya.worker.metrics import Cause, Observation, WorkerMetrics
from ostrya.worker.running import RETRY_ELSEWHERE_S, Running, draining
from ostrya.worker.settings import WorkerSettings
from ostrya.worker.spans import WorkerSpans

log = logging.getLogger(__name__)

DEADLINE_SLACK_S = 0.05
DEADLINE_SLACK_RATIO = 0.01
"""A client's cancel at its own deadline arrives before the worker's copy of it, which gRPC rounds up by 1 %."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one engine. `set_serving` tells health; `epoch` is the registration's, 0 while there is none."""

    def __init__(
        self,
        engine: EngineProcess | LastingEngine,
        metrics: WorkerMetrics,
        *,
        settings: WorkerSettings,
        tokenizer_fingerprint: str,
        chain_self_test: bytes,
        set_serving: Callable[[bool], Awaitable[None]],
        epoch: Callable[[], int],
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._engine, self._metrics, self._settings = engine, metrics, settings
        self._tokenizer_fingerprint, self._chain_self_test = tokenizer_fingerprint, chain_self_test
        self._set_serving, self._epoch = set_serving, epoch
        self._running = Running()
        self._is_alive = True
        self._telling = asyncio.Lock()
        self._serial = itertools.count(1)
        self._spans = WorkerSpans(tracer)
        if tracer is not NO_TRACER:
            engine.listen(self._spans.report)

    @status.translated
    async def Generate(
        self, request: worker_pb2.WorkerServiceGenerateRequest, context: status.Context
    ) -> AsyncGenerator[worker_pb2.WorkerServiceGenerateResponse, None]:
        """Streams an answer. When the client goes away or its deadline passes, the engine frees the request at once."""
        # A client may send one id twice at a time; the engine must not see that.
        request_id = RequestId(f"{request.request_id}#{next(self._serial)}")
        if not self._is_alive:
            raise _restarting()
        checked = partial(convert.engine_request, request, request_id=request_id, info=self._engine.info)
        # A long prompt takes as long as a step, and the event loop carries every stream.
        asked = checked() if len(request.token_ids) <= convert.SLICE else await asyncio.to_thread(checked)
        num_prompt = len(asked.token_ids)
        with self._running.hold(request_id), self._observed(asked, context) as seen:
            async with aclosing(self._engine.submit(asked)) as outputs:
                async for output in outputs:
                    is_first = seen.num_generated == 0
                    seen.output(output)
                    usage = common_pb2.Usage(
                        prompt_tokens=num_prompt,
                        completion_tokens=seen.num_generated,
                        cached_tokens=seen.num_cached,
                        simulated=self._engine.info.is_simulated,
                    )
                    wants_usage = is_first or output.finish_reason is not None
                    yield convert.response(output, usage=usage if wants_usage else None, load=self._engine.load)

    @status.translated
    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: status.Context) -> worker_pb2.GetInfoResponse:
        """What a router must know before it sends anything."""
        info, settings = self._engine.info, self._settings
        return worker_pb2.GetInfoResponse(
            worker_id=settings.worker_id,
            pool=settings.pool,
            epoch=self._epoch(),
            model=info.model,
            page_size=info.page_size,
            routing_stride=info.routing_stride,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            chain_self_test=self._chain_self_test,
            limits=worker_pb2.Limits(
                context_tokens=info.context_tokens,
                vocab_size=info.vocab_size,
                max_running=info.max_running,
                max_waiting=settings.max_waiting,
                max_message_bytes=settings.max_message_bytes,
                num_pages=info.num_pages,
            ),
            backend=info.backend,
            load=convert.load_report(self._engine.load),
            state_schema=keys.SCHEMA,
            time_s=time.time(),
            version=version("ostrya"),
            weights=info.weights,
            simulated=info.is_simulated,
        )

    @status.translated
    async def Cordon(self, request: worker_pb2.CordonRequest, context: status.Context) -> worker_pb2.CordonResponse:
        """Takes no new work and keeps what it has."""
        self._running.cordon()
        await self._tell()
        return worker_pb2.CordonResponse()

    @status.translated
    async def Uncordon(
        self, request: worker_pb2.UncordonRequest, context: status.Context
    ) -> worker_pb2.UncordonResponse:
        """Takes new work again, also during or after a drain; not once the process is ending."""
        self._running.uncordon()
        await self._tell()
        return worker_pb2.UncordonResponse()

    @status.translated
    async def Drain(self, request: worker_pb2.DrainRequest, context: status.Context) -> worker_pb2.DrainResponse:
        """Takes no new work, finishes what it has, then answers; it stays cordoned, also when the caller goes away.

        Unavailable when an uncordon comes first.
        """
        timeout_s = convert.drain_timeout_s(request, default=self._settings.drain_timeout_s)
        return worker_pb2.DrainResponse(num_cancelled=await self._drain(timeout_s))

    async def end(self, timeout_s: float) -> int:
        """The drain of the process's own end, which nothing calls off; how many requests it had to cancel."""
        self._running.end()
        return await self._drain(timeout_s)

    async def hear_pulse(self, *, is_alive: bool) -> None:
        """Says no to new work while there is no engine; whether the worker is cordoned stays as it is."""
        self._is_alive = is_alive
        await self._tell()

    async def _drain(self, timeout_s: float) -> int:
        try:
            with self._running.drain():
                await self._tell()
                return await self._running.empty(
                    timeout_s, lambda request_id: self._engine.abort(request_id, draining())
                )
        finally:
            await self._tell()

    async def _tell(self) -> None:
        """Health and metrics say what the state is now; one at a time, so that the last word is the true one."""
        async with self._telling:
            state = self._running.state
            self._metrics.enter(state if self._is_alive or state == "draining" else "restarting")
            await self._set_serving(self._is_alive and self._running.state == "ready")

    @contextmanager
    def _observed(self, asked: EngineRequest, context: status.Context) -> Iterator[Observation]:
        """Counts the request, and why it ended if it did early; its spans; one log line."""
        time_left_s, trace_id = context.time_remaining(), ""
        try:
            with (
                self._metrics.observe(num_prompt=len(asked.token_ids)) as seen,
                self._spans.follow(asked, context.invocation_metadata(), seen) as span,
            ):
                trace_id = span.trace_id
                try:
                    yield seen
                except BaseException as error:
                    cause = _cause(error, context, time_left_s)
                    if cause is not None:
                        seen.cancelled(cause)
                    raise
        finally:
            fields = {
                "request_id": asked.request_id,
                "prompt_tokens": seen.num_prompt,
                "cached_tokens": seen.num_cached,
                "completion_tokens": seen.num_generated,
                "ending": seen.ending,
                "duration_s": round(seen.duration_s, 6),
                **({"trace_id": trace_id} if trace_id else {}),
            }
            log.info("request", extra={"fields": fields})


def _restarting() -> Unavailable:
    """What a request is told while no engine is there; it has met no harm, and another replica may be free at once."""
    return Unavailable(
        "the engine of this worker starts again; send the request to another", retry_after_s=RETRY_ELSEWHERE_S
    )


def _cause(error: BaseException, context: status.Context, time_left_s: float | None) -> Cause | None:
    """Why an accepted request ended early; None: it was refused, or this is a bug."""
    match error:
        case EngineDied():
            return "engine"
        case Unavailable():
            return "drain"
        case asyncio.CancelledError() | GeneratorExit():
            # The one arrives while we wait, the other while gRPC sends.
            return "deadline" if _has_passed(context, time_left_s) else "client"
    return None


def _has_passed(context: status.Context, time_left_s: float | None) -> bool:
    """Whether the call's deadline, which was `time_left_s` away at its start, is the likely reason for its end."""
    if time_left_s is None:
        return False
    slack_s = max(DEADLINE_SLACK_S, DEADLINE_SLACK_RATIO * time_left_s)
    return (context.time_remaining() or 0.0) <= slack_s
