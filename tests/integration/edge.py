"""The servers as a caller meets them: channels that send any bytes to any method, and a worker without an engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import error_details_pb2, status_pb2
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from ostrya.api.v1 import admin_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from ostrya.engine.process import EngineProcess
from ostrya.service import status
from ostrya.service.server import GrpcServer, channel
from ostrya.worker.metrics import WorkerMetrics
from ostrya.worker.servicer import WorkerServicer
from ostrya.worker.settings import WorkerSettings
from tests.fakes import engine_info

SERVICES = [
    file.DESCRIPTOR.services_by_name[name]
    for file, name in (
        (inference_pb2, "InferenceService"),
        (admin_pb2, "AdminService"),
        (worker_pb2, "WorkerService"),
    )
]
CONTEXT = 2_048
"""Of the worker."""


class Engine:
    """Knows what it could do; nothing here gets as far as asking it to."""

    info = replace(
        engine_info.INFO, context_tokens=CONTEXT, page_size=16, routing_stride=1, eos_token_ids=(0,), max_running=1
    )


@asynccontextmanager
async def worker() -> AsyncIterator[tuple[grpc.aio.Channel, CollectorRegistry]]:
    """A worker's servicer and server, as its app makes them."""
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, model="fake")
    name = SERVICES[2].full_name
    server = GrpcServer("127.0.0.1", 0, max_message_bytes=1 << 20, services=[name], undecodable=metrics.undecodable.inc)
    servicer = WorkerServicer(
        cast("EngineProcess", Engine()),
        metrics,
        settings=WorkerSettings(worker_id="w0"),
        tokenizer_fingerprint="t",
        chain_self_test=b"",
        set_serving=server.set_serving,
        epoch=lambda: 0,
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20) as way:
        yield way, registry
    await server.stop(0)


async def failure_of(way: grpc.aio.Channel, method: MethodDescriptor, request: bytes) -> grpc.aio.AioRpcError:
    """How a call with these bytes fails."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        if method.client_streaming:
            async for _ in way.stream_stream(path, bytes, bytes)(iter([request]), timeout=30):
                pass
        elif method.server_streaming:
            async for _ in way.unary_stream(path, bytes, bytes)(request, timeout=30):
                pass
        else:
            await way.unary_unary(path, bytes, bytes)(request, timeout=30)
    return refused.value


def violation(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Field and description of the rich error."""
    raw = dict(error.trailing_metadata()).get(status.DETAILS, b"")
    assert isinstance(raw, bytes)
    bad = error_details_pb2.BadRequest()
    for detail in status_pb2.Status.FromString(raw).details:
        if detail.Unpack(bad):
            return bad.field_violations[0].field, bad.field_violations[0].description
    return "", error.details() or ""
