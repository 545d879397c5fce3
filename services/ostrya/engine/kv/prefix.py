"""Which page holds the tokens of which digest: the prefix cache over the page pool, and the resume points it makes.

A page becomes matchable in register(), which the scheduler calls when the step that writes its last token is planned
and nothing more can be added to that step: only later steps, which run after it, can match it. Because a sequence
refers to all pages of its chain and releases tails as older than heads, what is left here is always prefix-closed.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ostrya.engine.kv.pool import PageId, PagePool
from ostrya.prefix.chain import Digest, RoutingDigest, page_digests, routing_digest


class Chain:
    """Digests of one sequence's full pages, each computed once and only when asked for."""

    def __init__(self, root: Digest, *, page_size: int) -> None:
        self._root = root
        self._page_size = page_size
        self._digests: list[Digest] = []

    def digests(self, token_ids: "array[int]", *, num_pages: int) -> list[Digest]:
        """Of the first `num_pages` pages of `token_ids`, which only ever grows between calls."""
        known = len(self._digests)
        if known < num_pages:
            start = self._digests[-1] if known else self._root
            new = token_ids[known * self._page_size : num_pages * self._page_size]
            self._digests += page_digests(start, new, page_size=self._page_size)
        return self._digests[:num_pages]

    def num_usable(self, token_ids: "array[int]") -> int:
        """Full pages before the last token."""
        return (len(token_ids) - 1) // self._page_size

    def digest(self, token_ids: "array[int]", page_index: int) -> Digest:
        """Of page `page_index`."""
        if page_index >= len(self._digests):
            self.digests(token_ids, num_pages=page_index + 1)
        return self._digests[page_index]


@dataclass(frozen=True, slots=True)
class Events:
    """Resume points that came and went since the last look; apply `removed` first."""

    stored: tuple[RoutingDigest, ...]
    removed: tuple[RoutingDigest, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: Digest
    is_resume_point: bool


class PrefixCache:
    """Digest -> page, for pages whose content every later step can read."""

    def __init__(self, pool: PagePool, *, routing_stride: int) -> None:
        self._pool = pool
        self._stride = routing_stride
        self._page_of: dict[Digest, PageId] = {}
        self._entries: dict[PageId, _Entry] = {}
        self._stored: dict[RoutingDigest, None] = {}
        self._removed: dict[RoutingDigest, None] = {}
        pool.on_evict = self._forget

    def match(self, digests: Sequence[Digest]) -> list[PageId]:
        """Pages of the longest known prefix of `digests`; takes no reference."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def depth(self, chain: Chain, token_ids: "array[int]", *, num_pages: int) -> int:
        """How many of the first `num_pages` pages of `token_ids` are known; a few look-ups, as what is known is
        prefix-closed."""
        return bisect_left(range(num_pages), True, key=lambda i: chain.digest(token_ids, i) not in self._page_of)

    def register(self, page: PageId, digest: Digest, *, page_index: int) -> PageId:
        """Makes a full page matchable and returns the page that holds `digest` from now on.

        When another page already holds it, the caller's reference moves there and its own page is released.
        """
        existing = self._page_of.get(digest)
        if existing is None:
            entry = _Entry(digest, (page_index + 1) % self._stride == 0)
            self._page_of[digest] = page
            self._entries[page] = entry
            self._pool.keep(page)
            if entry.is_resume_point:
                _note(routing_digest(digest), into=self._stored, unless_in=self._removed)
            return page
        if existing != page:
            self._pool.reference(existing)
            self._pool.release([page])
        return existing

    def take_events(self) -> Events:
        """What changed since the last call, netted: a digest that came and went again is in neither."""
        events = Events(tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return events

    def resume_points(self) -> set[RoutingDigest]:
        """All there are now."""
        return {routing_digest(entry.digest) for entry in self._entries.values() if entry.is_resume_point}

    def _forget(self, page: PageId) -> None:
        entry = self._entries.pop(page)
        del self._page_of[entry.digest]
        if entry.is_resume_point:
            _note(routing_digest(entry.digest), into=self._removed, unless_in=self._stored)


def _note(digest: RoutingDigest, *, into: dict[RoutingDigest, None], unless_in: dict[RoutingDigest, None]) -> None:
    """Records a change, or cancels it against the opposite one that nobody was told of yet."""
    if digest in unless_in:
        del unless_in[digest]
    else:
        into[digest] = None
