"""WorkerService over a real socket: the servicer with a real engine process that has the fake runner."""

import asyncio
import importlib.metadata
import math
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from ostrya.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from ostrya.engine.config import EngineConfig
from ostrya.engine.process import EngineProcess
from ostrya.prefix.chain import ChainKey, self_test
from ostrya.service.server import LIVENESS, GrpcServer, channel
from ostrya.service.status import DETAILS
from ostrya.state import keys
from ostrya.worker import convert
from ostrya.worker.app import SERVICE
from ostrya.worker.metrics import WorkerMetrics
from ostrya.worker.running import RETRY_ELSEWHERE_S
from ostrya.worker.servicer import WorkerServicer
from ostrya.worker.settings import WorkerSettings
from tests.fakes.waiting import Stopwatch

CONFIG = EngineConfig(
    model_path="/", model_name="fake", tokenizer_fingerprint="t", num_pages=257, page_size=4, max_running=2
)
SETTINGS = WorkerSettings(worker_id="w-0", max_waiting=2, max_message_bytes=1 << 20)
SELF_TEST = self_test(ChainKey(model="fake", tokenizer_fingerprint="t"), page_size=4, stride=2)
Request = worker_pb2.WorkerServiceGenerateRequest
Sampling = common_pb2.SamplingParams
Call = grpc.aio.UnaryStreamCall[Request, worker_pb2.WorkerServiceGenerateResponse]


