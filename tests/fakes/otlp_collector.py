"""An OTLP gRPC collector on a free port of 127.0.0.1 that keeps every span it gets."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True, slots=True)
class Seen:
    """One span as it arrived."""

    raw: Span
    resource: dict[str, object]
    attributes: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", plain(self.raw.attributes))

    @property
    def name(self) -> str:
        return self.raw.name

    @property
    def trace_id(self) -> str:
        return self.raw.trace_id.hex()

    @property
    def span_id(self) -> str:
        return self.raw.span_id.hex()

    @property
    def parent_id(self) -> str:
        return self.raw.parent_span_id.hex()

    @property
    def error(self) -> str:
        """The kind of its error; empty when it has none."""
        return self.raw.status.message if self.raw.status.code == self.raw.status.STATUS_CODE_ERROR else ""

    @property
    def duration_s(self) -> float:
        return (self.raw.end_time_unix_nano - self.raw.start_time_unix_nano) / 1e9


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Use it as a context manager; `endpoint` is host:port."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.payload = b""
        """Everything received, as it was on the wire."""
        self._threads = ThreadPoolExecutor(max_workers=2)
        self._server = grpc.server(self._threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        self._threads.shutdown()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.payload += request.SerializeToString()
        for group in request.resource_spans:
            resource = plain(group.resource.attributes)
            self.spans += [Seen(span, resource) for scope in group.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Seen]:
        """Spans of that name, first started first."""
        found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.raw.start_time_unix_nano)

    def one(self, name: str) -> Seen:
        """The only span of that name."""
        (found,) = self.named(name)
        return found

    def under(self, parent: Seen) -> list[str]:
        """Names of a span's children, in the order in which they began."""
        children = [span for span in self.spans if span.parent_id == parent.span_id]
        return [span.name for span in sorted(children, key=lambda span: span.raw.start_time_unix_nano)]

    def wait_for(self, condition: Callable[[], object], *, timeout_s: float = 15.0) -> None:
        """Returns when `condition()` holds; for tests without an event loop."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"got only {[span.name for span in self.spans]}"
            time.sleep(0.02)


def plain(attributes: Iterable[KeyValue]) -> dict[str, object]:
    """Attributes as Python values."""
    return {one.key: _value(one.value) for one in attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
