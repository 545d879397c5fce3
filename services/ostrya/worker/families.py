"""Makes the worker's metrics: prefix and model label filled in, every series there from the start, at 0.

Used by worker/metrics.py; worker/aliases.py reads the families back.
"""

from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

F = TypeVar("F", Gauge, Counter, Histogram)
PREFIX = "ostrya_worker_"


class Families:
    """Metrics by their name after the prefix. A `label` comes with all its values."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self.model = registry, model
        self._by_name: dict[str, Gauge | Counter | Histogram] = {}

    def __getitem__(self, name: str) -> Gauge | Counter | Histogram:
        return self._by_name[name]

    def gauge(self, name: str, text: str) -> Gauge:
        return self._kept(name, Gauge(PREFIX + name, text, ["model"], registry=self._registry)).labels(self.model)

    def counter(self, name: str, text: str) -> Counter:
        return self._kept(name, Counter(PREFIX + name, text, ["model"], registry=self._registry)).labels(self.model)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, text, ["model"], buckets=buckets, registry=self._registry)
        return self._kept(name, family).labels(self.model)

    def gauges(self, name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Gauge]:
        family = self._kept(name, Gauge(PREFIX + name, text, ["model", label], registry=self._registry))
        return {value: family.labels(self.model, value) for value in values}

    def counters(self, name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
        family = self._kept(name, Counter(PREFIX + name, text, ["model", label], registry=self._registry))
        return {value: family.labels(self.model, value) for value in values}

    def counters_by_two(
        self, name: str, text: str, first: tuple[str, tuple[str, ...]], second: tuple[str, tuple[str, ...]]
    ) -> dict[tuple[str, str], Counter]:
        """By the values of `first` and of `second`: each a label and its values."""
        labels = ["model", first[0], second[0]]
        family = self._kept(name, Counter(PREFIX + name, text, labels, registry=self._registry))
        return {(one, two): family.labels(self.model, one, two) for one in first[1] for two in second[1]}

    def histograms(
        self, name: str, text: str, label: str, values: tuple[str, ...], buckets: tuple[float, ...]
    ) -> dict[str, Histogram]:
        family = Histogram(PREFIX + name, text, ["model", label], buckets=buckets, registry=self._registry)
        self._kept(name, family)
        return {value: family.labels(self.model, value) for value in values}

    def _kept(self, name: str, family: F) -> F:
        self._by_name[name] = family
        return family
