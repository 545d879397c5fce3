"""Reading ranges: what a region holds and no more, in order, ahead of who asks, and one line when a file changes."""

import logging
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostrya.engine.models import reading
from ostrya.engine.models.reading import Block, Place, Reader, blocks, shifted, skips_rows, span
from ostrya.engine.models.sharding import Part, Range, Region
from ostrya.engine.models.source import cut
from ostrya.errors import ModelLoadError
from tests.fakes import logs

PREFIX = 24
"""Bytes in the file before the tensor."""


@st.composite
def parts(draw: st.DrawFn, size: int) -> Part:
    """Ranges in any order, with holes and copies, as heads have them."""
    ranges, at = [], 0
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        at += draw(st.integers(0, 2))
        ranges.append(Range(at, start, stop))
        at += stop - start
    return Part(at + draw(st.integers(0, 2)), tuple(ranges))


@st.composite
def regions(draw: st.DrawFn) -> Region:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    return Region(shape, tuple(draw(st.one_of(st.just(Part.whole(size)), parts(size))) for size in shape))


def written(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    values = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.uint8).view(shape)
    path.write_bytes(bytes(PREFIX) + values.numpy().tobytes() + b"behind")
    return values


@given(region=regions(), max_bytes=st.integers(1, 40), unit=st.integers(1, 3), gap=st.sampled_from([0, 2, 1 << 20]))
def test_what_is_read_of_a_region_is_what_would_be_cut_out(
    region: Region, max_bytes: int, unit: int, gap: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("r") / "f"
    expected = cut(written(path, region.shape), region.parts)
    out = torch.zeros(region.local_shape, dtype=torch.uint8)
    out_rows = out.view(-1, out.shape[-1]) if out.numel() else out
    low, high = span(region.parts[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "GAP_BYTES", gap)
        place, reader = Place(path, PREFIX, region.shape[-1]), Reader()
        wanted = list(blocks(place, region.rows, low=low, high=high, unit=unit, max_bytes=max_bytes))
        for block in wanted if out.numel() else ():
            values = torch.from_numpy(reader.read(block))
            columns = shifted(region.parts[-1])
            out_rows[block.at : block.at + len(values)] = cut(values, (Part.whole(len(values)), columns))
        sizes = [block.num_bytes for block in wanted]
    assert torch.equal(out, expected)
    assert max(sizes, default=0) <= max(max_bytes, unit * region.shape[-1])
    assert all((block.last - block.first) % unit == 0 or is_last_of(block, region) for block in wanted)


def is_last_of(block: Block, region: Region) -> bool:
    return any(block.last == one.stop for one in region.rows.ranges)


def test_rows_are_read_exactly_and_ends_of_rows_only_where_they_are_short(tmp_path: Path) -> None:
    row_bytes, num_rows = 4 * reading.GAP_BYTES, 6
    path = tmp_path / "f"
    path.write_bytes(bytes(row_bytes * num_rows))
    place = Place(path, 0, row_bytes)

    def num_read(rows: Part, low: int, high: int) -> int:
        reader = Reader()
        for block in blocks(place, rows, low=low, high=high):
            assert reader.read(block).shape == (block.last - block.first, high - low)
        return reader.num_bytes

    half = Part(3, (Range(0, 3, 6),))
    assert num_read(half, 0, row_bytes) == 3 * row_bytes
    assert num_read(half, row_bytes // 2, row_bytes) == 3 * row_bytes // 2
    assert num_read(half, 0, row_bytes - reading.GAP_BYTES) == 3 * row_bytes - reading.GAP_BYTES


def test_what_is_expected_is_read_before_it_is_asked_for_and_not_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(200)))
    place = Place(path, 0, 1)
    expected = list(blocks(place, Part.whole(200), low=0, high=1, max_bytes=4))
    submitted: list[Block] = []
    monkeypatch.setattr(reading._Files, "read", recording(submitted))
    reader = Reader()
    with reader.ahead(expected):
        assert submitted_soon(submitted, expected[: reading.NUM_AHEAD])
        # Out of order, twice, and passing others over: whoever asks gets what they ask for.
        for index in (0, 0, 5, 3, 6, 40, 7, 49):
            assert reader.read(expected[index]).tobytes() == bytes(range(4 * index, 4 * index + 4))
        assert len(submitted) < len(expected)
    assert reader.num_bytes == 8 * 4
    assert reader.read(expected[1]).tobytes() == bytes(range(4, 8))


def recording(into: list[Block]) -> object:
    plain = reading._Files.read

    def read(files: reading._Files, block: Block) -> reading.Bytes:
        into.append(block)
        return plain(files, block)

    return read


def submitted_soon(found: list[Block], wanted: list[Block]) -> bool:
    """Reader threads need a moment."""
    event = threading.Event()
    for _ in range(500):
        if set(wanted) <= set(found):
            return True
        event.wait(0.01)
    return False


def test_no_file_stays_open_and_no_thread_alive(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(40)]
    for file in files:
        file.write_bytes(b"12")
    expected = [Block(Place(file, 0, 1), 0, 0, 2, 0, 1) for file in files]
    reader = Reader()
    with reader.ahead(expected):
        for block in expected[:-1]:
            reader.read(block)
        assert 0 < num_open(tmp_path) <= reading._MAX_HANDLES + reading.NUM_THREADS
    reader.read(expected[-1])
    with pytest.raises(ZeroDivisionError), reader.ahead(expected):
        raise ZeroDivisionError
    assert num_open(tmp_path) == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def num_open(directory: Path) -> int:
    """Files of it that this process has open."""
    found = 0
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            found += handle.readlink().is_relative_to(directory)
    return found


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_file_that_has_become_shorter_is_named(is_ahead: bool, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1234")
    (block,) = blocks(Place(path, 0, 1), Part.whole(5), low=0, high=1)
    reader, told = Reader(), "/f: it has become shorter while it was read; fetch it again"
    with pytest.raises(ModelLoadError, match=told), reader.ahead([block] if is_ahead else []):
        reader.read(block)
    path.unlink()
    with pytest.raises(ModelLoadError, match="/f cannot be read: No such file"):
        reader.read(block)


def test_progress_is_told_now_and_then_with_what_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "f"
    path.write_bytes(bytes(4000))
    expected = list(blocks(Place(path, 0, 1), Part.whole(4000), low=0, high=1, max_bytes=1000))
    now = [100.0]
    reader = Reader(clock=lambda: now[0])
    with reader.ahead(expected):
        for block in expected:
            now[0] += 6.0
            reader.read(block)
    told = [(record.message, record.__dict__["fields"]) for record in logs.ours(caplog)]
    assert [message for message, _ in told] == ["loading weights", "loading weights", "weights are read"]
    assert (told[0][1]["percent"], told[0][1]["left_s"]) == (50, 12.0)
    assert told[2][1]["seconds"] == 24.0
    assert told[2][1]["gb"] == told[2][1]["of_gb"]


def test_leading_dimensions_are_one_of_rows() -> None:
    picked = Part(3, (Range(0, 2, 3), Range(2, 0, 1)))
    region = Region((3, 4, 5), (picked, Part(1, (Range(0, 3, 4),)), Part.whole(5)))
    assert region.rows == Part(3, (Range(0, 11, 12), Range(2, 3, 4)))
    assert skips_rows(region)
    assert Region.whole((3, 4, 5)).rows == Part.whole(12)
