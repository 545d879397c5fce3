"""Enough of the Hugging Face Hub for its own client library: a model's info and its files at a revision.

`with FakeHub(models) as hub` serves on `hub.url`; give that to the library as HF_ENDPOINT.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

Models = dict[str, dict[str, bytes]]
"""org/name -> file -> content."""
TOKEN = "hf_secret"


class FakeHub:
    """Models whose name ends in "-gated" want TOKEN. Every model has the revisions main and v1."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.downloads: list[str] = []
        self.short: set[str] = set()
        """Files that arrive without their last byte."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @staticmethod
    def commit(model: str, revision: str) -> str:
        return hashlib.sha1(f"{model}@{revision}".encode()).hexdigest()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            words = unquote(urlsplit(self.path).path).strip("/").split("/")
            is_api = words[:2] == ["api", "models"]
            model = "/".join(words[2:4] if is_api else words[:2])
            files = hub.models.get(model)
            if files is None or (model.endswith("-gated") and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
                self._error(401, "RepoNotFound", "Invalid username or password.")
                return
            commits = {hub.commit(model, revision) for revision in ("main", "v1")}
            if is_api:
                revision = words[5] if words[4:5] == ["revision"] else "main"
                if revision not in ("main", "v1"):
                    self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
                else:
                    self._info(model, hub.commit(model, revision), files)
            elif words[2] == "resolve" and words[3] in commits and "/".join(words[4:]) in files:
                self._file("/".join(words[4:]), words[3], files)
            else:
                self._error(404, "EntryNotFound", "Entry not found")

        def _info(self, model: str, commit: str, files: dict[str, bytes]) -> None:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            self._send(json.dumps({"id": model, "sha": commit, "siblings": siblings}).encode(), {})

        def _file(self, name: str, commit: str, files: dict[str, bytes]) -> None:
            content = files[name]
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
            if self.command == "GET":
                hub.downloads.append(name)
                content = content[:-1] if name in hub.short else content
            self._send(content, headers)

        def _send(self, body: bytes, headers: dict[str, str], code: int = 200) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def _error(self, code: int, name: str, message: str) -> None:
            self._send(
                json.dumps({"error": message}).encode(), {"X-Error-Code": name, "X-Error-Message": message}, code
            )

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler
