"""All wiring of a router, and its life: start, serve, drain.

A router is SERVING as soon as it can accept requests, with or without replicas: a request waits a little for the first
one, and NOT_SERVING routers would only hide from clients what NO_REPLICA with RetryInfo says better.
"""

import asyncio
import gc
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from prometheus_client import CollectorRegistry

from ostrya.api.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ostrya.prefix.chain import ChainKey
from ostrya.prefix.index import PrefixIndex
from ostrya.router import convert
from ostrya.router.admin import AdminServicer, Status
from ostrya.router.admission import Admission
from ostrya.router.closing import Closing
from ostrya.router.decide import Decider
from ostrya.router.discovery import Discovery
from ostrya.router.explain import DecisionLog
from ostrya.router.fleet import Fleet
from ostrya.router.gate import Gate
from ostrya.router.metrics import KubernetesMetrics, RouterMetrics
from ostrya.router.offload import Offload
from ostrya.router.proxy import Proxy
from ostrya.router.served import ServedModel
from ostrya.router.servicer import InferenceServicer
from ostrya.router.settings import RouterSettings
from ostrya.router.tracker import Tracker
from ostrya.router.waiting import WaitingRoom, num_free
from ostrya.service import descriptors, logs, tracing
from ostrya.service.metrics import MetricsEndpoint
from ostrya.service.parts import Parts
from ostrya.service.server import GrpcServer, stop_signal
from ostrya.state.rows import Rejects
from ostrya.text.source import resolve_model
from ostrya.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

_SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)

_GAUGES_EVERY_S = 0.5
"""Below any scrape interval."""

_LAST_WORDS_S = 1.0
"""For the statuses of the requests that the end of a drain ends; a client that does not read them is cut off then."""


