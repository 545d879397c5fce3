"""The metrics object adds up what reports and requests say, under names that promtool accepts."""

import os
import shutil
import subprocess

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from ostrya.engine.types import (
    FinishReason,
    Load,
    Peaks,
    RequestId,
    SequenceOutput,
    StepKind,
    StepLimit,
    StepReport,
    StepTime,
)
from ostrya.fetch.report import StartReport
from ostrya.prefix.chain import RoutingDigest
from ostrya.state.connection import Refusal
from ostrya.worker.metrics import STATES, WorkerMetrics
from tests.fakes import engine_info

INFO = replace(engine_info.INFO, model="m", load_s=1.5, warmup_s=0.5)


class Seen:
    """A fresh metrics object and a way to read it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = WorkerMetrics(self.registry, model="m")

    def value(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"ostrya_worker_{name}", {"model": "m", **labels})
        assert value is not None, name
        return value


def output(*token_ids: int, reason: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(
        request_id=RequestId("r"),
        token_ids=token_ids,
        finish_reason=reason,
        queue_s=1,
        prefill_s=2,
        num_cached_tokens=8,
    )


def test_engine_totals_are_added_as_differences() -> None:
    seen = Seen()
    for total in (5, 5, 12):
        seen.metrics.report(StepReport(load=Load(hit_tokens=total, num_steps=total, num_preemptions=total)))
    assert seen.value("prefix_cache_hit_tokens_total") == 12
    assert seen.value("preemptions_total") == 12


def test_how_long_steps_take_and_what_idle_checks_found_are_shown() -> None:
    seen = Seen()
    for num_page_leaks in (0, 1, 1):
        load = Load(step_time=StepTime(0.4, 0.3, 0.2, 0.1), num_page_leaks=num_page_leaks)
        seen.metrics.report(StepReport(load=load))
    parts = ("base", "row", "prefill_token", "kv_token")
    assert [seen.value("step_time_fit_seconds", part=part) for part in parts] == [0.4, 0.3, 0.2, 0.1]
    assert seen.value("page_leaks_total") == 1
    seen.metrics.engine_lost("died")
    assert seen.value("step_time_fit_seconds", part="base") == 0


def test_the_share_of_the_limit_is_exact_over_steps_of_a_kind() -> None:
    seen = Seen()
    steps: tuple[tuple[StepKind, float, float, float], ...]
    steps = (("decode", 0.01, 0.0, 0.04), ("decode", 0.02, 0.01, 0.06), ("mixed", 0.0, 0.9, 1.0))
    for kind, memory_s, compute_s, step_s in steps:
        seen.metrics.report(StepReport(limit=StepLimit(kind, memory_s, compute_s), step_s=step_s))
    seen.metrics.report(StepReport(step_s=7.0))  # it compiled
    seen.metrics.report(StepReport(limit=None))  # a heartbeat
    memory, compute = (seen.value("step_limit_seconds_total", kind="decode", bound=of) for of in ("memory", "compute"))
    assert (memory, compute) == pytest.approx((0.03, 0.01))
    assert seen.value("step_taken_seconds_total", kind="decode") == pytest.approx(0.1)
    assert seen.value("step_limit_ratio_sum", kind="decode") == pytest.approx(0.25 + 0.5)
    assert seen.value("step_limit_ratio_count", kind="decode") == 2
    assert seen.value("step_limit_ratio_bucket", kind="mixed", le="0.8") == 0
    assert seen.value("step_limit_ratio_bucket", kind="mixed", le="0.9") == 1
    assert seen.value("step_taken_seconds_total", kind="prefill") == 0


def test_a_worker_says_against_what_its_limit_is_and_whether_it_computes_at_all() -> None:
    seen = Seen()
    seen.metrics.started(replace(INFO, peaks=Peaks(4e9, 8e9, "told"), is_simulated=True))
    assert (seen.value("peak_bytes_per_second"), seen.value("peak_flops_per_second")) == (4e9, 8e9)
    assert seen.value("simulated") == 1
    seen.metrics.started(INFO)
    assert (seen.value("peak_bytes_per_second"), seen.value("simulated")) == (0, 0)


def test_a_lost_engine_uses_nothing() -> None:
    seen = Seen()
    seen.metrics.started(INFO, pid=os.getpid())
    assert seen.value("engine_resident_memory_bytes") > 0
    seen.metrics.engine_lost("died")
    assert seen.registry.get_sample_value("ostrya_worker_engine_resident_memory_bytes", {"model": "m"}) is None


def test_pages_are_shown_by_state() -> None:
    seen = Seen()
    seen.metrics.report(StepReport(load=Load(free_pages=10, reusable_pages=5, total_pages=20)))
    states = {state: seen.value("kv_cache_blocks", state=state) for state in ("free", "reusable", "referenced")}
    assert states == {"free": 10, "reusable": 5, "referenced": 5}
    assert seen.value("kv_cache_usage_ratio") == 0.25


def test_heartbeat_is_no_step() -> None:
    seen = Seen()
    seen.metrics.report(StepReport())
    seen.metrics.report(StepReport(step_s=0.1, batch_size=3, stored=(RoutingDigest(1), RoutingDigest(2))))
    assert seen.value("batch_size_count") == 1
    assert seen.value("cache_events_published_total", type="stored") == 2


def test_finished_request_is_timed_and_counted() -> None:
    seen = Seen()
    times = iter([0.0, 3.0, 4.0, 4.0])
    with seen.metrics.observe(num_prompt=10, clock=lambda: next(times)) as observation:
        observation.output(output(1))
        observation.output(output(2, 3, reason=FinishReason.LENGTH))
        observation.cancelled("client")  # too late to be one
    assert observation.num_cached == 8
    assert seen.value("time_to_first_token_seconds_sum") == 3
    assert (seen.value("inter_token_latency_seconds_count"), seen.value("inter_token_latency_seconds_sum")) == (2, 1)
    assert (seen.value("prompt_tokens_total"), seen.value("generation_tokens_total")) == (10, 3)
    assert seen.value("request_duration_seconds_sum", finish_reason="length") == 4
    assert seen.value("cancelled_requests_total", cause="client") == 0


def test_cancelled_request_has_one_cause() -> None:
    seen = Seen()
    with seen.metrics.observe(num_prompt=1) as observation:
        observation.cancelled("deadline")
        observation.cancelled("client")
    assert seen.value("cancelled_requests_total", cause="deadline") == 1
    assert seen.value("cancelled_requests_total", cause="client") == 0
    assert seen.value("request_duration_seconds_count", finish_reason="cancelled") == 1


def test_refused_request_is_no_ended_one() -> None:
    seen = Seen()
    with seen.metrics.observe(num_prompt=1):
        pass
    assert all(
        seen.value("request_duration_seconds_count", finish_reason=reason) == 0
        for reason in ("stop", "length", "cancelled")
    )


def test_worker_is_in_one_state() -> None:
    seen = Seen()
    seen.metrics.enter("ready")
    states = {state: seen.value("lifecycle_state", state=state) for state in STATES}
    assert states == {"starting": 0, "ready": 1, "cordoned": 0, "draining": 0, "restarting": 0, "dead": 0}


def test_a_worker_that_has_not_written_yet_was_refused_nothing() -> None:
    seen = Seen()
    assert seen.value("redis_writable") == 1
    assert {seen.value("redis_refusals_total", reason=reason) for reason in Refusal} == {0}


def test_a_shape_is_a_compilation_of_the_phase_that_first_saw_it() -> None:
    seen = Seen()

    def compiled() -> dict[tuple[str, str], float]:
        keys = [(phase, cache) for phase in ("warmup", "serving") for cache in ("hit", "miss")]
        return {key: seen.value("compilations_total", phase=key[0], cache=key[1]) for key in keys}

    assert set(compiled().values()) == {0}
    for shapes, late in ((12, 0), (12, 0), (14, 2)):
        seen.metrics.report(StepReport(load=Load(num_shapes=shapes, num_late_shapes=late)))
    assert compiled() == {
        ("warmup", "hit"): 0,
        ("warmup", "miss"): 12,
        ("serving", "hit"): 0,
        ("serving", "miss"): 2,
    }
    assert seen.value("late_shapes_total") == 2


def test_phases_before_the_start_come_from_their_reports() -> None:
    seen = Seen()
    assert seen.value("startup_cache_total", phase="fetch_compile_cache", result="miss") == 0
    seen.metrics.fetched([StartReport(phase="fetch_model", result="hit", seconds=1.5, bytes=1)])
    assert seen.value("startup_phase_seconds", phase="fetch_model") == 1.5
    assert seen.value("startup_phase_seconds", phase="fetch_compile_cache") == 0
    assert seen.value("startup_cache_total", phase="fetch_model", result="hit") == 1
    assert seen.value("startup_cache_total", phase="fetch_model", result="miss") == 0


def test_promtool_accepts_every_name() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        skip_or_fail = pytest.fail if os.environ.get("OSTRYA_REQUIRE_ALL") == "1" else pytest.skip
        skip_or_fail("no promtool on this machine")
    assert promtool is not None
    disable_created_metrics()  # type: ignore[no-untyped-call]
    seen = Seen()
    seen.metrics.started(INFO)
    seen.metrics.report(StepReport(load=Load(total_pages=2), step_s=0.1, batch_size=1))
    text = generate_latest(seen.registry)
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
