"""The gRPC side of a process: server with health, reflection and the right keepalive keys; channels; stop signals."""

import asyncio
import signal
import socket
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

# A client may ping every 10 s, with or without a call; the default of 300 s answers GOAWAY too_many_pings.
_MIN_CLIENT_PING_MS = 5_000
_CLIENT_PING_MS = 10_000
_PING_TIMEOUT_MS = 5_000
# Far above a router's fan-out to one worker; bounds what one client connection can hold open.
_MAX_STREAMS = 4_096


class GrpcServer:
    """A grpc.aio server. Add servicers to `server`, then start(); it is NOT_SERVING until set_serving(True)."""

    def __init__(self, host: str, port: int, *, max_message_bytes: int, services: Sequence[str]) -> None:
        self.server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                ("grpc.http2.min_ping_interval_without_data_ms", _MIN_CLIENT_PING_MS),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", 0),
            ]
        )
        self._host, self._port = host, port
        self._services = ("", *services)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    async def start(self) -> int:
        """Binds, listens, returns the port. OSError if it is taken."""
        _must_be_free(self._host, self._port)
        port = self.server.add_insecure_port(f"{self._host}:{self._port}")
        await self.set_serving(False)
        await self.server.start()
        return port

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers, to Check and to everyone watching."""
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if serving else states.NOT_SERVING
        for name in self._services:
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING, no new calls, running ones get `grace_s` seconds; then they are cancelled."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def channel(address: str, *, max_message_bytes: int) -> grpc.aio.Channel:
    """A plaintext channel that notices a silent peer within 15 s and reconnects quickly."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", _CLIENT_PING_MS),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
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
