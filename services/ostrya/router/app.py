"""All wiring of a router, and its life: start, serve, drain.

A router is SERVING as soon as it can accept requests, with or without replicas: a request waits a little for the first
one, and NOT_SERVING routers would only hide from clients what NO_REPLICA with RetryInfo says better.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from prometheus_client import CollectorRegistry

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ostrya.prefix.chain import ChainKey
from ostrya.prefix.index import PrefixIndex
from ostrya.router.admin import AdminServicer
from ostrya.router.admission import Admission
from ostrya.router.decide import Decider
from ostrya.router.discovery import Discovery
from ostrya.router.explain import DecisionLog
from ostrya.router.fleet import Fleet
from ostrya.router.metrics import RouterMetrics
from ostrya.router.proxy import Proxy
from ostrya.router.served import ServedModel
from ostrya.router.servicer import InferenceServicer
from ostrya.router.settings import RouterSettings
from ostrya.router.tracker import Tracker
from ostrya.service import logs
from ostrya.service.metrics import MetricsEndpoint
from ostrya.service.server import GrpcServer, stop_signal
from ostrya.text.source import resolve_model
from ostrya.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

_SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)

_GAUGES_EVERY_S = 0.5
"""Below any scrape interval."""

_FAREWELL_S = 0.3
"""NOT_SERVING and still accepting, so that who balances by health looks away before calls are refused."""


class Router:
    """Every part of one router, wired."""

    def __init__(self, settings: RouterSettings, *, name: str, tokenizer: Tokenizer) -> None:
        clock = time.monotonic
        registry = CollectorRegistry()
        chain = ChainKey(model=name, tokenizer_fingerprint=tokenizer.fingerprint)
        decisions = DecisionLog(clock=clock)
        self._settings = settings
        self._metrics = metrics = RouterMetrics(registry, model=name, pool=settings.pool)
        self._index = index = PrefixIndex()
        self.fleet = fleet = Fleet(index=index, clock=clock)
        self.admission = admission = Admission(max_in_flight=settings.max_in_flight, clock=clock)
        metrics.in_flight.set_function(lambda: admission.in_flight)
        self._discovery = Discovery(settings, fleet=fleet, chain=chain, clock=clock)
        self._tracker = Tracker(settings, fleet=fleet, index=index, clock=clock)
        self._server = GrpcServer(
            settings.host, settings.port, max_message_bytes=settings.max_message_bytes, services=_SERVICES
        )
        self._endpoint = MetricsEndpoint(registry, settings.host, settings.metrics_port)
        inference = InferenceServicer(
            served=ServedModel(name=name, tokenizer=tokenizer, fleet=fleet, clock=clock),
            admission=admission,
            decider=Decider(fleet=fleet, index=index, chain=chain, decisions=decisions, metrics=metrics, clock=clock),
            proxy=Proxy(fleet=fleet, metrics=metrics, model=name, settings=settings, clock=clock),
            metrics=metrics,
            draw_seed=lambda: secrets.randbits(64),
            clock=clock,
        )
        admin = AdminServicer(fleet=fleet, decisions=decisions)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, self._server.server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server.server)
        self.port = 0
        self.metrics_port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[set[asyncio.Task[None]]]:
        """Serves while the block runs; the tasks given to it should run for ever.

        Leaving drains: NOT_SERVING, a moment later no new calls, running streams end or are cut off, all is closed.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.fleet.close)
            stack.push_async_callback(self._discovery.close)
            stack.push_async_callback(self._tracker.close)
            self.metrics_port = self._endpoint.start()
            # Its thread looks for the end only now and then; streams must not wait for that.
            stack.push_async_callback(asyncio.to_thread, self._endpoint.close)
            tasks = {asyncio.create_task(part) for part in (self._discovery.run(), self._tracker.run(), self._show())}
            stack.push_async_callback(_end, tasks)
            self.port = await self._server.start()
            stack.push_async_callback(self._drain)
            await self._server.set_serving(True)
            yield tasks

    async def _drain(self) -> None:
        await self._server.set_serving(False)
        await asyncio.sleep(_FAREWELL_S)
        await self._server.stop(self._settings.drain_timeout_s)

    async def _show(self) -> None:
        """Keeps the gauges of fleet and index current."""
        while True:
            fleet, index = self.fleet, self._index
            self._metrics.show_fleet(fleet.replicas(), fleet.snapshot(), redis_up=fleet.redis_up)
            self._metrics.show_index(self._tracker, num_entries=index.num_entries, num_refused=index.num_refused)
            await asyncio.sleep(_GAUGES_EVERY_S)


async def serve(settings: RouterSettings) -> int:
    """Runs a router until SIGTERM or SIGINT, then drains it. The exit code: 1 if a part of it broke.

    ConfigError, ModelLoadError, or OSError for a port that is taken.
    """
    settings.check()
    logs.setup("router", settings.log_level)
    stop = stop_signal()
    source = resolve_model(settings.model)
    name = settings.model_name or source.name
    router = Router(settings, name=name, tokenizer=load_tokenizer(source.path))
    async with router.serving() as parts:
        fields = {"port": router.port, "metrics_port": router.metrics_port, "model": name}
        log.info("router serves", extra={"fields": fields})
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait({stopping, *parts}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        log.info("router drains", extra={"fields": {"in_flight": router.admission.in_flight}})
        for broken in done - {stopping}:
            log.error("a part of the router broke", exc_info=broken.exception())
        return 0 if stopping in done else 1


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    # What a part failed with was said by serve.
    await asyncio.gather(*tasks, return_exceptions=True)
