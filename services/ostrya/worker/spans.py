"""A request's way through the engine as spans: its queue, its prefill down to the step that ended it, its decode.

They are made afterwards, from the engine's own times: it measures anyway and is not touched. Counts and times only.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ostrya.engine.types import EngineRequest, RequestId, SequenceOutput, StepReport
from ostrya.service.tracing import Attributes, Span, Tracer
from ostrya.worker.metrics import Observation


class WorkerSpans:
    """Of every open request. `report` listens to the engine; without a tracer nobody needs to call it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._steps: dict[RequestId, _Steps] = {}

    def report(self, report: StepReport) -> None:
        """Takes in one engine report."""
        for output in report.outputs:
            steps = self._steps.get(output.request_id)
            if steps is not None:
                steps.add(output, report, now_ns=time.time_ns())

    @contextmanager
    def follow(
        self, asked: EngineRequest, metadata: Iterable[tuple[str, str | bytes]] | None, seen: Observation
    ) -> Iterator[Span]:
        """The span `ostrya.worker.generate` around a request, with the engine's below it."""
        with self._tracer.request("ostrya.worker.generate", metadata) as span:
            if not span.is_recording:
                yield span
                return
            steps = self._steps[asked.request_id] = _Steps(span)
            span.set({"ostrya.request_id": asked.request_id, "gen_ai.request.max_tokens": asked.sampling.max_tokens})
            try:
                yield span
            finally:
                del self._steps[asked.request_id]
                steps.ended()
                span.set(_result(seen))


class _Steps:
    """The steps that gave one request a token."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._num_steps = 0
        self._num_rows = 0
        self._slowest_s = 0.0
        self._first_step = self._last_step = 0
        self._decode_from_ns = self._decode_to_ns = 0

    def add(self, output: SequenceOutput, report: StepReport, *, now_ns: int) -> None:
        """One more, which ended now."""
        if not self._decode_from_ns:
            self._decode_from_ns = now_ns
            self._prefilled(output, report, now_ns)
            return
        self._first_step = self._first_step or report.load.num_steps
        self._last_step, self._decode_to_ns = report.load.num_steps, now_ns
        self._num_steps += 1
        self._num_rows += report.batch_size
        self._slowest_s = max(self._slowest_s, report.step_s)

    def ended(self) -> None:
        """There will be no more. One span stands for all decode steps: a long answer has thousands."""
        if not self._num_steps:
            return
        attributes: Attributes = {
            "ostrya.engine.steps": self._num_steps,
            "ostrya.engine.first_step": self._first_step,
            "ostrya.engine.last_step": self._last_step,
            "ostrya.engine.slowest_step_s": self._slowest_s,
            "ostrya.engine.mean_batch_size": self._num_rows / self._num_steps,
        }
        decode = self._span.child("engine.decode", attributes=attributes, start_ns=self._decode_from_ns)
        decode.end(self._decode_to_ns)

    def _prefilled(self, output: SequenceOutput, report: StepReport, now_ns: int) -> None:
        began_ns = now_ns - _ns(output.prefill_s)
        self._span.child("engine.queue", start_ns=began_ns - _ns(output.queue_s)).end(began_ns)
        cached: Attributes = {"gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens}
        prefill = self._span.child("engine.prefill", attributes=cached, start_ns=began_ns)
        step: Attributes = {
            "ostrya.engine.step": report.load.num_steps,
            "ostrya.engine.batch_size": report.batch_size,
        }
        prefill.child("engine.step", attributes=step, start_ns=now_ns - _ns(report.step_s)).end(now_ns)
        prefill.end(now_ns)


def _result(seen: Observation) -> Attributes:
    return {
        "gen_ai.usage.input_tokens": seen.num_prompt,
        "gen_ai.usage.output_tokens": seen.num_generated,
        "gen_ai.usage.cache_read.input_tokens": seen.num_cached,
        "ostrya.ending": seen.ending,
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
