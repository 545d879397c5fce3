"""Every alias says what our own metric says, at every scrape."""

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ostrya.engine.types import FinishReason, Load, RequestId, SequenceOutput, StepReport
from ostrya.worker.aliases import ALIASES, VllmAliases
from ostrya.worker.metrics import WorkerMetrics

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Worker:
    """Metrics with something in each of them, on a registry with aliases."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        self.metrics = WorkerMetrics(self.registry, model="m")
        self.registry.register(VllmAliases(self.metrics.families, page_size=16, num_pages=lambda: 99))

    def work(self) -> None:
        load = Load(
            num_running=3,
            num_waiting=2,
            free_pages=25,
            total_pages=100,
            queried_tokens=40,
            hit_tokens=30,
            num_preemptions=1,
        )
        self.metrics.report(StepReport(load=load))
        for reason, took_s in ((FinishReason.STOP, 1.0), (FinishReason.LENGTH, 6.0)):
            self._request(reason, took_s)
        with self.metrics.observe(num_prompt=1, clock=iter([0.0, 50.0]).__next__) as seen:
            seen.cancelled("client")

    def _request(self, reason: FinishReason, took_s: float) -> None:
        times = iter([0.0, took_s / 2, took_s, took_s])
        with self.metrics.observe(num_prompt=7, clock=lambda: next(times)) as seen:
            for tokens, finish in (((1,), None), ((2, 3), reason)):
                seen.output(
                    SequenceOutput(
                        request_id=RequestId("r"), token_ids=tokens, finish_reason=finish, queue_s=0.2, prefill_s=0.3
                    )
                )

    def samples(self) -> Samples:
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value for one in families for sample in one.samples
        }


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def test_each_alias_has_the_values_of_our_metric() -> None:
    worker = Worker()
    worker.work()
    samples = worker.samples()
    num_compared = 0
    for ours, theirs in ALIASES.items():
        if ours == "request_duration_seconds":
            continue
        for (name, have), value in samples.items():
            if name.startswith(f"ostrya_worker_{ours}"):
                renamed = frozenset(("model_name" if key == "model" else key, word) for key, word in have)
                assert samples[f"vllm:{theirs}{name.removeprefix(f'ostrya_worker_{ours}')}", renamed] == value
                num_compared += 1
    assert num_compared > 60


def test_names_and_values_are_those_that_gateways_and_autoscalers_read() -> None:
    worker = Worker()
    worker.work()
    samples, model = worker.samples(), labels(model_name="m")
    expected = {
        "vllm:num_requests_waiting": 2,
        "vllm:num_requests_running": 3,
        "vllm:kv_cache_usage_perc": 0.75,
        "vllm:prefix_cache_queries_total": 40,
        "vllm:prefix_cache_hits_total": 30,
        "vllm:num_preemptions_total": 1,
        "vllm:prompt_tokens_total": 14,
        "vllm:generation_tokens_total": 6,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:time_to_first_token_seconds_sum": 3.5,
        "vllm:inter_token_latency_seconds_count": 4,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_prefill_time_seconds_count": 2,
    }
    assert {name: samples[name, model] for name in expected} == expected
    assert samples["vllm:cache_config_info", labels(model_name="m", block_size="16", num_gpu_blocks="99")] == 1


def test_latency_counts_finished_requests_and_success_tells_them_apart() -> None:
    worker = Worker()
    worker.work()
    samples, model = worker.samples(), labels(model_name="m")
    assert samples["vllm:e2e_request_latency_seconds_count", model] == 2
    assert samples["vllm:e2e_request_latency_seconds_sum", model] == 7
    assert samples["vllm:e2e_request_latency_seconds_bucket", labels(model_name="m", le="1.28")] == 1
    assert samples["vllm:e2e_request_latency_seconds_bucket", labels(model_name="m", le="+Inf")] == 2
    ended = {
        reason: samples["vllm:request_success_total", labels(model_name="m", finished_reason=reason)]
        for reason in ("stop", "length", "abort")
    }
    assert ended == {"stop": 1, "length": 1, "abort": 1}


def test_a_scrape_sees_what_came_after_the_last_one() -> None:
    worker = Worker()
    assert worker.samples()["vllm:num_requests_running", labels(model_name="m")] == 0
    worker.work()
    assert worker.samples()["vllm:num_requests_running", labels(model_name="m")] == 3
