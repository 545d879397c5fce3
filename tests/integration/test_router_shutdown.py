"""The end of a router: what runs ends well, what comes goes to another, and it does end."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ostrya.api.v1 import admin_pb2, inference_pb2_grpc
from ostrya.client import AsyncClient
from ostrya.errors import Unavailable
from ostrya.router.app import Router
from ostrya.router.settings import RouterSettings
from ostrya.service.server import LIVENESS, channel
from tests.fakes.redis_server import free_port
from tests.fakes.waiting import until
from tests.fakes.worker import Behaviour, FakeWorker, Identity
from tests.integration.bed import (
    NO_REDIS,
    TOKENIZER,
    Params,
    Request,
    bed,
    details_of,
    metric,
    router_of,
    saying,
    text_of,
)

PATIENT = RouterSettings(no_replica_wait_s=20.0)
ANSWER = "every word of it"


@dataclass
class Crowd:
    """Clients that ask again and again."""

    target: str
    answers: int = 0
    wrong: list[str] = field(default_factory=list)

    async def ask(self, stop: asyncio.Event) -> None:
        async with AsyncClient(self.target) as client:
            while not stop.is_set():
                try:
                    text = await client.generate("What?", timeout_s=20.0).read()
                except Exception as error:
                    text = repr(error)
                self.answers += 1
                if text != ANSWER:
                    self.wrong.append(text)

    @asynccontextmanager
    async def asking(self, number: int) -> AsyncIterator[None]:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(number):
                tasks.create_task(self.ask(stop))
            try:
                yield
            finally:
                stop.set()

    async def more(self, answers: int) -> None:
        """Waits for so many further answers."""
        aim = self.answers + answers
        await until(lambda: self.answers >= aim, timeout_s=30)


@asynccontextmanager
async def workers(*behaviours: Behaviour, model: str = "tiny") -> AsyncIterator[list[FakeWorker]]:
    async with AsyncExitStack() as stack:
        identities = (
            Identity(worker_id=f"w{n}", model=model, tokenizer_fingerprint=TOKENIZER.fingerprint)
            for n in range(len(behaviours))
        )
        yield [
            await stack.enter_async_context(FakeWorker(identity, behaviour=behaviour))
            for identity, behaviour in zip(identities, behaviours, strict=True)
        ]


async def test_a_client_of_two_routers_does_not_notice_that_one_ends() -> None:
    async with workers(saying(ANSWER), saying(ANSWER)) as replicas, AsyncExitStack() as stack:
        addresses = tuple(one.address for one in replicas)
        ports = [free_port(), free_port()]
        crowd = Crowd(f"ipv4:127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}")

        @asynccontextmanager
        async def running(port: int) -> AsyncIterator[Router]:
            router = router_of(addresses, replace(PATIENT, port=port))
            async with router.serving():
                yield router

        await stack.enter_async_context(running(ports[0]))
        await stack.enter_async_context(crowd.asking(12))
        for _ in range(3):
            async with running(ports[1]) as second:
                await busy(second)
                await crowd.more(100)
        await crowd.more(20)
    assert crowd.wrong == []


async def test_clients_of_one_router_wait_while_it_starts_again() -> None:
    async with workers(saying(ANSWER)) as replicas:
        crowd = Crowd(f"127.0.0.1:{(port := free_port())}")

        @asynccontextmanager
        async def running() -> AsyncIterator[None]:
            async with router_of((replicas[0].address,), replace(PATIENT, port=port)).serving():
                yield

        async with AsyncExitStack() as stack:
            async with running():
                await stack.enter_async_context(crowd.asking(12))
                await crowd.more(50)
            for _ in range(3):
                async with running():
                    await crowd.more(50)
            async with running():
                await crowd.more(20)
                await stack.aclose()
    assert crowd.wrong == []


async def test_connections_that_grow_old_disturb_nobody() -> None:
    async with AsyncExitStack() as stack:
        (worker,) = await stack.enter_async_context(workers(saying(ANSWER)))
        router = router_of((worker.address,), replace(PATIENT, port=0, max_connection_age_s=0.1))
        await stack.enter_async_context(router.serving())
        crowd = Crowd(f"127.0.0.1:{router.port}")
        async with crowd.asking(8):
            await crowd.more(300)
    assert crowd.wrong == []


async def test_a_drain_finishes_what_runs_and_what_waits() -> None:
    async with bed(saying(ANSWER), settings=replace(PATIENT, drain_timeout_s=20.0)) as stand:
        (worker,) = stand.workers
        worker.next_token.close()
        running = asyncio.create_task(stand.ask(Request(text="a")))
        await worker.until(lambda one: one.active == 1)
        await worker.set_serving(False)
        await stand.until(ready=0)
        waiting = asyncio.create_task(stand.ask(Request(text="b")))
        await until(lambda: stand.num_waiting == 1)
        draining = asyncio.create_task(stand.router._drain())
        await until(lambda: stand.router.status().is_draining)
        await worker.set_serving(True)
        worker.next_token.open()
        assert (text_of(await running), text_of(await waiting)) == (ANSWER, ANSWER)
        async with asyncio.timeout(30):
            await draining


async def test_while_it_drains_a_router_is_alive_and_not_ready() -> None:
    async with (
        bed(Behaviour(), settings=replace(PATIENT, farewell_s=5.0)) as stand,
        channel(f"127.0.0.1:{stand.router.port}", max_message_bytes=1 << 20) as way,
    ):
        stub = health_pb2_grpc.HealthStub(way)

        async def states() -> dict[str, bool]:
            names = ("", "ostrya.api.v1.InferenceService", LIVENESS)
            asked = [health_pb2.HealthCheckRequest(service=name) for name in names]
            answers = [await stub.Check(one, timeout=5) for one in asked]  # type: ignore[attr-defined]
            serving = health_pb2.HealthCheckResponse.SERVING
            return {name: one.status == serving for name, one in zip(names, answers, strict=True)}

        assert set((await states()).values()) == {True}
        draining = asyncio.create_task(stand.router._drain())
        await until(lambda: stand.router.status().is_draining)
        assert await states() == {"": False, "ostrya.api.v1.InferenceService": False, LIVENESS: True}
        assert (await stand.admin.GetStatus(admin_pb2.GetStatusRequest())).is_draining
        stand.router.hurry.set()
        async with asyncio.timeout(2):
            await draining


@pytest.mark.parametrize("how", ["timeout", "hurry"])
async def test_a_stream_that_does_not_end_is_cut_off_in_the_end(how: str) -> None:
    drain_timeout_s = 0.1 if how == "timeout" else 60.0
    async with bed(saying(ANSWER), settings=replace(PATIENT, drain_timeout_s=drain_timeout_s)) as stand:
        (worker,) = stand.workers
        worker.next_token.close()
        async with AsyncClient(f"127.0.0.1:{stand.router.port}") as client:
            stream = client.generate("a")
            await anext(stream)
            draining = asyncio.create_task(stand.router._drain())
            if how == "hurry":
                stand.router.hurry.set()
            async with asyncio.timeout(30):
                with pytest.raises(Unavailable):
                    await stream.read()
                await draining
        await worker.until(lambda one: one.active == 0)


@pytest.mark.parametrize("is_waiting", [False, True], ids=["answered", "waiting"])
async def test_what_the_end_of_a_drain_ends_is_unavailable_with_an_invitation(is_waiting: bool) -> None:
    async with bed(saying(ANSWER), settings=replace(PATIENT, drain_timeout_s=0.1)) as stand:
        (worker,) = stand.workers
        worker.next_token.close()
        if is_waiting:
            await worker.set_serving(False)
            await stand.until(ready=0)
        asking = asyncio.create_task(stand.ask(Request(text="a")))
        await (until(lambda: stand.num_waiting) if is_waiting else worker.until(lambda one: one.active == 1))
        async with asyncio.timeout(30):
            await stand.router._drain()
            with pytest.raises(grpc.aio.AioRpcError, match="router has shut down") as cut:
                await asking
        assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(cut.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
        await stand.idle()
        assert await metric(stand, 'requests_total{code="UNAVAILABLE"}') == 1
        assert await metric(stand, 'requests_total{code="CANCELLED"}') == 0


async def test_a_client_that_does_not_read_does_not_hold_up_the_end_of_a_drain() -> None:
    async with AsyncExitStack() as stack:
        stand = await stack.enter_async_context(
            bed(Behaviour(num_tokens=2_000), settings=replace(PATIENT, drain_timeout_s=0.1))
        )
        # A connection that takes little unread.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1_024)]
        target = f"127.0.0.1:{stand.router.port}"
        way = await stack.enter_async_context(grpc.aio.insecure_channel(target, options=options))
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(way)
        call = stub.Generate(Request(text="a", sampling=Params(max_tokens=2_000)), timeout=60)
        await call.read()
        await stand.workers[0].until(lambda one: one.active == 0)
        async with asyncio.timeout(30):
            await stand.router._drain()
        await stand.idle()
        assert await metric(stand, 'requests_total{code="UNAVAILABLE"}') == 1


async def test_a_second_signal_ends_the_process_whatever_runs() -> None:
    # Tokens with text: of those drawn from the whole vocabulary, one in 150 has none until another comes.
    async with workers(Behaviour(script=(1000, 1001, 1002, 1003, 1004)), model="smollm2-135m-instruct") as replicas:
        (worker,) = replicas
        worker.next_token.close()
        port = free_port()
        options = ("--port", str(port), "--redis-url", NO_REDIS, "--static-workers", worker.address)
        command = (sys.executable, "-m", "ostrya.cli.main", "router", *options, "--drain-timeout-s", "60")
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
        try:
            async with AsyncClient(f"127.0.0.1:{port}") as client:
                await until_true(lambda: answers(client))
                stream = client.generate(token_ids=[1, 2], max_tokens=5)
                await anext(stream)
                process.send_signal(signal.SIGTERM)
                await until_true(lambda: is_draining(port))
                process.send_signal(signal.SIGTERM)
                with pytest.raises(Unavailable):
                    await stream.read()
                async with asyncio.timeout(30):
                    assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def busy(router: Router) -> None:
    """Waits for a request inside it."""
    await until(lambda: router.admission.in_flight)


async def answers(client: AsyncClient) -> bool:
    try:
        return any(model.num_replicas_ready for model in await client.models(timeout_s=1.0))
    except Unavailable:
        return False


async def is_draining(port: int) -> bool:
    """Health says so, until its port is closed."""
    async with channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20) as way:
        stub = health_pb2_grpc.HealthStub(way)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)  # type: ignore[attr-defined]
        except grpc.aio.AioRpcError:
            return True
        return bool(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    """Asks until it holds."""
    async with asyncio.timeout(20):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)
