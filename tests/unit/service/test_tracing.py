"""The tracing seam alone: nothing without an endpoint, W3C context in and out, and collectors that are not there."""

import asyncio
import logging
import subprocess
import sys

import pytest

from ostrya.errors import ConfigError, NoReplica
from ostrya.service import tracing
from tests.fakes.otlp_collector import OtlpCollector
from tests.fakes.redis_server import free_port
from tests.fakes.waiting import Stopwatch, until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = ("traceparent", f"00-{TRACE_ID}-{CALLER}-01")
UNSAMPLED = ("traceparent", f"00-{TRACE_ID}-{CALLER}-00")
EXIT_LIMIT_S = 1.2
"""FLUSH_S and FAREWELL_S, and a scheduler's slack."""


def tracer_to(endpoint: str) -> tracing.Tracer:
    return tracing.start(endpoint, service="ostrya-router", instance="r0", pool="blue")


def test_without_an_endpoint_nothing_that_traces_is_even_imported() -> None:
    # Not all of opentelemetry: redis imports its metrics wherever they are installed.
    program = (
        "import sys; from ostrya.service import tracing; import ostrya.router.app, ostrya.worker.app;"
        "tracer = tracing.start('', service='s', instance='i', pool='p');"
        "span = tracer.request('a', None); assert span.child('b') is span and span.headers() is None;"
        "tracers = ('opentelemetry.sdk.trace', 'opentelemetry.exporter', 'ostrya.service.otel');"
        "print([name for name in sys.modules if name.startswith(tracers)])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_a_missing_extra_is_a_config_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ostrya.service.otel", None)
    with pytest.raises(ConfigError, match=r"ostrya\[tracing\]"):
        tracer_to("collector:4317")


@pytest.mark.parametrize("endpoint", ["collector", "collector:", "grpc://collector:4317", "a b:1", "http://c:4317/v1"])
def test_an_endpoint_that_cannot_be_one_is_a_config_error(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="host:port of a gRPC collector"):
        tracer_to(endpoint)


@pytest.mark.parametrize("endpoint", ["", "c:4317", "http://c:4317", "https://otel.example.org:443/", "[::1]:4317"])
def test_an_endpoint_that_can_be_one_is_no_problem(endpoint: str) -> None:
    assert tracing.problems(endpoint) == []


async def test_a_request_and_its_parts_arrive_as_one_tree() -> None:
    with OtlpCollector() as collector:
        tracer = tracer_to(collector.endpoint)
        with tracer.request("whole", None) as whole:
            whole.set({"ostrya.number": 3, "gen_ai.response.finish_reasons": ("stop",)})
            with whole.child("part", kind="client", attributes={"ostrya.attempt": 1}) as part:
                part.child("past", start_ns=1_000).end(3_000)
        await tracer.close()
    seen = collector.one("whole")
    assert (seen.parent_id, seen.error) == ("", "")
    assert seen.attributes == {"ostrya.number": 3, "gen_ai.response.finish_reasons": ["stop"]}
    assert collector.under(seen) == ["part"]
    assert collector.under(collector.one("part")) == ["past"]
    assert collector.one("past").duration_s == pytest.approx(2e-6)
    assert {span.trace_id for span in collector.spans} == {whole.trace_id}
    names = {"service.name": "ostrya-router", "service.instance.id": "r0", "ostrya.pool": "blue"}
    assert names.items() <= seen.resource.items()


async def test_the_context_of_a_caller_is_continued_and_handed_on() -> None:
    with OtlpCollector() as collector:
        tracer = tracer_to(collector.endpoint)
        with tracer.request("whole", [SAMPLED, ("tracestate", "vendor=1"), ("x-other", b"binary")]) as whole:
            handed = dict(whole.headers() or ())
        await tracer.close()
    seen = collector.one("whole")
    assert (seen.trace_id, seen.parent_id) == (TRACE_ID, CALLER)
    assert handed == {"traceparent": f"00-{TRACE_ID}-{seen.span_id}-01", "tracestate": "vendor=1"}


