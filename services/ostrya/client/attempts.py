"""When a failed call may be tried again: where the server invited it, or where no server had it, within the caller's
time. A router that ends or starts again is met that way; nothing is tried again after the first message."""

import json
import time
from collections.abc import Callable
from math import isnan
from typing import TypeAlias, cast

import grpc

from ostrya.errors import InvalidRequest, OstryaError, Unavailable
from ostrya.service import status
from ostrya.service.bounds import ENDLESS_S

MAX_TRIES = 3

MIN_RECONNECT_S, MAX_RECONNECT_S = 0.1, 1.0
"""Between tries to reach a router, each twice as long as the one before."""

PATIENCE_S = 15.0
"""For a router that has answered this client before: one that is started again is back within seconds."""

# Requests go round all routers of a target that has several (DNS, or `ipv4:host:port,host:port`). Health makes a router
# that is about to end leave the round before it refuses calls.
_SERVICE_CONFIG = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}

OnRetry: TypeAlias = Callable[[OstryaError, float], None]
"""Is told why a try failed and how many seconds pass before the next."""

CHANNEL_OPTIONS = (
    # Above any router's limit, so that the server's own clear refusal is what a caller sees.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # Notices a silent server within 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Unreached(Unavailable):
    """No router answered: nobody listens, or whoever did is ending."""


def failure(rpc: grpc.RpcError, target: str) -> OstryaError:
    """The exception a failed call stands for; a transport's failure names the target."""
    code = cast("grpc.Call", rpc).code()
    if code is grpc.StatusCode.CANCELLED:
        # Not by us: so gRPC ends the calls that meet a server in the moment it stops, and those its drain cuts off.
        return Unreached(f"{target} ended the call; it is shutting down")
    error = status.error_of(rpc)
    if isinstance(error, Unavailable) and not status.is_ours(rpc):
        return Unreached(f"{target} cannot be reached: {status.innermost(error)}")
    return error


class Peer:
    """The router as one client has met it."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.has_answered = False
        """Then it is worth waiting for; a target that never did is more likely a wrong one."""
        self.is_closed = False
        """By the client, whose calls have all been cancelled."""

    def failure(self, rpc: grpc.RpcError) -> OstryaError:
        """The exception a failed call stands for."""
        if self.is_closed:
            return status.error_of(rpc)
        error = failure(rpc, self.target)
        self.has_answered = self.has_answered or not isinstance(error, Unreached)
        return error


class Attempts:
    """The tries of one request and the time they share."""

    def __init__(
        self,
        timeout_s: float | None,
        *,
        peer: Peer,
        clock: Callable[[], float] = time.monotonic,
        on_retry: OnRetry | None = None,
    ) -> None:
        self._peer, self._clock, self._on_retry = peer, clock, on_retry
        if timeout_s is not None and isnan(timeout_s):
            raise InvalidRequest("timeout_s", timeout_s, "seconds, or none for no limit")
        self._deadline = None if timeout_s is None or timeout_s > ENDLESS_S else clock() + timeout_s
        self._tries = 1
        self._unreached = 0
        self._unreached_since = 0.0

    def remaining_s(self) -> float | None:
        """What is left of the timeout; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def delay_after(self, error: OstryaError) -> float:
        """Seconds to wait before the next try; raises `error` when there must be none."""
        delay = self._reconnect_after() if isinstance(error, Unreached) else self._invited_after(error)
        remaining = self.remaining_s()
        if delay is None or (remaining is not None and delay >= remaining):
            raise error
        if self._on_retry is not None:
            self._on_retry(error, delay)
        return delay

    def _invited_after(self, error: OstryaError) -> float | None:
        self._unreached = 0
        self._tries += 1
        return status.retry_after_s(error) if self._tries <= MAX_TRIES else None

    def _reconnect_after(self) -> float | None:
        if not self._unreached:
            self._unreached_since = self._clock()
        self._unreached += 1
        delay = min(MIN_RECONNECT_S * 2 ** (self._unreached - 1), MAX_RECONNECT_S)
        if self._peer.has_answered:
            return delay if self._clock() - self._unreached_since + delay <= PATIENCE_S else None
        return delay if self._unreached < MAX_TRIES else None
