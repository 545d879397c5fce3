"""The worker's metrics once more under vLLM's names, for dashboards, autoscalers and gateways that read those.

A view: values are read from our own metrics at each scrape, so the two cannot differ. The Gateway API inference
extension's model server protocol is num_requests_waiting, num_requests_running, kv_cache_usage_perc and
cache_config_info. Histograms keep our buckets. Registered with `--metric-aliases` only.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ostrya.worker.families import PREFIX, Families

ALIASES = {
    "requests_waiting": "num_requests_waiting",
    "requests_running": "num_requests_running",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",  # a ratio there too: 1 = full
    "prefix_cache_queried_tokens": "prefix_cache_queries",
    "prefix_cache_hit_tokens": "prefix_cache_hits",
    "preemptions": "num_preemptions",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_queue_seconds": "request_queue_time_seconds",
    "prefill_seconds": "request_prefill_time_seconds",
    "request_duration_seconds": "e2e_request_latency_seconds",
}
"""Ours after ostrya_worker_, theirs after vllm:."""
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}


class VllmAliases(Collector):
    """`num_pages` says how many a request can have."""

    def __init__(self, families: Families, *, page_size: int, num_pages: Callable[[], int]) -> None:
        self._families, self._page_size, self._num_pages = families, page_size, num_pages

    def describe(self) -> Iterator[Metric]:
        """Names without values, for the registry to know clashes."""
        for metric in self.collect():
            yield Metric(metric.name, metric.documentation, metric.type)

    def collect(self) -> Iterator[Metric]:
        """Every alias, now."""
        for ours, theirs in ALIASES.items():
            yield self._renamed(ours, f"vllm:{theirs}")
        yield self._ended()
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "KV pages and their size.", labels=["model_name", "block_size", "num_gpu_blocks"]
        )
        info.add_metric([self._families.model, str(self._page_size), str(self._num_pages())], 1)
        yield info

    def _renamed(self, ours: str, theirs: str) -> Metric:
        """The same samples, summed over finish reasons: a latency counts where a request came to its end."""
        (metric,) = self._families[ours].collect()
        sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        for sample in metric.samples:
            if sample.labels.get("finish_reason") != "cancelled":
                sums[sample.name.removeprefix(PREFIX + ours), sample.labels.get("le", "")] += sample.value
        alias = Metric(theirs, metric.documentation, metric.type)
        for (suffix, le), value in sums.items():
            labels = {"model_name": self._families.model} | ({"le": le} if le else {})
            alias.add_sample(theirs + suffix, labels, value)
        return alias

    def _ended(self) -> Metric:
        (metric,) = self._families["request_duration_seconds"].collect()
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=["model_name", "finished_reason"]
        )
        for sample in metric.samples:
            if sample.name.endswith("_count"):
                ended.add_metric([self._families.model, _REASONS[sample.labels["finish_reason"]]], sample.value)
        return ended
