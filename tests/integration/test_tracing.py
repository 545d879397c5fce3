"""Traces over real sockets: one tree from the router to the engine's step, in a collector that keeps what it gets."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import DEVNULL, Popen

import grpc
import msgspec
import pytest

from ostrya.api.v1 import inference_pb2, inference_pb2_grpc
from ostrya.client import AsyncClient, Client
from ostrya.engine.config import EngineConfig
from ostrya.router.app import Router
from ostrya.router.settings import RouterSettings
from ostrya.service.server import channel
from ostrya.worker.settings import WorkerSettings
from tests.fakes.otlp_collector import OtlpCollector
from tests.fakes.redis_server import free_port
from tests.fakes.tokenizer import byte_tokenizer
from tests.fakes.waiting import Stopwatch, until
from tests.fakes.worker import Behaviour, Gate
from tests.integration.bed import Params, Request, bed, saying

TOKENIZER = byte_tokenizer()
NO_REDIS = "redis://127.0.0.1:1/0"
SECRET = "xylophonequartz"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
EXIT_LIMIT_S = 2.5
"""A second for traces; the rest is the farewell, the metrics endpoint and the engine's process."""
READY_S = 90.0
CLOCK_SLACK_NS = 20_000_000
"""Spans of two processes, and times read in one and written in another."""

ATTRIBUTES = {
    "error.type",
    "gen_ai.request.max_tokens",
    "gen_ai.request.model",
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "ostrya.attempt",
    "ostrya.decision.id",
    "ostrya.decision.reason",
    "ostrya.ending",
    "ostrya.engine.batch_size",
    "ostrya.engine.first_step",
    "ostrya.engine.last_step",
    "ostrya.engine.mean_batch_size",
    "ostrya.engine.slowest_step_s",
    "ostrya.engine.step",
    "ostrya.engine.steps",
    "ostrya.outcome",
    "ostrya.predicted_cached_tokens",
    "ostrya.replicas_excluded",
    "ostrya.request_id",
    "ostrya.time_to_first_token_s",
    "ostrya.worker.id",
    "rpc.grpc.status_code",
    "rpc.method",
    "rpc.service",
    "rpc.system",
}
"""Every attribute there is; docs/metrics.md names them too. What is not here is not written."""


@dataclass(slots=True)
class WorkerProcess:
    """A real worker with the fake runner."""

    address: str
    log: Path
    process: Popen[bytes]

    def stop(self) -> float:
        """SIGTERM; the seconds until its end."""
        watch = Stopwatch(self.process.pid)
        self.process.terminate()
        took_s = watch.until_ended(self.process.pid)
        assert self.process.wait() == 0
        return took_s


@contextmanager
def worker_process(tmp_path: Path, *, otlp_endpoint: str) -> Iterator[WorkerProcess]:
    port, log = free_port(), tmp_path / "worker.log"
    settings = WorkerSettings(worker_id="w-0", port=port, redis_url=NO_REDIS, otlp_endpoint=otlp_endpoint)
    config = EngineConfig(
        model_path="/", model_name="tiny", tokenizer_fingerprint=TOKENIZER.fingerprint, num_pages=257, page_size=4
    )
    arguments = (msgspec.json.encode(settings), msgspec.json.encode(config), b"tests.fakes.runner:load_paced_runner")
    with log.open("wb") as stderr:
        command = [sys.executable, "-m", "tests.fakes.worker_process", *(one.decode() for one in arguments)]
        process = Popen(command, stdin=DEVNULL, stderr=stderr)
    try:
        yield WorkerProcess(f"127.0.0.1:{port}", log, process)
    finally:
        process.kill()
        process.wait(30)


@asynccontextmanager
async def router_for(address: str, *, otlp_endpoint: str, wait_s: float = READY_S) -> AsyncIterator[Router]:
    settings = RouterSettings(
        port=0,
        redis_url=NO_REDIS,
        static_workers=(address,),
        no_replica_wait_s=wait_s,
        drain_timeout_s=1.0,
        otlp_endpoint=otlp_endpoint,
    )
    router = Router(settings, name="tiny", tokenizer=TOKENIZER)
    async with router.serving():
        yield router


