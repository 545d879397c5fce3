"""The faults table on the real stack: processes are killed, queues are full, clients go away; nothing is lost."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostrya.api.v1 import admin_pb2
from ostrya.client import AsyncClient, Client
from ostrya.errors import DeadlineExceeded, NoReplica, OstryaError, Overloaded
from ostrya.text.source import resolve_model
from tests.fakes.redis_server import free_port
from tests.fakes.waiting import Stopwatch
from tests.integration.stack import RunningStack, eventually, start_stack

ESSAY = "Write a long essay about the sea. " * 8


@pytest.fixture(scope="module")
def breakable() -> Iterator[RunningStack]:
    """A stack that these tests break and heal; float32, where another path to the same keys changes no token."""
    running = start_stack(worker_options=("--dtype", "float32"))
    yield running
    running.close()


async def greedy(client: AsyncClient, prompt: str, max_tokens: int = 24) -> tuple[int, ...]:
    """The tokens of one greedy answer that does not stop early."""
    async with client.generate(text=prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True) as stream:
        return tuple([token async for chunk in stream for token in chunk.token_ids])


def indexed(client: Client) -> dict[str, int]:
    return {replica.worker_id: replica.indexed_blocks for replica in client.replicas().replicas}


def epochs(client: Client) -> set[int]:
    return {replica.epoch for replica in client.replicas().replicas}


def covers(client: Client, before: dict[str, int]) -> bool:
    """The journal is followed, and every worker has at least the blocks it had."""
    fresh = client.replicas().level == admin_pb2.KNOWLEDGE_LEVEL_FRESH
    return fresh and all(indexed(client).get(name, 0) >= count for name, count in before.items())


def num_ready(client: Client) -> int:
    return sum(model.num_replicas_ready for model in client.models())


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_request_that_ends_early_frees_slot_and_pages_within_100_ms(stack: RunningStack, how: str) -> None:
    await stack.idle()
    cause = {"cancel": "client", "deadline": "deadline"}[how]
    before = {worker: stack.total(worker, CANCELLED, f"cause={cause}") for worker in stack.workers}
    async with AsyncClient(stack.target) as client:
        timeout_s = 1.0 if how == "deadline" else 60.0
        stream = client.generate(text=ESSAY, max_tokens=4000, ignore_eos=True, timeout_s=timeout_s)
        async with stream:
            try:
                async for _ in stream:
                    if how == "cancel":
                        break
            except DeadlineExceeded:
                pass
        watch = Stopwatch(*(pid for name in stack.processes for pid in stack.pids(name)))
        await stack.idle(timeout_s=30)
        held_s = watch.seconds()
    counted = sum(stack.total(worker, CANCELLED, f"cause={cause}") - before[worker] for worker in stack.workers)
    assert counted == 1
    # 100 ms for the worker; the rest is this test's own scraping of three processes.
    assert held_s < 0.4, f"slot and pages were held for {held_s:.3f} s"


CANCELLED = "ostrya_worker_cancelled_requests_total"


async def test_killing_a_worker_fails_no_request_and_answers_stay_exact(breakable: RunningStack) -> None:
    prompts = [f"{index}. {ESSAY}" for index in range(6)]
    async with AsyncClient(breakable.target) as client:
        expected = [await greedy(client, prompt) for prompt in prompts]
        running = [asyncio.create_task(greedy(client, prompt)) for prompt in prompts]
        await eventually(lambda: bool(breakable.busy()), timeout_s=10, what=lambda: "nothing started")
        breakable.processes["worker-0"].kill()
        killed = time.monotonic()
        assert await asyncio.gather(*running) == expected
    with Client(breakable.target) as blocking:
        await eventually(lambda: num_ready(blocking) == 1, timeout_s=5, what=lambda: "killed worker is still routed to")
        assert time.monotonic() - killed < 60
        breakable.restart("worker-0")
        await eventually(
            lambda: num_ready(blocking) == 2, timeout_s=60, what=lambda: "restarted worker is not routed to"
        )


async def test_redis_killed_and_emptied_fails_no_request_and_the_index_is_whole_in_5_s(breakable: RunningStack) -> None:
    with Client(breakable.target) as blocking:
        async with AsyncClient(breakable.target) as client:
            await asyncio.gather(*(greedy(client, f"{index}. {ESSAY}", 2) for index in range(6)))
            await breakable.idle()
            await eventually(
                lambda: sum(indexed(blocking).values()) > 0, timeout_s=5, what=lambda: str(indexed(blocking))
            )
            before, old_epochs = indexed(blocking), epochs(blocking)
            breakable.redis.kill()
            during = [asyncio.create_task(greedy(client, f"{index}. {ESSAY}", 8)) for index in range(6)]
            await asyncio.gather(*during)
            breakable.redis.restart()
            back = time.monotonic()
            await eventually(
                lambda: not old_epochs & epochs(blocking) and covers(blocking, before),
                timeout_s=5,
                what=lambda: f"index before {before}, after {indexed(blocking)} at {blocking.replicas().level}",
            )
            print(f"index whole again after {time.monotonic() - back:.2f} s")
            await greedy(client, "After the outage:", 2)


async def test_with_redis_absent_at_start_requests_are_answered() -> None:
    stack = await asyncio.to_thread(start_stack, redis="absent")
    try:
        async with AsyncClient(stack.target) as client:
            answers = await asyncio.gather(*(greedy(client, f"{index}. {ESSAY}", 4) for index in range(4)))
            assert all(len(tokens) == 4 for tokens in answers)
        with Client(stack.target) as blocking:
            assert not blocking.replicas().redis_connected
            await asyncio.to_thread(stack.redis.restart)
            await eventually(
                lambda: blocking.replicas().redis_connected and max(indexed(blocking).values()) > 0,
                timeout_s=10,
                what=lambda: f"router did not follow the journal: {indexed(blocking)}",
            )
    finally:
        stack.close()


async def test_a_full_queue_is_resource_exhausted_and_no_replica_is_unavailable_both_with_retry_info() -> None:
    stack = await asyncio.to_thread(
        start_stack,
        num_workers=1,
        worker_options=("--max-waiting", "2", "--max-running", "1", "--max-step-tokens", "64"),
        router_options=("--no-replica-wait-s", "0.5"),
    )
    try:
        async with AsyncClient(stack.target) as client:
            running = [asyncio.create_task(first_error(client)) for _ in range(12)]
            refused = [error for error in await asyncio.gather(*running) if error is not None]
            assert refused
            for error in refused:
                assert isinstance(error, Overloaded)
                assert error.retry_after_s
            stack.processes["worker-0"].kill()
            with Client(stack.target) as blocking:
                await eventually(lambda: num_ready(blocking) == 0, timeout_s=5, what=lambda: "still ready")
            unserved = await first_error(client)
            assert isinstance(unserved, NoReplica)
            assert unserved.retry_after_s
    finally:
        stack.close()


async def first_error(client: AsyncClient) -> OstryaError | None:
    """Runs a request of a second or so and gives the error it ended with."""
    try:
        await greedy(client, ESSAY, 24)
    except OstryaError as error:
        return error
    return None


def broken_models(directory: Path) -> dict[str, Path]:
    """What a worker must refuse: name -> path."""
    whole = resolve_model("smollm2-135m-instruct").path
    truncated = directory / "truncated.gguf"
    with whole.open("rb") as source:
        truncated.write_bytes(source.read(30_000_000))
    garbage = directory / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + bytes(range(256)) * 64)
    half = directory / "half"
    half.mkdir()
    (half / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return {"truncated": truncated, "garbage": garbage, "half": half, "missing": directory / "missing.gguf"}


@pytest.mark.parametrize("name", ["truncated", "garbage", "half", "missing"])
def test_a_broken_model_ends_the_worker_at_start_with_one_clear_line(name: str, tmp_path: Path) -> None:
    path = broken_models(tmp_path)[name]
    command = ("worker", "--worker-id", "w", "--model", str(path), "--redis-url", f"redis://127.0.0.1:{free_port()}/0")
    ended = subprocess.run(
        [sys.executable, "-m", "ostrya.cli.main", *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    complaints = [line for line in ended.stderr.splitlines() if str(path) in line or path.name in line]
    assert len(complaints) == 1, ended.stderr
