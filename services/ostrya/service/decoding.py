"""Requests that no servicer should see: bytes that are not the method's message, and giants.

The former are the caller's fault, so INVALID_ARGUMENT, a count, and one log line in a while; gRPC itself would answer
UNKNOWN and log a traceback for each. Giants are refused here because here they can be let go of at once: a servicer's
request lives as long as its call, and several of them at a time are gigabytes.
"""

import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from ostrya.errors import InvalidRequest
from ostrya.service import status

log = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0

# The runtime class is not generic; only its stub is.
if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[object, object]
else:
    Handler = grpc.RpcMethodHandler
Request = TypeVar("Request")
Response = TypeVar("Response")
_Unary: TypeAlias = Callable[[object, status.Context], Awaitable[object]]
_Stream: TypeAlias = Callable[[object, status.Context], AsyncGenerator[object, None]]


class Gate(Protocol):
    """What a service has against requests, whatever they ask for. Asked on the event loop, so it must be quick."""

    def check_raw(self, method: str, raw: bytes) -> None:
        """InvalidRequest for what should not even be decoded."""

    def check(self, request: object) -> None:
        """InvalidRequest for what should be let go of at once."""


class NoGate:
    """Lets everything through."""

    def check_raw(self, method: str, raw: bytes) -> None: ...

    def check(self, request: object) -> None: ...


NO_GATE: Gate = NoGate()


class _Refused:
    """Stands for such a request."""

    def __init__(self, num_bytes: int, error: InvalidRequest | None = None) -> None:
        self.num_bytes, self.error = num_bytes, error


class Decoding(grpc.aio.ServerInterceptor):
    """Between gRPC and every async servicer method. `count` hears of each call whose bytes do not decode."""

    def __init__(
        self, count: Callable[[], object], *, gate: Gate = NO_GATE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._gate, self._clock = count, gate, clock
        self._guarded: dict[str, Handler] = {}
        self._num_unlogged = 0
        self._logged_at = float("-inf")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Request, Response] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Request, Response] | None":
        method = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._guarded[method] = self._guard(method, cast("Handler", handler))
        return cast("grpc.RpcMethodHandler[Request, Response]", self._guarded[method])

    def _guard(self, method: str, handler: Handler) -> Handler:
        if handler.request_deserializer is None:
            return handler
        decode, encode = _tolerant(method, handler.request_deserializer, self._gate), handler.response_serializer
        if handler.unary_unary is not None and inspect.iscoroutinefunction(handler.unary_unary):
            unary = self._one(method, cast("_Unary", handler.unary_unary))
            return grpc.unary_unary_rpc_method_handler(unary, decode, encode)
        if handler.unary_stream is not None and inspect.iscoroutinefunction(handler.unary_stream):
            writing = self._one(method, cast("_Unary", handler.unary_stream))
            return grpc.unary_stream_rpc_method_handler(writing, decode, encode)
        if handler.unary_stream is not None and inspect.isasyncgenfunction(handler.unary_stream):
            stream = self._stream(method, cast("_Stream", handler.unary_stream))
            return grpc.unary_stream_rpc_method_handler(stream, decode, encode)
        if handler.stream_stream is not None and inspect.isasyncgenfunction(handler.stream_stream):
            talk = self._talk(method, cast("_Stream", handler.stream_stream))
            return grpc.stream_stream_rpc_method_handler(talk, decode, encode)
        return handler

    def _one(self, method: str, behaviour: _Unary) -> _Unary:
        async def guarded(request: object, context: status.Context) -> object:
            await self._check(method, request, context)
            return await behaviour(request, context)

        return guarded

    def _stream(self, method: str, behaviour: _Stream) -> _Stream:
        async def guarded(request: object, context: status.Context) -> AsyncGenerator[object, None]:
            await self._check(method, request, context)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        return guarded

    def _talk(self, method: str, behaviour: _Stream) -> _Stream:
        async def guarded(requests: object, context: status.Context) -> AsyncGenerator[object, None]:
            async def decoded() -> AsyncIterator[object]:
                async for request in cast("AsyncIterator[object]", requests):
                    await self._check(method, request, context)
                    yield request

            async with aclosing(behaviour(decoded(), context)) as responses:
                async for response in responses:
                    yield response

        return guarded

    async def _check(self, method: str, request: object, context: status.Context) -> None:
        if not isinstance(request, _Refused):
            return
        if request.error is not None:
            await status.abort(context, request.error)
        self._count()
        self._num_unlogged += 1
        if self._clock() - self._logged_at >= _LOG_EVERY_S:
            fields = {"method": method, "num_bytes": request.num_bytes, "num_since_last_line": self._num_unlogged}
            log.warning("requests could not be decoded", extra={"fields": fields})
            self._num_unlogged, self._logged_at = 0, self._clock()
        shown = f"{request.num_bytes} bytes that do not decode"
        await status.abort(context, InvalidRequest("request", shown, f"the request message of {method}"))


def _tolerant(method: str, decode: Callable[[bytes], object], gate: Gate) -> Callable[[bytes], object]:
    def decoded(raw: bytes) -> object:
        try:
            gate.check_raw(method, raw)
            message = decode(raw)
            gate.check(message)
        except DecodeError:
            return _Refused(len(raw))
        except InvalidRequest as error:
            # Its traceback would keep the giant.
            return _Refused(len(raw), error.with_traceback(None))
        return message

    return decoded