async def ask(router: Router, request: Request, *metadata: tuple[str, str]) -> list[inference_pb2.GenerateResponse]:
    async with channel(f"127.0.0.1:{router.port}", max_message_bytes=1 << 20) as open_channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(open_channel)
        return [one async for one in stub.Generate(request, timeout=READY_S, metadata=metadata)]


def parent(flags: str) -> tuple[str, str]:
    return ("traceparent", f"00-{TRACE_ID}-{CALLER}-{flags}")


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as running:
        yield running


async def test_one_trace_leads_from_the_caller_through_router_and_worker_to_the_step(
    tmp_path: Path, collector: OtlpCollector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    request = Request(
        text=f"{SECRET} {SECRET}", request_id="mine", sampling=Params(max_tokens=5, temperature=0, ignore_eos=True)
    )
    with worker_process(tmp_path, otlp_endpoint=collector.endpoint) as worker:
        async with router_for(worker.address, otlp_endpoint=collector.endpoint) as router:
            responses = await ask(router, request, parent("01"), ("tracestate", "vendor=1"))
        assert await asyncio.to_thread(worker.stop) < EXIT_LIMIT_S
        log = worker.log.read_text()

    root, attempt = collector.one("ostrya.generate"), collector.one("ostrya.try")
    served, prefill = collector.one("ostrya.worker.generate"), collector.one("engine.prefill")
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    assert root.parent_id == CALLER
    assert [name for name in collector.under(root) if name != "ostrya.queue"] == ["ostrya.tokenize", "ostrya.try"]
    assert collector.under(attempt) == ["ostrya.worker.generate"]
    assert collector.under(served) == ["engine.queue", "engine.prefill", "engine.decode"]
    assert collector.under(prefill) == ["engine.step"]
    assert served.raw.trace_state == "vendor=1"
    assert [root.raw.kind, attempt.raw.kind, served.raw.kind] == [2, 3, 2], "server, client, server"
    assert (root.resource["service.name"], served.resource["service.name"]) == ("ostrya-router", "ostrya-worker")
    assert (served.resource["service.instance.id"], served.resource["ostrya.pool"]) == ("w-0", "default")

    num_prompt = len(f"{SECRET} {SECRET}")
    assert {
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": 5,
        "rpc.grpc.status_code": 0,
        "ostrya.request_id": "mine",
        "ostrya.worker.id": "w-0",
    }.items() <= root.attributes.items()
    assert {
        "ostrya.worker.id": "w-0",
        "ostrya.decision.id": responses[0].decision_id,
        "ostrya.attempt": 1,
        "ostrya.outcome": "answered",
        "ostrya.predicted_cached_tokens": 0,
    }.items() <= attempt.attributes.items()
    assert {"gen_ai.usage.input_tokens": num_prompt, "ostrya.ending": "length"}.items() <= served.attributes.items()
    decode = collector.one("engine.decode").attributes
    first, last = decode["ostrya.engine.first_step"], decode["ostrya.engine.last_step"]
    assert isinstance(first, int)
    assert (decode["ostrya.engine.steps"], last) == (4, first + 3)
    assert collector.one("engine.step").attributes == {"ostrya.engine.step": first - 1, "ostrya.engine.batch_size": 1}

    by_id = {span.span_id: span for span in collector.spans}
    for span in collector.spans:
        assert span.error == ""
        if span.parent_id in by_id:
            above = by_id[span.parent_id].raw
            assert above.start_time_unix_nano - CLOCK_SLACK_NS <= span.raw.start_time_unix_nano, span.name
            assert span.raw.end_time_unix_nano <= above.end_time_unix_nano + CLOCK_SLACK_NS, span.name
    assert {key for span in collector.spans for key in span.attributes} <= ATTRIBUTES
    assert SECRET.encode() not in collector.payload
    assert TRACE_ID in log, "the worker's log line joins the trace"
    (line,) = [record for record in caplog.records if record.getMessage() == "request ended"]
    assert vars(line)["fields"]["trace_id"] == TRACE_ID


async def test_a_continued_answer_shows_both_tries_in_one_trace(collector: OtlpCollector) -> None:
    settings = RouterSettings(otlp_endpoint=collector.endpoint)
    behaviours = [Behaviour(num_tokens=50, breaks_after_tokens=7) for _ in range(2)]
    async with bed(*behaviours, settings=settings) as stand:
        for worker in stand.workers:
            worker.first_token.close()
        asking = asyncio.create_task(stand.ask(Request(text="Why?", sampling=Params(seed=1, max_tokens=20))))
        await until(lambda: any(worker.record.requests for worker in stand.workers))
        (healthy,) = [worker for worker in stand.workers if not worker.record.requests]
        healthy.behaviour.breaks_after_tokens = None
        for worker in stand.workers:
            worker.first_token.open()
        await asking
    first, second = collector.named("ostrya.try")
    root = collector.one("ostrya.generate")
    assert collector.under(root) == ["ostrya.tokenize", "ostrya.try", "ostrya.try"]
    assert [one.attributes["ostrya.attempt"] for one in (first, second)] == [1, 2]
    assert [one.attributes["ostrya.outcome"] for one in (first, second)] == ["failed", "answered"]
    assert [one.attributes["gen_ai.usage.output_tokens"] for one in (first, second)] == [7, 13]
    assert [one.error for one in (first, second, root)] == ["Unavailable", "", ""]
    assert first.attributes["ostrya.worker.id"] != second.attributes["ostrya.worker.id"]


async def test_waiting_for_a_replica_is_a_part_and_giving_up_an_error(collector: OtlpCollector) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    async with router_for(nowhere, otlp_endpoint=collector.endpoint, wait_s=0.2) as router:
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(router, Request(text=SECRET))
    root = collector.one("ostrya.generate")
    assert collector.under(root) == ["ostrya.tokenize", "ostrya.queue"]
    assert collector.one("ostrya.queue").duration_s == pytest.approx(0.2, abs=0.1)
    assert (root.error, root.attributes["rpc.grpc.status_code"]) == ("NoReplica", 14)
    assert SECRET.encode() not in collector.payload


async def test_bad_input_is_an_error_by_its_kind_without_the_input(collector: OtlpCollector) -> None:
    async with bed(saying("ok"), settings=RouterSettings(otlp_endpoint=collector.endpoint)) as stand:
        with pytest.raises(grpc.aio.AioRpcError):
            await stand.ask(Request(text="a", model=SECRET))
    assert collector.one("ostrya.generate").error == "UnknownModel"
    assert SECRET.encode() not in collector.payload


async def test_a_stop_string_closes_the_try_and_is_no_error(collector: OtlpCollector) -> None:
    async with bed(saying("one STOP two"), settings=RouterSettings(otlp_endpoint=collector.endpoint)) as stand:
        await stand.ask(Request(text="a", stop=["STOP"]))
    attempt, root = collector.one("ostrya.try"), collector.one("ostrya.generate")
    assert (attempt.attributes["ostrya.outcome"], attempt.error, root.error) == ("closed", "", "")


@pytest.mark.parametrize(("ending", "code", "error"), [("cancel", 1, ""), ("deadline", 4, "DeadlineExceeded")])
async def test_how_a_client_ended_it_is_told(collector: OtlpCollector, ending: str, code: int, error: str) -> None:
    async with bed(saying("hm"), settings=RouterSettings(otlp_endpoint=collector.endpoint)) as stand:
        stand.workers[0].first_token = closed = Gate()
        closed.close()
        asking = asyncio.create_task(stand.ask(Request(text="a"), timeout_s=0.3 if ending == "deadline" else 10))
        await stand.workers[0].until(lambda one: len(one.record.requests) == 1)
        if ending == "cancel":
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await stand.idle()
    root = collector.one("ostrya.generate")
    assert (root.attributes["rpc.grpc.status_code"], root.error) == (code, error)
    assert collector.one("ostrya.try").attributes["ostrya.outcome"] in ("closed", "failed")


async def test_a_cancel_in_the_middle_closes_every_span_down_to_the_engine(
    tmp_path: Path, collector: OtlpCollector
) -> None:
    request = Request(text="a", sampling=Params(max_tokens=1000, ignore_eos=True))
    with worker_process(tmp_path, otlp_endpoint=collector.endpoint) as worker:
        async with (
            router_for(worker.address, otlp_endpoint=collector.endpoint) as router,
            channel(f"127.0.0.1:{router.port}", max_message_bytes=1 << 20) as open_channel,
        ):
            call = inference_pb2_grpc.InferenceServiceStub(open_channel).Generate(request, timeout=READY_S)
            async for _ in call:
                call.cancel()
                break
            await until(lambda: not router.admission.in_flight)
        await asyncio.to_thread(worker.stop)
    root, served = collector.one("ostrya.generate"), collector.one("ostrya.worker.generate")
    assert (root.attributes["rpc.grpc.status_code"], root.error, served.error) == (1, "", "")
    assert served.attributes["ostrya.ending"] == "client"
    assert collector.under(served)[:2] == ["engine.queue", "engine.prefill"]
    assert collector.one("ostrya.try").attributes["ostrya.outcome"] == "closed"


async def test_a_caller_that_does_not_sample_is_left_alone_by_router_and_worker(
    tmp_path: Path, collector: OtlpCollector
) -> None:
    with worker_process(tmp_path, otlp_endpoint=collector.endpoint) as worker:
        async with router_for(worker.address, otlp_endpoint=collector.endpoint) as router:
            await ask(router, Request(text="a", sampling=Params(max_tokens=2)), parent("00"))
            assert collector.spans == []
            await ask(router, Request(text="a", sampling=Params(max_tokens=2)))
        await asyncio.to_thread(worker.stop)
    assert TRACE_ID not in {span.trace_id for span in collector.spans}
    assert len(collector.named("ostrya.generate")) == len(collector.named("ostrya.worker.generate")) == 1


async def test_the_python_clients_hand_the_callers_context_on(collector: OtlpCollector) -> None:
    async with bed(saying("ok"), settings=RouterSettings(otlp_endpoint=collector.endpoint)) as stand:
        target = f"127.0.0.1:{stand.router.port}"
        async with AsyncClient(target) as client:
            await client.generate("a", metadata=[parent("01")]).read()
        with Client(target) as blocking:
            await asyncio.to_thread(lambda: blocking.generate("a", metadata=[parent("01")]).read())
    assert [span.parent_id for span in collector.named("ostrya.generate")] == [CALLER, CALLER]


async def test_an_absent_collector_costs_spans_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    caplog.set_level(logging.INFO)
    with worker_process(tmp_path, otlp_endpoint=nowhere) as worker:
        async with router_for(worker.address, otlp_endpoint=nowhere) as router:
            for _ in range(20):
                await ask(router, Request(text="a", sampling=Params(max_tokens=2)))
            watch = Stopwatch()
        assert watch.seconds() < EXIT_LIMIT_S
        assert await asyncio.to_thread(worker.stop) < EXIT_LIMIT_S
        lines = worker.log.read_text().splitlines()
    about = [record.getMessage() for record in caplog.records] + lines
    assert sum("traces" in one for one in about) <= 2, "one line a process"
    assert not any("opentelemetry" in one for one in about)


async def test_spans_of_many_requests_at_once_do_not_mix(collector: OtlpCollector) -> None:
    settings = RouterSettings(otlp_endpoint=collector.endpoint)
    async with bed(saying("ok"), replace(saying("ok"), cached_tokens=3), settings=settings) as stand:
        await asyncio.gather(*(stand.ask(Request(text=f"prompt {number}")) for number in range(40)))
    roots = {span.span_id: span.trace_id for span in collector.named("ostrya.generate")}
    assert len(set(roots.values())) == 40
    assert all(roots[one.parent_id] == one.trace_id for one in collector.named("ostrya.try"))
    assert len(collector.named("ostrya.try")) == 40