class Router:
    """Every part of one router, wired."""

    def __init__(self, settings: RouterSettings, *, name: str, tokenizer: Tokenizer) -> None:
        clock = time.monotonic
        registry = CollectorRegistry()
        chain = ChainKey(model=name, tokenizer_fingerprint=tokenizer.fingerprint)
        decisions = DecisionLog(clock=clock)
        self._settings, self._name = settings, name
        self._metrics = metrics = RouterMetrics(registry, model=name, pool=settings.pool)
        self._index = index = PrefixIndex()
        self.fleet = fleet = Fleet(index=index, clock=clock)
        self.admission = admission = Admission(max_in_flight=settings.max_in_flight, clock=clock)
        metrics.in_flight.set_function(lambda: admission.in_flight)
        self._room = room = WaitingRoom(
            max_waiting=settings.max_waiting,
            num_free=lambda: num_free(fleet.snapshot()),
            clock=clock,
            waited=metrics.queue_wait_s.observe,
        )
        metrics.queue_depth.set_function(lambda: room.num_waiting)
        self._kubernetes = KubernetesMetrics(registry) if settings.discovery == "kubernetes" else None
        self._rejects = rejects = Rejects()
        self._discovery = Discovery(settings, fleet=fleet, chain=chain, clock=clock, rejects=rejects)
        self._tracker = Tracker(settings, fleet=fleet, index=index, clock=clock, rejects=rejects)
        self._parts = Parts(
            {
                "discovery": self._discovery.run,
                "tracker": self._tracker.run,
                "waiting": lambda: room.follow(fleet.wait_changed),
                "gauges": self._show,
            },
            clock=clock,
        )
        self._offload = offload = Offload()
        served = ServedModel(
            name=name,
            tokenizer=tokenizer,
            fleet=fleet,
            offload=offload,
            clock=clock,
            allow_special_tokens_in_content=settings.allow_special_tokens_in_content,
        )
        bounds = convert.Bounds(max_messages=settings.max_messages, max_prompt_bytes=settings.max_prompt_bytes)
        self._server = GrpcServer(
            settings.host,
            settings.port,
            max_message_bytes=settings.max_message_bytes,
            services=_SERVICES,
            max_connection_age_s=settings.max_connection_age_s,
            undecodable=metrics.undecodable.inc,
            gate=Gate(served=served, bounds=bounds, metrics=metrics),
        )
        self._endpoint = MetricsEndpoint(registry, settings.host, settings.metrics_port)
        instance = f"{socket.gethostname()}:{settings.port}"
        self._tracer = tracing.start(
            settings.otlp_endpoint, service="ostrya-router", instance=instance, pool=settings.pool
        )
        self._closing = Closing()
        inference = InferenceServicer(
            served=served,
            admission=admission,
            decider=Decider(
                fleet=fleet,
                index=index,
                chain=chain,
                decisions=decisions,
                metrics=metrics,
                offload=offload,
                long_request_tokens=settings.long_request_tokens,
                clock=clock,
            ),
            proxy=Proxy(
                fleet=fleet, room=room, metrics=metrics, model=name, settings=settings, offload=offload, clock=clock
            ),
            closing=self._closing,
            bounds=bounds,
            offload=offload,
            metrics=metrics,
            draw_seed=lambda: secrets.randbits(64),
            clock=clock,
            tracer=self._tracer,
        )
        admin = AdminServicer(
            fleet=fleet, decisions=decisions, max_message_bytes=settings.max_message_bytes, status=self.status
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, self._server.server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server.server)
        self.port = 0
        self.metrics_port = 0
        self.hurry = asyncio.Event()
        """Set: a drain waits no longer."""
        self._is_draining = False

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serves while the block runs.

        Leaving drains: NOT_SERVING, a moment later no new calls, running streams end (also those that still wait for a
        replica) or are ended with UNAVAILABLE, all is closed.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._tracer.close)
            stack.push_async_callback(asyncio.to_thread, self._offload.close)
            stack.push_async_callback(self.fleet.close)
            stack.push_async_callback(self._discovery.close)
            stack.push_async_callback(self._tracker.close)
            self.metrics_port = self._endpoint.start()
            # It waits for a thread; streams must not wait for that.
            stack.push_async_callback(asyncio.to_thread, self._endpoint.close)
            stack.push_async_callback(_end, asyncio.create_task(self._parts.run(), name="parts"))
            self.port = await self._server.start()
            stack.push_async_callback(self._drain)
            await self._server.set_alive(True)
            await self._server.set_serving(True)
            self._metrics.enter("serving")
            yield

    def status(self) -> Status:
        """As GetStatus tells it."""
        return Status(
            pool=self._settings.pool,
            model=self._name,
            discovery=self._settings.discovery,
            redis_up=self.fleet.redis_up,
            kubernetes_up=self._discovery.kubernetes_up,
            level=self.fleet.snapshot().level,
            num_in_flight=self.admission.in_flight,
            num_waiting=self._room.num_waiting,
            is_draining=self._is_draining,
            failing=self._parts.failing(),
        )

    async def _drain(self) -> None:
        self._is_draining = True
        self._metrics.enter("draining")
        hurried = asyncio.create_task(self.hurry.wait())
        await self._server.set_serving(False)
        await asyncio.wait({hurried}, timeout=self._settings.farewell_s)
        drain_timeout_s = self._settings.drain_timeout_s
        stopping = asyncio.create_task(self._server.stop(drain_timeout_s + _LAST_WORDS_S))
        await asyncio.wait({stopping, hurried}, timeout=drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        self._closing.end()
        await asyncio.wait({stopping}, timeout=_LAST_WORDS_S)
        if not stopping.done():
            await self._server.stop(0)
        await stopping

    async def _show(self) -> None:
        """Keeps the gauges of fleet and index current."""
        while True:
            fleet, index = self.fleet, self._index
            self._metrics.show_fleet(fleet.replicas(), fleet.snapshot(), redis_up=fleet.redis_up)
            self._metrics.show_index(self._tracker, num_entries=index.num_entries, num_refused=index.num_refused)
            self._metrics.show_parts(self._parts.failing(), self._parts.num_restarts)
            self._metrics.show_rejects(self._rejects.counts)
            if self._kubernetes is not None:
                self._kubernetes.show(self._discovery, self._discovery.nodes)
            await asyncio.sleep(_GAUGES_EVERY_S)


async def serve(settings: RouterSettings) -> int:
    """Runs a router until SIGTERM or SIGINT, then drains it; a second signal ends the drain. The exit code, 0.

    ConfigError, ModelLoadError, or OSError for a port that is taken.
    """
    settings.check()
    logs.setup("router", settings.log_level)
    descriptors.raise_limit()
    stop = stop_signal()
    source = resolve_model(settings.model)
    name = settings.model_name or source.name
    router = Router(settings, name=name, tokenizer=load_tokenizer(source.path))
    # What is here by now stays: looking through it again and again would be most of each pause for garbage.
    gc.collect()
    gc.freeze()
    async with router.serving():
        fields = {"port": router.port, "metrics_port": router.metrics_port, "model": name}
        log.info("router serves", extra={"fields": fields})
        await stop.wait()
        stop.clear()
        router.hurry = stop
        log.info("router drains", extra={"fields": {"in_flight": router.admission.in_flight}})
    return 0


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    # What a part failed with was said when it did.
    await asyncio.gather(task, return_exceptions=True)
