"""The packed snapshot."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostrya.errors import Unreadable
from ostrya.prefix.chain import RoutingDigest
from ostrya.state.snapshot import Snapshot, pack, unpack

U64 = st.integers(0, 2**64 - 1)


@given(epoch=U64, seq=U64, digests=st.lists(U64.map(RoutingDigest)))
def test_what_was_packed_comes_back(epoch: int, seq: int, digests: list[RoutingDigest]) -> None:
    assert unpack(pack(epoch, seq, digests), most=len(digests)) == Snapshot(epoch, seq, (array("Q", digests),))


def test_the_bytes_are_big_endian_whatever_the_machine() -> None:
    assert pack(1, 2, [RoutingDigest(3)])[4:20] + pack(1, 2, [RoutingDigest(3)])[-8:] == bytes(
        [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3]
    )


@pytest.mark.parametrize("position", [0, 25, 30, 43])
def test_a_flipped_bit_is_found(position: int) -> None:
    raw = bytearray(pack(1, 2, [RoutingDigest(3), RoutingDigest(4)]))
    raw[position] ^= 1
    with pytest.raises(Unreadable):
        unpack(bytes(raw), most=9)


@pytest.mark.parametrize("length", [0, 10, 28, 35])
def test_a_cut_snapshot_is_found(length: int) -> None:
    with pytest.raises(Unreadable):
        unpack(pack(1, 2, [RoutingDigest(3)])[:length], most=9)
