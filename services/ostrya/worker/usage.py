"""Memory and CPU time of the engine's process, which is a child and so not in the worker's own process_* metrics.

Read at each scrape, as Linux counts them; where the kernel does not say, the series are missing. Registered by
worker/metrics.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ostrya.worker.families import PREFIX

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class EngineUsage(Collector):
    """Of the process with the id that `pid` is set to; None = there is none."""

    def __init__(self, registry: CollectorRegistry, *, model: str) -> None:
        self.pid: int | None = None
        self._model = model
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """The two without samples."""
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        """What is known now."""
        memory, cpu = self._families()
        pid = self.pid
        if pid is not None and (num_bytes := resident_bytes(pid)) is not None:
            memory.add_metric([self._model], num_bytes)
        if pid is not None and (seconds := cpu_s(pid)) is not None:
            cpu.add_metric([self._model], seconds)
        yield from (memory, cpu)

    def _families(self) -> tuple[GaugeMetricFamily, CounterMetricFamily]:
        return (
            GaugeMetricFamily(
                f"{PREFIX}engine_resident_memory_bytes", "Resident memory of the engine process.", labels=["model"]
            ),
            CounterMetricFamily(
                f"{PREFIX}engine_cpu_seconds", "CPU time of the engine process; from 0 in a new one.", labels=["model"]
            ),
        )


def resident_bytes(pid: int) -> int | None:
    """None where the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def cpu_s(pid: int) -> float | None:
    """User and system time of all its threads; None where the kernel does not say."""
    try:
        # The name before ")" may hold anything, spaces too.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except (OSError, IndexError, ValueError):
        return None
