"""Free ports on this machine, for children that must know each other's before they start."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ostrya.errors import ConfigError

HOST = "127.0.0.1"
TRIES = 100


@contextmanager
def free_ports() -> Iterator[Callable[[int], int]]:
    """Hands out ports that are free now, all different; with a wish, that port or the next free one."""
    held: list[socket.socket] = []

    def take(wish: int) -> int:
        for port in range(wish, wish + TRIES) if wish else [0]:
            holder = socket.socket()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.append(holder)
            try:
                holder.bind((HOST, port))
                # Bound sockets may share a port when they say so; listening ones may not.
                holder.listen(1)
            except OSError:
                continue
            return int(holder.getsockname()[1])
        raise ConfigError([f"ports {wish} to {wish + TRIES - 1} are all taken; choose another with --port"])

    try:
        yield take
    finally:
        for holder in held:
            holder.close()
