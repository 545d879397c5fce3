"""The engine's memory and CPU are what the kernel says of its process, and missing where it says nothing."""

import os
import resource

import pytest
from prometheus_client import CollectorRegistry

from ostrya.worker.usage import EngineUsage

NAMES = ("ostrya_worker_engine_resident_memory_bytes", "ostrya_worker_engine_cpu_seconds_total")


def values(pid: int | None) -> list[float | None]:
    registry = CollectorRegistry()
    EngineUsage(registry, model="m").pid = pid
    return [registry.get_sample_value(name, {"model": "m"}) for name in NAMES]


def test_a_process_is_as_large_and_as_busy_as_it_knows_itself() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    memory_bytes, cpu_s = values(os.getpid())
    assert memory_bytes is not None
    assert 1 << 20 < memory_bytes <= used.ru_maxrss * 1024 * 1.1
    assert cpu_s == pytest.approx(used.ru_utime + used.ru_stime, abs=0.5)


@pytest.mark.parametrize("pid", [None, 2**30])
def test_where_there_is_no_process_there_are_no_values(pid: int | None) -> None:
    assert values(pid) == [None, None]
