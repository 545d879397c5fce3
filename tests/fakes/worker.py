"""A worker without an engine: WorkerService and grpc.health.v1 over a real socket, in the test's own event loop.

Tokens depend on (seed, position) only, so a stream continued elsewhere from prompt + tokens goes on exactly, as with
real workers. Delays are gates that a test opens, never sleeps. `behaviour` may be changed at any time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ostrya.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from ostrya.prefix.chain import ChainKey, self_test

SERVICE = "ostrya.api.v1.WorkerService"
GARBAGE = b"\xff"
"""No message of any type."""


class Gate:
    """Lets callers pass one by one or freely. Starts open."""

    def __init__(self) -> None:
        self._free = True
        self._allowed = 0
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Whoever comes from now on waits."""
        self._free, self._allowed = False, 0

    def open(self) -> None:
        """Everybody may pass."""
        self._free = True
        self._changed.set()

    def allow(self, count: int) -> None:
        """`count` more passes through a closed gate."""
        self._allowed += count
        self._changed.set()

    async def passed(self) -> None:
        """Returns when this caller may go on."""
        while not self._free and self._allowed == 0:
            self._changed.clear()
            await self._changed.wait()
        if not self._free:
            self._allowed -= 1


class Refusal(StrEnum):
    """How a request ends before its first token."""

    NONE = "none"
    UNAVAILABLE = "unavailable"
    QUEUE_FULL = "queue_full"
    """RESOURCE_EXHAUSTED with RetryInfo, as a worker whose queue is full answers."""
    FAULT = "fault"
    """INTERNAL without details, as our servicers answer for a bug, and gRPC for bytes that are no frame."""
    DRAINING = "draining"
    """UNAVAILABLE with RetryInfo, as a worker that drains answers; its health may be a moment behind."""


@dataclass(slots=True)
class Behaviour:
    """What the next requests meet."""

    num_tokens: int = 8
    """Where the model ends by itself; `max_tokens` below it ends with LENGTH."""
    script: Sequence[int] | None = None
    """Exactly these tokens instead of computed ones."""
    tokens_per_message: int = 1
    cached_tokens: int = 0
    refusal: Refusal = Refusal.NONE
    refusals_left: int | None = None
    """How many requests are refused; None = all."""
    max_open: int | None = None
    """One more request meets a full queue; None = any number is taken."""
    breaks_after_tokens: int | None = None
    """The stream ends with UNAVAILABLE after that many tokens."""
    dies_after_tokens: int | None = None
    """The whole server goes away after that many tokens, as a killed process does."""
    garbles_after_tokens: int | None = None
    """After that many tokens comes a message that does not decode."""


@dataclass(slots=True, kw_only=True)
class Identity:
    """What GetInfo says."""

    worker_id: str = "w0"
    pool: str = "default"
    epoch: int = 0
    model: str = "tiny"
    tokenizer_fingerprint: str = "fake"
    page_size: int = 16
    routing_stride: int = 1
    context_tokens: int = 2048
    vocab_size: int = 1000
    max_running: int = 8
    max_waiting: int = 64
    chain_self_test: bytes | None = None
    """None = the right one for model and fingerprint."""


