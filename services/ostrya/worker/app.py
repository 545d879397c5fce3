"""A worker process: all of its wiring, from settings to exit code. Called by `ostrya worker`.

An engine that dies or hangs is started again in place (lasting.py). When it keeps doing so, or another process takes
the worker's id, the worker says so and exits 1, and its supervisor starts a fresh one.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from ostrya.api.v1 import worker_pb2, worker_pb2_grpc
from ostrya.engine import memory
from ostrya.engine.config import EngineConfig
from ostrya.engine.process import EngineProcess
from ostrya.engine.types import EngineInfo
from ostrya.engine.world import ranks_per_host
from ostrya.errors import Fenced, ModelLoadError
from ostrya.fetch import report as start_report
from ostrya.prefix.chain import ChainKey, self_test
from ostrya.service import descriptors, logs, tracing
from ostrya.service.metrics import MetricsEndpoint
from ostrya.service.parts import Parts
from ostrya.service.server import GrpcServer, stop_signal
from ostrya.state import keys
from ostrya.state.members import Member
from ostrya.worker.aliases import VllmAliases
from ostrya.worker.following import follow
from ostrya.worker.lasting import Cause, LastingEngine, Start
from ostrya.worker.metrics import WorkerMetrics
from ostrya.worker.publisher import Publisher
from ostrya.worker.remarks import Remarks
from ostrya.worker.role import role
from ostrya.worker.servicer import WorkerServicer
from ostrya.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_End = asyncio.Future[bool] | asyncio.Future[str] | asyncio.Future[Fenced]
FLUSH_S = 1.0
"""For the last statuses to reach their clients."""


async def serve(
    settings: WorkerSettings,
    config: EngineConfig,
    *,
    factory: str | None = None,
    vocabulary: Callable[[], list[bytes]] = list,
) -> int:
    """Runs a worker until SIGTERM or SIGINT (0), or until it cannot go on (1); one more signal ends its drain.

    `factory` ("module:function") replaces the backend's own runner; `vocabulary` says what each token spells. On a host
    other than the first of a slice it follows that one. ConfigError when settings or environment leave no role.
    """
    slice_ = role(settings, os.environ)
    ranks_per_host(config, slice_.num_hosts)
    if slice_.host:
        return await follow(settings, config, slice_, factory=factory)
    logs.setup("worker", settings.log_level)
    descriptors.raise_limit()
    stop = stop_signal()
    stopping = asyncio.create_task(stop.wait())
    start = partial(
        EngineProcess.start,
        config,
        max_waiting=settings.max_waiting,
        factory=factory,
        slice_=slice_,
        vocabulary=vocabulary,
    )
    starting = asyncio.create_task(start())
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, model=config.model_name)
    if settings.start_report_dir:
        metrics.fetched(start_report.read(Path(settings.start_report_dir)))
    endpoint = MetricsEndpoint(registry, settings.host, settings.metrics_port)
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(endpoint.close)
            stack.push_async_callback(_closed, starting)
            stack.push_async_callback(_cancelled, stopping)
            metrics_port = endpoint.start()
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 0
            worker = _Worker(settings, config, starting.result(), metrics, restart=start)
            if settings.metric_aliases:
                aliases = VllmAliases(
                    metrics.families, page_size=config.page_size, num_pages=lambda: worker.num_usable_pages
                )
                registry.register(aliases)
            return await worker.run(stop, metrics_port=metrics_port)
    except (ModelLoadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


class _Worker:
    """The parts around a warm engine, from the first SERVING to the end of the last request."""

    def __init__(
        self,
        settings: WorkerSettings,
        config: EngineConfig,
        engine: EngineProcess,
        metrics: WorkerMetrics,
        *,
        restart: Start,
    ) -> None:
        self._settings, self._config, self._metrics = settings, config, metrics
        self._engine = LastingEngine(engine, start=restart, lost=self._engine_lost, back=self._engine_back)
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
            self._engine,
            metrics,
            settings=settings,
            tokenizer_fingerprint=config.tokenizer_fingerprint,
            chain_self_test=self._self_test,
            set_serving=self._server.set_serving,
            epoch=lambda: self._publisher.epoch if self._publisher else 0,
            tracer=self._tracer,
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server.server)
        metrics.started(engine.info, pid=engine.pid)
        _tell_of(engine.info)
        metrics.report_age.set_function(lambda: self._engine.report_age_s)
        self._engine.listen(metrics.report)
        self._remarks = Remarks()
        self._engine.listen(lambda report: self._remarks.report(report))

    @property
    def num_usable_pages(self) -> int:
        """KV pages that requests can have: page 0 is scratch."""
        return self._engine.info.num_pages - 1

    async def run(self, stop: asyncio.Event, *, metrics_port: int) -> int:
        """Serves until `stop`, or until the engine keeps ending or the worker is fenced; then drains. The exit code.

        Whatever it raises, all of it is closed.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._tracer.close)
            return await self._serve(stop, stack, metrics_port=metrics_port)

    async def _serve(self, stop: asyncio.Event, stack: contextlib.AsyncExitStack, *, metrics_port: int) -> int:
        """What is started here `stack` ends, the last first."""
        port = await self._server.start()
        stack.push_async_callback(self._server.stop, FLUSH_S)
        address = self._settings.advertise_address or f"{self._settings.host}:{port}"
        publisher = self._publisher = Publisher(
            self._settings,
            member=self._member(address),
            refused=lambda refusal: self._metrics.redis_refusals[refusal].inc(),
        )
        stack.push_async_callback(publisher.close)
        self._engine.listen(lambda report: publisher.publish(report.stored, report.removed, report.load))
        self._metrics.registered.set_function(lambda: publisher.is_registered)
        self._metrics.redis_writable.set_function(lambda: not publisher.refusal)
        parts = Parts({"publisher": partial(_publish, publisher)}, clock=time.monotonic)
        self._metrics.parts["publisher"].set_function(lambda: "publisher" not in parts.failing())
        stack.push_async_callback(_cancelled, asyncio.create_task(parts.run()))
        stack.push_async_callback(self._engine.close)
        keeping = asyncio.create_task(self._engine.run())
        stack.push_async_callback(_cancelled, keeping)
        stopping: asyncio.Task[bool] = asyncio.create_task(stop.wait())
        stack.push_async_callback(_cancelled, stopping)
        await self._server.set_alive(True)
        await self._servicer.hear_pulse(is_alive=True)
        log.info("listening", extra={"fields": {"address": address, "port": port, "metrics_port": metrics_port}})
        ends: set[_End] = {stopping, keeping, publisher.fenced}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        stop.clear()
        if keeping.done():
            return await self._give_up(keeping.result())
        return await self._finish(publisher, hurry=stop)

    async def _finish(self, publisher: Publisher, *, hurry: asyncio.Event) -> int:
        """NOT_SERVING at once, then waits for the requests that can still end well, until `hurry`."""
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

    async def _give_up(self, why: str) -> int:
        await self._server.set_serving(False)
        self._metrics.enter("dead")
        log.error("the engine keeps ending; the worker exits", extra={"fields": {"reason": why}})
        return 1

    async def _engine_lost(self, cause: Cause) -> None:
        """To everybody else this worker is now a new process. What it says of itself comes before whoever asks it.

        `liveness` stays: a kubelet that killed the pod would only make the same take longer.
        """
        if self._publisher is not None:
            self._publisher.start_anew()
        self._metrics.engine_lost(cause)
        await self._servicer.hear_pulse(is_alive=False)
        self._server.hang_up()

    async def _engine_back(self, info: EngineInfo) -> None:
        self._remarks = Remarks()
        self._metrics.started(info, pid=self._engine.pid)
        _tell_of(info)
        await self._servicer.hear_pulse(is_alive=True)

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


