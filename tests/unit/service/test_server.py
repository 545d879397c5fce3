"""Health, reflection, limits and keepalive over a real socket."""

import asyncio
import json
import logging
import urllib.request
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from ostrya.api.v1 import inference_pb2, inference_pb2_grpc
from ostrya.service.logs import JsonFormatter
from ostrya.service.metrics import MetricsEndpoint
from ostrya.service.server import LIVENESS, GrpcServer, _Health, channel
from tests.fakes.waiting import until

NAME = "ostrya.api.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Unused(inference_pb2_grpc.InferenceServiceServicer):
    """Generated base classes are abstract only for the type checker."""


def server_of(max_message_bytes: int = 1 << 20) -> GrpcServer:
    server = GrpcServer("127.0.0.1", 0, max_message_bytes=max_message_bytes, services=[NAME])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Unused(), server.server)  # type: ignore[abstract]
    return server


async def test_health_is_not_serving_until_told_and_watchers_hear_it() -> None:
    server = server_of()
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20) as open_channel:
        stub = health_pb2_grpc.HealthStub(open_channel)
        for name in ("", NAME):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)  # type: ignore[attr-defined]
            assert answer.status == NOT_SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=5)  # type: ignore[attr-defined]
        assert (await watch.read()).status == NOT_SERVING
        await server.set_serving(True)
        assert (await watch.read()).status == SERVING
        watch.cancel()
    await server.stop(0)


async def test_liveness_is_apart_from_readiness() -> None:
    server = server_of()
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20) as open_channel:
        stub = health_pb2_grpc.HealthStub(open_channel)

        async def states() -> list[int]:
            return [
                (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status  # type: ignore[attr-defined]
                for name in (NAME, LIVENESS)
            ]

        assert await states() == [NOT_SERVING, NOT_SERVING]
        await server.set_alive(True)
        assert await states() == [NOT_SERVING, SERVING]
        await server.set_serving(True)
        await server.set_serving(False)
        assert await states() == [NOT_SERVING, SERVING]
    await server.stop(0)


async def test_who_watches_health_does_not_hold_up_the_end() -> None:
    server = server_of()
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20) as open_channel:
        stub = health_pb2_grpc.HealthStub(open_channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=60)  # type: ignore[attr-defined]
        assert (await watch.read()).status == NOT_SERVING
        async with asyncio.timeout(10):
            await server.stop(30)
            assert await watch.read() is grpc.aio.EOF


class Heard:
    """The call of a watcher, as far as a handler needs one."""

    def __init__(self) -> None:
        self.states: list[int] = []

    async def write(self, answer: health_pb2.HealthCheckResponse) -> None:
        self.states.append(answer.status)


async def test_a_watch_whose_turn_comes_after_the_end_ends_at_once() -> None:
    """Nobody else would end it: a loop that closes next destroys it, and says so on somebody's stderr."""
    health, heard = _Health(), Heard()
    context = cast("grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]", heard)
    running = asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(), context))
    await until(lambda: heard.states)
    await health.end_watches()
    async with asyncio.timeout(10):
        await running
        await health.Watch(health_pb2.HealthCheckRequest(), context)
    assert len(heard.states) == 1


async def test_a_connection_of_age_gives_way_to_a_new_one_and_keeps_its_stream() -> None:
    server = GrpcServer("127.0.0.1", 0, max_message_bytes=1024, services=[NAME], max_connection_age_s=0.2)
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20) as open_channel:
        stub = health_pb2_grpc.HealthStub(open_channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=10)  # type: ignore[attr-defined]
        assert (await watch.read()).status == NOT_SERVING
        # GOAWAY takes the channel out of READY; the stream on the old connection goes on.
        async with asyncio.timeout(10):
            await open_channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await server.set_serving(True)
        assert (await watch.read()).status == SERVING
        watch.cancel()
    await server.stop(0)


async def test_reflection_lists_our_service() -> None:
    server = server_of()
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20) as open_channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(open_channel)  # type: ignore[arg-type]
        call = stub.ServerReflectionInfo(  # type: ignore[operator]
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
        )
        names = {service.name async for answer in call for service in answer.list_services_response.service}
    await server.stop(0)
    assert {NAME, "grpc.health.v1.Health"} <= names


async def test_a_message_over_the_limit_is_resource_exhausted_with_limit_and_value() -> None:
    server = server_of(max_message_bytes=4096)
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20) as open_channel:
        stub = inference_pb2_grpc.InferenceServiceStub(open_channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * 8192), timeout=5)
    await server.stop(0)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "4096" in (caught.value.details() or "")


async def test_a_taken_port_is_an_oserror_that_names_it() -> None:
    first = server_of()
    port = await first.start()
    second = GrpcServer("127.0.0.1", port, max_message_bytes=1024, services=[NAME])
    with pytest.raises(OSError, match=str(port)):
        await second.start()
    await first.stop(0)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
    return text


async def test_metrics_endpoint_serves_the_registry_and_stops() -> None:
    registry = CollectorRegistry()
    Counter("ostrya_test_events_total", "Events of a test.", registry=registry).inc()
    endpoint = MetricsEndpoint(registry, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{endpoint.start()}/metrics"
    text = await asyncio.to_thread(fetch, url)
    endpoint.close()
    assert "ostrya_test_events_total 1.0" in text
    assert "_created" not in text
    assert "process_resident_memory_bytes" in text
    assert "ostrya_process_tasks 1.0" in text
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(fetch, url)


def test_a_log_line_is_one_json_object_with_its_fields() -> None:
    record = logging.LogRecord("ostrya.x", logging.INFO, "f", 1, "request done", (), None)
    record.fields = {"tokens": 3}
    line = json.loads(JsonFormatter("router").format(record))
    assert (line["service"], line["level"], line["message"], line["tokens"]) == ("router", "info", "request done", 3)


async def test_a_server_that_hangs_up_on_watchers_goes_on_and_takes_new_ones() -> None:
    server = server_of()
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20) as open_channel:
        stub = health_pb2_grpc.HealthStub(open_channel)
        for _ in range(2):
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=30)  # type: ignore[attr-defined]
            assert (await watch.read()).status == NOT_SERVING
            server.hang_up()
            assert await watch.read() is grpc.aio.EOF
            assert await watch.code() is grpc.StatusCode.OK
    await server.stop(0)


class Slow:
    """A call whose client takes its time."""

    def __init__(self) -> None:
        self.sends, self.may_go = asyncio.Event(), asyncio.Event()
        self.sent: list[int] = []

    async def write(self, message: health_pb2.HealthCheckResponse) -> None:
        self.sends.set()
        await self.may_go.wait()
        self.sent.append(message.status)


async def test_hanging_up_does_not_cut_what_is_being_sent() -> None:
    """A call that is cancelled there stays open for ever, and its watcher waits with it."""
    health, call = _Health(), Slow()
    await health.set(NAME, NOT_SERVING)
    request = health_pb2.HealthCheckRequest(service=NAME)
    watching = asyncio.create_task(health.Watch(request, cast("grpc.aio.ServicerContext[Any, Any]", call)))
    await call.sends.wait()
    health.hang_up()
    ending = asyncio.create_task(health.end_watches())
    await asyncio.sleep(0.01)
    assert not watching.done()
    assert not ending.done()
    call.may_go.set()
    await asyncio.gather(watching, ending)
    assert call.sent == [NOT_SERVING]
