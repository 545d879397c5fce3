"""When replicas are full, draining or gone: requests wait in order, and what has begun is never cut short."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2

from ostrya.api.v1 import worker_pb2
from ostrya.api.v1.worker_pb2_grpc import WorkerServiceStub
from ostrya.router.proxy import _NEVER_SENT
from ostrya.router.settings import RouterSettings
from ostrya.router.waiting import CROWD, MIN_PAUSE_S
from ostrya.service.server import channel
from tests.fakes.redis_server import free_port
from tests.fakes.waiting import until
from tests.fakes.worker import Behaviour, FakeWorker, Identity, Refusal
from tests.integration.bed import (
    Bed,
    Params,
    Request,
    Response,
    bed,
    details_of,
    metric,
    saying,
    text_of,
    tokens_of,
)

PATIENT = RouterSettings(no_replica_wait_s=20.0)
PLACES = CROWD * Identity().max_running


async def expected_of(behaviour: Behaviour, request: Request) -> list[int]:
    """What an undisturbed router answers."""
    async with bed(behaviour) as undisturbed:
        return tokens_of(await undisturbed.ask(request))


async def start(
    stand: Bed, requests: Sequence[Request], *, timeout_s: float = 20.0
) -> list[asyncio.Task[list[Response]]]:
    """Asks one after the other, each once the router has the one before it."""
    asking = []
    for number, request in enumerate(requests, start=stand.router.admission.in_flight + 1):
        asking.append(asyncio.create_task(stand.ask(request, timeout_s=timeout_s)))
        await stand.admitted(number)
    return asking


async def test_after_an_outage_hundreds_are_served_in_order_and_none_is_refused() -> None:
    async with bed(replace(saying("late"), max_open=PLACES), settings=PATIENT) as stand:
        (worker,) = stand.workers
        await worker.set_serving(False)
        await stand.until(ready=0)
        # Token ids, because threads that tokenize text may overtake each other.
        asking = await start(stand, [Request(token_ids=[65], request_id=f"{n}") for n in range(300)])
        await until(lambda: stand.num_waiting == 300)
        worker.next_token.close()
        await worker.set_serving(True)
        await worker.until(lambda one: one.active == PLACES)
        # Who comes now does not overtake.
        asking += await start(stand, [Request(token_ids=[65], request_id="300")])
        assert stand.num_waiting == 301 - PLACES
        worker.next_token.open()
        assert {text_of(one) for one in await asyncio.gather(*asking)} == {"late"}
        assert (worker.record.refused, worker.record.most_active) == ([], PLACES)
        order = [int(one.request_id.partition(".")[0]) for one in worker.record.requests]
        # What is sent in one moment may change places on the wire.
        assert max(abs(number - position) for position, number in enumerate(order)) < PLACES
        await stand.idle()


async def test_a_full_room_refuses_at_once_with_retry_info() -> None:
    async with bed(settings=replace(PATIENT, max_waiting=1)) as stand:
        (waiting,) = await start(stand, [Request(text="a")])
        await until(lambda: stand.num_waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.ask(Request(text="b"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(refused.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
        waiting.cancel()
        await until(lambda: stand.num_waiting == 0)
        await stand.idle()


async def test_who_has_waited_waits_on_when_the_replica_that_returned_is_full() -> None:
    async with bed(replace(saying("at last"), max_open=1), settings=PATIENT) as stand:
        (worker,) = stand.workers
        await worker.set_serving(False)
        await stand.until(ready=0)
        worker.next_token.close()
        asking = await start(stand, [Request(text=f"{n}") for n in range(5)])
        began = time.monotonic()
        await worker.set_serving(True)
        await worker.until(lambda one: one.active == 1 and len(one.record.refused) > 0)
        worker.next_token.open()
        assert {text_of(one) for one in await asyncio.gather(*asking)} == {"at last"}
        # One try finds out that it is full, and a pause or one of five free places follows; not every waiter at once.
        assert len(worker.record.refused) <= 10 + (time.monotonic() - began) / MIN_PAUSE_S
        await stand.idle()


async def test_who_has_waited_for_a_place_in_vain_is_told_that_replicas_are_full() -> None:
    async with bed(Behaviour(max_open=0), settings=RouterSettings(no_replica_wait_s=0.3)) as stand:
        (worker,) = stand.workers
        await worker.set_serving(False)
        await stand.until(ready=0)
        (asking,) = await start(stand, [Request(text="a")])
        await worker.set_serving(True)
        with pytest.raises(grpc.aio.AioRpcError, match="no replica had a place") as refused:
            await asking
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stand.idle()


async def test_a_stream_that_has_begun_waits_for_a_place_elsewhere() -> None:
    request = Request(token_ids=range(10, 60), sampling=Params(seed=1234, max_tokens=20))
    expected = await expected_of(Behaviour(num_tokens=50), request)
    async with bed(Behaviour(num_tokens=50), Behaviour(num_tokens=50), settings=PATIENT) as stand:
        for worker in stand.workers:
            worker.next_token.close()
            worker.next_token.allow(6)
        (asking,) = await start(stand, [request])
        await until(lambda: any(one.active for one in stand.workers))
        first, other = sorted(stand.workers, key=lambda one: one.active, reverse=True)
        other.behaviour.max_open = 0
        assert await first.drain(0.1) == 1, "cut off in the middle, and refusing although its health says SERVING"
        await other.until(lambda one: len(one.record.refused) > 1)
        other.behaviour.max_open = None
        other.next_token.open()
        assert tokens_of(await asking) == expected
        await stand.idle()


async def test_a_stream_survives_the_drain_of_every_replica_at_once() -> None:
    """More replicas turn it away than may fail it; each comes back as a new process on its address."""
    request = Request(token_ids=range(10, 60), sampling=Params(seed=7, max_tokens=30))
    expected = await expected_of(Behaviour(num_tokens=50), request)
    behaviours = [Behaviour(num_tokens=50) for _ in range(5)]
    async with bed(*behaviours, settings=replace(PATIENT, max_attempts=2)) as stand:
        for worker in stand.workers:
            worker.next_token.close()
            worker.next_token.allow(2)
        (asking,) = await start(stand, [request])

        async def update(worker: FakeWorker) -> None:
            await worker.drain(0.05)
            await worker.set_serving(False)
            await worker.stop()
            worker.next_token.close()
            worker.next_token.allow(2)
            await worker.start()

        for _ in range(4):
            await until(lambda: any(one.active for one in stand.workers))
            await asyncio.gather(*(update(worker) for worker in stand.workers))
        for worker in stand.workers:
            worker.next_token.open()
        assert tokens_of(await asking) == expected
        tried = [one for worker in stand.workers for one in worker.record.requests]
        assert len(tried) > 4, "it was cut off, turned away, or both, each time"
        assert max(len(one.token_ids) for one in tried) > 50, "and went on from what it had"
        await stand.idle()


async def test_replicas_that_turn_away_before_their_health_says_so_fail_nobody() -> None:
    behaviours = [replace(saying("ok"), refusal=Refusal.DRAINING) for _ in range(4)]
    async with bed(*behaviours, settings=replace(PATIENT, max_attempts=1)) as stand:
        asking = await start(stand, [Request(text=f"{n}") for n in range(20)])
        await until(lambda: sum(len(one.record.refused) for one in stand.workers) >= 20)
        for behaviour in behaviours:
            behaviour.refusal = Refusal.NONE
        assert {text_of(one) for one in await asyncio.gather(*asking)} == {"ok"}
        await stand.idle()


async def test_a_replica_that_is_gone_does_not_count_as_one_that_failed_the_request() -> None:
    async with bed(saying("a"), saying("b"), settings=replace(PATIENT, max_attempts=1)) as stand:
        for worker in stand.workers:
            await worker.stop()
        asking = await start(stand, [Request(text=f"{n}") for n in range(20)])
        for worker in stand.workers:
            await worker.start()
        assert {text_of(one) for one in await asyncio.gather(*asking)} <= {"a", "b"}
        await stand.idle()


async def test_a_request_that_breaks_every_replica_is_given_up_after_max_attempts() -> None:
    async with bed(*(Behaviour(breaks_after_tokens=0) for _ in range(5)), settings=PATIENT) as stand:
        with pytest.raises(grpc.aio.AioRpcError, match="breaks off") as failed:
            await stand.ask(Request(text="a"))
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert sum(len(one.record.requests) for one in stand.workers) == PATIENT.max_attempts
        await stand.idle()


async def test_grpc_says_of_a_refused_connection_what_the_proxy_listens_for() -> None:
    async with channel(f"127.0.0.1:{free_port()}", max_message_bytes=1 << 20) as nobody:
        with pytest.raises(grpc.aio.AioRpcError, match=_NEVER_SENT) as refused:
            await WorkerServiceStub(nobody).GetInfo(worker_pb2.GetInfoRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_wait_is_measured_and_the_queue_is_shown() -> None:
    async with bed(saying("now"), settings=PATIENT) as stand:
        (worker,) = stand.workers
        assert text_of(await stand.ask(Request(text="a"))) == "now"
        await worker.set_serving(False)
        await stand.until(ready=0)
        asking = await start(stand, [Request(text="a"), Request(text="b")])
        await until(lambda: stand.num_waiting == 2)
        assert (await metric(stand, "queue_depth"), await metric(stand, "queue_wait_seconds_count")) == (2, 0)
        await worker.set_serving(True)
        await asyncio.gather(*asking)
        assert (await metric(stand, "queue_depth"), await metric(stand, "queue_wait_seconds_count")) == (0, 2)
        assert (await metric(stand, "queue_wait_seconds_sum")) > 0
