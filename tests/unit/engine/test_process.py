"""The engine process over a real socket, with a fake runner in a real child."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from re import fullmatch

import pytest
from msgspec.structs import replace

from ostrya.engine.config import EngineConfig
from ostrya.engine.process import EngineProcess
from ostrya.engine.types import (
    EngineRequest,
    FinishReason,
    Grammar,
    RequestId,
    Sampling,
    SequenceOutput,
    Shape,
    StepReport,
)
from ostrya.errors import ConfigError, EngineDied, InvalidRequest, ModelLoadError, Overloaded, Unavailable
from tests.fakes.waiting import Stopwatch

CONFIG = EngineConfig(
    model_path="/", model_name="fake", tokenizer_fingerprint="t", num_pages=257, page_size=4, max_running=4
)
FAKES = "tests.fakes.runner"


def request(request_id: str = "r", *, prompt: int = 10, max_tokens: int = 5) -> EngineRequest:
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=RequestId(request_id), token_ids=list(range(prompt)), sampling=sampling)


@asynccontextmanager
async def engine(factory: str = "load_runner", *, max_waiting: int = 8) -> AsyncIterator[EngineProcess]:
    process = await EngineProcess.start(CONFIG, factory=f"{FAKES}:{factory}", max_waiting=max_waiting, timeout_s=30)
    try:
        yield process
    finally:
        await process.close()


async def outputs_of(process: EngineProcess, asked: EngineRequest) -> list[SequenceOutput]:
    return [output async for output in process.submit(asked)]


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition changes in another process
            await asyncio.sleep(0.005)


def first_of(process: EngineProcess, asked: EngineRequest) -> Awaitable[SequenceOutput]:
    return anext(process.submit(asked))


async def test_request_streams_its_tokens_and_ends_with_a_reason() -> None:
    async with engine() as process:
        outputs = await outputs_of(process, request(max_tokens=30))
        assert sum(len(output.token_ids) for output in outputs) == 30
        assert [output.finish_reason for output in outputs][-1] == FinishReason.LENGTH
        assert process.num_open == 0
        assert (process.info.page_size, process.info.context_tokens, process.info.load_s) == (4, 1024, 0.25)


async def test_many_requests_at_once_get_their_own_tokens() -> None:
    async with engine() as process:
        alone = [await outputs_of(process, request(f"a{n}", prompt=n)) for n in range(1, 9)]
        together = await asyncio.gather(*(outputs_of(process, request(f"b{n}", prompt=n)) for n in range(1, 9)))
    tokens = [[[t for output in answer for t in output.token_ids] for answer in run] for run in (alone, together)]
    assert tokens[0] == tokens[1]


def structured(text: str, *, request_id: str = "r") -> EngineRequest:
    plain = request(request_id, max_tokens=40)
    sampling = replace(plain.sampling, grammar=Grammar(kind="regex", text=text))
    return replace(plain, sampling=sampling)


def letters() -> list[bytes]:
    """A vocabulary of the fake model's size."""
    return [bytes([number % 256]) if number < 256 else b"" for number in range(1000)]


async def test_a_grammar_is_compiled_in_the_child_and_forms_the_answer() -> None:
    process = await EngineProcess.start(CONFIG, factory=f"{FAKES}:load_runner", vocabulary=letters, timeout_s=30)
    try:
        outputs = await outputs_of(process, structured("[a-f]{20}!"))
        text = bytes(token_id for output in outputs for token_id in output.token_ids)
        assert fullmatch(rb"[a-f]{20}!", text)
        assert outputs[-1].finish_reason == FinishReason.STOP
        with pytest.raises(InvalidRequest, match="unclosed group") as caught:
            await outputs_of(process, structured("(a"))
        assert caught.value.field == "sampling.structured.regex"
        assert process.num_open == 0
        reading = asyncio.create_task(outputs_of(process, structured("[a-f]*", request_id="gone")))
        await asyncio.sleep(0)
        assert process.num_open == 1
        reading.cancel()
        await asyncio.wait([reading])
        assert len(await outputs_of(process, request())) >= 1
        await until(lambda: process.load.num_running == process.load.num_waiting == 0)
    finally:
        await process.close()


async def test_without_a_vocabulary_a_grammar_is_refused_in_words() -> None:
    async with engine() as process:
        with pytest.raises(InvalidRequest, match="started without a vocabulary"):
            await outputs_of(process, structured("a"))


async def test_full_queue_refuses_with_a_time_to_retry() -> None:
    async with engine("load_paced_runner", max_waiting=1) as process:
        tasks = [asyncio.create_task(outputs_of(process, request(f"{n}", max_tokens=50))) for n in range(5)]
        await until(lambda: process.num_open == 5)
        with pytest.raises(Overloaded, match="5 requests are open") as caught:
            await first_of(process, request("one more"))
        assert 0.1 <= caught.value.retry_after_s <= 10
        await asyncio.gather(*tasks)


async def test_request_that_cannot_fit_is_refused_by_the_child() -> None:
    async with engine() as process:
        with pytest.raises(InvalidRequest, match=r"10 \+ 5000 tokens; allowed: .* at most 1024") as caught:
            await outputs_of(process, request(max_tokens=5000))
        assert caught.value.field == "prompt + max_tokens"
        assert len(await outputs_of(process, request())) >= 1


