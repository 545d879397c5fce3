"""Who holds which KV page. The scheduler allocates, the prefix cache keeps; no tokens, no tensors here.

A page is free, reusable (nobody refers to it, but its content is still in the prefix cache) or referenced, and the
three counts always add up to the total. Page 0 is scratch: padding writes there, no sequence owns it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NewType

PageId = NewType("PageId", int)


def _forget_nothing(page: PageId) -> None:
    raise AssertionError(f"page {page} was evicted, but nobody keeps pages")


class PagePool:
    """Reference counts over `num_pages` pages, the scratch page included."""

    def __init__(self, num_pages: int, *, on_evict: Callable[[PageId], None] = _forget_nothing) -> None:
        self.on_evict = on_evict
        """Told of each kept page whose content is about to be overwritten."""
        self._total = num_pages - 1
        self._free = [PageId(page) for page in range(num_pages - 1, 0, -1)]
        self._num_references = [0] * num_pages
        self._kept = [False] * num_pages
        # Least recently released first.
        self._reusable: OrderedDict[PageId, None] = OrderedDict()

    @property
    def num_total(self) -> int:
        return self._total

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_reusable(self) -> int:
        return len(self._reusable)

    @property
    def num_referenced(self) -> int:
        return self._total - self.num_free - self.num_reusable

    @property
    def num_available(self) -> int:
        """Pages that allocate() can hand out."""
        return self.num_free + self.num_reusable

    @property
    def is_unused(self) -> bool:
        """No page has a reference, and none is lost: what must hold when nothing runs. Cheap, unlike check()."""
        has_references = self._num_references.count(0) < len(self._num_references)
        return not has_references and self.num_available == self._total

    def is_reusable(self, page: PageId) -> bool:
        return page in self._reusable

    def allocate(self) -> PageId:
        """One page with one reference; evicts the least recently released page when none is free."""
        assert self.num_available, "allocate() without a look at num_available"
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._reusable.popitem(last=False)
            self.on_evict(page)
            self._kept[page] = False
        self._num_references[page] = 1
        return page

    def reference(self, page: PageId) -> None:
        """One more reference to a page that is referenced or reusable."""
        assert self._num_references[page] or page in self._reusable, f"page {page} is free and cannot be shared"
        self._reusable.pop(page, None)
        self._num_references[page] += 1

    def keep(self, page: PageId) -> None:
        """The content of this referenced page stays reusable after its last release."""
        assert self._num_references[page], f"page {page} has no reference; only a referenced page can be kept"
        self._kept[page] = True

    def release(self, pages: Sequence[PageId]) -> None:
        """One reference less to each. `pages` is in sequence order: the tail becomes older than the head."""
        for page in reversed(pages):
            assert self._num_references[page], f"page {page} is released more often than referenced"
            self._num_references[page] -= 1
            if self._num_references[page]:
                continue
            if self._kept[page]:
                self._reusable[page] = None
            else:
                self._free.append(page)

    def check(self) -> None:
        """AssertionError unless every page is in exactly one state and the counts add up."""
        free, reusable = set(self._free), set(self._reusable)
        referenced = {page for page, count in enumerate(self._num_references) if count}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & reusable, "a page is free and reusable"
        assert not (free | reusable) & referenced, "a referenced page is free or reusable"
        assert free | reusable | referenced == set(range(1, self._total + 1)), "a page is lost, or scratch is owned"
        assert all(self._kept[page] for page in reusable), "a reusable page is not kept"
        assert not any(self._kept[page] for page in free), "a free page is kept"
        assert self.num_free + self.num_reusable + self.num_referenced == self.num_total
