"""The seam for traces: what routers and workers say about a request, whoever listens. Here nobody does.

Spans are passed along as arguments, never found in an ambient context. Only `start` with an endpoint imports
OpenTelemetry (service/otel.py). Attributes are names, counts and times; never a prompt, an answer or a token id.
"""

import re
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias

from ostrya.errors import ConfigError

Value: TypeAlias = str | bool | int | float | tuple[str, ...]
Attributes: TypeAlias = Mapping[str, Value]
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
Kind: TypeAlias = Literal["internal", "server", "client"]

NO_ATTRIBUTES: Attributes = {}
_ENDPOINT = re.compile(r"(https?://)?(\[[0-9a-fA-F:.]+\]|[^\s/:@\[\]]+):\d{1,5}/?")


class Span(Protocol):
    """One piece of work. As a context manager it ends with its block; an exception becomes its error."""

    @property
    def trace_id(self) -> str:
        """32 hex digits; empty without tracing."""

    @property
    def is_recording(self) -> bool:
        """False where what is told to it reaches nobody."""

    def set(self, attributes: Attributes) -> None:
        """Adds or replaces attributes."""

    def child(
        self,
        name: str,
        *,
        kind: Kind = "internal",
        attributes: Attributes = NO_ATTRIBUTES,
        start_ns: int | None = None,
    ) -> "Span":
        """A part of this work, from now or from `start_ns` (Unix time) on. Whoever asked for it ends it."""

    def headers(self) -> Metadata | None:
        """Metadata that makes another process's work a part of this."""

    def failed(self, kind: str) -> None:
        """It went wrong; `kind` names the error, and its text stays out, as it may quote a request."""

    def end(self, end_ns: int | None = None) -> None:
        """It is over, now or at `end_ns` (Unix time)."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    """Where a process's spans come from."""

    def request(self, name: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Span:
        """A call that was received: a part of the caller's trace if W3C context came along, else its own."""

    async def close(self) -> None:
        """Sends what is left, within a second; the rest is lost."""


class NoSpan:
    """Tells nobody."""

    __slots__ = ()
    trace_id = ""
    is_recording = False

    def set(self, attributes: Attributes) -> None: ...

    def child(
        self,
        name: str,
        *,
        kind: Kind = "internal",
        attributes: Attributes = NO_ATTRIBUTES,
        start_ns: int | None = None,
    ) -> Span:
        return self

    def headers(self) -> None:
        return None

    def failed(self, kind: str) -> None: ...

    def end(self, end_ns: int | None = None) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


NO_SPAN: Span = NoSpan()


class NoTracer:
    """What there is without an endpoint."""

    def request(self, name: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Span:
        return NO_SPAN

    async def close(self) -> None: ...


NO_TRACER: Tracer = NoTracer()


def problems(endpoint: str) -> list[str]:
    """What is wrong with a setting `otlp_endpoint`, for ConfigError to show with the others."""
    if endpoint and not _ENDPOINT.fullmatch(endpoint):
        return [
            f"otlp_endpoint is {endpoint!r}; it must be host:port of a gRPC collector, or https://host:port for TLS"
        ]
    try:
        if endpoint:
            import ostrya.service.otel  # noqa: F401 - only whether it can be
    except ImportError as error:
        return [f"otlp_endpoint is {endpoint!r}, but {error.name} is not installed; pip install 'ostrya[tracing]'"]
    return []


def start(endpoint: str, *, service: str, instance: str, pool: str) -> Tracer:
    """The tracer of a process; with an empty endpoint one that costs nothing. ConfigError as `problems` tells."""
    if found := problems(endpoint):
        raise ConfigError(found)
    if not endpoint:
        return NO_TRACER
    from ostrya.service.otel import OtelTracer

    return OtelTracer(endpoint, service=service, instance=instance, pool=pool)
