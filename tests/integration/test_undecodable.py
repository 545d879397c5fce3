"""What generic tools and broken clients send: bytes that are no message, questions to reflection, Health/List."""

import logging
from typing import cast

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from ostrya.service.server import channel
from tests.fakes.logs import ours
from tests.integration.bed import bed, metric, saying
from tests.integration.edge import SERVICES, failure_of, violation, worker

GARBAGE = b"\xff"
"""The beginning of a tag: no message, not even an empty one, can be that."""
HEALTH = cast("ServiceDescriptor", health_pb2.DESCRIPTOR.services_by_name["Health"])
REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


def methods_of(*services: ServiceDescriptor) -> list[MethodDescriptor]:
    """Also those that every server has."""
    found = [descriptor_pool.Default().FindServiceByName(name) for name in REFLECTIONS]
    return [method for service in (*services, HEALTH, *found) for method in service.methods]


async def expect_refusals(way: grpc.aio.Channel, methods: list[MethodDescriptor]) -> None:
    for method in methods:
        error = await failure_of(way, method, GARBAGE)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, method.full_name
        field, description = violation(error)
        assert field == "request", method.full_name
        assert "1 bytes that do not decode" in description
        assert method.name in description


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return ours(caplog, level=logging.WARNING)


async def test_bytes_that_do_not_decode_are_invalid_and_counted_and_one_line_of_a_routers_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        bed(saying("x")) as stand,
        channel(f"127.0.0.1:{stand.router.port}", max_message_bytes=1 << 20) as way,
    ):
        caplog.clear()
        methods = methods_of(*SERVICES[:2])
        await expect_refusals(way, methods)
        assert await metric(stand, "undecodable_requests_total") == len(methods)
        (line,) = lines(caplog)
        assert line.exc_info is None
        assert line.__dict__["fields"]["num_since_last_line"] == 1


async def test_bytes_that_do_not_decode_are_invalid_and_counted_and_one_line_of_a_workers_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with worker() as (way, registry):
        methods = methods_of(SERVICES[2])
        await expect_refusals(way, methods)
        name = "ostrya_worker_undecodable_requests_total"
        assert registry.get_sample_value(name, {"model": "fake"}) == len(methods)
        (line,) = lines(caplog)
        assert line.exc_info is None


@pytest.mark.parametrize("service", REFLECTIONS)
async def test_reflection_answers_under_both_names_and_describes_itself(service: str) -> None:
    question, answer = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
    async with worker() as (way, _):
        method = way.stream_stream(
            f"/{service}/ServerReflectionInfo",
            request_serializer=question.SerializeToString,
            response_deserializer=answer.FromString,
        )
        call = method(iter([question(list_services=""), question(file_containing_symbol=service)]), timeout=30)
        listed, described = [one async for one in call]
        names = {one.name for one in listed.list_services_response.service}
        assert {*REFLECTIONS, HEALTH.full_name, SERVICES[2].full_name} == names
        files = described.file_descriptor_response.file_descriptor_proto
        package = service.rpartition(".")[0]
        assert any(package.encode() in file for file in files)


async def test_health_lists_every_service_with_its_status() -> None:
    async with bed(saying("x")) as stand, channel(f"127.0.0.1:{stand.router.port}", max_message_bytes=1 << 20) as way:
        answer = await health_pb2_grpc.HealthStub(way).List(health_pb2.HealthListRequest(), timeout=30)  # type: ignore[attr-defined]
        states = {name: one.status for name, one in answer.statuses.items()}
        serving = health_pb2.HealthCheckResponse.SERVING
        assert states == dict.fromkeys(("", *(one.full_name for one in SERVICES[:2]), "liveness"), serving)


@pytest.mark.parametrize("name", ["Check", "Watch"])
async def test_health_knows_no_service_of_an_endless_name(name: str) -> None:
    async with worker() as (way, _):
        request = health_pb2.HealthCheckRequest(service="x" * 257).SerializeToString()
        error = await failure_of(way, HEALTH.methods_by_name[name], request)
        assert (error.code(), violation(error)[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "service")
