"""The index against a naive one, and what it promises about time and memory bounds."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import Cleared, Event, Removed, Stored
from ostrya.prefix.index import PrefixIndex


def digests(*numbers: int) -> tuple[RoutingDigest, ...]:
    return tuple(map(RoutingDigest, numbers))


def stored(*numbers: int) -> list[Event]:
    return [Stored(digests(*numbers))]


def test_depth_is_that_of_the_deepest_published_digest() -> None:
    index = PrefixIndex()
    attention, hybrid, other = index.add_slot(), index.add_slot(), index.add_slot()
    index.apply(attention, stored(1, 2))
    index.apply(hybrid, stored(3))  # a recurrent state was kept there only
    index.apply(other, stored(9))
    assert index.depths(digests(1, 2, 3, 4)) == {attention: 2, hybrid: 3}


def test_nothing_in_common_is_no_entry() -> None:
    index = PrefixIndex()
    index.apply(index.add_slot(), stored(1))
    assert index.depths(digests(5, 6)) == {}
    assert index.depths(()) == {}


def test_a_retired_slot_vanishes_before_it_is_swept() -> None:
    index = PrefixIndex()
    gone, stays = index.add_slot(), index.add_slot()
    index.apply(gone, stored(1, 2, 3))
    index.apply(stays, stored(1))
    index.retire(gone)
    assert index.depths(digests(1, 2, 3)) == {stays: 1}
    assert (index.num_blocks(gone), index.num_entries) == (0, 3)


def test_sweeping_in_slices_frees_what_only_dead_slots_held() -> None:
    index = PrefixIndex()
    gone, stays = index.add_slot(), index.add_slot()
    index.apply(gone, stored(*range(100)))
    index.apply(stays, stored(*range(10)))
    index.retire(gone)
    slices = 1
    while not index.sweep(7):
        slices += 1
    assert slices == 15
    assert index.num_entries == 10
    assert index.holds(stays) == set(range(10))


def test_a_new_slot_inherits_nothing_from_a_dead_one() -> None:
    index = PrefixIndex()
    for _ in range(5):
        slot = index.add_slot()
        index.apply(slot, stored(1, 2))
        index.predict(slot, digests(3), now=0.0)
        index.retire(slot)
        fresh = index.add_slot()
        assert index.depths(digests(1, 2, 3)) == {}
        index.retire(fresh)
        while not index.sweep(1):
            pass
        assert index.depths(digests(1, 2, 3)) == {}
        assert index.num_entries == 0


def test_events_that_come_during_a_sweep_are_kept() -> None:
    index = PrefixIndex()
    gone, stays = index.add_slot(), index.add_slot()
    index.apply(gone, stored(*range(20)))
    index.retire(gone)
    index.sweep(5)
    index.apply(stays, stored(3, 18, 50))
    late = index.add_slot()
    index.apply(late, stored(4))
    index.retire(late)
    while not index.sweep(5):
        pass
    assert index.holds(stays) == {3, 18, 50}
    assert index.num_entries == 3


def test_replace_holds_exactly_the_new_set() -> None:
    index = PrefixIndex()
    slot, other = index.add_slot(), index.add_slot()
    index.apply(slot, stored(1, 2, 3))
    index.apply(other, stored(1))
    index.replace(slot, digests(2, 7))
    assert (index.holds(slot), index.num_blocks(slot)) == ({2, 7}, 2)
    assert index.depths(digests(1)) == {other: 1}


def test_cleared_empties_one_slot() -> None:
    index = PrefixIndex()
    slot, other = index.add_slot(), index.add_slot()
    index.apply(slot, stored(1))
    index.apply(other, stored(1))
    index.apply(slot, [Cleared()])
    assert index.depths(digests(1)) == {other: 1}


def test_a_prediction_counts_until_its_time_is_over() -> None:
    index = PrefixIndex()
    slot = index.add_slot()
    index.apply(slot, stored(1))
    index.predict(slot, digests(2, 3), now=10.0)
    assert index.depths(digests(1, 2, 3)) == {slot: 3}
    index.expire(11.9)
    assert index.depths(digests(1, 2, 3)) == {slot: 3}
    index.expire(14.1)
    assert index.depths(digests(1, 2, 3)) == {slot: 1}


def test_a_prediction_outlives_one_rotation_only() -> None:
    index = PrefixIndex()
    slot = index.add_slot()
    index.predict(slot, digests(1), now=0.0)
    index.predict(slot, digests(2), now=2.5)
    assert index.depths(digests(1)) == {slot: 1}
    index.predict(slot, digests(3), now=5.0)
    assert index.depths(digests(1)) == {}
    assert index.depths(digests(2)) == {slot: 1}


def test_predictions_are_bounded() -> None:
    index = PrefixIndex()
    slot = index.add_slot()
    for start in range(0, 300_000, 100):
        index.predict(slot, digests(*range(start, start + 100)), now=0.0)
    assert index.num_predicted <= 2 * 66_000


def test_a_full_index_refuses_new_digests_and_counts_them() -> None:
    index = PrefixIndex(max_entries=3)
    first, second = index.add_slot(), index.add_slot()
    index.apply(first, stored(1, 2, 3, 4, 5))
    index.apply(second, stored(1, 9))
    assert (index.num_entries, index.num_refused) == (3, 3)
    assert index.depths(digests(1, 2, 3, 4, 5)) == {first: 3, second: 1}
    index.apply(first, [Removed(digests(3))])
    index.apply(second, stored(9))
    assert index.holds(second) == {1, 9}


NUMBERS = st.lists(st.integers(0, 12), max_size=6)
ACTIONS = ["store", "remove", "clear", "replace", "retire", "add", "sweep"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear", "replace", "retire", "add", "sweep"]), st.integers(0, 5), NUMBERS
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, chain=st.lists(st.integers(0, 12), unique=True, max_size=13))
def test_depths_and_counts_equal_a_naive_index(steps: list[tuple[str, int, list[int]]], chain: list[int]) -> None:
    index, naive = PrefixIndex(), dict[int, set[int]]()
    for what, which, numbers in steps:
        if what == "add":
            naive[index.add_slot()] = set()
        elif what == "sweep":
            index.sweep(which)
        elif naive:
            slot = sorted(naive)[which % len(naive)]
            if what == "retire":
                index.retire(slot)
                del naive[slot]
            elif what == "replace":
                index.replace(slot, digests(*numbers))
                naive[slot] = set(numbers)
            elif what == "clear":
                index.apply(slot, [Cleared()])
                naive[slot] = set()
            elif what == "store":
                index.apply(slot, stored(*numbers))
                naive[slot] |= set(numbers)
            else:
                index.apply(slot, [Removed(digests(*numbers))])
                naive[slot] -= set(numbers)
    expected = {
        slot: max(depth for depth, digest in enumerate(chain, 1) if digest in held)
        for slot, held in naive.items()
        if held & set(chain)
    }
    assert index.depths(digests(*chain)) == expected
    assert {slot: index.num_blocks(slot) for slot in naive} == {slot: len(held) for slot, held in naive.items()}
    while not index.sweep(3):
        pass
    assert index.num_entries == len(set().union(*naive.values()))


def test_no_shard_has_much_to_move_when_it_grows_and_they_grow_at_different_times() -> None:
    index = PrefixIndex()
    shares = Counter(map(id, index._buckets))
    digests = [share / len(index._buckets) * index.max_entries for share in shares.values()]
    assert max(digests) < 4_000
    assert 1.8 < max(digests) / min(digests) < 2.2
    assert len(set(digests)) > 8