async def test_closed_iteration_frees_pages_within_100_ms() -> None:
    async with engine("load_paced_runner") as process:
        async with aclosing(process.submit(request(max_tokens=900))) as outputs:
            await anext(outputs)
        watch = Stopwatch(process.pid)
        await until(lambda: process.load.num_running == 0)
        assert watch.seconds() < 0.1
        assert process.load.free_pages + process.load.reusable_pages == process.load.total_pages


async def test_cancelled_consumer_aborts_even_during_a_long_step() -> None:
    async with engine("load_slow_runner") as process:
        task = asyncio.create_task(outputs_of(process, request()))
        await until(lambda: process.load.num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        watch = Stopwatch(process.pid)
        await until(lambda: process.load.num_running == 0)
        assert watch.seconds() < 0.25  # told by the next heartbeat, not by the end of the step
        assert process.num_open == 0


async def test_aborted_request_raises_what_the_abort_was_given() -> None:
    async with engine("load_paced_runner") as process:
        task = asyncio.create_task(outputs_of(process, request(max_tokens=900)))
        await until(lambda: process.load.num_running == 1)
        process.abort(RequestId("r"), Unavailable("draining"))
        with pytest.raises(Unavailable, match="draining"):
            await task


async def test_heartbeats_come_while_idle_and_during_long_steps() -> None:
    times_s: list[float] = []
    async with engine("load_slow_runner") as process:
        watch = Stopwatch(process.pid)
        process.listen(lambda _: times_s.append(watch.seconds()))
        await until(lambda: len(times_s) > 4)
        await outputs_of(process, request(max_tokens=1))
        await until(lambda: process.load.num_steps == 1)
    assert max(later - earlier for earlier, later in pairwise(times_s)) < 0.25


async def test_killed_child_fails_its_requests_within_2_s() -> None:
    async with engine("load_paced_runner") as process:
        task = asyncio.create_task(outputs_of(process, request(max_tokens=900)))
        await until(lambda: process.load.num_running == 1)
        watch = Stopwatch()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="signal 9"):
            await task
        assert watch.seconds() < 2
        assert "signal 9" in await process.dead
        with pytest.raises(EngineDied):
            await first_of(process, request())


async def test_failing_step_ends_the_child_and_its_requests() -> None:
    async with engine("load_breaking_runner") as process:
        with pytest.raises(EngineDied, match="exit code 1"):
            await outputs_of(process, request())


async def test_model_that_cannot_load_is_one_clear_line() -> None:
    with pytest.raises(ModelLoadError) as caught:
        await EngineProcess.start(CONFIG, factory=f"{FAKES}:refuse_to_load")
    assert str(caught.value) == "/ is cut short: 12 of 40 bytes; fetch it again"


async def test_child_that_exits_while_loading_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match="code 3 before it was ready"):
        await EngineProcess.start(CONFIG, factory=f"{FAKES}:exit_while_loading")


async def test_bad_settings_are_told_by_start() -> None:
    config = EngineConfig(model_path="/nowhere", model_name="x", tokenizer_fingerprint="t")
    with pytest.raises((ConfigError, ModelLoadError), match="/nowhere does not exist"):
        await EngineProcess.start(config, factory=f"{FAKES}:load_runner")


async def test_child_ends_by_itself_when_its_parent_is_gone() -> None:
    async with engine("load_slow_runner") as process:
        pid = process.pid
        process._writer.transport.abort()  # what the kernel does to a killed parent's socket
        await until(lambda: process.dead.done())
        assert process.dead.result() == "engine process ended (exit code 0)"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_stopped_child_that_is_killed_fails_its_requests_at_once_and_is_heard_no_more() -> None:
    reports: list[StepReport] = []
    async with engine("load_paced_runner") as process:
        task = asyncio.create_task(outputs_of(process, request(max_tokens=900)))
        await until(lambda: process.load.num_running == 1)
        os.kill(process.pid, signal.SIGSTOP)
        process.listen(reports.append)
        process.kill("it hangs")
        with pytest.raises(EngineDied, match=r"^it hangs$"):
            await task
        with pytest.raises(EngineDied, match="it hangs"):
            await first_of(process, request())
        assert await process.dead == "it hangs (signal 9)"
        assert process.is_gone
        process.kill("again")
    assert reports == []


async def test_a_stopped_child_does_not_hold_up_the_end_with_what_it_never_read() -> None:
    async with engine() as process:
        os.kill(process.pid, signal.SIGSTOP)
        task = asyncio.ensure_future(first_of(process, request(prompt=1_000_000)))
        await until(lambda: process._writer.transport.get_write_buffer_size() > 0)
        async with asyncio.timeout(10):
            await process.close()
        assert process.dead.result() == "engine process ended (signal 9)"
        with pytest.raises(EngineDied):
            await task


async def test_heartbeats_say_which_step_runs() -> None:
    shapes: set[Shape | None] = set()
    async with engine("load_slow_runner") as process:
        process.listen(lambda report: shapes.add(report.shape))
        await outputs_of(process, request(max_tokens=2))
        await until(lambda: None in shapes)
    assert {shape.tokens for shape in shapes if shape} == {16, 4}  # the prompt's step and the decode step
