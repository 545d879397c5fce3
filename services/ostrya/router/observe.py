"""A request as operators see it: its metrics, its log line, its span. Never a prompt, an answer or a token id."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from ostrya.errors import NoReplica, OstryaError, Overloaded
from ostrya.router.closing import Closing
from ostrya.router.metrics import RouterMetrics
from ostrya.router.proxy import Part
from ostrya.service.status import code_of
from ostrya.service.tracing import NO_SPAN, Span

log = logging.getLogger(__name__)

_DEADLINE_SLACK_S = 0.05
"""A deadline is rounded up on its way, so the client's own comes first."""


class Observation:
    """What is known of a request so far."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float], span: Span) -> None:
        self._metrics = metrics
        self._span = span
        self._clock = clock
        self._started = clock()
        self._ttft_s: float | None = None
        self.request_id = ""
        self.deadline = math.inf
        self.num_prompt_tokens = 0
        self._num_tokens = 0
        self._num_cached = 0
        self._replica = ""

    def part(self, part: Part) -> None:
        """Some tokens came from a replica."""
        if self._ttft_s is None:
            self._ttft_s = self._clock() - self._started
            self._metrics.ttft_s.observe(self._ttft_s)
            self._metrics.prompt_tokens.inc(self.num_prompt_tokens)
            self._metrics.actual.inc(part.cached_tokens)
        self._num_tokens += len(part.token_ids)
        self._num_cached, self._replica = part.cached_tokens, part.worker_id
        self._metrics.generated_tokens.inc(len(part.token_ids))

    def ended(self, code: grpc.StatusCode) -> None:
        """Nothing more will come."""
        duration_s = self._clock() - self._started
        self._metrics.requests.labels(code.name).inc()
        self._metrics.duration_s.observe(duration_s)
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "code": code.name,
            "duration_s": round(duration_s, 4),
            "ttft_s": None if self._ttft_s is None else round(self._ttft_s, 4),
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "cached_tokens": self._num_cached,
            "replica": self._replica,
        }
        if self._span.trace_id:
            fields["trace_id"] = self._span.trace_id
            self._describe(code)
        log.info("request ended", extra={"fields": fields})

    def _describe(self, code: grpc.StatusCode) -> None:
        self._span.set(
            {
                "rpc.system": "grpc",
                "rpc.service": "ostrya.api.v1.InferenceService",
                "rpc.method": "Generate",
                "rpc.grpc.status_code": code.value[0],
                "gen_ai.usage.input_tokens": self.num_prompt_tokens,
                "gen_ai.usage.output_tokens": self._num_tokens,
                "gen_ai.usage.cache_read.input_tokens": self._num_cached,
                "ostrya.request_id": self.request_id,
                "ostrya.worker.id": self._replica,
            }
        )
        if self._ttft_s is not None:
            self._span.set({"ostrya.time_to_first_token_s": self._ttft_s})
        # Exceptions are the span's own to see; a deadline comes as a cancel.
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._span.failed("DeadlineExceeded")


@contextmanager
def observed(
    metrics: RouterMetrics, clock: Callable[[], float], span: Span = NO_SPAN, closing: Closing | None = None
) -> Iterator[Observation]:
    """Counts what happens in the block, however it ends; `span` is the request's."""
    observation = Observation(metrics, clock, span)
    code = grpc.StatusCode.INTERNAL
    try:
        yield observation
        code = grpc.StatusCode.OK
    except OstryaError as error:
        code = code_of(error)
        if isinstance(error, NoReplica | Overloaded):
            metrics.shed.labels("no_replica" if isinstance(error, NoReplica) else "queue_full").inc()
        raise
    except (asyncio.CancelledError, GeneratorExit):
        # gRPC cancels the call in all cases.
        if clock() >= observation.deadline - _DEADLINE_SLACK_S:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        elif closing is not None and closing.is_over:
            code = grpc.StatusCode.UNAVAILABLE
        else:
            code = grpc.StatusCode.CANCELLED
        raise
    finally:
        observation.ended(code)
