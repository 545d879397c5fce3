"""The HTTP/1.1 under the fake Kubernetes API: answers in JSON and chunked streams that end well or break off."""

import json
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HttpServer(ThreadingHTTPServer):
    """A thread for each connection; `server_close` waits for all of them."""

    daemon_threads = False  # so that server_close joins them

    def __init__(
        self, address: tuple[str, int], answer: Callable[["Handler"], None], *, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(address, Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.answer = answer


class Handler(BaseHTTPRequestHandler):
    """One connection: JSON answers, and streams of JSON lines in chunks."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    """Headers and body are two packets, and a client acknowledges the first 40 ms later."""
    timeout = 0.5
    """Between requests of a kept connection, so that server_close need not wait for clients to leave."""
    server: HttpServer

    def do_GET(self) -> None:
        with suppress(OSError):  # the client went away
            self.server.answer(self)

    do_PATCH = do_DELETE = do_GET

    def send_json(self, status: int, body: Mapping[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_line(self, event: Mapping[str, object]) -> None:
        self.send_part(json.dumps(event).encode() + b"\n")

    def send_part(self, data: bytes) -> None:
        """One chunk."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def break_off(self) -> None:
        """The connection ends without the stream's end."""
        self.close_connection = True

    def is_abandoned(self) -> bool:
        """Whether the client has closed its end."""
        self.connection.setblocking(False)
        try:
            return bool(self.connection.recv(1) == b"")
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(self.timeout)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: tests read `requests`."""
