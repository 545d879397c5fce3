"""The faults table on the real stack: queues are full, clients go away, models are broken; nothing is lost.

A killed worker, and a Redis that is killed and comes back empty: `ostrya up --check`, run by test_up.py.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from ostrya.client import AsyncClient, Client
from ostrya.errors import DeadlineExceeded, NoReplica, OstryaError, Overloaded
from ostrya.text.source import resolve_model
from tests.fakes.redis_server import free_port
from tests.fakes.waiting import Stopwatch
from tests.integration.stack import RunningStack, eventually, start_stack

ESSAY = "Write a long essay about the sea. " * 8


async def greedy(client: AsyncClient, prompt: str, max_tokens: int = 24) -> tuple[int, ...]:
    """The tokens of one greedy answer that does not stop early."""
    async with client.generate(text=prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True) as stream:
        return tuple([token async for chunk in stream for token in chunk.token_ids])


def indexed(client: Client) -> dict[str, int]:
    return {replica.worker_id: replica.indexed_blocks for replica in client.replicas().replicas}


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
