"""One kind of objects of the Kubernetes API, kept current from a thread of its own.

List, watch for a few seconds, list again, for as long as it runs: whatever a watch misses (an event that never came, a
connection that fell silent, expired history) is seen by the next list. The official client brings addresses,
certificates and token refresh; what comes back is decoded here, because its models refuse the nulls that servers send
for empty lists (kubernetes-client/python#2423). cluster.py says what to watch; nothing here knows of replicas.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from urllib3 import HTTPResponse

log = logging.getLogger(__name__)

Item = TypeVar("Item")
View = TypeVar("View")

_CONNECT_TIMEOUT_S = 2.0
_LIST_TIMEOUT_S = 4.0
_OVERDUE_S = 1.0
"""A watch that has not ended this long after its time is not connected to anybody any more."""
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_JOIN_TIMEOUT_S = 2.0


class WatchEvent(StrEnum):
    """What happened to a watch."""

    LISTED = "listed"
    RECONNECTED = "reconnected"
    """It broke, fell silent or ended early; a list follows."""
    EXPIRED = "expired"
    """The server has forgotten the version it started from; a list follows."""
    FAILED = "failed"
    """A list or watch was refused, or the server cannot be reached; tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Generic[View]):
    """What a watch tells the event loop; absent parts say nothing new."""

    event: WatchEvent | None = None
    is_up: bool | None = None
    view: View | None = None
    """The whole, not a difference; to be read only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource(Generic[Item, View]):
    """What to watch and what to make of it."""

    name: str
    """As RBAC rules name it."""
    where: str
    """For messages: the namespace, or the cluster."""
    open: "Callable[..., HTTPResponse]"
    """The official client's list method, with its selectors."""
    item: type[Item]
    view: Callable[[Mapping[str, Item]], View]
    """From all objects by name; called in the thread."""
    watch_s: int
    """How long one watch lasts, and so how late at most a missed event is made good."""
    list_version: str | None = None
    """resourceVersion of lists: "0" = from the server's cache, which may be behind; None = the newest."""


