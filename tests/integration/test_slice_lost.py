"""A replica of two hosts that loses one of them, behind a router: answers go on exactly elsewhere, and it comes back.

Real worker processes with the fake runner: host 0 and host 1 of a replica, two ranks each; another replica of one host.
"""

import asyncio
import dataclasses
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ostrya.api.v1 import worker_pb2_grpc
from ostrya.service.server import LIVENESS, channel
from ostrya.worker.following import SERVICE
from ostrya.worker.settings import WorkerSettings
from tests.fakes.redis_server import RunningRedis, free_port, start_redis
from tests.fakes.waiting import Stopwatch, until
from tests.integration.bed import Params, Request
from tests.integration.test_engine_lost import BUSY_S, CONFIG, PROMPT, Front, front
from tests.integration.test_worker_process import RunningWorker, count_tokens, is_alive, poll

WHOLE_S = 5.0
SLICED = msgspec.structs.replace(CONFIG, tensor_parallel=4)
"""Two ranks a host."""


@pytest.fixture(scope="module")
def redis() -> Iterator[RunningRedis]:
    server = start_redis()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def workers(redis: RunningRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningWorker]]:
    logs = tmp_path_factory.mktemp("workers")
    alone = WorkerSettings(worker_id="alone", redis_url=redis.url)
    first = dataclasses.replace(
        alone, worker_id="sliced", hosts=2, host_index=0, leader_address="127.0.0.1", slice_port=free_port()
    )
    # Nobody needs Redis there.
    second = dataclasses.replace(first, worker_id="second", host_index=1, redis_url="redis://127.0.0.1:1/0")
    started = {
        one.worker_id: RunningWorker(
            logs / f"{one.worker_id}.log",
            factory="load_paced_runner",
            settings=one,
            config=SLICED if one.hosts else CONFIG,
        )
        for one in (second, first, alone)
    }
    yield started
    for running in started.values():
        running.process.terminate()
    for running in started.values():
        assert running.process.wait(20) == 0


async def answer(
    seen: Front, prompt: str, *, max_tokens: int, stop: int = 0, number: int = 0
) -> tuple[list[int], list[str]]:
    """Tokens, and the replicas they came from; process `stop` gets the signal in the middle."""
    asked = Request(text=prompt, sampling=Params(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    tokens, replicas = list[int](), list[str]()
    async for response in seen.inference.Generate(asked, timeout=120):
        tokens += response.token_ids
        if response.replica not in replicas:
            replicas.append(response.replica)
        if stop and len(tokens) >= 20:
            os.kill(stop, number)
            stop = 0
    return tokens, replicas


async def is_following(address: str) -> tuple[bool, bool]:
    """Ready, and alive."""
    async with channel(address, max_message_bytes=1 << 20) as open_channel:
        stub = health_pb2_grpc.HealthStub(open_channel)
        answers = [
            await stub.Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(service=name), timeout=10, wait_for_ready=True
            )
            for name in (SERVICE, LIVENESS)
        ]
    ready, alive = (one.status == health_pb2.HealthCheckResponse.SERVING for one in answers)
    return ready, alive


# 10 ms a token: one that is stopped is noticed after 4 s.
@pytest.mark.parametrize(("number", "max_tokens"), [(signal.SIGKILL, 120), (signal.SIGSTOP, 600)])
async def test_an_answer_of_a_replica_that_loses_a_host_goes_on_exactly_elsewhere_and_the_replica_comes_back(
    redis: RunningRedis, workers: dict[str, RunningWorker], number: signal.Signals, max_tokens: int
) -> None:
    first, second = workers["sliced"], workers["second"]
    address = f"127.0.0.1:{second.fields('listening')['port']}"
    prompt = f"{number} {PROMPT}"  # the replica that has its prefix is chosen
    async with front(redis, first) as seen:
        expected, _ = await answer(seen, prompt, max_tokens=max_tokens)
        await until(lambda: seen.blocks("sliced") > 0, timeout_s=BUSY_S)
    async with front(redis, first, workers["alone"]) as seen:
        await until(lambda: seen.blocks("sliced") > 0, timeout_s=BUSY_S)
        restarts = await second.metric("ostrya_worker_follower_restarts_total")
        lost = await first.metric("ostrya_worker_engine_restarts_total", cause="died")
        await seen_following(address)
        rank = min(second.children())
        watch = Stopwatch()
        tokens, replicas = await answer(seen, prompt, max_tokens=max_tokens, stop=rank, number=number)
        assert (tokens, replicas) == (expected, ["sliced", "alone"])
        assert len(expected) == max_tokens
        assert watch.seconds() < WHOLE_S + 0.01 * max_tokens + 1
        poll(lambda: rank not in second.children(), 15, lambda: "the old rank is still there")
        await seen_following(address)
        await until(lambda: seen.is_ready("sliced"), timeout_s=BUSY_S)
        reason = f"{first.fields('the engine is lost; its requests go elsewhere')['reason']}"
        assert re.match(r"the replica fails whole: rank [23] on host 1 of 2 \(", reason), reason
        assert await second.metric("ostrya_worker_follower_restarts_total") > restarts
        assert await first.metric("ostrya_worker_engine_restarts_total", cause="died") == lost + 1


async def seen_following(address: str, *, is_ready: bool = True) -> None:
    """Waits until it is, or is not; alive it must be all the time."""
    async with asyncio.timeout(BUSY_S):
        while (found := await is_following(address)) != (is_ready, True):
            assert found[1]
            await asyncio.sleep(0.05)


async def test_a_following_host_outlives_the_first_waits_for_the_next_and_drains_with_it(tmp_path: Path) -> None:
    settings = WorkerSettings(
        worker_id="w",
        redis_url="redis://127.0.0.1:1/0",
        hosts=2,
        host_index=0,
        leader_address="127.0.0.1",
        slice_port=free_port(),
        drain_timeout_s=20,
    )

    def start(name: str, host: int) -> RunningWorker:
        here = dataclasses.replace(settings, host_index=host)
        return RunningWorker(tmp_path / name, factory="load_paced_runner", settings=here, config=SLICED)

    second = start("second", 1)
    started = [second]
    try:
        address = f"127.0.0.1:{second.fields('listening')['port']}"
        assert await is_following(address) == (False, True)
        second.fields("follower: dialling")
        for name in ("first", "next"):
            first = start(name, 0)
            started.append(first)
            await seen_following(address)
            assert await second.metric("ostrya_worker_follower_phase", phase="following") == 1
            if name == "first":
                first.fields("listening")
                first.process.kill()
                first.process.wait(10)
                await seen_following(address, is_ready=False)
        async with channel(str(first.fields("listening")["address"]), max_message_bytes=1 << 20) as open_channel:
            stub = worker_pb2_grpc.WorkerServiceStub(open_channel)
            answering = asyncio.create_task(count_tokens(stub, 150))
            while await first.metric("ostrya_worker_requests_running") < 1:
                pass
            ranks = second.children()
            second.process.send_signal(signal.SIGTERM)
            first.process.send_signal(signal.SIGTERM)
            assert await answering == 150
        assert [await asyncio.to_thread(one.process.wait, 10) for one in (first, second)] == [0, 0]
        assert not any(map(is_alive, ranks))
    finally:
        for one in started:
            one.process.kill()
            one.process.wait(10)
