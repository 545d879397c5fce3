"""The /metrics endpoint of a process: Prometheus text over HTTP from a registry that is passed in.

Adds what every process of ours shows about itself: memory, CPU and open files (prometheus_client's process_*), and the
number of asyncio tasks, which is what a leaked stream would raise.
"""

import asyncio

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics

from ostrya.service.scraping import ScrapeServer


class MetricsEndpoint:
    """Serves `registry` in a thread of its own until close(). One endpoint a registry."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._registry, self._host, self._port = registry, host, port
        self._running: ScrapeServer | None = None
        self._tasks = Gauge("ostrya_process_tasks", "Asyncio tasks alive in this process.", registry=registry)

    def start(self) -> int:
        """Binds and returns the port; call inside the running loop. OSError if the port is taken."""
        # promtool finds no unit in *_created, and nobody reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        loop = asyncio.get_running_loop()
        server = ScrapeServer(self._registry)
        try:
            port = server.start(self._host, self._port)
        except OSError as error:
            raise OSError(f"cannot serve metrics on {self._host}:{self._port}: {error.strerror}") from error
        ProcessCollector(registry=self._registry)
        self._tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        self._running = server
        return port

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
