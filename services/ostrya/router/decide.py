"""Stops 3 and 4 of a request: digests of its tokens, what the index knows of them, the pick.

A Routing belongs to one request and is asked once for each try; every answer is recorded for explain.py. `choose`
awaits nothing; before it, `prepare` has hashed a long prompt elsewhere than on the event loop.
"""

import asyncio
import time
import uuid
from array import array
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from functools import partial

from ostrya.prefix.chain import ChainKey, Digest, RoutingDigest, page_digests, root, routing_digests
from ostrya.prefix.index import PrefixIndex
from ostrya.router import pick
from ostrya.router.admission import Ticket
from ostrya.router.explain import Decision, DecisionLog
from ostrya.router.fleet import Fleet
from ostrya.router.metrics import RouterMetrics
from ostrya.router.offload import SMALL_BYTES, Offload
from ostrya.router.types import FleetSnapshot, WorkerId

_MAX_BLOCKS = 16_384
"""How much of a prompt counts for routing: a million tokens in blocks of 64, and a few milliseconds of look-up."""

_SLICE_PAGES = 1_024
"""Hashed in one go: half a millisecond."""


@dataclass(slots=True)
class Together:
    """What the answers to one prompt share: its digests, and the replica that the first of them went to, which computes
    the prompt for all."""

    worker_id: WorkerId | None = None
    chains: dict[tuple[int, int], list[RoutingDigest]] = field(default_factory=dict)
    """By page size and stride."""
    hashing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Decider:
    """What routings share."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: PrefixIndex,
        chain: ChainKey,
        decisions: DecisionLog,
        metrics: RouterMetrics,
        offload: Offload,
        long_request_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.fleet = fleet
        self.index = index
        self.decisions = decisions
        self.metrics = metrics
        self.offload = offload
        self.clock = clock
        self._chain = chain
        self._long_request_tokens = long_request_tokens

    def open(
        self,
        ticket: Ticket,
        token_ids: "array[int]",
        *,
        max_tokens: int | None,
        seed: int,
        together: Together | None = None,
    ) -> "Routing":
        """The routing of one answer; `seed` breaks ties. No `max_tokens` is as long as the context allows."""
        key = replace(self._chain, namespace=ticket.namespace)
        is_long = max_tokens is None or max_tokens >= self._long_request_tokens
        return Routing(
            self, ticket, token_ids, root=root(key), is_long=is_long, seed=seed, together=together or Together()
        )


class Routing:
    """Where one request goes, try by try."""

    def __init__(
        self,
        decider: Decider,
        ticket: Ticket,
        token_ids: "array[int]",
        *,
        root: Digest,
        is_long: bool,
        seed: int,
        together: Together,
    ) -> None:
        self._decider = decider
        self._request_id = ticket.request_id
        self._root = root
        self._is_long = is_long
        self._seed = seed
        self._together = together
        self._token_ids = token_ids
        self._chains = together.chains
        self._attempt = 0

    async def prepare(self) -> None:
        """Hashes what the next `choose` needs of a long prompt; a short one's is nothing to wait for."""
        num_bytes = 4 * len(self._token_ids)
        if num_bytes <= SMALL_BYTES:
            return
        geometries = _geometries(self._decider.fleet.snapshot())
        async with self._together.hashing:
            for geometry in geometries - self._chains.keys():
                self._chains[geometry] = await self._decider.offload.in_thread(
                    partial(self._hash, geometry), num_bytes=num_bytes
                )

    def choose(self, *, excluded: Set[WorkerId] = frozenset()) -> Decision | None:
        """The replica for the next try, recorded; None if all are excluded or there is none."""
        decider, started = self._decider, time.perf_counter()
        snapshot = decider.fleet.snapshot()
        depths, first_digest = self._depths(snapshot)
        avoided = decider.fleet.avoided(is_long=self._is_long)
        excluded = excluded | self._others(snapshot)
        looked_up = time.perf_counter()
        choice = pick.choose(
            snapshot,
            depths,
            num_tokens=len(self._token_ids),
            first_digest=first_digest,
            seed=self._seed,
            excluded=excluded,
            avoided=avoided,
        )
        if choice is None:
            return None
        self._attempt += 1
        self._together.worker_id = self._together.worker_id or choice.worker_id
        decision = Decision(
            decision_id=uuid.uuid4().hex[:16],
            request_id=self._request_id,
            time_s=time.time(),
            attempt=self._attempt,
            snapshot=snapshot,
            depths=depths,
            num_tokens=len(self._token_ids),
            first_digest=first_digest,
            seed=self._seed,
            excluded=frozenset(excluded),
            avoided=avoided,
            choice=choice,
        )
        decider.decisions.add(decision)
        self._predict(decision)
        decider.metrics.decided(choice, lookup_s=looked_up - started, decision_s=time.perf_counter() - started)
        return decision

    def _others(self, snapshot: FleetSnapshot) -> Set[WorkerId]:
        """All but the replica of the answers beside this one, for its first try, while that is routable."""
        first = self._together.worker_id
        if first is None or self._attempt > 0:
            return set()
        ids = {view.worker_id for view in snapshot.replicas}
        return ids - {first} if first in ids else set()

    def _depths(self, snapshot: FleetSnapshot) -> tuple[dict[int, int], RoutingDigest | None]:
        """Leading routing blocks by slot. A pool has one page size and stride, but for a while during an update."""
        geometries = _geometries(snapshot)
        depths: dict[int, int] = {}
        first_digest = None
        for geometry in sorted(geometries):
            chain = self._chain(geometry)
            found = self._decider.index.depths(chain)
            if len(geometries) > 1:
                same = {view.slot for view in snapshot.replicas if (view.page_size, view.routing_stride) == geometry}
                found = {slot: depth for slot, depth in found.items() if slot in same}
            depths |= found
            first_digest = chain[0] if chain and first_digest is None else first_digest
        return depths, first_digest

    def _chain(self, geometry: tuple[int, int]) -> list[RoutingDigest]:
        if geometry not in self._chains:
            self._chains[geometry] = self._hash(geometry)
        return self._chains[geometry]

    def _hash(self, geometry: tuple[int, int]) -> list[RoutingDigest]:
        """Slice by slice, because a thread that hashes short pages holds the interpreter lock."""
        page_size, stride = geometry
        slice_tokens = max(1, _SLICE_PAGES // stride) * stride * page_size
        end = min(len(self._token_ids), _MAX_BLOCKS * stride * page_size)
        last, chain = self._root, list[RoutingDigest]()
        for first in range(0, end, slice_tokens):
            pages = page_digests(last, self._token_ids[first : min(end, first + slice_tokens)], page_size=page_size)
            chain += routing_digests(pages, stride=stride)
            last = pages[-1] if pages else last
        return chain

    def _predict(self, decision: Decision) -> None:
        """Siblings in the same burst should land together, before the replica's first event arrives."""
        view = next(view for view in decision.snapshot.replicas if view.worker_id == decision.choice.worker_id)
        if view.slot < 0:
            return
        chain = self._chain((view.page_size, view.routing_stride))
        known = decision.depths.get(view.slot, 0)
        self._decider.index.predict(view.slot, chain[known:], self._decider.clock())


def _geometries(snapshot: FleetSnapshot) -> set[tuple[int, int]]:
    """Page size and stride of every replica with prefix credit."""
    return {(view.page_size, view.routing_stride) for view in snapshot.replicas if view.slot >= 0}
