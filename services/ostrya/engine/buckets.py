"""The few shapes a step may have. All are compiled before serving, and every plan is padded to one of them.

A step of decode rows alone has tokens = rows; a step with any prefill chunk has a token bucket and the largest row
bucket.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ostrya.engine.plan import Bucket

MIN_ROWS = 4
"""From four rows up, plain decoding and verification of drafts give bit-identical logits (speculative.md 0.4)."""
MIN_TOKENS = 16
MIN_PAGES_TOKENS = 256
"""What the smallest page bucket covers; finer ones save nothing that can be measured and double the shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The sizes of each dimension, ascending powers of two."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    pages: tuple[int, ...]

    @property
    def buckets(self) -> list[Bucket]:
        """Every shape, smallest first."""
        decode = [Bucket(rows, rows, pages) for rows in self.rows for pages in self.pages]
        mixed = [Bucket(tokens, self.rows[-1], pages) for tokens in self.tokens for pages in self.pages]
        return sorted(set(decode + mixed))

    def fit(self, *, rows: int, tokens: int, pages: int) -> Bucket:
        """The smallest bucket for `rows` rows with `tokens` tokens altogether, each within `pages` pages."""
        page_bucket = _at_least(self.pages, pages)
        if tokens == rows:
            row_bucket = _at_least(self.rows, rows)
            return Bucket(row_bucket, row_bucket, page_bucket)
        return Bucket(_at_least(self.tokens, tokens), self.rows[-1], page_bucket)


def ladder(*, max_running: int, max_step_tokens: int, page_size: int, context_tokens: int) -> Ladder:
    """The shapes of an engine with these limits."""
    smallest_pages = max(1, MIN_PAGES_TOKENS // page_size)
    return Ladder(
        rows=_doubling(MIN_ROWS, max_running),
        tokens=_doubling(MIN_TOKENS, max_step_tokens),
        pages=_doubling(smallest_pages, -(-context_tokens // page_size)),
    )


def _doubling(first: int, enough: int) -> tuple[int, ...]:
    """first, 2 * first, ... until `enough` is covered."""
    sizes = [first]
    while sizes[-1] < enough:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    index = bisect_left(sizes, wanted)
    assert index < len(sizes), f"{wanted} exceeds the largest bucket, {sizes[-1]}"
    return sizes[index]
