"""Which replicas there are, and what keeps new work from them, by one of three modes.

registry: the members in Redis, and the addresses in the settings; a lease that is over removes its replica, or keeps
new work from it if it is one of the settings'.
static: the addresses in the settings alone.
kubernetes: the endpoints of the workers' Service. A lease that is over, an endpoint that is not ready, terminating or
no longer there keeps new work away; a replica without an endpoint goes when its streams have ended.
A lease is over when it stays away and the replica does not answer for itself (registry.py).

A Link per address finds out who is there and whether it serves. This module decides which addresses deserve one and
when a replica is gone. Neither Redis nor the Kubernetes API being away decides anything.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from ostrya.prefix.chain import ChainKey
from ostrya.router import endpoints
from ostrya.router.cluster import Cluster, Watched
from ostrya.router.fleet import Fleet
from ostrya.router.kubernetes import WatchEvent
from ostrya.router.link import Link
from ostrya.router.pace import Pace
from ostrya.router.registry import Registry
from ostrya.router.settings import RouterSettings
from ostrya.router.types import Hold, ReplicaState
from ostrya.state.rows import Rejects

log = logging.getLogger(__name__)

_POLL_S = 0.25
_STARTS = 32
"""Links started a poll: each is a connection, and a table full of members is not worth a pause of the others."""

_ENDS = 16
"""Links ended at a time, for the same reason."""


class Discovery:
    """Keeps the fleet true. `run` in a task, `close` after it ended."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        fleet: Fleet,
        chain: ChainKey,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rejects: Rejects | None = None,
    ) -> None:
        """ConfigError if the settings ask for a Kubernetes API that is not to be found."""
        self._settings, self._fleet, self._chain = settings, fleet, chain
        self._registry = Registry(settings, fleet=fleet, clock=clock, rejects=rejects)
        is_kubernetes = settings.discovery == "kubernetes"
        self._cluster = Cluster(settings, changed=self._cluster_changed, wall=wall) if is_kubernetes else None
        self._cluster_news = asyncio.Event()
        nothing: Counter[str] = Counter({event.value: 0 for event in WatchEvent})
        self.watch_events = self._cluster.events if self._cluster is not None else nothing
        """What happened to the watch of the endpoints, by WatchEvent."""
        self._links: dict[str, asyncio.Task[None]] = {}
        self._pace = Pace()
        self._is_watching = False

    @property
    def redis_up(self) -> bool:
        """As last seen."""
        return self._registry.is_up

    @property
    def kubernetes_up(self) -> bool | None:
        """Whether the endpoints are watched; None = not in mode kubernetes."""
        return self._cluster.is_up if self._cluster is not None else None

    @property
    def nodes(self) -> Watched | None:
        """The watch of the nodes; None = not asked for."""
        return self._cluster.nodes if self._cluster is not None else None

    def endpoint_counts(self) -> dict[str, int]:
        """Endpoints of the workers' Service by condition: ready, serving, terminating."""
        known = self._cluster.endpoints if self._cluster is not None else None
        return endpoints.count((known or {}).values())

    async def run(self) -> None:
        """Until cancelled; then no link is left, the fleet keeps what it knows.

        A failure leaves the links at work: whoever starts this again finds them, and requests never notice.
        """
        if self._cluster is not None and not self._is_watching:
            self._is_watching = True
            self._cluster.start()
        try:
            while True:
                await self._registry.poll()
                self._fleet.set_holds(self._holds())
                await self._remove_gone()
                await self._match_links()
                await self._pause()
        except asyncio.CancelledError:
            await self._end(list(self._links))
            raise

    async def close(self) -> None:
        """Ends links and watches and closes the connection to Redis."""
        await self._end(list(self._links))
        if self._cluster is not None:
            await self._cluster.close()
        await self._registry.close()

    def _cluster_changed(self) -> None:
        """A terminating replica gets no new work from this moment on; links follow."""
        self._fleet.set_holds(self._holds())
        self._cluster_news.set()

    async def _pause(self) -> None:
        # Not wait_for: in Python 3.11 it loses a cancel that comes together with the news.
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._cluster_news.wait()
        self._cluster_news.clear()

    def _wanted(self) -> set[str]:
        """The addresses that deserve a link."""
        static = set(self._settings.static_workers)
        if self._settings.discovery == "static":
            return static
        if self._cluster is None:
            return self._registry.addresses | self._connected() | static
        if self._cluster.endpoints is not None:
            return set(self._cluster.endpoints)
        # A router that starts while the API is away has nothing older to keep; the members are the next best.
        return self._registry.addresses if self._cluster.events[WatchEvent.FAILED] else set()

    def _connected(self) -> set[str]:
        """Of replicas whose lease is not over and that are there, whatever address their row says at the moment."""
        over = self._registry.over
        return {
            row.info.address
            for row in self._fleet.replicas()
            if row.state is not ReplicaState.LOST and row.info.worker_id not in over
        }

    def _holds(self) -> dict[str, tuple[Hold, ...]]:
        """By address. With static workers alone nothing keeps work from a replica: it serves, or it does not."""
        holds = self._cluster.holds() if self._cluster is not None else {}
        if self._cluster is not None and self._cluster.endpoints is not None:
            gone = self._links.keys() - self._cluster.endpoints.keys()
            holds |= dict.fromkeys(gone, (Hold.TERMINATING,))
        if self._registry.is_up:
            over = self._registry.over if self._settings.discovery != "static" else set()
            for worker_ids, hold in ((over, Hold.NO_LEASE), (self._registry.unrenewed, Hold.LEASE_NOT_RENEWED)):
                for worker_id in worker_ids:
                    replica = self._fleet.info(worker_id)
                    # A process that never registered has no lease to lose.
                    if replica is not None and (replica.epoch or hold is Hold.LEASE_NOT_RENEWED):
                        holds[replica.address] = (*holds.get(replica.address, ()), hold)
        return holds

    async def _remove_gone(self) -> None:
        if self._cluster is not None:
            await self._remove_empty()
        elif self._settings.discovery == "registry":
            await self._remove_over()

    async def _remove_over(self) -> None:
        """Replicas whose lease is over. Those of the settings stay, held, for as long as it is."""
        for worker_id in self._registry.over:
            replica = self._fleet.info(worker_id)
            if replica is not None and replica.address not in self._settings.static_workers:
                await self._end([replica.address])
                self._fleet.remove(worker_id)

    async def _remove_empty(self) -> None:
        """Replicas without an endpoint, once they have no stream of ours or cannot be reached any more."""
        wanted = self._wanted()
        for row in self._fleet.replicas():
            if row.info.address not in wanted and (row.in_flight == 0 or row.state is ReplicaState.LOST):
                await self._end([row.info.address])
                self._fleet.remove(row.info.worker_id)

    async def _match_links(self) -> None:
        """A running link for every address that deserves one, and no other."""
        wanted = self._wanted()
        for address, task in list(self._links.items()):
            if task.done():
                log.error("link ended by a fault of ours; starting it again", exc_info=task.exception())
                del self._links[address]
        kept = wanted if self._cluster is None else wanted | {row.info.address for row in self._fleet.replicas()}
        await self._end([address for address in self._links if address not in kept])
        for address in sorted(wanted - self._links.keys())[:_STARTS]:
            link = Link(
                address=address,
                pool=self._settings.pool,
                chain=self._chain,
                fleet=self._fleet,
                pace=self._pace,
                max_message_bytes=self._settings.max_message_bytes,
            )
            self._links[address] = asyncio.create_task(link.run(), name=f"link {address}")

    async def _end(self, addresses: list[str]) -> None:
        for first in range(0, len(addresses), _ENDS):
            tasks = [self._links.pop(one) for one in addresses[first : first + _ENDS] if one in self._links]
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    log.error("link ended by a fault of ours", exc_info=result)
