"""A request's tries in its trace: one span each, with what was predicted and what came of it. Counts, no tokens."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ostrya.api.v1 import worker_pb2
from ostrya.router.explain import Decision
from ostrya.service.tracing import Metadata, Span


class Try:
    """One replica's part of an answer, as it goes."""

    def __init__(self, span: Span, decision: Decision) -> None:
        self._span = span
        self.decision = decision
        self.outcome = "closed"
        """By us, before its end: a stop string was found, or the client went away."""
        self._num_tokens = 0

    def headers(self) -> Metadata | None:
        """Metadata that makes the replica's work a part of this try."""
        return self._span.headers()

    def message(self, message: worker_pb2.WorkerServiceGenerateResponse) -> None:
        """Some tokens came."""
        if not self._num_tokens:
            self._span.set({"gen_ai.usage.cache_read.input_tokens": message.usage.cached_tokens})
        self._num_tokens += len(message.token_ids)
        if message.finish_reason:
            self.outcome = "answered"

    def ended(self) -> None:
        self._span.set({"ostrya.outcome": self.outcome, "gen_ai.usage.output_tokens": self._num_tokens})
        self._span.end()


@asynccontextmanager
async def attempt(parent: Span, decision: Decision) -> AsyncIterator[Try]:
    """The span `ostrya.try` around a call to the chosen replica; what the call raises becomes its error."""
    choice = decision.choice
    attributes = {
        "ostrya.worker.id": choice.worker_id,
        "ostrya.decision.id": decision.decision_id,
        "ostrya.decision.reason": choice.reason.value,
        "ostrya.predicted_cached_tokens": choice.cached_tokens,
        "ostrya.attempt": decision.attempt,
        "ostrya.replicas_excluded": len(decision.excluded),
    }
    span = parent.child("ostrya.try", kind="client", attributes=attributes)
    this = Try(span, decision)
    try:
        yield this
    except Exception as error:
        this.outcome = "failed"
        span.failed(type(error).__name__)
        raise
    finally:
        this.ended()
