"""The metrics port: whoever idles on it, floods it or does not read from it keeps nobody from a scrape."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from ostrya.service import scraping
from ostrya.service.scraping import MAX_CONNECTIONS, MAX_REQUEST_BYTES, ScrapeServer

SCRAPE_S = 10.0
"""For a busy machine."""
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


class Port:
    """A server and its clients, which end with it."""

    def __init__(self, number: int, clients: ExitStack) -> None:
        self.number, self._clients = number, clients

    def connect(self, sends: bytes = b"", *, receive_bytes: int = 0) -> socket.socket:
        """A client that sends that much and then does nothing."""
        client = socket.socket()
        self._clients.enter_context(client)
        if receive_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(SCRAPE_S)
        client.connect(("127.0.0.1", self.number))
        client.sendall(sends)
        return client

    def scrape(self, **headers: str) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.number}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=SCRAPE_S) as answer:
            body: bytes = answer.read()
        return body


@contextmanager
def serving(registry: CollectorRegistry) -> Iterator[Port]:
    server = ScrapeServer(registry)
    with ExitStack() as clients:
        number = server.start("127.0.0.1", 0)
        try:
            yield Port(number, clients)
        finally:
            server.close()
            assert not server._thread.is_alive()


@pytest.fixture
def port() -> Iterator[Port]:
    registry = CollectorRegistry()
    Counter("ostrya_test_events_total", "Events.", registry=registry).inc(3)
    with serving(registry) as made:
        yield made


def is_cut_off(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_three_hundred_idle_connections_keep_nobody_from_a_scrape_and_are_cut_off(port: Port) -> None:
    idle = [port.connect(b"" if number % 2 else b"GET /met") for number in range(300)]
    assert b"ostrya_test_events_total 3.0" in port.scrape()
    # All but those that have a place are gone already; the scrape took one of theirs.
    assert all(is_cut_off(client) for client in idle[: 300 - MAX_CONNECTIONS])


def test_a_request_that_does_not_arrive_in_time_is_cut_off(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "REQUEST_S", 0.2)
    assert is_cut_off(port.connect(b"GET /metrics HTTP/1.1\r\n"))
    assert b"ostrya_test_events_total 3.0" in port.scrape()


def test_readers_that_take_nothing_keep_nobody_from_a_scrape_and_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "ANSWER_S", 0.2)
    registry = CollectorRegistry()
    events = Counter("ostrya_test_events_total", "Events.", ["name"], registry=registry)
    events.labels("x" * 8_000_000)  # more than the kernel takes off our hands
    with serving(registry) as port:
        slow = [port.connect(GET, receive_bytes=4096) for _ in range(2 * MAX_CONNECTIONS)]
        assert len(port.scrape()) > 4_000_000
        for client in slow:
            with pytest.raises(ConnectionError):
                while client.recv(1 << 20):
                    pass
                raise ConnectionError("ended early")


def test_an_answer_is_what_prometheus_asks_for(port: Port) -> None:
    plain = port.scrape().decode()
    assert "ostrya_test_events" in [family.name for family in text_string_to_metric_families(plain)]
    assert port.scrape(Accept="application/openmetrics-text;version=1.0.0").endswith(b"# EOF\n")
    assert port.scrape(**{"Accept-Encoding": "gzip"}).startswith(b"\x1f\x8b")


@pytest.mark.parametrize(
    ("sends", "expected"),
    [
        (GET, b"HTTP/1.1 200 OK\r\n"),
        (GET.replace(b"GET", b"HEAD"), b"HTTP/1.1 200 OK\r\n"),
        (GET.replace(b"GET", b"POST"), b"HTTP/1.1 405 "),
        (b"\r\n\r\n", b"HTTP/1.1 405 "),
        (b"\xff\x00: \r\n\r\n", b"HTTP/1.1 405 "),
        (b"GET / HTTP/1.1\r\nAccept: application/openmetrics-text;version=x.y\r\n\r\n", b"HTTP/1.1 400 "),
        (b"x" * 2 * MAX_REQUEST_BYTES, b""),
        (b"", b""),
    ],
)
def test_whatever_is_sent_ends_in_one_answer_or_none(
    port: Port, sends: bytes, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "REQUEST_S", 0.3)
    client = port.connect(sends)
    answer = b""
    try:
        while more := client.recv(1 << 16):
            answer += more
    except ConnectionError:
        pass
    assert answer.startswith(expected)
    assert bool(answer) == bool(expected)
    assert (b"Connection: close" in answer) == bool(expected)
    assert port.scrape()


def test_close_cuts_off_who_is_there_and_frees_the_port() -> None:
    server, before = ScrapeServer(CollectorRegistry()), threading.active_count()
    with ExitStack() as clients:
        port = Port(server.start("127.0.0.1", 0), clients)
        idle = port.connect()
        port.scrape()  # the server has seen both
        server.close()
        assert is_cut_off(idle)
        assert threading.active_count() == before
        with pytest.raises(urllib.error.URLError, match="refused"):
            port.scrape()
