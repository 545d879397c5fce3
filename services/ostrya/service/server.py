"""The gRPC side of a process: server with health, reflection and the right keepalive keys; channels; stop signals."""

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from ostrya.errors import InvalidRequest
from ostrya.service import descriptors, reflection
from ostrya.service.bounds import check_name
from ostrya.service.decoding import NO_GATE, Decoding, Gate
from ostrya.service.status import Context, abort

# A client may ping every 10 s, with or without a call; the default of 300 s answers GOAWAY too_many_pings.
_MIN_CLIENT_PING_MS = 5_000
_CLIENT_PING_MS = 10_000
_PING_TIMEOUT_MS = 5_000
# A connection that does not begin to speak HTTP/2; gRPC would wait for 120 s.
_HANDSHAKE_MS = 10_000
_STATES = {True: health_pb2.HealthCheckResponse.SERVING, False: health_pb2.HealthCheckResponse.NOT_SERVING}
# Far above a router's fan-out to one worker; bounds what one client connection can hold open.
_MAX_STREAMS = 4_096
_LAST_WATCHES_S = 1.0

LIVENESS = "liveness"
"""The health service that says whether a process should live; the others say whether it takes new work."""


class GrpcServer:
    """A grpc.aio server. Add servicers to `server`, then start(); it is NOT_SERVING until set_serving(True)."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_message_bytes: int,
        services: Sequence[str],
        max_connection_age_s: float = 0.0,
        undecodable: Callable[[], object] = lambda: None,
        gate: Gate = NO_GATE,
    ) -> None:
        """`undecodable` hears of each request whose bytes are not its method's message; `gate` is asked about each."""
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_CLIENT_PING_MS),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_allowed_incoming_connections", descriptors.max_clients()),
        ]
        if max_connection_age_s:
            # GOAWAY sends new calls to a new connection. The old one ends with its last stream, however long that
            # takes: gRPC's grace is endless unless set, and no stream is worth cutting for the sake of balance.
            options.append(("grpc.max_connection_age_ms", round(max_connection_age_s * 1000)))
        self.server = grpc.aio.server(options=options, interceptors=(Decoding(undecodable, gate=gate),))
        self._host, self._port = host, port
        self._services = ("", *services)
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable((*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name), self.server)

    async def start(self) -> int:
        """Binds, listens, returns the port. OSError if it is taken."""
        _must_be_free(self._host, self._port)
        port = self.server.add_insecure_port(f"{self._host}:{self._port}")
        await self.set_serving(False)
        await self.set_alive(False)
        await self.server.start()
        return port

    async def set_serving(self, serving: bool) -> None:
        """Readiness: what grpc.health.v1 answers for the services, to Check and to everyone watching."""
        for name in self._services:
            await self._health.set(name, _STATES[serving])

    async def set_alive(self, alive: bool) -> None:
        """The same for `liveness`, which readiness leaves alone: a process that drains must not be killed for it."""
        await self._health.set(LIVENESS, _STATES[alive])

    def hang_up(self) -> None:
        """Ends every open health watch: whoever still cares asks again, and who this is too."""
        self._health.hang_up()

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING, no new calls, running ones get `grace_s` seconds; then they are cancelled.

        Who watches health is not waited for. A second call with a shorter grace overrides the first.
        """
        await self.set_serving(False)
        stopping = asyncio.ensure_future(self.server.stop(grace_s))
        await asyncio.sleep(0)  # from here on no new watch can begin
        await self._health.end_watches()
        await stopping


class _Watch:
    """An open one."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        """It is to look again."""
        self.is_ended = False
        self.closed = asyncio.Event()

    def end(self) -> None:
        self.is_ended = True
        self.woken.set()


class _Health(HealthServicer):
    """A watch is a call without an end, so that a server with one watcher would use up its whole grace. To cancel one
    is no way out: met while it sends, its call stays open for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._watches: set[_Watch] = set()
        self._told: dict[str, int] = {}
        self._is_ended = False

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]",
    ) -> health_pb2.HealthCheckResponse:
        await _check_name(request, context)
        return await super().Check(request, context)

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]",
    ) -> None:
        # A watch of a service that is not there waits for it, and would hold a name of any length meanwhile.
        await _check_name(request, context)
        watch = _Watch()
        self._watches.add(watch)
        last: int | None = None
        try:
            # Its call may have come just before the end, and its turn after it.
            while not (watch.is_ended or self._is_ended):
                watch.woken.clear()
                status = self._told.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status == last:
                    await watch.woken.wait()
                else:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    last = status
        finally:
            self._watches.discard(watch)
            watch.closed.set()

    def hang_up(self) -> None:
        """Ends those that are open, with OK."""
        for watch in self._watches:
            watch.end()

    async def set(self, service: str, status: int) -> None:
        self._told[service] = status
        await super().set(service, status)
        for watch in self._watches:
            watch.woken.set()

    # The published types are behind the library and lack this method and its messages.
    async def List(
        self,
        request: health_pb2.HealthListRequest,  # type: ignore[name-defined]
        context: Context,
    ) -> health_pb2.HealthListResponse:  # type: ignore[name-defined]
        """Every service and its status."""
        statuses = {name: health_pb2.HealthCheckResponse(status=one) for name, one in self._told.items()}
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]

    async def end_watches(self) -> None:
        """Ends all of them with OK, also those that are to begin. Returns when they have ended, so that the loop may
        close, but waits for none that takes nothing."""
        self._is_ended = True
        self.hang_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WATCHES_S):
                await asyncio.gather(*(watch.closed.wait() for watch in self._watches))


async def _check_name(
    request: health_pb2.HealthCheckRequest,
    context: "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]",
) -> None:
    try:
        check_name("service", request.service)
    except InvalidRequest as error:
        await abort(cast("Context", context), error)


def channel(address: str, *, max_message_bytes: int) -> grpc.aio.Channel:
    """A plaintext channel that notices a silent peer within 15 s and reconnects quickly."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", _CLIENT_PING_MS),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            # The one that governs: at its default a peer that hangs is noticed after 70 s.
            ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            # Each channel its own connection: a replica's failure must not be hidden by a shared one.
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


def stop_signal() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. Call inside the running loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def _must_be_free(host: str, port: int) -> None:
    """OSError in our words; gRPC itself would log its own and raise a RuntimeError without a reason."""
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
