"""A worker and a Redis that wants TLS, a user and a password with every character that a URL knows."""

import dataclasses
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import pytest

from ostrya.errors import StateUnavailable
from ostrya.state.connection import Connection
from ostrya.state.members import read
from tests.fakes.certificates import make_certificate
from tests.fakes.redis_server import binary, free_port, require
from tests.integration.test_worker_process import READY_S, SETTINGS, poll, worker

USER, PASSWORD = "us:er@1", "p@ss/w?rd#1%"


@contextmanager
def tls_redis(directory: Path) -> Iterator[int]:
    """A server without a plaintext port; its one user may touch our keys only."""
    require("redis")
    now = datetime.now(UTC)
    made = make_certificate(["127.0.0.1"], not_before=now - timedelta(days=1), not_after=now + timedelta(days=1))
    (directory / "tls.crt").write_bytes(made.pem)
    (directory / "tls.key").write_bytes(made.key_pem)
    port = free_port()
    flags = {"port": 0, "tls-port": port, "bind": "127.0.0.1", "save": "", "tls-auth-clients": "no"}
    flags |= {"tls-cert-file": directory / "tls.crt", "tls-key-file": directory / "tls.key", "dir": directory}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    users = ["--user", "default", "off", "--user", USER, "on", f">{PASSWORD}", "~ostrya:*", "+@all"]
    process = subprocess.Popen([str(binary("redis")), *words, *users], stdout=subprocess.DEVNULL)
    try:
        poll(lambda: is_open(port), 10, lambda: "redis-server does not listen")
        yield port
    finally:
        process.terminate()
        process.wait(10)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def url(port: int, ca: Path, password: str = PASSWORD) -> str:
    login = f"{quote(USER, safe='')}:{quote(password, safe='')}"
    return f"rediss://{login}@127.0.0.1:{port}/0?ssl_ca_certs={quote(str(ca))}"


async def test_a_worker_registers_over_tls_with_a_user_and_a_password(tmp_path: Path) -> None:
    with tls_redis(tmp_path) as port:
        settings = dataclasses.replace(SETTINGS, redis_url=url(port, tmp_path / "tls.crt"))
        with worker(tmp_path, settings=settings) as running:
            running.fields("registered")
            assert await members(settings.redis_url) == {"w-0"}
        assert PASSWORD not in running.log.read_text()


async def members(redis_url: str) -> set[str]:
    """A handshake has half a second, which is little on a busy machine."""
    connection = Connection(redis_url)
    try:
        for _ in range(30):
            with suppress(StateUnavailable):
                return set(await read(connection, "default"))
        raise AssertionError("no member could be read")
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("password", "ca", "said", "why"),
    [
        ("wr@ng/secret", "tls.crt", "Redis refuses writes; serving on", "invalid username-password pair"),
        (PASSWORD, "none.crt", "Redis is gone; serving on", "No such file"),
        (PASSWORD, "", "Redis is gone; serving on", "certificate verify"),
    ],
)
async def test_what_keeps_a_worker_out_is_logged_without_the_password(
    tmp_path: Path, password: str, ca: str, said: str, why: str
) -> None:
    with tls_redis(tmp_path) as port:
        wrong = url(port, tmp_path / ca, password) if ca else url(port, Path(), password).partition("?")[0]
        with worker(tmp_path, settings=dataclasses.replace(SETTINGS, redis_url=wrong)) as running:
            # On a busy machine a handshake that takes too long is told first.
            poll(lambda: any(said in line and why in line for line in running.lines()), READY_S, running.log.read_text)
            log = running.log.read_text()
    assert password not in log
    assert quote(password, safe="") not in log