async def test_a_state_longer_than_a_header_to_a_worker_may_be_is_left_out() -> None:
    with OtlpCollector() as collector:
        tracer = tracer_to(collector.endpoint)
        with tracer.request("whole", [SAMPLED, ("tracestate", "vendor=" + "x" * 506)]) as whole:
            handed = dict(whole.headers() or ())
        await tracer.close()
    assert handed == {"traceparent": f"00-{TRACE_ID}-{collector.one('whole').span_id}-01"}


async def test_a_caller_that_does_not_sample_is_respected_and_others_still_hear_of_it() -> None:
    with OtlpCollector() as collector:
        tracer = tracer_to(collector.endpoint)
        with tracer.request("whole", [UNSAMPLED]) as whole, whole.child("part") as part:
            assert not part.is_recording
            handed = dict(part.headers() or ())["traceparent"]
        await tracer.close()
        assert isinstance(handed, str)
        assert handed.startswith(f"00-{TRACE_ID}-")
        assert handed.endswith("-00")
        assert whole.trace_id == TRACE_ID
        assert collector.spans == []


@pytest.mark.parametrize("broken", ["", "00-0-0-01", f"00-{'0' * 32}-{CALLER}-01", "ff-nonsense", "x" * 5000])
async def test_a_context_that_makes_no_sense_starts_a_trace_of_its_own(broken: str) -> None:
    with OtlpCollector() as collector:
        tracer = tracer_to(collector.endpoint)
        tracer.request("whole", [("traceparent", broken), ("traceparent-bin", b"\x00")]).end()
        await tracer.close()
    assert collector.one("whole").parent_id == ""


async def test_an_error_is_told_by_its_kind_alone_and_a_cancel_is_none() -> None:
    with OtlpCollector() as collector:
        tracer = tracer_to(collector.endpoint)
        with pytest.raises(NoReplica), tracer.request("failed", None):
            raise NoReplica("my secret prompt")
        with pytest.raises(asyncio.CancelledError), tracer.request("cancelled", None):
            raise asyncio.CancelledError
        await tracer.close()
    assert collector.one("failed").error == "NoReplica"
    assert collector.one("failed").attributes["error.type"] == "NoReplica"
    assert collector.one("cancelled").error == ""
    assert b"secret" not in collector.payload


async def test_long_attributes_are_cut() -> None:
    with OtlpCollector() as collector:
        tracer = tracer_to(collector.endpoint)
        with tracer.request("whole", None) as whole:
            whole.set({"ostrya.request_id": "x" * 10_000})
        await tracer.close()
    assert len(str(collector.one("whole").attributes["ostrya.request_id"])) == 256


async def test_an_absent_collector_delays_the_end_by_at_most_a_second_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    tracer = tracer_to(f"127.0.0.1:{free_port()}")
    for _ in range(5_000):  # more than the queue holds
        tracer.request("whole", None).end()
    watch = Stopwatch()
    await tracer.close()
    assert watch.seconds() < EXIT_LIMIT_S
    assert len(caplog.records) <= 1


async def test_each_change_of_the_collector_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from ostrya.service.otel import Exporter

    class Scripted(SpanExporter):
        results = [SpanExportResult.FAILURE] * 3 + [SpanExportResult.SUCCESS] * 3 + [SpanExportResult.FAILURE]

        def export(self, spans: object) -> SpanExportResult:
            return self.results.pop(0)

    caplog.set_level(logging.INFO)
    exporter = Exporter(Scripted(), "collector:4317")
    while Scripted.results:
        exporter.export([])
    lost, sent = "traces are lost: the collector does not take them", "traces are exported"
    assert [record.getMessage() for record in caplog.records] == [lost, sent, lost]
    exporter.stop()
    exporter.stop()
    assert exporter.export([]) is SpanExportResult.FAILURE


async def test_spans_leave_while_the_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with OtlpCollector() as collector:
        tracer = tracer_to(f"http://{collector.endpoint}")
        tracer.request("whole", None).end()
        await until(lambda: collector.spans)
        await tracer.close()
