"""Our errors as gRPC statuses, and back: the one place where codes are chosen.

Servicers raise OstryaErrors from methods wrapped in `translated`; clients turn an RpcError into the same exceptions
with `error_of`. Details follow google.rpc: ErrorInfo always (reason = the class), BadRequest for a field, RetryInfo
when waiting helps.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from ostrya import errors

log = logging.getLogger(__name__)

# The runtime class is not generic; only its stub is.
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[object, object]
else:
    Context = grpc.aio.ServicerContext

DOMAIN = "ostrya"
DETAILS = "grpc-status-details-bin"
PUSHBACK = "grpc-retry-pushback-ms"

# First match wins, so a subclass stands before its base.
_CODES: tuple[tuple[type[errors.OstryaError], grpc.StatusCode], ...] = (
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownModel, grpc.StatusCode.NOT_FOUND),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.StateUnavailable, grpc.StatusCode.UNAVAILABLE),
)

M = TypeVar("M", bound=Callable[..., object])
E = TypeVar("E", bound=errors.OstryaError)


def code_of(error: errors.OstryaError) -> grpc.StatusCode:
    """The status code that stands for `error`; INTERNAL for what a client should never see."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def to_status(error: errors.OstryaError) -> status_pb2.Status:
    """`error` as a google.rpc.Status with details."""
    details: list[message.Message] = [error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN)]
    if isinstance(error, errors.InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code_pb2.Code.Value(code_of(error).name), message=str(error))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(context: Context, error: errors.OstryaError) -> NoReturn:
    """Ends the call with `error`. abort_with_status would drop the pushback trailer, so the two are combined here."""
    trailers: list[tuple[str, str | bytes]] = [(DETAILS, to_status(error).SerializeToString())]
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        trailers.append((PUSHBACK, str(round(retry_after_s * 1000))))
    await _end(context, code_of(error), str(error), tuple(trailers))


def translated(method: M) -> M:
    """Wraps an async servicer method, unary or streaming, so that an OstryaError becomes its status.

    Anything else is a bug: it is logged with its traceback and answered with INTERNAL, without its text.
    """
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: object, request: object, context: Context) -> AsyncIterator[object]:
            try:
                async for response in method(self, request, context):
                    yield response
            except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
                raise
            except Exception as error:
                await _refuse(context, error)

        return cast("M", stream)

    @functools.wraps(method)
    async def unary(self: object, request: object, context: Context) -> object:
        try:
            return await cast("Callable[..., Awaitable[object]]", method)(self, request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _refuse(context, error)

    return cast("M", unary)


async def _refuse(context: Context, error: Exception) -> NoReturn:
    if isinstance(error, errors.OstryaError) and code_of(error) is not grpc.StatusCode.INTERNAL:
        await abort(context, error)
    log.error("request failed in our code", exc_info=error)
    await _end(context, grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")


async def _end(
    context: Context, code: grpc.StatusCode, text: str, trailers: tuple[tuple[str, str | bytes], ...] = ()
) -> NoReturn:
    try:
        await context.abort(code, text, trailers)
    except grpc.aio.InternalError as error:
        # The call has ended meanwhile, most often by its deadline; nobody is there to be told. A cancelled handler is
        # what gRPC expects then: anything else it logs with a traceback.
        raise asyncio.CancelledError("the call has ended") from error
    raise AssertionError("context.abort returned")


def error_of(rpc: grpc.RpcError) -> errors.OstryaError:
    """The exception a failed call stands for, with retry_after_s where the server gave one."""
    call = cast("grpc.Call", rpc)
    code, text = call.code(), call.details() or ""
    reason, field, retry_after_s = _details(call)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _with_message(errors.InvalidRequest(field, "", ""), text)
    if code is grpc.StatusCode.NOT_FOUND:
        kind = errors.UnknownModel("", ()) if reason == "UnknownModel" else errors.NotFound()
        return _with_message(kind, text)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return with_retry(errors.Overloaded(text), retry_after_s)
    if code is grpc.StatusCode.UNAVAILABLE:
        exact = {"NoReplica": errors.NoReplica, "EngineDied": errors.EngineDied}.get(reason, errors.Unavailable)
        return with_retry(exact(text), retry_after_s)
    return errors.OstryaError(f"{code.name}: {text}")


def is_ours(rpc: grpc.RpcError) -> bool:
    """Whether a servicer of ours ended the call so; otherwise gRPC did, or somebody on the way."""
    reason, _, _ = _details(cast("grpc.Call", rpc))
    return bool(reason)


def innermost(error: errors.OstryaError) -> str:
    """gRPC nests a cause behind its own layers: "failed to connect ...; last error: ...: Connection refused"."""
    return str(error).rpartition(": ")[2].rstrip(")")


def retry_after_s(error: errors.OstryaError) -> float | None:
    """How long the server asked to wait; None: it did not invite a retry."""
    return cast("float | None", getattr(error, "retry_after_s", None))


def _details(call: grpc.Call) -> tuple[str, str, float | None]:
    """Reason, field and retry delay; nothing where somebody on the way has put what does not decode."""
    try:
        return _decoded_details(call)
    except message.DecodeError:
        return "", "", None


def _decoded_details(call: grpc.Call) -> tuple[str, str, float | None]:
    reason, field, delay = "", "", None
    # An aio error has no trailers of the kind from_call wants when the connection itself failed.
    status = _rich_status(call)
    for packed in status.details if status else ():
        if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            packed.Unpack(info)
            reason = info.reason if info.domain == DOMAIN else ""
        elif packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            packed.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else ""
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            packed.Unpack(retry)
            delay = retry.retry_delay.ToMilliseconds() / 1000
    return reason, field, delay


def _rich_status(call: grpc.Call) -> status_pb2.Status | None:
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return None


def _with_message(error: E, text: str) -> E:
    error.args = (text,)
    return error


def with_retry(error: E, delay: float | None) -> E:
    """`error` with that wait; None replaces the default, because no invitation is not an invitation."""
    error.retry_after_s = delay  # type: ignore[attr-defined]
    return error