class Served:
    """A worker's servicer and server in this process, its engine in a child."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.registry = CollectorRegistry()
        metrics = WorkerMetrics(self.registry, model="fake")
        engine.listen(metrics.report)
        self.server = GrpcServer("127.0.0.1", 0, max_message_bytes=SETTINGS.max_message_bytes, services=[SERVICE])
        self.servicer = WorkerServicer(
            engine,
            metrics,
            settings=SETTINGS,
            tokenizer_fingerprint="t",
            chain_self_test=SELF_TEST,
            set_serving=self.server.set_serving,
            epoch=lambda: 7,
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self.server.server)

    async def start(self) -> None:
        port = await self.server.start()
        await self.server.set_serving(True)
        await self.server.set_alive(True)
        self.channel = channel(f"127.0.0.1:{port}", max_message_bytes=64 << 20)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(0)
        await self.engine.close()

    def cancelled(self) -> dict[str, float]:
        """Causes that were counted."""
        name = "ostrya_worker_cancelled_requests_total"
        values = {
            cause: self.registry.get_sample_value(name, {"model": "fake", "cause": cause})
            for cause in ("client", "deadline", "drain", "engine")
        }
        return {cause: value for cause, value in values.items() if value}

    def state(self) -> str:
        """The one that is 1."""
        (state,) = [
            sample.labels["state"]
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "ostrya_worker_lifecycle_state" and sample.value
        ]
        return state

    async def is_serving(self, service: str = SERVICE) -> bool:
        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def idle(self) -> float:
        """Waits until the engine holds nothing; how long that took."""
        started_s = time.monotonic()
        await until(lambda: self.engine.load.num_running == self.engine.load.num_waiting == self.engine.num_open == 0)
        load = self.engine.load
        assert load.free_pages + load.reusable_pages == load.total_pages
        return time.monotonic() - started_s


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition changes in another process
            await asyncio.sleep(0.002)


async def serve(factory: str) -> AsyncIterator[Served]:
    engine = await EngineProcess.start(
        CONFIG, factory=f"tests.fakes.runner:{factory}", max_waiting=SETTINGS.max_waiting, timeout_s=30
    )
    served = Served(engine)
    await served.start()
    yield served
    await served.close()


@pytest.fixture
async def fast() -> AsyncIterator[Served]:
    async for served in serve("load_runner"):
        yield served


@pytest.fixture
async def paced() -> AsyncIterator[Served]:
    """10 ms a step."""
    async for served in serve("load_paced_runner"):
        yield served


def ask(*, prompt: int = 10, max_tokens: int = 5, request_id: str = "r", model: str = "") -> Request:
    sampling = Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=request_id, model=model, token_ids=range(prompt), sampling=sampling)


async def read(call: Call) -> list[worker_pb2.WorkerServiceGenerateResponse]:
    return [message async for message in call]


async def error_of(call: Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    return caught.value


def retry_after_s(error: grpc.aio.AioRpcError) -> float:
    raw = dict(error.trailing_metadata())[DETAILS]
    assert isinstance(raw, bytes)
    info = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(info) for detail in status_pb2.Status.FromString(raw).details)
    delay: Duration = info.retry_delay
    return delay.ToMilliseconds() / 1000


async def test_answer_carries_usage_first_and_last_and_load_always(fast: Served) -> None:
    messages = await read(fast.stub.Generate(ask(prompt=12, max_tokens=8)))
    again = await read(fast.stub.Generate(ask(prompt=12, max_tokens=8)))
    assert [t for m in messages for t in m.token_ids] == [t for m in again for t in m.token_ids]
    first, last = again[0], again[-1]
    assert (first.usage.prompt_tokens, first.usage.cached_tokens) == (12, 8)
    assert (last.usage.completion_tokens, last.usage.cached_tokens) == (8, 8)
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert not any(m.HasField("usage") or m.finish_reason for m in again[1:-1])
    assert all(m.load.total_pages == 256 for m in messages + again)
    assert last.load.hit_tokens_total == 8


async def test_a_long_prompt_is_gone_through_off_the_event_loop(fast: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    checked_by: list[int] = []

    def noted(*arguments: object, **named: object) -> object:
        checked_by.append(threading.get_ident())
        return engine_request(*arguments, **named)  # type: ignore[arg-type]

    engine_request = convert.engine_request
    monkeypatch.setattr(convert, "engine_request", noted)
    short = await read(fast.stub.Generate(ask(prompt=12)))
    monkeypatch.setattr(convert, "SLICE", 5)
    long = await read(fast.stub.Generate(ask(prompt=12)))
    assert [t for m in short for t in m.token_ids] == [t for m in long for t in m.token_ids]
    assert [one == threading.get_ident() for one in checked_by] == [True, False]


async def test_info_names_limits_and_the_chain_self_test(fast: Served) -> None:
    info = await fast.stub.GetInfo(worker_pb2.GetInfoRequest())
    assert (info.worker_id, info.pool, info.epoch, info.model) == ("w-0", "default", 7, "fake")
    assert (info.page_size, info.routing_stride, info.chain_self_test) == (4, 2, SELF_TEST)
    assert (info.limits.context_tokens, info.limits.vocab_size, info.limits.max_waiting) == (1024, 1000, 2)


async def test_info_names_what_a_doctor_compares(fast: Served) -> None:
    before_s = time.time()
    info = await fast.stub.GetInfo(worker_pb2.GetInfoRequest())
    assert before_s <= info.time_s <= time.time()
    assert (info.state_schema, info.version) == (keys.SCHEMA, importlib.metadata.version("ostrya"))


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (Request(), grpc.StatusCode.INVALID_ARGUMENT, "token_ids is empty"),
        (ask(model="gpt-5"), grpc.StatusCode.NOT_FOUND, "fake"),
        (Request(token_ids=[1], sampling=Sampling(temperature=math.nan)), grpc.StatusCode.INVALID_ARGUMENT, "nan"),
        (Request(token_ids=[5000]), grpc.StatusCode.INVALID_ARGUMENT, "5000; allowed: 0 to 999"),
        (ask(max_tokens=1020), grpc.StatusCode.INVALID_ARGUMENT, "1024"),
        (Request(token_ids=[200] * (1 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED, str(1 << 20)),
    ],
)
async def test_bad_request_is_refused_with_words(
    fast: Served, request_: Request, code: grpc.StatusCode, words: str
) -> None:
    error = await error_of(fast.stub.Generate(request_))
    assert error.code() is code
    assert words in (error.details() or "")
    assert fast.cancelled() == {}


async def test_full_queue_is_resource_exhausted_with_retry_info(paced: Served) -> None:
    calls = [paced.stub.Generate(ask(max_tokens=60)) for _ in range(4)]
    reading = [asyncio.create_task(read(call)) for call in calls]
    await until(lambda: paced.engine.num_open == 4)
    error = await error_of(paced.stub.Generate(ask()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_after_s(error) > 0
    await asyncio.gather(*reading)
    assert paced.cancelled() == {}


async def test_clients_cancel_frees_slot_and_pages_within_100_ms(paced: Served) -> None:
    for expected in (1, 2):
        call = paced.stub.Generate(ask(max_tokens=1000))
        await call.read()
        call.cancel()
        assert await paced.idle() < 0.1
        await until(lambda expected=expected: paced.cancelled() == {"client": expected})  # type: ignore[misc]


async def test_passed_deadline_frees_slot_and_pages_within_100_ms(paced: Served) -> None:
    error = await error_of(paced.stub.Generate(ask(max_tokens=1000), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await paced.idle() < 0.1
    await until(lambda: paced.cancelled() == {"deadline": 1})


async def test_every_cancel_of_running_and_waiting_requests_is_counted_once(paced: Served) -> None:
    for _ in range(5):
        calls = [paced.stub.Generate(ask(max_tokens=1000, prompt=1 + n)) for n in range(4)]
        await until(lambda: paced.engine.num_open == 4)
        for call in calls:
            call.cancel()
        await paced.idle()
    await until(lambda: paced.cancelled() == {"client": 20})


async def test_one_request_id_may_be_used_twice_at_a_time(fast: Served) -> None:
    answers = await asyncio.gather(*(read(fast.stub.Generate(ask())) for _ in range(2)))
    assert [t for m in answers[0] for t in m.token_ids] == [t for m in answers[1] for t in m.token_ids]


async def test_drain_finishes_what_runs_and_refuses_what_comes(paced: Served) -> None:
    reading = asyncio.create_task(read(paced.stub.Generate(ask(max_tokens=30))))
    await until(lambda: paced.engine.load.num_running == 1)
    draining = asyncio.ensure_future(paced.stub.Drain(worker_pb2.DrainRequest()))
    async with asyncio.timeout(5):
        while await paced.is_serving():
            pass
    error = await error_of(paced.stub.Generate(ask()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in (error.details() or "")
    assert (await draining).num_cancelled == 0
    assert (await reading)[-1].usage.completion_tokens == 30
    assert paced.cancelled() == {}


async def test_cordon_refuses_what_comes_and_keeps_what_runs_until_uncordon(paced: Served) -> None:
    reading = asyncio.create_task(read(paced.stub.Generate(ask(max_tokens=30))))
    await until(lambda: paced.engine.load.num_running == 1)
    for _ in range(2):
        await paced.stub.Cordon(worker_pb2.CordonRequest())
    assert (await paced.is_serving(), await paced.is_serving(LIVENESS), paced.state()) == (False, True, "cordoned")
    error = await error_of(paced.stub.Generate(ask()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_after_s(error) == RETRY_ELSEWHERE_S
    assert (await reading)[-1].usage.completion_tokens == 30
    for _ in range(2):
        await paced.stub.Uncordon(worker_pb2.UncordonRequest())
    assert (await paced.is_serving(), paced.state()) == (True, "ready")
    assert (await read(paced.stub.Generate(ask())))[-1].usage.completion_tokens == 5


async def test_uncordon_calls_a_waiting_drain_off_and_cancels_nothing(paced: Served) -> None:
    reading = asyncio.create_task(read(paced.stub.Generate(ask(max_tokens=60))))
    await until(lambda: paced.engine.load.num_running == 1)
    draining = asyncio.ensure_future(paced.stub.Drain(worker_pb2.DrainRequest()))
    await until(lambda: paced.state() == "draining")
    await paced.stub.Uncordon(worker_pb2.UncordonRequest())
    with pytest.raises(grpc.aio.AioRpcError, match="called off by an uncordon") as caught:
        await draining
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await paced.is_serving(), paced.state()) == (True, "ready")
    assert (await reading)[-1].usage.completion_tokens == 60
    assert paced.cancelled() == {}


async def test_a_drained_worker_stays_cordoned_and_may_serve_again(fast: Served) -> None:
    await fast.stub.Drain(worker_pb2.DrainRequest())
    assert (await fast.is_serving(), fast.state()) == (False, "cordoned")
    await fast.stub.Uncordon(worker_pb2.UncordonRequest())
    assert (await read(fast.stub.Generate(ask())))[-1].usage.completion_tokens == 5


async def test_a_worker_without_an_engine_takes_no_new_work_and_leaves_cordons_alone(fast: Served) -> None:
    await fast.servicer.hear_pulse(is_alive=False)
    assert (await fast.is_serving(), await fast.is_serving(LIVENESS), fast.state()) == (False, True, "restarting")
    error = await error_of(fast.stub.Generate(ask()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_after_s(error) == RETRY_ELSEWHERE_S
    assert fast.cancelled() == {}
    await fast.stub.Cordon(worker_pb2.CordonRequest())
    await fast.servicer.hear_pulse(is_alive=True)
    assert (await fast.is_serving(), fast.state()) == (False, "cordoned")
    await fast.servicer.hear_pulse(is_alive=False)
    await fast.stub.Uncordon(worker_pb2.UncordonRequest())
    assert (await fast.is_serving(), fast.state()) == (False, "restarting")
    await fast.stub.Drain(worker_pb2.DrainRequest())
    await fast.stub.Uncordon(worker_pb2.UncordonRequest())
    assert not await fast.is_serving()
    await fast.servicer.hear_pulse(is_alive=True)
    assert (await fast.is_serving(), fast.state()) == (True, "ready")


async def test_a_drain_whose_caller_goes_away_leaves_the_worker_cordoned(paced: Served) -> None:
    reading = asyncio.create_task(read(paced.stub.Generate(ask(max_tokens=60))))
    await until(lambda: paced.engine.load.num_running == 1)
    draining = paced.stub.Drain(worker_pb2.DrainRequest())
    await until(lambda: paced.state() == "draining")
    draining.cancel()
    await until(lambda: paced.state() == "cordoned")
    assert not await paced.is_serving()
    assert (await reading)[-1].usage.completion_tokens == 60


async def test_drain_cancels_what_is_late(paced: Served) -> None:
    call = paced.stub.Generate(ask(max_tokens=1000))
    await anext(aiter(call))
    answer = await paced.stub.Drain(worker_pb2.DrainRequest(timeout_s=0.05))
    assert answer.num_cancelled == 1
    assert (await error_of(call)).code() is grpc.StatusCode.UNAVAILABLE
    await paced.idle()
    assert paced.cancelled() == {"drain": 1}


async def test_dead_engine_is_unavailable_within_2_s(paced: Served) -> None:
    call = paced.stub.Generate(ask(max_tokens=1000))
    await anext(aiter(call))
    watch = Stopwatch()
    os.kill(paced.engine.pid, signal.SIGKILL)
    error = await error_of(call)
    assert watch.seconds() < 2
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_after_s(error) > 0
    assert paced.cancelled() == {"engine": 1}
    assert (await error_of(paced.stub.Generate(ask()))).code() is grpc.StatusCode.UNAVAILABLE
