"""Requests that have no place yet, and who of them goes next. Pure; the scheduler alone changes it."""

from bisect import insort
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from ostrya.engine.kv.prefix import PrefixCache
from ostrya.engine.sequence import Sequence

WINDOW = 64
"""So many are looked at in a step; those behind have come later than all of them."""

by_rank = attrgetter("rank")


class Waiting:
    """In order of rank: by priority, then first come, first served."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """One more; a sequence that was preempted comes back to where its arrival puts it."""
        insort(self._sequences, sequence, key=by_rank)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def candidates(self, prefix: PrefixCache, *, page_size: int, tokens_per_s: float) -> list[Sequence]:
        """The first of the queue, in the order in which they should be admitted.

        What the cache holds of a prompt counts as though it had waited so much longer as computing that would take: it
        is work saved, and may be evicted soon. That ages by itself: whoever comes more than one prefill of a cached
        prompt later goes behind, so nobody is overtaken for longer than that.
        """
        window = list(islice(self._sequences, WINDOW))
        if len(window) < 2:
            return window

        def key(sequence: Sequence) -> tuple[int, float]:
            depth = prefix.depth(sequence.chain, sequence.token_ids, num_pages=sequence.num_usable_pages)
            return sequence.rank[0], sequence.submitted_s - depth * page_size / tokens_per_s

        return sorted(window, key=key)
