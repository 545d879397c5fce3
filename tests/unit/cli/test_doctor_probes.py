"""What the probes make of names and of answers that are not what they should be."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ostrya.cli import probes
from ostrya.cli.diagnosis.facts import Dialled
from ostrya.cli.dialling import dial
from ostrya.cli.prometheus import shown
from tests.fakes.prometheus_server import Scraped, prometheus
from tests.fakes.redis_server import free_port
from tests.fakes.router import FakeRouter
from tests.fakes.worker import FakeWorker


@contextmanager
def web_server(status: int, body: str) -> Iterator[str]:
    """Answers every GET so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
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
    assert not router.error.endswith("]")


async def test_a_redis_that_says_nothing_is_told_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody speaks
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        found = (await probes.ask(probes.Questions(targets=(), redis_url=url, timeout_s=5))).redis
    assert found is not None
    assert found.error == "no answer in time"


async def test_a_worker_is_told_from_one_that_hangs_one_that_has_ended_and_one_that_is_out_of_reach() -> None:
    async with FakeWorker() as worker:
        await worker.set_serving(False)
        assert await dial(worker.address, 3.0) is Dialled.ANSWERS, "whether it takes work or not"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert await dial(f"127.0.0.1:{silent.getsockname()[1]}", 0.5) is Dialled.SILENT
    assert await dial(f"127.0.0.1:{free_port()}", 3.0) is Dialled.REFUSED
    for nowhere in ("", "no.such.name.invalid:1", "127.0.0.1:99999"):
        assert await dial(nowhere, 3.0) is Dialled.UNREACHABLE


async def test_the_workers_that_routers_and_redis_know_are_dialled() -> None:
    with FakeRouter() as router:
        facts = await probes.ask(probes.Questions(targets=(router.target,), timeout_s=2))
    assert facts.workers.keys() == {"127.0.0.1:7000"}


async def test_routers_that_cannot_watch_nodes_are_found_in_prometheus(tmp_path: Path) -> None:
    exposition = "".join(
        f'ostrya_router_kubernetes_up{{resource="{resource}"}} {is_up}\n'
        for resource, is_up in (("endpointslices", 1), ("nodes", 0))
    )
    with web_server(200, exposition) as router:
        target = Scraped("ostrya-router", router.removeprefix("http://"), {"pool": "a", "replica": "r0"})
        with prometheus(tmp_path, target) as url:
            found = (await probes.ask(probes.Questions(targets=(), prometheus=url, timeout_s=5))).prometheus
    assert found is not None
    assert found.error == ""
    assert set(found.blind_to_nodes) == {("a", "r0")}


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
