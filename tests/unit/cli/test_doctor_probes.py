"""What the probes make of names and of answers that are not what they should be."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ostrya.cli import probes
from ostrya.cli.prometheus import shown
from tests.fakes.router import FakeRouter


@contextmanager
def web_server(status: int, body: str) -> Iterator[str]:
    """Answers every GET so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(5)


async def test_behind_a_name_with_several_addresses_every_router_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, *args: object, **more: object) -> list[tuple[object, ...]]:
        plain = [(socket.AF_INET, 0, 0, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]
        return [(socket.AF_INET6, 0, 0, "", ("::1", port, 0, 0)), *plain]

    with FakeRouter() as router:
        port = router.target.rpartition(":")[2]
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        facts = await probes.ask(probes.Questions(targets=(f"routers:{port}",), timeout_s=2))
    assert [one.target for one in facts.routers] == [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
    assert [bool(one.error) for one in facts.routers] == [False, True]
    assert list(facts.routers[0].replicas) == ["worker-0"]


async def test_a_name_that_nobody_knows_is_a_router_that_does_not_answer() -> None:
    (router,) = (await probes.ask(probes.Questions(targets=("no.such.name.invalid:1",), timeout_s=2))).routers
    assert router.target == "no.such.name.invalid:1"
    assert router.error


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, "<html>", "Expecting value"),
        (200, '"text"', "its answer is not that of Prometheus"),
        (200, json.dumps({"status": "error"}), "its answer is not that of Prometheus"),
        (401, "", "HTTP 401 Unauthorized"),
        (200, json.dumps({"status": "success", "data": {}}), "its answer is not that of Prometheus"),
    ],
)
async def test_what_is_no_prometheus_says_so(status: int, body: str, words: str) -> None:
    with web_server(status, body) as url:
        questions = probes.Questions(targets=(), prometheus=url, timeout_s=3)
        found = (await probes.ask(questions)).prometheus
    assert found is not None
    assert words in found.error


@pytest.mark.parametrize(
    ("url", "without"),
    [
        ("redis://user:secret@host:6379/0?password=secret", "redis://host:6379/0"),
        ("rediss://:se@cret@host/1", "rediss://host/1"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("https://u:p@host/prefix/", "https://host/prefix/"),
    ],
)
def test_urls_are_shown_without_what_is_secret(url: str, without: str) -> None:
    assert shown(url) == without
