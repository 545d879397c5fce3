"""Enough of Google Cloud Storage for its own client library: list with a prefix, and media downloads with CRC32C.

`with FakeGcs(buckets) as gcs` serves on `gcs.url`; give that to the library as STORAGE_EMULATOR_HOST.
"""

import base64
import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c

Buckets = dict[str, dict[str, bytes]]
"""Bucket -> object name -> content."""
GENERATION = 1_700_000_000_000_001
_PAGE = 2
"""Objects a page: so small that every listing has several."""


class FakeGcs:
    """What it is asked is kept in `requests`; the attributes change how it answers, at any time."""

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.requests: list[str] = []
        self.is_forbidden = False
        self.damaged: set[str] = set()
        """Names whose content arrives with its first byte changed."""
        self.sizes: dict[str, int] = {}
        """Names that claim another size in listings."""
        self.cut_after: dict[str, int] = {}
        """Names whose connection breaks after that many bytes, once."""
        self.hold = threading.Event()
        """While not set, downloads stop before their last byte."""
        self.hold.set()
        self.held = threading.Event()
        """A download has stopped there."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(gcs: FakeGcs) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            gcs.requests.append(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            if gcs.is_forbidden:
                self._json(403, {"error": {"code": 403, "message": "anonymous caller has no storage.objects.list"}})
                return
            where = parts.path.split("/b/", 1)[1].split("/")
            objects = gcs.buckets.get(where[0])
            if objects is None:
                self._json(404, {"error": {"code": 404, "message": "The specified bucket does not exist."}})
            elif parts.path.startswith("/download/"):
                self._download(unquote(where[2]), objects)
            else:
                self._list(where[0], objects, query)

        def _list(self, bucket: str, objects: dict[str, bytes], query: dict[str, str]) -> None:
            names = sorted(name for name in objects if name.startswith(query.get("prefix", "")))
            first = int(query.get("pageToken", 0))
            page: dict[str, object] = {
                "kind": "storage#objects",
                "items": [_item(bucket, name, objects[name], gcs.sizes) for name in names[first : first + _PAGE]],
            }
            if len(names) > first + _PAGE:
                page["nextPageToken"] = str(first + _PAGE)
            self._json(200, page)

        def _download(self, name: str, objects: dict[str, bytes]) -> None:
            if name not in objects:
                self._json(404, {"error": {"code": 404, "message": "No such object"}})
                return
            content, first = objects[name], 0
            asked = self.headers.get("Range", "")
            if asked.startswith("bytes="):
                first = int(asked.removeprefix("bytes=").split("-")[0])
            sent = content[first:]
            if name in gcs.damaged:
                sent = bytes([sent[0] ^ 1]) + sent[1:]
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(sent)))
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.send_header("x-goog-hash", f"crc32c={_crc32c(content)}")
            self.send_header("x-goog-generation", str(GENERATION))
            self.send_header("x-goog-stored-content-length", str(len(content)))
            self.end_headers()
            cut = gcs.cut_after.pop(name, None)
            if cut is not None:
                self.wfile.write(sent[:cut])
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(sent[:-1])
            if not gcs.hold.is_set():
                self.wfile.flush()
                gcs.held.set()
                gcs.hold.wait(30)
            self.wfile.write(sent[-1:])

        def _json(self, code: int, answer: dict[str, object]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def end_headers(self) -> None:
            # The library closes no connection that it keeps, and a test that calls it would be left with them.
            self.send_header("Connection", "close")
            super().end_headers()

        def handle(self) -> None:
            # A client that is killed, or a connection that is cut on purpose, is no failure here.
            _quietly(super().handle)

        def finish(self) -> None:
            _quietly(super().finish)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


def _quietly(work: Callable[[], None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        work()


def _item(bucket: str, name: str, content: bytes, sizes: dict[str, int]) -> dict[str, str]:
    return {
        "kind": "storage#object",
        "name": name,
        "bucket": bucket,
        "generation": str(GENERATION),
        "size": str(sizes.get(name, len(content))),
        "crc32c": _crc32c(content),
    }


def _crc32c(content: bytes) -> str:
    return base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()
