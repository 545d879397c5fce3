"""Pages are in exactly one state, and the least recently released goes first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.engine.kv.pool import PageId, PagePool


def make_pool(num_pages: int) -> tuple[PagePool, list[PageId]]:
    evicted: list[PageId] = []
    return PagePool(num_pages, on_evict=evicted.append), evicted


def test_scratch_page_is_never_handed_out() -> None:
    pool, _ = make_pool(4)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    assert pool.num_available == 0


def test_released_page_is_free_unless_kept() -> None:
    pool, _ = make_pool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.keep(first)
    pool.release([first, second])
    assert (pool.num_free, pool.num_reusable, pool.num_referenced) == (1, 1, 0)


def test_tail_of_a_release_is_evicted_before_its_head() -> None:
    pool, evicted = make_pool(4)
    pages = [pool.allocate() for _ in range(3)]
    for page in pages:
        pool.keep(page)
    pool.release(pages)
    assert [pool.allocate() for _ in range(3)] == pages[::-1] == evicted


def test_page_referenced_again_is_not_evicted() -> None:
    pool, evicted = make_pool(3)
    pages = [pool.allocate(), pool.allocate()]
    for page in pages:
        pool.keep(page)
    pool.release(pages)
    pool.reference(pages[1])
    assert pool.allocate() == pages[0]
    assert evicted == [pages[0]]


def test_free_page_cannot_be_shared() -> None:
    pool, _ = make_pool(2)
    with pytest.raises(AssertionError, match="free"):
        pool.reference(PageId(1))


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "keep", "drop"]), st.integers(0, 20)), max_size=80))
@settings(max_examples=100, deadline=None)
def test_counts_add_up_after_any_history(history: list[tuple[str, int]]) -> None:
    pool, _ = make_pool(8)
    held: list[PageId] = []
    for action, pick in history:
        if action == "take" and pool.num_available:
            held.append(pool.allocate())
        elif held and action == "share":
            pool.reference(held[pick % len(held)])
            held.append(held[pick % len(held)])
        elif held and action == "keep":
            pool.keep(held[pick % len(held)])
        elif held and action == "drop":
            pool.release([held.pop(pick % len(held))])
        pool.check()
        assert pool.num_referenced == len(set(held))
        assert pool.is_unused == (not held)
