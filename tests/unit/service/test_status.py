"""Errors cross a real socket and come back as the same exceptions."""

import asyncio
from collections.abc import AsyncIterator
from typing import NoReturn, cast

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2

from ostrya import errors
from ostrya.api.v1 import inference_pb2, inference_pb2_grpc
from ostrya.service import status
from ostrya.service.server import GrpcServer, channel

CASES: tuple[tuple[errors.OstryaError, grpc.StatusCode], ...] = (
    (errors.InvalidRequest("top_p", 2.0, "(0, 1]"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownModel("gpt", ["b", "a"]), grpc.StatusCode.NOT_FOUND),
    (errors.NotFound("decision x is unknown"), grpc.StatusCode.NOT_FOUND),
    (errors.Overloaded("queue is full", retry_after_s=0.7), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.NoReplica("no replica", retry_after_s=2), grpc.StatusCode.UNAVAILABLE),
    (errors.EngineDied("engine died"), grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded("too late"), grpc.StatusCode.DEADLINE_EXCEEDED),
)


class Failing(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, error: Exception) -> None:
        self.error = error

    @status.translated
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: status.Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(text="a")
        raise self.error

    @status.translated
    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: status.Context
    ) -> inference_pb2.ListModelsResponse:
        raise self.error

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: object) -> inference_pb2.TokenizeResponse:
        raise AssertionError


async def failure(error: Exception, *, streaming: bool) -> grpc.aio.AioRpcError:
    """What a client sees of `error`."""
    server = GrpcServer("127.0.0.1", 0, max_message_bytes=1 << 20, services=["ostrya.api.v1.InferenceService"])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Failing(error), server.server)
    port = await server.start()
    try:
        async with channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20) as open_channel:
            stub = inference_pb2_grpc.InferenceServiceStub(open_channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                if streaming:
                    async for _ in stub.Generate(inference_pb2.GenerateRequest(), timeout=5):
                        pass
                else:
                    await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)
            return caught.value
    finally:
        await server.stop(0)


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize(("error", "code"), CASES, ids=lambda value: getattr(value, "name", type(value).__name__))
async def test_an_error_comes_back_as_itself(error: errors.OstryaError, code: grpc.StatusCode, streaming: bool) -> None:
    seen = await failure(error, streaming=streaming)
    assert seen.code() is code
    assert seen.details() == str(error)
    returned = status.error_of(seen)
    assert type(returned) is type(error)
    assert str(returned) == str(error)
    assert status.retry_after_s(returned) == status.retry_after_s(error)


async def test_pushback_trailer_goes_with_retry_info() -> None:
    seen = await failure(errors.Overloaded("full", retry_after_s=0.7), streaming=False)
    assert dict(seen.trailing_metadata())[status.PUSHBACK] == "700"


async def test_a_bug_is_internal_and_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen = await failure(KeyError("secret prompt"), streaming=False)
    assert seen.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (seen.details() or "")
    assert "request failed in our code" in caplog.text


class EndedContext:
    """Of a call that has ended while its handler ran."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> NoReturn:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch: 8")


@pytest.mark.parametrize("error", [errors.DeadlineExceeded("too late"), KeyError("a bug")], ids=["ours", "bug"])
async def test_a_refusal_that_comes_after_the_end_of_the_call_ends_the_handler_quietly(error: Exception) -> None:
    context = cast("status.Context", EndedContext())
    with pytest.raises(asyncio.CancelledError):
        async for _ in Failing(error).Generate(inference_pb2.GenerateRequest(), context):
            pass
    with pytest.raises(asyncio.CancelledError):
        await Failing(error).ListModels(inference_pb2.ListModelsRequest(), context)


async def test_a_refused_connection_is_unavailable_and_invites_no_retry() -> None:
    async with channel("127.0.0.1:1", max_message_bytes=1 << 20) as closed:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(closed).ListModels(
                inference_pb2.ListModelsRequest(), timeout=5
            )
    error = status.error_of(caught.value)
    assert type(error) is errors.Unavailable
    assert status.retry_after_s(error) is None


@pytest.mark.parametrize("is_inner", [False, True], ids=["status", "detail"])
def test_details_that_do_not_decode_are_none(is_inner: bool) -> None:
    packed = status_pb2.Status(details=[any_pb2.Any(type_url="x/google.rpc.ErrorInfo", value=b"\xff")])
    trailers = grpc.aio.Metadata((status.DETAILS, packed.SerializeToString() if is_inner else b"\xff"))
    seen = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, details="down")
    error = status.error_of(seen)
    assert (type(error), str(error)) == (errors.Unavailable, "down")
    assert not status.is_ours(seen)
