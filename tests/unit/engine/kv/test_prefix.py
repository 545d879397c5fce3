"""The prefix cache matches committed pages only, shares equal content, and tells about every stride-th page."""

from array import array

from ostrya.engine.kv.pool import PageId, PagePool
from ostrya.engine.kv.prefix import Chain, PrefixCache
from ostrya.prefix.chain import ChainKey, Digest, page_digests, root, routing_digest

ROOT = root(ChainKey(model="m", tokenizer_fingerprint="t"))


def digests_of(num_pages: int, *, salt: int = 0) -> list[Digest]:
    return page_digests(ROOT, range(salt, salt + 4 * num_pages), page_size=4)


def make_cache(*, num_pages: int = 9, stride: int = 1) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, routing_stride=stride)


def store(pool: PagePool, cache: PrefixCache, digests: list[Digest]) -> list[PageId]:
    return [cache.register(pool.allocate(), digest, page_index=index) for index, digest in enumerate(digests)]


def test_match_ends_at_the_first_unknown_page() -> None:
    pool, cache = make_cache()
    pages = store(pool, cache, digests_of(3))
    assert cache.match(digests_of(5)) == pages
    assert cache.match(digests_of(3, salt=1)) == []


def test_second_page_with_equal_content_is_given_back() -> None:
    pool, cache = make_cache()
    (first,) = store(pool, cache, digests_of(1))
    second = pool.allocate()
    assert cache.register(second, digests_of(1)[0], page_index=0) == first
    assert (pool.num_referenced, pool.num_free) == (1, 7)
    pool.release([first])
    assert pool.num_referenced == 1
    pool.release([first])
    assert pool.num_reusable == 1


def test_only_every_stride_th_page_is_a_resume_point() -> None:
    pool, cache = make_cache(stride=2)
    digests = digests_of(5)
    store(pool, cache, digests)
    assert cache.take_events().stored == (routing_digest(digests[1]), routing_digest(digests[3]))
    assert cache.resume_points() == {routing_digest(digests[1]), routing_digest(digests[3])}


def test_evicted_page_is_a_removed_resume_point_and_no_match() -> None:
    pool, cache = make_cache(num_pages=3)
    digests = digests_of(2)
    pool.release(store(pool, cache, digests))
    cache.take_events()
    pool.allocate()
    events = cache.take_events()
    assert (events.stored, events.removed) == ((), (routing_digest(digests[1]),))
    assert len(cache.match(digests)) == 1


def test_what_came_and_went_between_looks_is_no_event() -> None:
    pool, cache = make_cache(num_pages=2)
    (digest,) = digests_of(1)
    pool.release(store(pool, cache, [digest]))
    pool.release([pool.allocate()])
    events = cache.take_events()
    assert events.stored == events.removed == ()
    pool.release(store(pool, cache, [digest]))
    cache.take_events()
    page = pool.allocate()
    cache.register(page, digest, page_index=0)
    events = cache.take_events()
    assert events.stored == events.removed == ()


def test_chain_is_extended_as_tokens_are_added() -> None:
    chain = Chain(ROOT, page_size=4)
    tokens = array("I", range(9))
    expected = page_digests(ROOT, range(20), page_size=4)
    assert chain.digests(tokens, num_pages=2) == expected[:2]
    tokens.extend(range(9, 20))
    assert chain.digest(tokens, 3) == expected[3]
    assert chain.digests(tokens, num_pages=5) == expected
    assert chain.digests(tokens, num_pages=1) == expected[:1]
