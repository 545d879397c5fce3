"""Every metric of ours by its name on the wire, from the very objects that the processes register."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from ostrya.router.metrics import KubernetesMetrics, RouterMetrics
from ostrya.service.metrics import MetricsEndpoint
from ostrya.worker.following import FollowerMetrics
from ostrya.worker.metrics import WorkerMetrics
from ostrya.worker.usage import EngineUsage


def families() -> dict[str, str]:
    """Name without suffix, and type."""
    registry = CollectorRegistry()
    RouterMetrics(registry, model="m", pool="p")
    KubernetesMetrics(registry)
    WorkerMetrics(registry, model="m")
    FollowerMetrics(registry, model="m")
    MetricsEndpoint(registry, "127.0.0.1", 0)
    return dict(_families(registry))


def sample_names() -> dict[str, str]:
    """As families(), by the names that queries use."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {name + suffix: name for name, kind in families().items() for suffix in suffixes[kind]}


def _families(registry: CollectorRegistry) -> Iterator[tuple[str, str]]:
    # The registry's public side shows a labelled metric only after it has been used.
    for metric in registry._collector_to_names:
        assert isinstance(metric, MetricWrapperBase | EngineUsage)
        yield from ((family.name, family.type) for family in metric.describe())
