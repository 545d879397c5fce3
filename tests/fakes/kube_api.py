"""A Kubernetes API server on a free port of 127.0.0.1, as far as watching EndpointSlices and Nodes goes.

Lists, watches (chunked JSON lines, resourceVersion, label selectors, bookmarks, timeoutSeconds) and, on request, what
goes wrong with real ones. The contract tests hold it against the official client. `with KubeApi() as api` serves.
"""

import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast
from urllib.parse import parse_qsl, urlsplit

from tests.fakes.kube_http import Handler, HttpServer

Object = dict[str, object]
Verb = Literal["list", "watch"]

NODES = "/api/v1/nodes"
_KINDS = {"endpointslices": ("EndpointSliceList", "discovery.k8s.io/v1"), "nodes": ("NodeList", "v1")}
_LOOK_S = 0.05
"""How often a silent or waiting handler looks whether the server ends."""


def endpoint(address: str = "127.0.0.1", node: str = "", /, **conditions: bool) -> Object:
    """One entry of a slice; conditions that are not given are absent."""
    entry: Object = {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": address}}
    return entry | {"nodeName": node} if node else entry


@dataclass(frozen=True, slots=True)
class Seen:
    """A request, for assertions."""

    verb: Verb
    path: str
    query: Mapping[str, str]
    authorization: str


@dataclass(frozen=True, slots=True)
class _Change:
    path: str
    """Of the collection."""
    before: Object | None
    after: Object | None
    version: int
    is_swallowed: bool


@dataclass(slots=True, eq=False)
class _Open:
    """One running watch and what a test wants of it."""

    path: str
    position: int
    """In the list of changes."""
    is_silent: bool = False
    bookmarks: int = 0
    """To be sent."""
    ending: Literal["", "dropped", "truncated", "expired"] = ""


@dataclass(slots=True)
class _State:
    """What is stored, and what happened to it; guarded by the server's condition."""

    objects: dict[str, dict[str, Object]] = field(default_factory=dict)
    """By collection path, then name."""
    changes: list[_Change] = field(default_factory=list)
    version: int = 100
    oldest: int = 0
    """Watches from before this version are answered 410."""
    swallow: int = 0
    expire_watches: int = 0
    is_silent: bool = False
    refusals: dict[tuple[Verb, str], int] = field(default_factory=dict)
    """By verb and collection path; "" = every path."""
    watches: set[_Open] = field(default_factory=set)
    is_running: bool = True


class KubeApi:
    """Every method may be called from any thread; changes reach running watches at once."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Seen] = []
        self.port = 0
        self._tls = tls
        self._state = _State()
        self._changed = threading.Condition()
        self._server: HttpServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> "KubeApi":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Serves, after a stop on the same port with the same objects."""
        self._state.is_running = True
        self._server = HttpServer(("127.0.0.1", self.port), self.answer, tls=self._tls)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The port is closed and every connection broken; a second call does nothing."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.shutdown()
        with self._told() as state:
            state.is_running = False
        server.server_close()  # joins the handlers
        self._thread.join()

    # -- what is stored ------------------------------------------------------------------------------------------

    def put_slice(
        self,
        name: str,
        endpoints: Sequence[Object] | None,
        *,
        port: int = 50052,
        service: str = "workers",
        namespace: str = "default",
        address_type: str = "IPv4",
    ) -> None:
        """Creates or replaces a slice with the ports `grpc` and `metrics`."""
        metadata = {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": service}}
        ports = [{"name": "metrics", "port": 9401}, {"name": "grpc", "port": port}]
        body: Object = {"addressType": address_type, "endpoints": endpoints, "ports": ports, "metadata": metadata}
        self._change(_slices(namespace), name, body)

    def delete_slice(self, name: str, *, namespace: str = "default") -> None:
        self._change(_slices(namespace), name, None)

    def put_node(self, name: str, *, labels: Mapping[str, str] | None = None, taints: Sequence[str] = ()) -> None:
        """Creates or replaces a node."""
        spec = {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]}
        self._change(NODES, name, {"metadata": {"name": name, "labels": dict(labels or {})}, "spec": spec})

    def delete_node(self, name: str) -> None:
        self._change(NODES, name, None)

    # -- what goes wrong -----------------------------------------------------------------------------------------

    def drop_watches(self, *, truncated: bool = False) -> None:
        """Breaks the connections of all watches, in the middle of an event if truncated."""
        self._end_watches("truncated" if truncated else "dropped")

    def go_silent(self, *, completely: bool = False) -> None:
        """Running watches send nothing more, not even an end; if completely, new requests are not answered either."""
        with self._told() as state:
            state.is_silent = completely
            for watch in state.watches:
                watch.is_silent = True

    def speak(self) -> None:
        """Ends complete silence."""
        with self._told() as state:
            state.is_silent = False

    def swallow_next(self, count: int = 1) -> None:
        """That many changes happen without any watch hearing of them."""
        with self._told() as state:
            state.swallow = count

    def expire(self) -> None:
        """History is forgotten: running watches get an ERROR event 410, new ones from older versions too."""
        with self._told() as state:
            state.version += 1
            state.oldest = state.version
        self._end_watches("expired")

    def expire_next_watch(self) -> None:
        """The next watch to open is answered with HTTP 410; running ones are dropped."""
        with self._told() as state:
            state.expire_watches += 1
        self.drop_watches()

    def refuse(self, verb: Verb, status: int, *, path: str = "") -> None:
        """Answers that verb with this HTTP status, of one collection or of all; its running watches are dropped."""
        with self._told() as state:
            state.refusals[verb, path] = status
        self._end_watches("dropped", path)

    def accept(self) -> None:
        """Ends all refusals."""
        with self._told() as state:
            state.refusals.clear()

    def bookmark(self) -> None:
        """Sends one to every running watch that allows them."""
        with self._told() as state:
            for watch in state.watches:
                watch.bookmarks += 1

    # -- for assertions ------------------------------------------------------------------------------------------

    @property
    def num_watches(self) -> int:
        """Running now."""
        with self._changed:
            return len(self._state.watches)

    def count(self, verb: Verb) -> int:
        """Requests so far."""
        return sum(seen.verb == verb for seen in list(self.requests))

    # ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _told(self) -> Iterator[_State]:
        with self._changed:
            yield self._state
            self._changed.notify_all()

    def _change(self, path: str, name: str, body: Object | None) -> None:
        with self._told() as state:
            stored = state.objects.setdefault(path, {})
            before = stored.pop(name, None)
            state.version += 1
            if body is not None:
                metadata = cast("Object", body["metadata"])
                stored[name] = body | {"metadata": metadata | {"resourceVersion": str(state.version)}}
            is_swallowed = state.swallow > 0
            state.swallow -= is_swallowed
            state.changes.append(_Change(path, before, stored.get(name), state.version, is_swallowed))

    def _end_watches(self, how: Literal["dropped", "truncated", "expired"], path: str = "") -> None:
        with self._told() as state:
            for watch in state.watches:
                if path in ("", watch.path):
                    watch.ending = how

    # -- for handlers --------------------------------------------------------------------------------------------

    def answer(self, handler: Handler) -> None:
        """One GET."""
        parts = urlsplit(handler.path)
        query = dict(parse_qsl(parts.query))
        verb: Verb = "watch" if query.get("watch", "").lower() in ("true", "1") else "list"
        self.requests.append(Seen(verb, parts.path, query, handler.headers.get("Authorization", "")))
        with self._changed:
            self._changed.wait_for(lambda: not self._state.is_silent or not self._state.is_running)
            refusals, known = self._state.refusals, 200 if _kind(parts.path) in _KINDS else 404
            status = refusals.get((verb, parts.path)) or refusals.get((verb, ""), known)
            if verb == "watch" and status == 200 and self._is_expired(query):
                status = 410
        if status != 200:
            handler.send_json(status, _status(status, parts.path, verb))
        elif verb == "list":
            handler.send_json(200, self._list(parts.path, query))
        else:
            self._watch(handler, parts.path, query)

    def _is_expired(self, query: Mapping[str, str]) -> bool:
        if self._state.expire_watches:
            self._state.expire_watches -= 1
            return True
        return 0 < int(query.get("resourceVersion") or 0) < self._state.oldest

    def _list(self, path: str, query: Mapping[str, str]) -> Object:
        kind, version = _KINDS[_kind(path)]
        with self._changed:
            found = self._state.objects.get(path, {})
            items = [one for _, one in sorted(found.items()) if _selected(one, query)]
            metadata = {"resourceVersion": str(self._state.version)}
        return {"kind": kind, "apiVersion": version, "metadata": metadata, "items": items}

    def _watch(self, handler: Handler, path: str, query: Mapping[str, str]) -> None:
        deadline = time.monotonic() + float(query.get("timeoutSeconds", 1800))
        with self._told() as state:
            since = int(query.get("resourceVersion") or 0)
            position = next((i for i, one in enumerate(state.changes) if one.version > since), len(state.changes))
            watch = _Open(path, position if since else len(state.changes))
            existing = [] if since else list(state.objects.get(path, {}).values())
            state.watches.add(watch)
        try:
            handler.start_stream()
            for one in existing:
                if _selected(one, query):
                    handler.send_line(_event("ADDED", one))
            self._follow(handler, watch, query, deadline)
        finally:
            with self._told() as state:
                state.watches.discard(watch)

    def _follow(self, handler: Handler, watch: _Open, query: Mapping[str, str], deadline: float) -> None:
        while True:
            with self._changed:
                state = self._state
                self._changed.wait_for(lambda: self._has_news(watch), timeout=max(0.0, deadline - time.monotonic()))
                if watch.is_silent:
                    # Nothing is sent and nothing is closed until the client gives up.
                    while state.is_running and not handler.is_abandoned():
                        self._changed.wait(_LOOK_S)
                    return handler.break_off()
                new, watch.position = state.changes[watch.position :], len(state.changes)
                num_bookmarks, watch.bookmarks = watch.bookmarks, 0
                ending, is_running, version = watch.ending, state.is_running, state.version
            for line in _lines(watch.path, new, query):
                handler.send_line(line)
            if query.get("allowWatchBookmarks", "").lower() == "true":
                for _ in range(num_bookmarks):
                    handler.send_line(_event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}}))
            if ending == "expired":
                handler.send_line(_event("ERROR", _status(410, watch.path, "watch")))
            if ending == "truncated":
                handler.send_part(b'{"type": "MODIFIED", "object": {"metadata": {"na')
            if ending in ("dropped", "truncated") or not is_running:
                return handler.break_off()
            if ending or time.monotonic() >= deadline:
                return handler.end_stream()

    def _has_news(self, watch: _Open) -> bool:
        is_behind = watch.position < len(self._state.changes)
        return bool(is_behind or watch.ending or watch.bookmarks or watch.is_silent or not self._state.is_running)


