"""A worker of which something of ours fails: it serves on where it can, and closes all it has where it cannot."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from prometheus_client import CollectorRegistry

from ostrya.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from ostrya.engine.config import EngineConfig
from ostrya.engine.process import EngineProcess
from ostrya.errors import Fenced
from ostrya.service.server import channel
from ostrya.worker.app import _Worker
from ostrya.worker.lasting import LastingEngine
from ostrya.worker.metrics import WorkerMetrics
from ostrya.worker.publisher import Publisher
from ostrya.worker.settings import WorkerSettings
from tests.fakes.waiting import until

CONFIG = EngineConfig(model_path="/", model_name="fake", tokenizer_fingerprint="t", num_pages=257, page_size=4)
SETTINGS = WorkerSettings(worker_id="w-0", port=0, redis_url="redis://127.0.0.1:1/0", drain_timeout_s=5)


class Stand:
    """A worker in this process, its engine in a child."""

    def __init__(self, engine: EngineProcess) -> None:
        async def no_restart(*, timeout_s: float) -> EngineProcess:
            raise AssertionError("no engine was lost")

        self.engine, self.registry = engine, CollectorRegistry()
        metrics = WorkerMetrics(self.registry, model="fake")
        self.worker = _Worker(SETTINGS, CONFIG, engine, metrics, restart=no_restart)

    @property
    def address(self) -> str:
        assert self.worker._publisher is not None
        return self.worker._publisher._member.address

    def part_up(self) -> float | None:
        labels = {"model": "fake", "part": "publisher"}
        return self.registry.get_sample_value("ostrya_worker_part_up", labels)

    async def num_tokens(self) -> int:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        request = worker_pb2.WorkerServiceGenerateRequest(request_id="r", token_ids=range(10), sampling=sampling)
        async with channel(self.address, max_message_bytes=1 << 20) as way:
            stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(way)
            messages = [message async for message in stub.Generate(request, timeout=30)]
        return int(messages[-1].usage.completion_tokens)


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    engine = await EngineProcess.start(CONFIG, factory="tests.fakes.runner:load_runner")
    yield Stand(engine)
    await engine.close()


async def test_a_worker_serves_on_while_its_publisher_fails_and_says_so(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_failures = 0

    async def broken_turn(self: Publisher) -> None:
        nonlocal num_failures
        num_failures += 1
        raise KeyError("whatever stood there")

    monkeypatch.setattr(Publisher, "_turn", broken_turn)
    stop = asyncio.Event()
    serving = asyncio.create_task(stand.worker.run(stop, metrics_port=0))
    await until(lambda: num_failures >= 3)
    assert (stand.part_up(), stand.registry.get_sample_value("ostrya_worker_registered", {"model": "fake"})) == (0, 0)
    assert await stand.num_tokens() == 3
    assert not serving.done()
    stop.set()
    assert await serving == 0
    assert stand.engine.is_gone


async def test_a_fenced_publisher_is_no_failure(stand: Stand) -> None:
    serving = asyncio.create_task(stand.worker.run(asyncio.Event(), metrics_port=0))
    await until(lambda: stand.worker._publisher)
    assert stand.worker._publisher is not None
    stand.worker._publisher.fenced.set_result(Fenced("taken"))
    assert await serving == 1
    assert stand.part_up() == 1


async def test_what_a_task_of_the_worker_raises_leaves_nothing_open(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[Publisher](), Publisher.close

    async def broken_run(self: LastingEngine) -> str:
        raise RuntimeError("a fault of ours")

    async def seen_close(self: Publisher) -> None:
        await close(self)
        closed.append(self)

    monkeypatch.setattr(LastingEngine, "run", broken_run)
    monkeypatch.setattr(Publisher, "close", seen_close)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await stand.worker.run(asyncio.Event(), metrics_port=0)
    assert stand.engine.is_gone
    assert closed == [stand.worker._publisher]
    with pytest.raises(grpc.aio.AioRpcError, match="failed to connect"):
        await stand.num_tokens()