class Watcher(Generic[Item, View]):
    """Keeps one resource current. `start` and `close` in the event loop; updates are delivered there."""

    def __init__(
        self, resource: Resource[Item, View], api: "ApiClient", *, deliver: Callable[[Update[View]], None]
    ) -> None:
        self._resource, self._api, self._deliver = resource, api, deliver
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {resource.name}", daemon=True)
        self._stopping = threading.Event()
        self._response: HTTPResponse | None = None
        """Of the running watch."""
        self._objects: dict[str, Item] = {}
        self._view: View | None = None
        """As last told."""
        self._problem: str | None = ""
        """None = the watch stands, otherwise why not, as last logged."""

    def start(self) -> None:
        """Begins, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Ends the thread, mostly at once; a request that hangs is left to its timeout."""
        self._stopping.set()
        self._interrupt()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        while not self._stopping.is_set():
            started = time.monotonic()
            event = self._cycle()
            if event is not None:
                self._tell(Update(event=event))
                # A pooled connection may be as dead as the one that just failed.
                self._api.rest_client.pool_manager.clear()
            if event is None or time.monotonic() - started > _MAX_BACKOFF_S:
                backoff_s = _MIN_BACKOFF_S
            if event is not None:
                self._stopping.wait(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        self._api.rest_client.pool_manager.clear()

    def _cycle(self) -> WatchEvent | None:
        """A list and the watch after it. What ended it; None = its time."""
        step = "list"
        try:
            version = self._list()
            step = "watch"
            response = self._request(self._resource.watch_s + _OVERDUE_S, version=version, watch=True)
        except _Refused as refused:
            if step == "watch" and refused.status == 410:
                return WatchEvent.EXPIRED
            self._down(f"{step} {refused.status}", self._explain(step, refused))
            return WatchEvent.FAILED
        # Whatever client, transport and decoder raise: a thread that ended would keep old endpoints for ever, silently.
        except Exception as error:
            hint = "; kubernetes_ca_file names its authority" if "CERTIFICATE_VERIFY_FAILED" in str(error) else ""
            self._down(f"{step} {type(error).__name__}", f"{step}: {type(error).__name__}: {error}{hint}")
            return WatchEvent.FAILED
        deadline = time.monotonic() + self._resource.watch_s + _OVERDUE_S
        try:
            self._response = response  # before the look at `_stopping`: `close` does both in the other order
            if self._stopping.is_set():
                return None
            self._up()
            return self._watch(response, deadline)
        except Exception as error:  # broken off, silent, or not what a watch looks like
            log.debug("watch broke", extra={"fields": {"resource": self._resource.name, "error": repr(error)}})
            return WatchEvent.RECONNECTED
        finally:
            self._response = None
            response.close()

    def _list(self) -> str:
        """Takes over everything; the version to watch from."""
        response = self._request(_LIST_TIMEOUT_S, version=self._resource.list_version, watch=False)
        found = msgspec.json.decode(response.data, type=_List)
        self._objects = dict(self._read(raw) for raw in found.items or ())
        self._tell_view(WatchEvent.LISTED)
        return found.metadata.resource_version

    def _watch(self, response: "HTTPResponse", deadline: float) -> WatchEvent | None:
        for line in _lines(response):
            if self._stopping.is_set() or time.monotonic() > deadline:
                break
            event = msgspec.json.decode(line, type=_Event)
            if event.type == "ERROR":
                code = msgspec.json.decode(event.object, type=_Status).code
                return WatchEvent.EXPIRED if code == 410 else WatchEvent.RECONNECTED
            if event.type in ("ADDED", "MODIFIED", "DELETED"):
                name, item = self._read(event.object)
                if event.type == "DELETED":
                    self._objects.pop(name, None)
                else:
                    self._objects[name] = item
                self._tell_view()
        is_early = time.monotonic() < deadline - 2 * _OVERDUE_S
        return WatchEvent.RECONNECTED if is_early and not self._stopping.is_set() else None

    def _request(self, timeout_s: float, *, version: str | None, watch: bool) -> "HTTPResponse":
        """An answer with status 2xx, not read yet; _Refused otherwise."""
        options = {"watch": True, "allow_watch_bookmarks": True, "timeout_seconds": self._resource.watch_s}
        try:
            response = self._resource.open(
                resource_version=version,
                _preload_content=False,
                _request_timeout=(_CONNECT_TIMEOUT_S, timeout_s),
                **(options if watch else {}),
            )
        except Exception as error:
            # Until version 35 the client raises here for a status that later ones return.
            status = getattr(error, "status", None)
            if not status:
                raise
            raise _Refused(status, str(getattr(error, "reason", ""))) from error
        if not 200 <= response.status <= 299:
            reason = response.reason or ""
            response.close()
            raise _Refused(response.status, reason)
        return response

    def _read(self, raw: msgspec.Raw) -> tuple[str, Item]:
        name = msgspec.json.decode(raw, type=_Named).metadata.name
        return name, msgspec.json.decode(raw, type=self._resource.item)

    # -- what others hear ----------------------------------------------------------------------------------------

    def _tell_view(self, event: WatchEvent | None = None) -> None:
        view = self._resource.view(self._objects)
        is_new = self._view is None or view != self._view
        self._view = view
        if is_new or event is not None:
            self._tell(Update(event=event, view=view if is_new else None))

    def _tell(self, update: Update[View]) -> None:
        if self._loop is not None and not self._stopping.is_set():
            try:
                self._loop.call_soon_threadsafe(self._deliver, update)
            except RuntimeError:  # the loop was closed without us
                self._stopping.set()

    def _up(self) -> None:
        if self._problem is not None:
            self._problem = None
            log.info("watching", extra={"fields": {"resource": self._resource.name, "where": self._resource.where}})
            self._tell(Update(is_up=True))

    def _down(self, problem: str, message: str) -> None:
        """Said once for each problem, however often it is met again."""
        if self._problem != problem and not self._stopping.is_set():
            self._problem = problem
            fields = {"resource": self._resource.name, "where": self._resource.where, "error": message}
            log.warning("cannot watch; keeping what is known", extra={"fields": fields})
            self._tell(Update(is_up=False))

    def _explain(self, step: str, refused: "_Refused") -> str:
        what = f"{step}: the API server answers {refused.status} {refused.reason}"
        if refused.status == 403:
            return f"{what}; RBAC must allow the service account get, list, watch on {self._resource.name}"
        if refused.status == 401:
            return f"{what}; the token is not accepted (outside of a pod: kubernetes_token_file)"
        return what

    def _interrupt(self) -> None:
        response = self._response
        if response is not None:
            try:
                response.shutdown()
            except (ValueError, RuntimeError, OSError):  # it has just ended by itself
                return


class _Refused(Exception):
    """The server answered, with another status than 2xx."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}")
        self.status, self.reason = status, reason


# -- what an API server sends ------------------------------------------------------------------------------------


class _ObjectMeta(msgspec.Struct, frozen=True):
    name: str


class _Named(msgspec.Struct, frozen=True):
    metadata: _ObjectMeta


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: tuple[msgspec.Raw, ...] | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0


def _lines(response: "HTTPResponse") -> Iterator[bytes]:
    """Whole lines; a rest without its end is dropped, as the stream broke there."""
    rest = b""
    for part in response.stream(decode_content=False):
        *whole, rest = (rest + part).split(b"\n")
        yield from filter(None, whole)