@dataclass(slots=True)
class Record:
    """What happened, for assertions; lists hold request ids in order."""

    requests: list[worker_pb2.WorkerServiceGenerateRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    most_active: int = 0
    drains: int = 0


class _Health(health.aio.HealthServicer):
    def __init__(self, answer: Gate) -> None:
        super().__init__()
        self._answer = answer

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        await self._answer.passed()
        return await super().Check(request, context)


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """`async with FakeWorker(...) as worker` serves on `worker.address` and says SERVING."""

    def __init__(self, identity: Identity | None = None, *, behaviour: Behaviour | None = None, port: int = 0) -> None:
        self.identity = identity or Identity()
        self.behaviour = behaviour or Behaviour()
        self.load = common_pb2.LoadReport(free_pages=100, total_pages=100)
        self.record = Record()
        self.first_token = Gate()
        """Passed once by each request before its first token."""
        self.next_token = Gate()
        """Passed before each later message."""
        self.answer = Gate()
        """Passed by each GetInfo and health check; closed, the worker hangs, while its streams hold."""
        self.address = ""
        self.active = 0
        self.is_cordoned = False
        self.garbles_info = False
        """GetInfo answers what does not decode."""
        self._cut = asyncio.Event()
        """A drain's time is up."""
        self._port = port
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self._health = _Health(self.answer)
        self._death: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "FakeWorker":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Binds (again on the same port after a stop) and says SERVING."""
        # As real workers: a router's pings must not end a connection that is slow to be used.
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)
        server.add_registered_method_handlers(SERVICE, self._garbling())  # in the place of those two
        self._health = _Health(self.answer)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.address = f"127.0.0.1:{self._port}"
        self.is_cordoned = False
        await self.set_serving(True)
        await server.start()
        self._server = server

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 says from now on; watchers hear of it."""
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if serving else answer.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Connections break at once, running streams are cancelled. A second call does nothing."""
        if self._death is not None and self._death is not asyncio.current_task():
            await self._death
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def until(self, condition: Callable[["FakeWorker"], bool], *, timeout_s: float = 5.0) -> None:
        """Returns when `condition(self)` holds; TimeoutError otherwise. Looked at after everything that is recorded."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    def tokens_of(self, request: worker_pb2.WorkerServiceGenerateRequest) -> list[int]:
        """What Generate answers to this request if nothing goes wrong."""
        count = self._limit(request)
        if self.behaviour.script is not None:
            return list(self.behaviour.script[:count])
        prompt, seed = len(request.token_ids), request.sampling.seed
        return [fake_token(seed, prompt + step, vocab_size=self.identity.vocab_size) for step in range(count)]

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.GetInfoResponse:
        await self.answer.passed()
        if self.garbles_info:
            return worker_pb2.GetInfoResponse()
        who = self.identity
        return worker_pb2.GetInfoResponse(
            worker_id=who.worker_id,
            pool=who.pool,
            epoch=who.epoch,
            model=who.model,
            page_size=who.page_size,
            routing_stride=who.routing_stride,
            tokenizer_fingerprint=who.tokenizer_fingerprint,
            chain_self_test=self._self_test(),
            limits=worker_pb2.Limits(
                context_tokens=who.context_tokens,
                vocab_size=who.vocab_size,
                max_running=who.max_running,
                max_waiting=who.max_waiting,
                max_message_bytes=8 << 20,
            ),
            backend="fake",
            load=self.load,
        )

    async def Cordon(
        self, request: worker_pb2.CordonRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.CordonResponse:
        self.is_cordoned = True
        await self.set_serving(False)
        return worker_pb2.CordonResponse()

    async def Uncordon(
        self, request: worker_pb2.UncordonRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.UncordonResponse:
        self.is_cordoned = False
        await self.set_serving(True)
        return worker_pb2.UncordonResponse()

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.DrainResponse:
        self.is_cordoned = True
        await self.set_serving(False)
        async with self._changed:
            self.record.drains += 1
            self._changed.notify_all()
        return worker_pb2.DrainResponse(
            num_cancelled=await self.drain(request.timeout_s if request.HasField("timeout_s") else 30.0)
        )

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests, whatever health says; cuts off what still runs at the timeout."""
        self.is_cordoned = True
        with suppress(TimeoutError):
            await self.until(lambda one: one.active == 0, timeout_s=timeout_s)
        num_left = self.active
        self._cut.set()
        await self.until(lambda one: one.active == 0)
        self._cut.clear()
        return num_left

    async def Generate(
        self,
        request: worker_pb2.WorkerServiceGenerateRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[worker_pb2.WorkerServiceGenerateResponse]:
        self.active += 1
        self.record.requests.append(request)
        await self._notify()
        ended = self.record.cancelled
        try:
            await self._refuse(request, context)
            self.record.most_active = max(self.record.most_active, self.active)
            async for message in self._messages(request, context):
                yield message
            ended = self.record.finished
        except grpc.aio.AbortError:
            ended = self.record.refused
            raise
        finally:
            self.active -= 1
            ended.append(request.request_id)
            await asyncio.shield(self._notify())

    async def _messages(
        self, request: worker_pb2.WorkerServiceGenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.WorkerServiceGenerateResponse]:
        tokens = self.tokens_of(request)
        size = self.behaviour.tokens_per_message
        for start in range(0, len(tokens), size):
            if not await self._passed(self.first_token if start == 0 else self.next_token):
                await _abort(context, Refusal.DRAINING)
            await self._break(start, context)
            if self.behaviour.garbles_after_tokens is not None and start >= self.behaviour.garbles_after_tokens:
                yield worker_pb2.WorkerServiceGenerateResponse()
                return
            last = start + size >= len(tokens)
            message = worker_pb2.WorkerServiceGenerateResponse(token_ids=tokens[start : start + size], load=self.load)
            if request.sampling.HasField("logprobs"):
                message.logprobs.extend(map(fake_logprobs, message.token_ids))
            if request.sampling.HasField("prompt_logprobs") and start == 0:
                message.prompt_logprobs.extend(map(fake_logprobs, request.token_ids[1:]))
            if start == 0 or last:
                message.usage.CopyFrom(self._usage(request, completed=min(start + size, len(tokens))))
            if last:
                message.finish_reason = self._finish_reason(request)
            yield message

    def _garbling(self) -> "dict[str, grpc.RpcMethodHandler[object, object]]":
        """The methods that may answer garbage, which an empty message stands for."""

        def pack(message: worker_pb2.WorkerServiceGenerateResponse | worker_pb2.GetInfoResponse) -> bytes:
            return message.SerializeToString() or GARBAGE

        generate = grpc.unary_stream_rpc_method_handler(
            self.Generate,
            request_deserializer=worker_pb2.WorkerServiceGenerateRequest.FromString,
            response_serializer=pack,
        )
        get_info = grpc.unary_unary_rpc_method_handler(
            self.GetInfo, request_deserializer=worker_pb2.GetInfoRequest.FromString, response_serializer=pack
        )
        handlers = {"Generate": generate, "GetInfo": get_info}
        return cast("dict[str, grpc.RpcMethodHandler[object, object]]", handlers)

    async def _passed(self, gate: Gate) -> bool:
        """True at the gate's word, False if a drain cuts the request off first."""
        waits = [asyncio.create_task(gate.passed()), asyncio.create_task(self._cut.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[0].done()
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _refuse(
        self, request: worker_pb2.WorkerServiceGenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        does = self.behaviour
        if self.is_cordoned:
            await _abort(context, Refusal.DRAINING)
        if does.max_open is not None and self.active > does.max_open:
            await _abort(context, Refusal.QUEUE_FULL)
        if does.refusal is Refusal.NONE or does.refusals_left == 0:
            return
        if does.refusals_left is not None:
            does.refusals_left -= 1
        await _abort(context, does.refusal)

    async def _break(self, sent: int, context: grpc.aio.ServicerContext[object, object]) -> None:
        does = self.behaviour
        if does.breaks_after_tokens is not None and sent >= does.breaks_after_tokens:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the fake worker breaks off")
        if does.dies_after_tokens is not None and sent >= does.dies_after_tokens:
            self._death = self._death or asyncio.create_task(self.stop())
            await asyncio.Event().wait()  # the server's stop cancels this handler

    def _limit(self, request: worker_pb2.WorkerServiceGenerateRequest) -> int:
        natural = self.behaviour.num_tokens if self.behaviour.script is None else len(self.behaviour.script)
        return min(natural, request.sampling.max_tokens) if request.sampling.HasField("max_tokens") else natural

    def _finish_reason(self, request: worker_pb2.WorkerServiceGenerateRequest) -> common_pb2.FinishReason.ValueType:
        cut = request.sampling.HasField("max_tokens") and self._limit(request) == request.sampling.max_tokens
        return common_pb2.FINISH_REASON_LENGTH if cut else common_pb2.FINISH_REASON_STOP

    def _usage(self, request: worker_pb2.WorkerServiceGenerateRequest, *, completed: int) -> common_pb2.Usage:
        return common_pb2.Usage(
            prompt_tokens=len(request.token_ids),
            completion_tokens=completed,
            cached_tokens=self.behaviour.cached_tokens,
        )

    def _self_test(self) -> bytes:
        who = self.identity
        if who.chain_self_test is not None:
            return who.chain_self_test
        key = ChainKey(model=who.model, tokenizer_fingerprint=who.tokenizer_fingerprint)
        return self_test(key, page_size=who.page_size, stride=who.routing_stride)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def fake_token(seed: int, position: int, *, vocab_size: int) -> int:
    """The token at an absolute position: a fixed mix of seed and position."""
    return (seed * 2654435761 + position * 40503 + 7) % vocab_size


def fake_logprobs(token_id: int) -> common_pb2.TokenLogprobs:
    """Tells tokens from each other."""
    return common_pb2.TokenLogprobs(logprob=-token_id)


async def _abort(context: grpc.aio.ServicerContext[object, object], refusal: Refusal) -> None:
    """Ends the call as a worker would for that reason."""
    if refusal is Refusal.UNAVAILABLE:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the fake worker refuses")
    if refusal is Refusal.FAULT:
        await context.abort(grpc.StatusCode.INTERNAL, "the fake worker has a fault")
    code, reason, text = {
        Refusal.QUEUE_FULL: (grpc.StatusCode.RESOURCE_EXHAUSTED, "Overloaded", "the fake worker's queue is full"),
        Refusal.DRAINING: (grpc.StatusCode.UNAVAILABLE, "Unavailable", "the fake worker is draining"),
    }[refusal]
    await context.abort(code, text, trailing_metadata=_retry_details(code, reason, text))


def _retry_details(
    code: grpc.StatusCode, reason: str, message: str, *, after_s: float = 0.05
) -> tuple[tuple[str, bytes | str], ...]:
    details = []
    for detail in (
        ErrorInfo(reason=reason, domain="ostrya"),
        RetryInfo(retry_delay=Duration(nanos=int(after_s * 1e9))),
    ):
        packed = AnyMessage()
        packed.Pack(detail)
        details.append(packed)
    status = Status(code=code.value[0], message=message, details=details)
    return (
        ("grpc-status-details-bin", status.SerializeToString()),
        ("grpc-retry-pushback-ms", str(int(after_s * 1000))),
    )
