"""The key schema."""

from ostrya.state import keys


def test_the_keys_of_a_worker_share_a_hash_tag_and_differ() -> None:
    mine = keys.worker_keys("pool", "w0")
    names = [mine.lease, mine.meta, mine.journal, mine.snapshot]
    assert len(set(names)) == 4
    assert all(name.startswith("ostrya:{pool/w0}:") for name in names)


def test_the_tables_of_a_pool_share_a_hash_tag() -> None:
    assert keys.members("pool").startswith("ostrya:{pool}:")
    assert keys.load("pool").startswith("ostrya:{pool}:")
    assert keys.members("pool") != keys.load("pool")
