"""Member rows of older and newer versions are readable side by side, as in a rolling update."""

import msgspec

from ostrya.state import keys
from ostrya.state.members import Member

ROW = ("w0", "10.0.0.1:50052", "m", 16, 2, b"test", 8, 2048, 1000, 7)
"""As every version so far writes it; the rest follows behind."""


def read(row: tuple[object, ...]) -> Member:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=Member)


def test_a_row_from_before_the_schema_was_written_is_of_schema_1() -> None:
    assert read(ROW).schema == 1
    assert (read(ROW).worker_id, read(ROW).epoch) == ("w0", 7)


def test_a_row_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    later = read((*ROW, keys.SCHEMA + 1, "something new"))
    assert (later.schema, later.epoch) == (keys.SCHEMA + 1, 7)
