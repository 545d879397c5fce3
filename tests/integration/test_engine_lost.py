"""Workers that lose their engine, behind a router: answers go on exactly, and nobody credits what is gone.

Two real worker processes with the fake runner, whose tokens depend on every token before them; a router over real
sockets; Redis.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from ostrya.api.v1 import inference_pb2_grpc
from ostrya.engine.config import EngineConfig
from ostrya.router.app import Router
from ostrya.router.fleet import ReplicaRow
from ostrya.router.settings import RouterSettings
from ostrya.router.types import ReplicaState
from ostrya.service.server import channel
from ostrya.worker.settings import WorkerSettings
from tests.fakes.redis_server import RunningRedis, start_redis
from tests.fakes.waiting import until
from tests.integration.bed import TOKENIZER, Params, Request, tokens_of
from tests.integration.test_worker_process import RunningWorker

CONFIG = EngineConfig(
    model_path="/",
    model_name="tiny",
    tokenizer_fingerprint=TOKENIZER.fingerprint,
    num_pages=1025,
    page_size=4,
    max_context_tokens=1024,
)
BUSY_S = 30.0
"""For a busy machine; a lost engine is found in 5 s and started again in one."""
PROMPT = "Write a long essay about the sea."


@pytest.fixture(scope="module")
def redis() -> Iterator[RunningRedis]:
    server = start_redis()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def workers(redis: RunningRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningWorker]]:
    """10 ms a step, by worker id."""
    logs = tmp_path_factory.mktemp("workers")
    started = {
        name: RunningWorker(
            logs / f"{name}.log",
            factory="load_paced_runner",
            settings=WorkerSettings(worker_id=name, redis_url=redis.url),
            config=CONFIG,
        )
        for name in ("w0", "w1")
    }
    yield started
    for running in started.values():
        running.process.terminate()
    for running in started.values():
        running.process.wait(10)


class Front:
    """A router before some of the workers."""

    def __init__(self, router: Router, inference: "inference_pb2_grpc.InferenceServiceAsyncStub") -> None:
        self.router, self.inference = router, inference

    def row(self, worker_id: str) -> ReplicaRow | None:
        return next((row for row in self.router.fleet.replicas() if row.info.worker_id == worker_id), None)

    def is_ready(self, worker_id: str) -> bool:
        row = self.row(worker_id)
        return row is not None and row.state is ReplicaState.READY

    def blocks(self, worker_id: str) -> int:
        row = self.row(worker_id)
        return row.indexed_blocks if row is not None else 0

    def epoch(self, worker_id: str) -> int:
        row = self.row(worker_id)
        return row.info.epoch if row is not None else 0

    async def answer(self, victims: "dict[str, RunningWorker] | None" = None) -> tuple[list[int], list[str]]:
        """Tokens, and the replicas they came from. The engine of the first one is stopped in the middle."""
        call = self.inference.Generate(
            Request(text=PROMPT, sampling=Params(temperature=0, max_tokens=120, ignore_eos=True)), timeout=120
        )
        responses, replicas = [], []
        async for response in call:
            responses.append(response)
            if response.replica not in replicas:
                replicas.append(response.replica)
            if victims and len(responses) == 20:
                (pid,) = victims[response.replica].children()
                os.kill(pid, signal.SIGSTOP)
        return tokens_of(responses), replicas


@asynccontextmanager
async def front(redis: RunningRedis, *workers: RunningWorker) -> AsyncIterator[Front]:
    addresses = tuple([str((await asyncio.to_thread(one.fields, "listening"))["address"]) for one in workers])
    settings = RouterSettings(redis_url=redis.url, discovery="static", static_workers=addresses, port=0, metrics_port=0)
    router = Router(settings, name="tiny", tokenizer=TOKENIZER)
    async with router.serving(), channel(f"127.0.0.1:{router.port}", max_message_bytes=1 << 20) as open_channel:
        made = Front(router, inference_pb2_grpc.InferenceServiceStub(open_channel))
        await until(
            lambda: sum(row.state is ReplicaState.READY for row in router.fleet.replicas()) == len(workers),
            timeout_s=BUSY_S,
        )
        yield made


async def test_an_answer_whose_engine_is_stopped_goes_on_exactly_on_the_other_replica(
    redis: RunningRedis, workers: dict[str, RunningWorker]
) -> None:
    async with front(redis, *workers.values()) as seen:
        expected, (first,) = await seen.answer()
        await until(lambda: seen.blocks(first) > 0, timeout_s=BUSY_S)
        epoch = seen.epoch(first)
        tokens, replicas = await seen.answer(workers)
        assert tokens == expected
        assert len(expected) == 120
        assert replicas == [first, *(name for name in workers if name != first)]
        await until(lambda: seen.is_ready(first) and seen.epoch(first) > epoch, timeout_s=BUSY_S)
        # Its cache is empty and everybody knows: journal, snapshot and the index.
        assert seen.blocks(first) == 0
        assert await workers[first].metric("ostrya_worker_engine_restarts_total", cause="hung") == 1
        assert workers[first].process.poll() is None


async def test_with_no_other_replica_the_answer_waits_and_goes_on_exactly_on_the_new_engine(
    redis: RunningRedis, workers: dict[str, RunningWorker]
) -> None:
    async with front(redis, workers["w1"]) as seen:
        expected, _ = await seen.answer()
        tokens, replicas = await seen.answer(workers)
        assert (tokens, replicas) == (expected, ["w1"])
        await until(lambda: seen.blocks("w1") > 0, timeout_s=BUSY_S)  # of the part that the new engine computed


async def test_an_idle_engine_that_dies_while_redis_is_away_loses_its_credit_at_once(
    redis: RunningRedis, workers: dict[str, RunningWorker]
) -> None:
    async with front(redis, workers["w0"]) as seen:
        await seen.answer()
        await until(lambda: seen.blocks("w0") > 0, timeout_s=BUSY_S)
        redis.kill()
        (pid,) = workers["w0"].children()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: seen.blocks("w0") == 0, timeout_s=BUSY_S)
        await until(lambda: seen.is_ready("w0"), timeout_s=BUSY_S)
        assert (seen.epoch("w0"), seen.blocks("w0")) == (0, 0)
        redis.restart()
        await until(lambda: seen.epoch("w0") > 0, timeout_s=BUSY_S)
