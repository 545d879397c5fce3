"""What Kubernetes says of a pool: the endpoints of its workers' Service and, if asked for, what is coming for nodes.

Discovery reads it; it lives in the event loop and is fed by watchers in threads. While the API is away it keeps what it
last heard.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ostrya.errors import ConfigError
from ostrya.router import apiserver, disruption, endpoints
from ostrya.router.disruption import Node, Outlook
from ostrya.router.endpoints import Endpoint, Slice
from ostrya.router.kubernetes import Resource, Update, View, Watcher, WatchEvent
from ostrya.router.settings import RouterSettings
from ostrya.router.types import Hold

log = logging.getLogger(__name__)

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_ENDPOINTS_WATCH_S = 5
"""Together with a watcher's patience, a missed event is made good well within 10 s."""
_NODES_WATCH_S = 30
"""All nodes of the cluster come with each list, and what they announce is minutes ahead."""


@dataclass(slots=True, eq=False)
class Watched:
    """How a watch is doing."""

    is_up: bool = False
    events: Counter[str] = field(default_factory=lambda: Counter({event.value: 0 for event in WatchEvent}))
    """What happened to it."""

    def hear(self, update: Update[View]) -> None:
        if update.event is not None:
            self.events[update.event] += 1
        if update.is_up is not None:
            self.is_up = update.is_up


class Cluster:
    """`start` and `close` in the event loop. `changed` is called there after every change."""

    def __init__(
        self, settings: RouterSettings, *, changed: Callable[[], None], wall: Callable[[], float] = time.time
    ) -> None:
        """ConfigError where no API server is to be found, or without what it takes to be let in."""
        self.nodes = Watched() if settings.maintenance else None
        """The watch of the nodes; None = not asked for."""
        self._endpoints_watched = Watched()
        self.endpoints: Mapping[str, Endpoint] | None = None
        """By address; None = never heard."""
        self._outlooks: Mapping[str, Outlook] = {}
        """By node."""
        self._horizon_s = settings.maintenance_horizon_s
        self._service = settings.kubernetes_service
        self._changed, self._wall = changed, wall
        namespace = settings.kubernetes_namespace or _own_namespace()
        self._slices = _watch_slices(settings, namespace, deliver=self._hear_endpoints)
        self._nodes = _watch_nodes(settings, deliver=self._hear_nodes) if settings.maintenance else None

    @property
    def is_up(self) -> bool:
        """Whether the endpoints are watched."""
        return self._endpoints_watched.is_up

    @property
    def events(self) -> Counter[str]:
        """What happened to that watch."""
        return self._endpoints_watched.events

    def start(self) -> None:
        """Begins to watch."""
        self._slices.start()
        if self._nodes is not None:
            self._nodes.start()

    async def close(self) -> None:
        """Watches no more; what was heard stays."""
        await asyncio.gather(self._slices.close(), *([self._nodes.close()] if self._nodes is not None else []))

    def holds(self) -> dict[str, tuple[Hold, ...]]:
        """What keeps new work away at this time, by address; only those that something holds."""
        now_s = self._wall()
        every = {one.address: (*_said(one), *self._coming(one.node, now_s)) for one in (self.endpoints or {}).values()}
        return {address: holds for address, holds in every.items() if holds}

    def _coming(self, node: str, now_s: float) -> tuple[Hold, ...]:
        outlook = self._outlooks.get(node)
        return disruption.holds(outlook, now_s=now_s, horizon_s=self._horizon_s) if outlook is not None else ()

    def _hear_endpoints(self, update: Update[Mapping[str, Endpoint]]) -> None:
        self._endpoints_watched.hear(update)
        if update.view is not None:
            if not update.view:
                log.warning(
                    "the workers' Service has no endpoints", extra={"fields": {"kubernetes_service": self._service}}
                )
            self.endpoints = update.view
            self._changed()

    def _hear_nodes(self, update: Update[Mapping[str, Outlook]]) -> None:
        if self.nodes is not None:
            self.nodes.hear(update)
        if update.view is None:
            return
        for name, outlook in update.view.items():
            if outlook.malformed and self._outlooks.get(name) != outlook:
                fields = {"node": name, "label": disruption.SCHEDULED_LABEL, "value": outlook.malformed}
                log.warning("maintenance time is not in Unix seconds; ignored", extra={"fields": fields})
        self._outlooks = update.view
        self._changed()


def _said(endpoint: Endpoint) -> tuple[Hold, ...]:
    """A terminating endpoint is not ready either; one word for it is enough."""
    if endpoint.is_terminating:
        return (Hold.TERMINATING,)
    return () if endpoint.is_ready else (Hold.NOT_READY,)


def _watch_slices(
    settings: RouterSettings, namespace: str, *, deliver: Callable[[Update[Mapping[str, Endpoint]]], None]
) -> Watcher[Slice, Mapping[str, Endpoint]]:
    api = apiserver.connect(settings)
    from kubernetes.client import DiscoveryV1Api

    selector = f"kubernetes.io/service-name={settings.kubernetes_service}"
    resource = Resource(
        name="endpointslices.discovery.k8s.io",
        where=f"namespace {namespace}, service {settings.kubernetes_service}",
        open=partial(DiscoveryV1Api(api).list_namespaced_endpoint_slice, namespace, label_selector=selector),
        item=Slice,
        view=lambda slices: endpoints.merge(slices.values()),
        watch_s=_ENDPOINTS_WATCH_S,
    )
    return Watcher(resource, api, deliver=deliver)


def _watch_nodes(
    settings: RouterSettings, *, deliver: Callable[[Update[Mapping[str, Outlook]]], None]
) -> Watcher[Node, Mapping[str, Outlook]]:
    api = apiserver.connect(settings)
    from kubernetes.client import CoreV1Api

    resource = Resource(
        name="nodes",
        where="the cluster",
        open=CoreV1Api(api).list_node,
        item=Node,
        view=disruption.announced,
        watch_s=_NODES_WATCH_S,
        list_version="0",
    )
    return Watcher(resource, api, deliver=deliver)


def _own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError([f"kubernetes_namespace is empty and {NAMESPACE_FILE} cannot be read; set it"]) from error
