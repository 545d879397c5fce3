"""The client for an event loop: the calls of sync.py, awaited. Cancelling a task that reads a stream
cancels its request."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ostrya.client.answer import Answer, Chunk, joined
from ostrya.client.attempts import CHANNEL_OPTIONS, Attempts, Peer
from ostrya.client.request import GenerateOptions, Message, chat_messages, generate_request, made
from ostrya.service.cancelling import is_cancelled

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)
T = TypeVar("T")


class _Unary(Protocol[Request, Response]):
    def __call__(self, request: Request, *, timeout: float | None = None) -> Awaitable[Response]: ...


class _Call(Protocol):
    def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]: ...
    def cancel(self) -> bool: ...


class AsyncClient:
    """A connection to one router, for one event loop. `timeout_s` is the whole time of a call, retries included."""

    def __init__(self, target: str = "127.0.0.1:50051") -> None:
        self.target = target
        self._peer = Peer(target)
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def generate(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        **options: Unpack[GenerateOptions],
    ) -> "AsyncStream":
        """Starts one answer from exactly one kind of prompt. Iterate the stream for it; errors come from there.

        `metadata` goes along with the call: W3C `traceparent` and `tracestate` make the answer a part of your trace.
        InvalidRequest comes at once where a value cannot even be sent.
        """
        request = generate_request(text, messages, token_ids, options)
        method = self._inference.Generate

        def open_call(remaining_s: float | None) -> _Call:
            return method(request, timeout=remaining_s, metadata=tuple(metadata))

        return AsyncStream(open_call, Attempts(timeout_s, peer=self._peer), self._peer)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        continue_final_message: bool = False,
        model: str = "",
        timeout_s: float = 10.0,
    ) -> list[int]:
        """The token ids that `generate` would make of the same prompt."""
        request = made(
            inference_pb2.TokenizeRequest,
            model=model,
            text=text,
            messages=chat_messages(messages),
            continue_final_message=continue_final_message,
        )
        return list((await self._unary(self._inference.Tokenize, request, timeout_s)).token_ids)

    async def models(self, *, timeout_s: float = 10.0) -> list[inference_pb2.Model]:
        """What is served."""
        response = await self._unary(self._inference.ListModels, inference_pb2.ListModelsRequest(), timeout_s)
        return list(response.models)

    async def replicas(self, *, timeout_s: float = 10.0) -> admin_pb2.ListReplicasResponse:
        """Every replica the router knows, its load, and how much the router knows."""
        return await self._unary(self._admin.ListReplicas, admin_pb2.ListReplicasRequest(), timeout_s)

    async def explain(self, decision_id: str, *, timeout_s: float = 10.0) -> admin_pb2.ExplainRouteResponse:
        """Why a request went where it went; NotFound after ten minutes."""
        request = made(admin_pb2.ExplainRouteRequest, decision_id=decision_id)
        return await self._unary(self._admin.ExplainRoute, request, timeout_s)

    async def status(self, *, timeout_s: float = 10.0) -> admin_pb2.GetStatusResponse:
        """What the router is, sees and is busy with."""
        return await self._unary(self._admin.GetStatus, admin_pb2.GetStatusRequest(), timeout_s)

    async def cordon(self, worker_id: str, *, timeout_s: float = 10.0) -> None:
        """The replica takes no new work, from any router, and keeps what it has; NotFound if it is not known."""
        request = made(admin_pb2.CordonReplicaRequest, worker_id=worker_id)
        await self._unary(self._admin.CordonReplica, request, timeout_s)

    async def uncordon(self, worker_id: str, *, timeout_s: float = 10.0) -> None:
        """The replica takes new work again, also after a drain."""
        request = made(admin_pb2.UncordonReplicaRequest, worker_id=worker_id)
        await self._unary(self._admin.UncordonReplica, request, timeout_s)

    async def drain(
        self, worker_id: str, *, drain_timeout_s: float | None = None, timeout_s: float | None = None
    ) -> int:
        """Cordons the replica and waits until it is empty; after `drain_timeout_s` (None: its own) the rest must go on
        elsewhere. Returns how many requests that were."""
        request = made(admin_pb2.DrainReplicaRequest, worker_id=worker_id, timeout_s=drain_timeout_s)
        return (await self._unary(self._admin.DrainReplica, request, timeout_s)).num_cancelled

    async def close(self) -> None:
        """Cancels what runs and disconnects."""
        self._peer.is_closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(self, method: _Unary[Request, Response], request: Request, timeout_s: float | None) -> Response:
        attempts = Attempts(timeout_s, peer=self._peer)
        while True:
            try:
                response = await method(request, timeout=attempts.remaining_s())
                self._peer.has_answered = True
                return response
            except grpc.RpcError as rpc:
                delay_s = attempts.delay_after(self._peer.failure(rpc))
            await asyncio.sleep(delay_s)


class AsyncStream(Answer, AsyncIterator[Chunk]):
    """One answer, chunk by chunk. Closing it before its end cancels the request, and so does cancelling whoever reads
    it, at whatever moment; the stream has then ended."""

    def __init__(self, open_call: Callable[[float | None], _Call], attempts: Attempts, peer: Peer) -> None:
        super().__init__()
        self._open_call, self._attempts, self._peer = open_call, attempts, peer
        self._closed = asyncio.Event()
        self._open()

    def __anext__(self) -> "_Read[Chunk]":
        return _Read(self._next(), cancelled=self.close)

    def read(self) -> "_Read[str]":
        """The text from here to the end; of choice 0, if there are several."""
        return _Read(self._first(), cancelled=self.close)

    def read_all(self) -> "_Read[list[str]]":
        """The text of each choice from here to the end."""
        return _Read(self._rest(), cancelled=self.close)

    def close(self) -> None:
        """Cancels the request unless it has ended. The stream then ends without an error."""
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _first(self) -> str:
        return (await self._rest())[0]

    async def _rest(self) -> list[str]:
        return joined([chunk async for chunk in self])

    async def _next(self) -> Chunk:
        try:
            return await self._chunk()
        except (asyncio.CancelledError, GeneratorExit):
            # gRPC does so itself, but not when the cancel meets it between sending and receiving.
            self.close()
            raise

    async def _chunk(self) -> Chunk:
        while not self._closed.is_set():
            try:
                response = await self._messages.__anext__()
                self._peer.has_answered = True
                return self.absorb(response)
            except asyncio.CancelledError:
                # gRPC cancels the reader of a call that somebody else closed; that is an end, not a cancel.
                if not self._closed.is_set() or is_cancelled():
                    raise
                break
            except grpc.RpcError as rpc:
                if self._closed.is_set():
                    break
                await self._wait_for_next_try(rpc)
            if not self._closed.is_set():
                self._open()
        raise StopAsyncIteration

    def _open(self) -> None:
        self._call = self._open_call(self._attempts.remaining_s())
        self._messages = self._call.__aiter__()
        # gRPC's own tasks hold on to a call that is being read, so a forgotten stream would run to its end.
        weakref.finalize(self, _abandon, asyncio.get_running_loop(), self._call).atexit = False

    async def _wait_for_next_try(self, rpc: grpc.RpcError) -> None:
        error = self._peer.failure(rpc)
        if self.started:
            raise error from rpc
        with suppress(TimeoutError):
            async with asyncio.timeout(self._attempts.delay_after(error)):
                await self._closed.wait()


class _Read(Coroutine[object, None, T]):
    """A read that also hears of a cancel before its first step: asyncio tells a coroutine nothing of that which code
    inside it could see."""

    def __init__(self, inner: Coroutine[object, None, T], *, cancelled: Callable[[], None]) -> None:
        self._inner, self._cancelled = inner, cancelled
        self._has_begun = False

    def __await__(self) -> Generator[object, None, T]:
        return self._inner.__await__()

    def send(self, value: None, /) -> object:
        self._has_begun = True
        return self._inner.send(value)

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
        /,
    ) -> object:
        if not self._has_begun:
            self._cancelled()
        if not isinstance(kind, BaseException):
            kind = value if isinstance(value, BaseException) else kind()
        return self._inner.throw(kind)

    def close(self) -> None:
        self._inner.close()


def _abandon(loop: asyncio.AbstractEventLoop, call: _Call) -> None:
    """Cancels from wherever the garbage collector happens to run."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call.cancel)
