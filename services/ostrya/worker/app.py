"""A worker process: all of its wiring, from settings to exit code. Called by `ostrya worker`.

It never heals itself: when the engine dies or another process takes its id, it says so and exits 1, and its supervisor
starts a fresh one.
"""

import asyncio
import contextlib
import logging
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from ostrya.api.v1 import worker_pb2, worker_pb2_grpc
from ostrya.engine.config import EngineConfig
from ostrya.engine.process import EngineProcess
from ostrya.errors import Fenced, ModelLoadError
from ostrya.fetch import report as start_report
from ostrya.prefix.chain import ChainKey, self_test
from ostrya.service import logs, tracing
from ostrya.service.metrics import MetricsEndpoint
from ostrya.service.server import GrpcServer, stop_signal
from ostrya.state import keys
from ostrya.state.members import Member
from ostrya.worker.aliases import VllmAliases
from ostrya.worker.metrics import WorkerMetrics
from ostrya.worker.publisher import Publisher
from ostrya.worker.pulse import Pulse
from ostrya.worker.servicer import WorkerServicer
from ostrya.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_End = asyncio.Future[bool] | asyncio.Future[None] | asyncio.Future[str] | asyncio.Future[Fenced]
FLUSH_S = 1.0
"""For the last statuses to reach their clients."""
PULSE_S = 0.5
"""Between looks at the engine's pulse."""


async def serve(settings: WorkerSettings, config: EngineConfig, *, factory: str | None = None) -> int:
    """Runs a worker until SIGTERM or SIGINT (0), or until it cannot go on (1); one more signal ends its drain.

    `factory` ("module:function") replaces the backend's own runner.
    """
    logs.setup("worker", settings.log_level)
    stop = stop_signal()
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(EngineProcess.start(config, max_waiting=settings.max_waiting, factory=factory))
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, model=config.model_name)
    if settings.start_report_dir:
        metrics.fetched(start_report.read(Path(settings.start_report_dir)))
    endpoint = MetricsEndpoint(registry, settings.host, settings.metrics_port)
    try:
        metrics_port = endpoint.start()
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 0
        worker = _Worker(settings, config, starting.result(), metrics)
        if settings.metric_aliases:
            # Page 0 is scratch.
            registry.register(VllmAliases(metrics.families, page_size=config.page_size, num_pages=config.num_pages - 1))
        return await worker.run(stop, metrics_port=metrics_port)
    except (ModelLoadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        await _cancelled(stopping)
        await _closed(starting)
        endpoint.close()


class _Worker:
    """The parts around a warm engine, from the first SERVING to the end of the last request."""

    def __init__(
        self, settings: WorkerSettings, config: EngineConfig, engine: EngineProcess, metrics: WorkerMetrics
    ) -> None:
        self._settings, self._config, self._engine, self._metrics = settings, config, engine, metrics
        key = ChainKey(model=config.model_name, tokenizer_fingerprint=config.tokenizer_fingerprint)
        self._self_test = self_test(key, page_size=config.page_size, stride=config.routing_stride)
        self._server = GrpcServer(
            settings.host,
            settings.port,
            max_message_bytes=settings.max_message_bytes,
            services=[SERVICE],
            undecodable=metrics.undecodable.inc,
        )
        self._publisher: Publisher | None = None
        self._tracer = tracing.start(
            settings.otlp_endpoint, service="ostrya-worker", instance=settings.worker_id, pool=settings.pool
        )
        self._servicer = WorkerServicer(
            engine,
            metrics,
            settings=settings,
            tokenizer_fingerprint=config.tokenizer_fingerprint,
            chain_self_test=self._self_test,
            set_serving=self._server.set_serving,
            epoch=lambda: self._publisher.epoch if self._publisher else 0,
            tracer=self._tracer,
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server.server)
        self._pulse = Pulse()
        engine.listen(self._pulse.beat)
        metrics.started(engine.info)
        metrics.report_age.set_function(lambda: self._pulse.age_s)
        engine.listen(metrics.report)

    async def run(self, stop: asyncio.Event, *, metrics_port: int) -> int:
        """Serves until `stop`, or until the engine dies or the worker is fenced; then drains. The exit code."""
        port = await self._server.start()
        address = self._settings.advertise_address or f"{self._settings.host}:{port}"
        publisher = self._publisher = Publisher(self._settings, member=self._member(address))
        self._engine.listen(lambda report: publisher.publish(report.stored, report.removed, report.load))
        self._metrics.registered.set_function(lambda: publisher.is_registered)
        publishing = asyncio.create_task(publisher.run())
        watching = asyncio.create_task(self._watch_pulse())
        stopping: asyncio.Task[bool] = asyncio.create_task(stop.wait())
        try:
            await self._servicer.hear_pulse(is_alive=True)
            log.info("listening", extra={"fields": {"address": address, "port": port, "metrics_port": metrics_port}})
            ends: set[_End] = {stopping, publishing, self._engine.dead, publisher.fenced}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stop.clear()
            return await self._finish(publisher, hurry=stop)
        finally:
            await _cancelled(stopping)
            await _cancelled(watching)
            await _cancelled(publishing)
            await publisher.close()
            await self._server.stop(FLUSH_S)
            await self._tracer.close()

    async def _finish(self, publisher: Publisher, *, hurry: asyncio.Event) -> int:
        """NOT_SERVING at once, then waits for the requests that can still end well, until `hurry`."""
        if self._engine.dead.done():
            await self._server.set_serving(False)
            self._metrics.enter("dead")
            log.error("engine died; the worker exits", extra={"fields": {"reason": self._engine.dead.result()}})
            return 1
        num_cancelled = await self._drained(hurry)
        log.info("drained", extra={"fields": {"num_cancelled": num_cancelled}})
        if publisher.fenced.done():
            log.error("fenced; the worker exits", extra={"fields": {"reason": str(publisher.fenced.result())}})
            return 1
        return 0

    async def _drained(self, hurry: asyncio.Event) -> int:
        """How many requests had to be cancelled."""
        ending = asyncio.create_task(self._servicer.end(self._settings.drain_timeout_s))
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({ending, hurried}, return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(hurried)
        if not ending.done():
            num_cancelled = await self._servicer.end(0)
            await _cancelled(ending)
            return num_cancelled
        return ending.result()

    async def _watch_pulse(self) -> None:
        """Until cancelled; what `liveness` says follows the engine, also while the worker drains or is cordoned."""
        was_alive = None
        while True:
            is_alive = self._pulse.is_alive
            if is_alive is not was_alive:
                await self._server.set_alive(is_alive)
                await self._servicer.hear_pulse(is_alive=is_alive)
                if not is_alive:
                    log.error("the step loop hangs", extra={"fields": {"report_age_s": round(self._pulse.age_s, 1)}})
            was_alive = is_alive
            await asyncio.sleep(PULSE_S)

    def _member(self, address: str) -> Member:
        info = self._engine.info
        return Member(
            worker_id=self._settings.worker_id,
            address=address,
            model=info.model,
            page_size=info.page_size,
            routing_stride=info.routing_stride,
            chain_self_test=self._self_test,
            max_running=info.max_running,
            context_tokens=info.context_tokens,
            vocab_size=info.vocab_size,
            schema=keys.SCHEMA,
        )


async def _cancelled(task: "asyncio.Task[bool] | asyncio.Task[int] | asyncio.Task[None]") -> None:
    """Ends a task; what it raised before is raised here."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _closed(starting: "asyncio.Task[EngineProcess]") -> None:
    """Ends the engine, warm or still loading."""
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, ModelLoadError, OSError):
        await (await starting).close()
