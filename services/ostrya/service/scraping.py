"""HTTP for scrapes and nothing else: one request a connection, few connections, little patience. Used by metrics.py.

It has a thread and an event loop of its own, so that a scrape is answered while the process's own loop is busy. Nobody
can hold it up: whoever does not send a request or take the answer in time is cut off, and where all places are taken
the one that has idled longest makes room. So a thousand idle connections cost neither descriptors nor a scrape.
"""

import asyncio
import contextlib
import gzip
import socket
from threading import Thread

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

MAX_CONNECTIONS = 16
"""Two Prometheus servers, a person and a monitoring agent need one each for some milliseconds."""
REQUEST_S = 5.0
"""For a request to arrive."""
ANSWER_S = 10.0
"""For an answer to be taken; Prometheus itself gives up after 10 s."""
MAX_REQUEST_BYTES = 16 << 10
JOIN_S = 5.0

_Headers = dict[str, str]


class ScrapeServer:
    """Serves `registry` at every path. `start` binds; `close` cuts everybody off."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._end = asyncio.Event()
        self._idle: dict[asyncio.Task[None], asyncio.WriteTransport] = {}
        """Connections whose request has not arrived, the oldest first."""
        self._answering: dict[asyncio.Task[None], asyncio.WriteTransport] = {}

    def start(self, host: str, port: int) -> int:
        """Binds and returns the port. OSError if it is taken."""
        listener = _listener(host, port)
        bound: int = listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, args=(listener,), name="metrics", daemon=True)
        self._thread.start()
        return bound

    def close(self) -> None:
        """Returns when port and thread are free. Call after start."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(JOIN_S)

    def _run(self, listener: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._serve(listener))
        finally:
            self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        # As many are accepted at once as the backlog holds, before the first of them makes room.
        server = await asyncio.start_server(
            self._connected, sock=listener, limit=MAX_REQUEST_BYTES, backlog=2 * MAX_CONNECTIONS
        )
        await self._end.wait()
        server.close()
        open_ = self._idle | self._answering
        for transport in open_.values():
            transport.abort()
        await asyncio.gather(*open_, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, transport = asyncio.current_task(), writer.transport
        assert task is not None
        self._make_room()
        self._idle[task] = transport
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
            if self._idle.pop(task, None) is None:
                return  # cut off in the same moment
            self._answering[task] = transport
            transport.set_write_buffer_limits(0)  # drained means handed to the kernel
            writer.write(_answer(head, self._registry))
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass  # cut off, gone, late (TimeoutError is an OSError), or no request at all
        finally:
            self._idle.pop(task, None)
            self._answering.pop(task, None)
            transport.abort()

    def _make_room(self) -> None:
        """Cuts off one if all places are taken: who sends nothing before who takes nothing."""
        if len(self._idle) + len(self._answering) >= MAX_CONNECTIONS:
            some = self._idle or self._answering
            some.pop(next(iter(some))).abort()


def _answer(head: bytes, registry: CollectorRegistry) -> bytes:
    """A whole response. Nothing of the request is echoed."""
    method, _, rest = head.decode("latin-1").partition(" ")
    if method not in ("GET", "HEAD"):
        return _response("405 Method Not Allowed", {"Allow": "GET, HEAD"}, b"")
    asked = _headers(rest)
    try:
        encode, content_type = choose_encoder(asked.get("accept", ""))
    except (TypeError, ValueError):  # a version that is no number
        return _response("400 Bad Request", {}, b"")
    body, headers = encode(registry), {"Content-Type": content_type}
    if gzip_accepted(asked.get("accept-encoding", "")):
        body, headers["Content-Encoding"] = gzip.compress(body, compresslevel=1), "gzip"
    return _response("200 OK", headers, body, is_head=method == "HEAD")


def _headers(rest: str) -> _Headers:
    """By lower-case name; several of one name are one list, as HTTP has it."""
    found: _Headers = {}
    for line in rest.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        name = name.strip().lower()
        found[name] = f"{found[name]},{value.strip()}" if name in found else value.strip()
    return found


def _response(status: str, headers: _Headers, body: bytes, *, is_head: bool = False) -> bytes:
    all_headers = {**headers, "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in all_headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + (b"" if is_head else body)


def _listener(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server(
        (bare, port), family=family, dualstack_ipv6=bare == "::" and socket.has_dualstack_ipv6()
    )