def _tell_of(info: EngineInfo) -> None:
    """How the engine keeps its weights, and what lies in its memory."""
    log.info("the model is loaded", extra={"fields": _loaded(info)})
    if info.memory is None:
        return
    level = logging.WARNING if info.memory.limit_bytes and info.memory.free_bytes < 0 else logging.INFO
    fields = memory.rows(info.memory) | {"num_pages": info.num_pages}
    log.log(level, "memory of a device", extra={"fields": fields})


def _loaded(info: EngineInfo) -> dict[str, object]:
    """What the log says of it."""
    fields: dict[str, object] = {"weights": info.weights, "dtype": info.dtype}
    if info.peaks is not None:
        fields |= {"bytes_per_s": info.peaks.bytes_per_s, "flops_per_s": info.peaks.flops_per_s}
        fields["peaks"] = info.peaks.source
    return fields | ({"simulated": True} if info.is_simulated else {})


async def _publish(publisher: Publisher) -> None:
    """Until cancelled, also when fenced: that is no failure, and no new start would change it."""
    await publisher.run()
    await asyncio.Event().wait()


async def _cancelled(task: "asyncio.Task[bool] | asyncio.Task[int] | asyncio.Task[str] | asyncio.Task[None]") -> None:
    """Ends a task; what it raised before is raised here."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _closed(starting: "asyncio.Task[EngineProcess]") -> None:
    """Ends the engine, warm or still loading."""
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, ModelLoadError, OSError):
        await (await starting).close()
