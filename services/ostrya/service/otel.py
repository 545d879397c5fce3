"""The seam of tracing.py over OpenTelemetry's SDK: spans go to an OTLP gRPC collector, in batches, from a thread.

Imported by tracing.start alone, and only with an endpoint. The SDK's own settings apply where ours are silent:
OTEL_TRACES_SAMPLER (every request unless the caller decided, as an endpoint is set by who wants to see), OTEL_BSP_*
(2048 spans wait at most), OTEL_EXPORTER_OTLP_HEADERS and _CERTIFICATE. A collector that is not there costs spans only.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import Thread
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ostrya.service.tracing import NO_ATTRIBUTES, Attributes, Kind, Metadata, Span

log = logging.getLogger(__name__)

EXPORT_S = 5.0
"""For one batch, tries included."""
FLUSH_S = 0.8
"""For the last batch, when a process ends; SIGTERM must not wait longer for a collector."""
FAREWELL_S = 0.2
"""For the exporter to notice that it was stopped."""
MAX_ATTRIBUTE_CHARS = 256
_MAX_CONTEXT_CHARS = 512
"""Of traceparent and tracestate each, as W3C asks for at least; what is longer is not passed on, since with it a call
to a worker could have more headers than gRPC takes."""

_KINDS: dict[Kind, trace.SpanKind] = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_W3C = TraceContextTextMapPropagator()


class OtelTracer:
    """A Tracer. Its threads are daemons: they never hold a process that wants to end."""

    def __init__(self, endpoint: str, *, service: str, instance: str, pool: str) -> None:
        # The SDK's lines come per try and quote the collector; Exporter says what changed, once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        is_plain = not endpoint.startswith("https://")
        self._exporter = Exporter(OTLPSpanExporter(endpoint=endpoint, insecure=is_plain, timeout=EXPORT_S), endpoint)
        names = {"service.name": service, "service.instance.id": instance, "ostrya.pool": pool}
        self._provider = TracerProvider(
            resource=Resource.create(names),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE_CHARS),
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("ostrya")

    def request(self, name: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Span:
        carrier = {
            key: value
            for key, value in metadata or ()
            if key in _W3C.fields and isinstance(value, str) and len(value) <= _MAX_CONTEXT_CHARS
        }
        context = _W3C.extract(carrier, context=Context())
        return OtelSpan(self._tracer, self._tracer.start_span(name, context, trace.SpanKind.SERVER))

    async def close(self) -> None:
        flushed, loop = asyncio.Event(), asyncio.get_running_loop()

        def flush() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop did not wait
                loop.call_soon_threadsafe(flushed.set)

        Thread(target=flush, name="trace-flush", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if self._exporter.is_up is False else FLUSH_S):
                await flushed.wait()
        self._exporter.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await flushed.wait()


class OtelSpan:
    """A Span."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer, self._span = tracer, span

    @property
    def trace_id(self) -> str:
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def child(
        self,
        name: str,
        *,
        kind: Kind = "internal",
        attributes: Attributes = NO_ATTRIBUTES,
        start_ns: int | None = None,
    ) -> Span:
        parent = trace.set_span_in_context(self._span, Context())
        started = self._tracer.start_span(name, parent, _KINDS[kind], attributes, start_time=start_ns)
        return OtelSpan(self._tracer, started)

    def headers(self) -> Metadata:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return tuple(carrier.items())

    def failed(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(trace.StatusCode.ERROR, kind)

    def end(self, end_ns: int | None = None) -> None:
        self._span.end(end_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A cancel and a closed generator are ends, not errors.
        if isinstance(error, Exception):
            self.failed(type(error).__name__)
        self.end()


class Exporter(SpanExporter):
    """Passes batches on and says once when that begins to fail or to work."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter, self._endpoint = exporter, endpoint
        self._is_stopped = False
        self.is_up: bool | None = None
        """None until a batch was sent or lost."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE if self._is_stopped else self._exporter.export(spans)
        is_up = result is SpanExportResult.SUCCESS
        if is_up is not self.is_up and not self._is_stopped:
            self.is_up = is_up
            fields = {"endpoint": self._endpoint}
            if is_up:
                log.info("traces are exported", extra={"fields": fields})
            else:
                log.warning("traces are lost: the collector does not take them", extra={"fields": fields})
        return result

    def stop(self) -> None:
        """Ends a batch that is on its way. A second call does nothing."""
        if not self._is_stopped:
            self._is_stopped = True
            self._exporter.shutdown()

    def shutdown(self) -> None:
        self.stop()
