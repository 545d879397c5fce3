"""Whatever stands in Redis: a reader gives a value within its bounds, or says that there is none. Nothing else."""

import logging
import random
from contextlib import suppress
from itertools import chain

import msgspec
import pytest

from ostrya.errors import Unreadable
from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import MAX_EVENTS, SLICE, Cleared, Event, Removed, Stored, pack, unpack
from ostrya.prefix.index import PrefixIndex
from ostrya.state import board, keys, members, rows, snapshot
from ostrya.state.board import LoadRow
from ostrya.state.rows import Kind, Rejects
from tests.fakes import garbage
from tests.fakes.pool import member

MEMBER = msgspec.msgpack.encode(member())
LOAD = msgspec.msgpack.encode(LoadRow(stamp=1, num_running=3, prefill_tokens_per_s=100.0))
DIGESTS = [RoutingDigest(number * 0x9E37_79B9) for number in range(1, 20)]
SNAPSHOT = snapshot.pack(7, 3, DIGESTS)
BATCH = pack([Stored(tuple(DIGESTS)), Removed(tuple(DIGESTS[:3])), Cleared(), Stored(tuple(DIGESTS[3:]))])


def test_a_mutation_of_any_row_is_read_within_bounds_or_not_at_all() -> None:
    rng, num_read = random.Random(9), 0
    for _ in range(garbage.num_mutations(5_000)):
        try:
            seen = members.decode("w0", garbage.mutated(rng, MEMBER))
        except (ValueError, msgspec.MsgspecError):
            pass
        else:
            num_read += 1
            assert seen.worker_id == "w0"
            assert 0 <= seen.epoch <= keys.MAX_EPOCH
            assert min(seen.page_size, seen.routing_stride, seen.max_running, seen.context_tokens, seen.vocab_size) > 0
        with suppress(ValueError, msgspec.MsgspecError):
            assert isinstance(board.decode("w0", garbage.mutated(rng, LOAD)).stamp, int)
        with suppress(Unreadable):
            assert len(snapshot.unpack(garbage.mutated(rng, SNAPSHOT), most=100)) <= 100
        with suppress(Unreadable):
            assert 0 <= rows.integer(garbage.integer(rng), least=0, most=9) <= 9
    assert num_read > 50, "most damage is noticed, some is a plausible row"


def test_a_mutation_of_a_batch_is_applied_whole_or_not_at_all() -> None:
    rng, index = random.Random(10), PrefixIndex(max_entries=10_000)
    slot = index.add_slot()
    for _ in range(garbage.num_mutations(5_000)):
        raw = garbage.mutated(rng, BATCH) if rng.random() < 0.5 else garbage.batch(rng)
        before = index.num_entries
        try:
            events = unpack(raw)
        except ValueError:
            assert index.num_entries == before
            continue
        index.apply(slot, events)
        index.sweep(1_000)
    assert index.num_entries <= 10_000


def test_a_batch_comes_in_slices_and_is_checked_before_the_first() -> None:
    many = tuple(RoutingDigest(number) for number in range(2 * SLICE + 5))
    sizes = [len(event.digests) for event in unpack(pack([Stored(many)])) if isinstance(event, Stored)]
    assert sizes == [SLICE, SLICE, 5]
    with pytest.raises(ValueError, match="cut short"):
        unpack(pack([Stored(many)])[:-1])
    with pytest.raises(ValueError, match="kind 9"):
        unpack(pack([Stored(many)]) + b"\x09\x00\x00\x00\x00")


def test_what_a_later_clear_makes_void_is_not_applied() -> None:
    first, last = Stored((RoutingDigest(1),)), Stored((RoutingDigest(2),))
    events: list[Event] = [first, Cleared(), Cleared(), last]
    assert list(unpack(pack(events))) == [Cleared(), last]


def test_a_batch_of_too_many_events_is_refused() -> None:
    with pytest.raises(ValueError, match=str(MAX_EVENTS)):
        unpack(pack([Removed(())] * (MAX_EVENTS + 1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"worker_id": "w1"},
        {"address": "nowhere"},
        {"address": "h:0"},
        {"address": "h:1\n"},
        {"model": "m" * 2_000},
        {"page_size": 0},
        {"routing_stride": -1},
        {"max_running": 2**40},
        {"context_tokens": 0},
        {"vocab_size": 0},
        {"epoch": -1},
        {"epoch": 2**53},
        {"epoch": 2**64 - 1},
        {"schema": 0},
        {"chain_self_test": b"x" * 2_000},
    ],
    ids=str,
)
def test_a_member_with_a_field_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    raw = msgspec.msgpack.encode(msgspec.structs.replace(member(), **changes))
    with pytest.raises(ValueError, match=r"worker_id|address|model|page_size|stride|max_|context|vocab|epoch|schema"):
        members.decode("w0", raw)


@pytest.mark.parametrize("worker_id", ["", "w 0", "w0\n", "w\x000", "wörker", "w" * 254])
def test_an_id_that_could_forge_a_log_line_is_no_worker_id(worker_id: str) -> None:
    raw = msgspec.msgpack.encode(member(worker_id))
    with pytest.raises(ValueError, match="worker_id"):
        members.decode(worker_id, raw)


def test_what_cannot_be_read_is_named_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    rejects = Rejects()
    for _ in range(5):
        rejects.add(Kind.MEMBER, b"w\xff\n\x1b[2J" + b"x" * 10_000, ValueError("bad\nline " + "y" * 10_000))
        rejects.add(Kind.LOAD, "w0", "worse")
    assert rejects.counts == {Kind.MEMBER: 5, Kind.LOAD: 5}
    assert len(caplog.records) == 2
    fields = [record.__dict__["fields"] for record in caplog.records]
    assert all(str(value).isprintable() and len(str(value)) < 400 for one in fields for value in one.values())


def test_what_is_remembered_of_it_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    rejects = Rejects()
    with caplog.at_level(logging.WARNING):
        for number in range(5_000):
            rejects.add(Kind.MEMBER, f"w{number}", "bad")
    assert rejects.counts[Kind.MEMBER] == 5_000
    assert len(rejects.named) == 1_000
    assert len(caplog.records) == 1_001


def test_a_snapshot_larger_than_its_worker_is_refused_by_its_header() -> None:
    reader = snapshot.Reader(most=1_000)
    head = snapshot.pack(7, 3, [])[:16] + b"\x00" * 4
    with pytest.raises(Unreadable, match="can hold 1000"):
        reader.feed(head + (8_000_000).to_bytes(4, "big") + b"\x00" * 4, num_bytes=28 + 64_000_000)


def test_a_snapshot_is_read_in_parts() -> None:
    digests = [RoutingDigest(number) for number in range(1_000)]
    raw = snapshot.pack(7, 3, digests)
    reader, parts = snapshot.Reader(most=1_000), 0
    while (wanted := reader.wanted(800)) is not None:
        reader.feed(raw[wanted[0] : wanted[1] + 1], num_bytes=len(raw))
        parts += 1
    assert (parts, [*chain(*reader.snapshot().parts)]) == (10, digests)
