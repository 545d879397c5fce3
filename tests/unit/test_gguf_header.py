"""A GGUF header is read for what is asked of it; what nobody asks for may hold anything, and no count costs much."""

import re
import time
import tracemalloc
from pathlib import Path

import pytest

from ostrya.errors import ModelLoadError
from ostrya.gguf_header import model_stem, part_names, read_header
from tests.unit.gguf_bytes import ARRAY, STRING, UINT32, array, entry, header, string

HUGE = 2**62
FOUR = entry("four", UINT32, b"\4\0\0\0")


def written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def nested(depth: int) -> bytes:
    return array(ARRAY, count=1) * depth + array(UINT32, b"\7\0\0\0")


def test_nested_arrays_are_read(tmp_path: Path) -> None:
    pairs = array(ARRAY, array(STRING, string(b"a"), string(b"b")), array(STRING), array(UINT32, b"\1\0\0\0"))
    metadata = read_header(written(tmp_path / "m", header(entry("pairs", ARRAY, pairs), FOUR))).metadata
    assert metadata["pairs"] == [["a", "b"], [], [1]]
    assert metadata["four"] == 4
    assert list(metadata) == ["pairs", "four"]


def test_strings_that_are_not_utf8_are_refused_only_when_they_are_asked_for(tmp_path: Path) -> None:
    odd = entry("odd", STRING, string(b"caf\xe9"))
    odds = entry("odds", ARRAY, array(STRING, string(b"fine"), string(b"\xff")))
    path = written(tmp_path / "m.gguf", header(odd, odds, entry(b"k\xe9y", UINT32, b"\1\0\0\0"), FOUR))
    metadata = read_header(path).metadata
    assert (metadata["four"], len(metadata)) == (4, 4)
    for key in ("odd", "odds"):
        with pytest.raises(ModelLoadError, match=rf"m\.gguf: metadata {key} is not UTF-8; convert the model again"):
            metadata.get(key)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (header(FOUR, FOUR), "metadata 'four' is there twice"),
        (header(entry("deep", ARRAY, nested(8))), "nested more than 8 arrays deep"),
        (header(entry("deep", ARRAY, nested(100_000))), "nested more than 8 arrays deep"),
        (header(entry("k", ARRAY, array(STRING, count=HUGE))), "corrupt"),
        (header(entry("k", ARRAY, array(ARRAY, count=HUGE))), "corrupt"),
        (header(entry("k", ARRAY, array(UINT32, count=HUGE))), "corrupt"),
        (header(entry("k", ARRAY, array(ARRAY, array(UINT32, count=HUGE)))), "corrupt"),
        (header(entry("k", STRING, b"\xff" * 8)), "corrupt"),
        (header(entry("k", 99, b"")), "corrupt"),
        (header(FOUR, num_keys=HUGE), "corrupt"),
        (header(FOUR, num_tensors=HUGE), "corrupt"),
        (header(entry("general.alignment", 7, b"\1")), "general.alignment is True"),
        (
            header(string(b"t") + b"\0" * 16 + string(b"t") + b"\0" * 16, num_keys=0, num_tensors=2),
            "tensor 't' is there",
        ),
    ],
    ids=range(13),
)
def test_a_header_that_cannot_be_is_refused_in_one_line(tmp_path: Path, raw: bytes, words: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(words)) as refused:
        read_header(written(tmp_path / "m.gguf", raw))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("element", [STRING, ARRAY, UINT32])
def test_a_hostile_count_costs_neither_memory_nor_time(tmp_path: Path, element: int) -> None:
    """A sparse file of 1 GB, so that the count fits into the file: what it costs is bounded by our own limit."""
    path = written(tmp_path / "m.gguf", header(entry("k", ARRAY, array(element, count=1 << 26))))
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    tracemalloc.start()
    started_s = time.process_time()
    try:
        with pytest.raises(ModelLoadError, match="header is longer than 64 MiB"):
            read_header(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert time.process_time() - started_s < 5


def test_names_of_parts() -> None:
    assert part_names("m-00002-of-00002.gguf") == ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert part_names("m-00003-of-00002.gguf") == ("m-00003-of-00002.gguf",)
    assert part_names("m.gguf") == ("m.gguf",)
    assert [model_stem(name) for name in ("a-00001-of-00001.gguf", "b-00002-of-00003.gguf", "c.gguf")] == [
        "a",
        "b",
        "c",
    ]
