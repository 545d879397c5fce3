"""A worker's metrics: one object, fed by engine reports and by the observation of each request.

Counters of the engine arrive as totals and are added as differences.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Gauge

from ostrya.engine.types import EngineInfo, Load, Memory, Peaks, SequenceOutput, StepKind, StepLimit, StepReport
from ostrya.fetch.report import PHASES, StartReport
from ostrya.state.connection import Refusal
from ostrya.worker import lasting
from ostrya.worker.families import Families
from ostrya.worker.usage import EngineUsage

Cause = Literal["client", "deadline", "drain", "engine"]
State = Literal["starting", "ready", "cordoned", "draining", "restarting", "dead"]

CAUSES: tuple[Cause, ...] = ("client", "deadline", "drain", "engine")
STATES: tuple[State, ...] = ("starting", "ready", "cordoned", "draining", "restarting", "dead")
MEMORY = ("weights", "scratch", "kv", "free", "limit")
PARTS = ("publisher",)
"""What runs beside the requests and the engine."""

# OpenTelemetry's GenAI bounds.
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SHARE = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
KINDS: tuple[StepKind, ...] = get_args(StepKind)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class WorkerMetrics:
    """Everything a worker shows, on the registry it is given."""

    def __init__(self, registry: CollectorRegistry, *, model: str) -> None:
        make = self.families = Families(registry, model)
        self._model = model
        self._last = Load()
        self.waiting = make.gauge("requests_waiting", "Requests accepted and not yet scheduled.")
        self.running = make.gauge("requests_running", "Requests that have a place in the batch.")
        self.queued_tokens = make.gauge("queued_tokens", "Prompt tokens accepted and not yet computed.")
        self.kv_usage = make.gauge("kv_cache_usage_ratio", "KV pages that requests refer to, of all pages.")
        self.kv_blocks = make.gauges(
            "kv_cache_blocks", "KV pages by state.", "state", ("free", "reusable", "referenced")
        )
        self.prefill_rate = make.gauge("prefill_tokens_per_second", "Moving average over steps that prefilled.")
        self.queried = make.counter("prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache.")
        self.hit = make.counter("prefix_cache_hit_tokens", "Prompt tokens found there.")
        self.preemptions = make.counter("preemptions", "Requests put back to the queue because pages ran out.")
        self.steps = make.counter("steps", "Steps of the engine.")
        self.scheduled = make.counter("scheduled_tokens", "Tokens computed.")
        self.padded = make.counter("padded_tokens", "Tokens computed, padding included.")
        self.waste = make.gauge("padding_waste_ratio", "Padding, of all tokens computed since the start.")
        self.shapes = make.gauge("shapes", "Distinct shapes compiled.")
        self.late_shapes = make.counter("late_shapes", "Shapes first seen after warm-up; each one is a fault.")
        self.compilations = make.counters_by_two(
            "compilations",
            "Programs compiled, by phase and by whether the compile cache had them.",
            ("phase", ("warmup", "serving")),
            ("cache", ("hit", "miss")),
        )
        self.page_leaks = make.counter(
            "page_leaks", "Looks at the idle engine that found KV pages lost or referenced; each one is a fault."
        )
        self.step_time = make.gauges(
            "step_time_fit_seconds",
            "What a step takes, learned from steps: base, and for each row, prompt token and KV token in it.",
            "part",
            ("base", "row", "prefill_token", "kv_token"),
        )
        self.usage = EngineUsage(registry, model=model)
        self.events = make.counters(
            "cache_events_published", "Resume points told to the routers.", "type", ("stored", "removed")
        )
        self.batch_size = make.histogram("batch_size", "Rows of a step.", BATCH)
        self.step = make.histogram("step_seconds", "Time of a step.", STEP_S)
        self.limit_ratio = make.histograms(
            "step_limit_ratio",
            "The least time in which the hardware could do a step, of the time it took: 1 is the physical limit.",
            "kind",
            KINDS,
            SHARE,
        )
        self.limit_s = make.counters_by_two(
            "step_limit_seconds",
            "The least time for the steps that were done, by what bounds it.",
            ("kind", KINDS),
            ("bound", ("memory", "compute")),
        )
        self.taken_s = make.counters(
            "step_taken_seconds", "Time that these steps took; of others the limit is not known.", "kind", KINDS
        )
        self.peak_bytes = make.gauge(
            "peak_bytes_per_second", "Memory bandwidth of which the limit is made; 0 = not known."
        )
        self.peak_flops = make.gauge("peak_flops_per_second", "FLOP/s of which it is made, bfloat16; 0 = not known.")
        self.simulated = make.gauge(
            "simulated", "1 = nothing is computed (backend roofline), and every time here is a prediction."
        )
        self.first_token = make.histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S)
        self.inter_token = make.histogram("inter_token_latency_seconds", "From token to token.", INTER_TOKEN_S)
        self.queue = make.histogram("request_queue_seconds", "Arrival to the first step that had it.", FIRST_TOKEN_S)
        self.prefill = make.histogram("prefill_seconds", "From that step to the first token.", FIRST_TOKEN_S)
        self.duration = make.histograms(
            "request_duration_seconds",
            "Arrival to the last token, or to the cancel.",
            "finish_reason",
            ("stop", "length", "cancelled"),
            DURATION_S,
        )
        self.prompt_tokens = make.counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.generation_tokens = make.counter("generation_tokens", "Tokens generated.")
        self.cancelled = make.counters("cancelled_requests", "Requests that ended early.", "cause", CAUSES)
        self.undecodable = make.counter("undecodable_requests", "Calls whose bytes are not their method's message.")
        self.load_s = make.gauge("model_load_seconds", "Time to read the weights.")
        self.load_bytes = make.gauge("load_bytes", "Read from the checkpoint by the engine process; 0 = not known.")
        self.memory = make.gauges(
            "memory_bytes", "Memory of a device by what lies in it, and what there is; 0 = not known.", "part", MEMORY
        )
        self.phases = make.gauges(
            "startup_phase_seconds", "Time of each phase of the start.", "phase", (*PHASES, "load", "warmup")
        )
        self.startup_cache = make.counters_by_two(
            "startup_cache",
            "What a start-up phase found already there.",
            ("phase", PHASES),
            ("result", ("hit", "miss")),
        )
        self.states = make.gauges("lifecycle_state", "1 for the state the worker is in.", "state", STATES)
        self.report_age = make.gauge(
            "engine_report_age_seconds", "Since the step loop last spoke; 0 while the engine starts again."
        )
        self.restarts = make.counters(
            "engine_restarts", "Engine processes that were lost and replaced.", "cause", lasting.CAUSES
        )
        self.parts = make.gauges("part_up", "0 while a part of the worker fails and is started again.", "part", PARTS)
        for part in self.parts.values():
            part.set(1)  # none has failed yet
        self.registered = make.gauge("registered", "Whether Redis has this worker's lease.")
        self.redis_writable = make.gauge("redis_writable", "0 while Redis answers this worker and refuses its writes.")
        self.redis_writable.set(1)  # nothing was refused yet
        self.redis_refusals = make.counters(
            "redis_refusals", "Writes that Redis refused, by why.", "reason", tuple(Refusal)
        )
        self._info = Gauge(
            "ostrya_worker_info", "What serves.", ["model", "backend", "dtype", "page_size"], registry=registry
        )
        self.enter("starting")

    def enter(self, state: State) -> None:
        """The worker is in `state` now."""
        for name, gauge in self.states.items():
            gauge.set(name == state)

    def fetched(self, reports: Iterable[StartReport]) -> None:
        """What ran before this process started."""
        for report in reports:
            self.phases[report.phase].set(report.seconds)
            self.startup_cache[report.phase, report.result].inc()

    def started(self, info: EngineInfo, *, pid: int | None = None) -> None:
        """What the engine said of itself, and which process it is."""
        self.usage.pid = pid
        self.load_s.set(info.load_s)
        self.load_bytes.set(info.load_bytes)
        self._memory(info.memory)
        self.phases["load"].set(info.load_s)
        self.phases["warmup"].set(info.warmup_s)
        self.simulated.set(info.is_simulated)
        peaks = info.peaks or Peaks(0.0, 0.0, "")
        self.peak_bytes.set(peaks.bytes_per_s)
        self.peak_flops.set(peaks.flops_per_s)
        self._info.labels(self._model, info.backend, info.dtype, str(info.page_size)).set(1)

    def _memory(self, memory: Memory | None) -> None:
        if memory is None:
            return
        self.memory["weights"].set(memory.weights_bytes)
        self.memory["scratch"].set(memory.scratch_bytes)
        self.memory["kv"].set(memory.kv_bytes)
        if memory.limit_bytes:
            self.memory["limit"].set(memory.limit_bytes)
            self.memory["free"].set(memory.free_bytes)

    def engine_lost(self, cause: lasting.Cause) -> None:
        """The process is gone and what it was busy with too; the next one counts from 0."""
        self.restarts[cause].inc()
        self.usage.pid = None
        self._last = Load()
        self._load(Load())

    def report(self, report: StepReport) -> None:
        """Takes in one engine report."""
        self._load(report.load)
        self.events["stored"].inc(len(report.stored))
        self.events["removed"].inc(len(report.removed))
        if report.step_s:
            self.batch_size.observe(report.batch_size)
            self.step.observe(report.step_s)
            if report.limit is not None:
                self._compare(report.limit, report.step_s)

    @contextmanager
    def observe(self, *, num_prompt: int, clock: Callable[[], float] = time.monotonic) -> Iterator["Observation"]:
        """One request from arrival to end; whoever cancels it says so to the observation."""
        observation = Observation(self, num_prompt=num_prompt, clock=clock)
        try:
            yield observation
        finally:
            observation.close()

    def _compare(self, limit: StepLimit, step_s: float) -> None:
        self.limit_ratio[limit.kind].observe(limit.seconds / step_s)
        self.limit_s[limit.kind, "memory"].inc(limit.memory_s)
        self.limit_s[limit.kind, "compute"].inc(limit.compute_s)
        self.taken_s[limit.kind].inc(step_s)

    def _load(self, load: Load) -> None:
        referenced = load.total_pages - load.free_pages - load.reusable_pages
        self.waiting.set(load.num_waiting)
        self.running.set(load.num_running)
        self.queued_tokens.set(load.queued_tokens)
        self.kv_usage.set(referenced / load.total_pages if load.total_pages else 0.0)
        self.kv_blocks["free"].set(load.free_pages)
        self.kv_blocks["reusable"].set(load.reusable_pages)
        self.kv_blocks["referenced"].set(referenced)
        self.prefill_rate.set(load.prefill_tokens_per_s)
        self.step_time["base"].set(load.step_time.base_s)
        self.step_time["row"].set(load.step_time.row_s)
        self.step_time["prefill_token"].set(load.step_time.prefill_token_s)
        self.step_time["kv_token"].set(load.step_time.kv_token_s)
        self.shapes.set(load.num_shapes)
        self.waste.set(1 - load.num_scheduled_tokens / load.num_padded_tokens if load.num_padded_tokens else 0.0)
        last, self._last = self._last, load
        self.queried.inc(load.queried_tokens - last.queried_tokens)
        self.hit.inc(load.hit_tokens - last.hit_tokens)
        self.preemptions.inc(load.num_preemptions - last.num_preemptions)
        self.steps.inc(load.num_steps - last.num_steps)
        self.scheduled.inc(load.num_scheduled_tokens - last.num_scheduled_tokens)
        self.padded.inc(load.num_padded_tokens - last.num_padded_tokens)
        self.page_leaks.inc(load.num_page_leaks - last.num_page_leaks)
        num_late = load.num_late_shapes - last.num_late_shapes
        self.late_shapes.inc(num_late)
        self.compilations["serving", "miss"].inc(num_late)
        num_hits = load.num_cached_shapes - last.num_cached_shapes
        self.compilations["warmup", "hit"].inc(num_hits)
        self.compilations["warmup", "miss"].inc(load.num_shapes - last.num_shapes - num_late - num_hits)


class Observation:
    """Times and counts of one request; it ends in one of finish reason and cancel cause, or in neither if refused."""

    def __init__(self, metrics: WorkerMetrics, *, num_prompt: int, clock: Callable[[], float]) -> None:
        self._metrics, self._clock = metrics, clock
        self._started_s = self._last_s = clock()
        self.num_prompt = num_prompt
        self.num_generated = 0
        self.num_cached = 0
        self.duration_s = 0.0
        """Known at the end."""
        self.ending = "refused"
        """A finish reason, a cancel cause, or that."""

    def output(self, output: SequenceOutput) -> None:
        """Tokens arrived."""
        now_s, metrics = self._clock(), self._metrics
        if self.num_generated == 0:
            metrics.first_token.observe(now_s - self._started_s)
            metrics.queue.observe(output.queue_s)
            metrics.prefill.observe(output.prefill_s)
            metrics.prompt_tokens.inc(self.num_prompt)
            self.num_cached = output.num_cached_tokens
        else:
            for _ in output.token_ids:
                metrics.inter_token.observe((now_s - self._last_s) / len(output.token_ids))
        metrics.generation_tokens.inc(len(output.token_ids))
        self.num_generated += len(output.token_ids)
        self._last_s = now_s
        if output.finish_reason is not None:
            self.ending = output.finish_reason.value

    def cancelled(self, cause: Cause) -> None:
        """It ends without its last token. After a finish reason this changes nothing."""
        if self.ending == "refused":
            self.ending = cause
            self._metrics.cancelled[cause].inc()

    def close(self) -> None:
        """Counts how long it took."""
        self.duration_s = self._clock() - self._started_s
        if self.ending != "refused":
            self._metrics.duration["cancelled" if self.ending in CAUSES else self.ending].observe(self.duration_s)
