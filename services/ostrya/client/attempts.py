"""When a failed call may be tried again: only where the server invited it, and only within the caller's time."""

import time
from collections.abc import Callable
from typing import TypeAlias

import grpc

from ostrya.errors import OstryaError, Unavailable
from ostrya.service import status

MAX_TRIES = 3

OnRetry: TypeAlias = Callable[[OstryaError, float], None]
"""Is told why a try failed and how many seconds pass before the next."""

CHANNEL_OPTIONS = (
    # Above any router's limit, so that the server's own clear refusal is what a caller sees.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Notices a silent server within 15 s; only while a call runs, an idle client costs nothing.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def failure(rpc: grpc.RpcError, target: str) -> OstryaError:
    """The exception a failed call stands for; a transport's failure names the target."""
    error = status.error_of(rpc)
    if isinstance(error, Unavailable) and status.retry_after_s(error) is None:
        # gRPC nests the cause behind its own layers: "failed to connect ...; last error: ...: Connection refused".
        error.args = (f"{target} cannot be reached: {str(error).rpartition(': ')[2].rstrip(')')}",)
    return error


class Attempts:
    """The tries of one request and the time they share."""

    def __init__(
        self,
        timeout_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_retry: OnRetry | None = None,
    ) -> None:
        self._clock, self._on_retry = clock, on_retry
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._tries = 1

    def remaining_s(self) -> float | None:
        """What is left of the timeout; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def delay_after(self, error: OstryaError) -> float:
        """Seconds to wait before the next try; raises `error` when there must be none."""
        delay = status.retry_after_s(error)
        remaining = self.remaining_s()
        if delay is None or self._tries >= MAX_TRIES or (remaining is not None and delay >= remaining):
            raise error
        self._tries += 1
        if self._on_retry is not None:
            self._on_retry(error, delay)
        return delay
