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
class Growth:
    """How many times the one before each size of a dimension is, at most: what a backend asks for. Powers of two: fewer
    sizes take less time to compile, and more to compute."""

    rows: int = 2
    tokens: int = 2
    pages: int | None = 2
    """None: only the largest, where attention reads no more pages than a row has."""


DOUBLING = Growth()


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


def ladder(
    *, max_running: int, max_step_tokens: int, page_size: int, context_tokens: int, growth: Growth = DOUBLING
) -> Ladder:
    """The shapes of an engine with these limits."""
    pages = _growing(max(1, MIN_PAGES_TOKENS // page_size), -(-context_tokens // page_size), growth.pages or 2)
    return Ladder(
        rows=_growing(MIN_ROWS, max_running, growth.rows),
        tokens=_growing(MIN_TOKENS, max_step_tokens, growth.tokens),
        pages=pages if growth.pages else pages[-1:],
    )


def _growing(first: int, enough: int, factor: int) -> tuple[int, ...]:
    """From `first` on, each `factor` times the one before; the last is the least doubling that covers `enough`."""
    last = first
    while last < enough:
        last *= 2
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(last, factor * sizes[-1]))
    return tuple(sizes)


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    index = bisect_left(sizes, wanted)
    assert index < len(sizes), f"{wanted} exceeds the largest bucket, {sizes[-1]}"
    return sizes[index]