def _slices(namespace: str) -> str:
    return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def _kind(path: str) -> str:
    return path.rpartition("/")[2]


def _event(kind: str, body: Object) -> Object:
    return {"type": kind, "object": body}


def _status(code: int, path: str, verb: Verb) -> Object:
    reasons = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 410: "Expired"}
    message = f"cannot {verb} {_kind(path)}" if code != 410 else "too old resource version"
    reason = reasons.get(code, "InternalError")
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


def _selected(body: Object | None, query: Mapping[str, str]) -> bool:
    """Equality selectors only."""
    if body is None:
        return False
    metadata = cast("Mapping[str, Mapping[str, str]]", body["metadata"])
    wanted = [pair.split("=", 1) for pair in query.get("labelSelector", "").split(",") if pair]
    return all(metadata.get("labels", {}).get(key) == value for key, value in wanted)


def _lines(path: str, changes: Sequence[_Change], query: Mapping[str, str]) -> Iterator[Object]:
    """What a watch of `path` with this selector hears of the changes."""
    for change in changes:
        if change.path != path or change.is_swallowed:
            continue
        was, now = _selected(change.before, query), _selected(change.after, query)
        if now and change.after is not None:
            yield _event("MODIFIED" if was else "ADDED", change.after)
        elif was and change.before is not None:
            metadata = cast("Object", change.before["metadata"])
            last = change.before | {"metadata": metadata | {"resourceVersion": str(change.version)}}
            yield _event("DELETED", last)
