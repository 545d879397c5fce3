"""Headers of safetensors files: what the library writes is read as it says; what a file cannot keep is refused."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ostrya.engine.models.safetensors_file import read_header
from ostrya.errors import ModelLoadError

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.arange(4, dtype=torch.float32),
    "c": torch.tensor(True),
    "d": torch.empty(0, 3, dtype=torch.float16),
}


def test_a_file_of_the_library_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    entries = read_header(path)
    raw = path.read_bytes()
    assert set(entries) == set(TENSORS)
    for name, tensor in TENSORS.items():
        entry = entries[name]
        assert entry.shape == tuple(tensor.shape)
        stored = raw[entry.start : entry.start + entry.num_bytes]
        assert stored == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert [entries[name].dtype for name in "abcd"] == ["BF16", "F32", "BOOL", "F16"]


Header = Mapping[str, object] | bytes


def tensor(start: object = 0, end: object = 8, *, dtype: object = "F32", shape: object = (2,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write(path: Path, header: Header, *, num_bytes: int = 8, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


def test_a_plain_header_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "f", {"w": tensor(), "__metadata__": {"format": "pt"}})
    assert read_header(path)["w"].num_bytes == 8


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"w": tensor(0, 12, shape=(3,))}, "truncated: tensor w ends at byte .*, the file at"),
        ({"w": tensor(2**62, 2**62 + 8)}, "truncated: tensor w ends at byte"),
        ({"w": tensor(-8, 0)}, "tensor w lies at bytes -8 to 0"),
        ({"w": tensor(8, 0)}, "tensor w lies at bytes 8 to 0"),
        ({"w": tensor(), "v": tensor()}, "tensor v begins at byte .*, within tensor w"),
        ({"w": tensor(4, 8, shape=(1,))}, "nothing is said of bytes .*, before tensor w"),
        ({"w": tensor(0, 4, shape=(1,))}, "its tensors end at byte .*, the file at"),
        ({"w": tensor(shape=(3,))}, r"tensor w has 8 bytes, which are not those of F32 \[3\]"),
        ({"w": tensor(shape=(10**4000, 10**4000))}, "tensor w has 8 bytes"),
        ({"w": tensor(shape=(2**40, 2**40))}, "tensor w has 8 bytes"),
        ({"w": tensor(shape=(-1, -2))}, r"tensor w has shape \[-1, -2\]"),
        ({"w": tensor(shape=(True, 2))}, "tensor w has shape"),
        ({"w": tensor(shape=(2.0,))}, "tensor w has shape"),
        ({"w": tensor(shape="2")}, "does not say dtype, shape and data_offsets"),
        ({"w": tensor("0", "8")}, "does not say dtype, shape and data_offsets"),
        ({"w": [1]}, "does not say dtype, shape and data_offsets"),
        ({"a\nb": tensor()}, r"a tensor is called 'a\\nb'"),
        (b'{"w": 1, "w": 2}', "'w' is there twice"),
        (b"[1]", "is no JSON object"),
        (b"{", "its header cannot be read"),
        (b"\xff\xfe{}", "its header cannot be read"),
        (b"[" * 100_000, "its header cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused_in_one_line(header: Header, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "f.safetensors", header)
    with pytest.raises(ModelLoadError) as refused:
        read_header(path)
    message = str(refused.value)
    assert re.search(words, message), message
    assert "\n" not in message
    assert len(message) < 400
    assert str(path) in message


def test_a_header_longer_than_the_file_or_than_any_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="truncated: its header ends at byte 1008, the file at 18"):
        read_header(write(tmp_path / "f", b"{}", length=1000))
    with pytest.raises(ModelLoadError, match="its header has 18446744073709551615 bytes; supported: at most"):
        read_header(write(tmp_path / "f", b"{}", length=2**64 - 1))
    (tmp_path / "f").write_bytes(b"1234567")
    with pytest.raises(ModelLoadError, match="truncated: it has 7 bytes, and no header"):
        read_header(tmp_path / "f")
    with pytest.raises(ModelLoadError, match="cannot be read: Is a directory"):
        read_header(tmp_path)


def test_a_file_cut_anywhere_or_damaged_is_refused_or_its_tensors_lie_within_it(tmp_path: Path) -> None:
    path, damaged = tmp_path / "m.safetensors", tmp_path / "d.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        damaged.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError):
            read_header(damaged)
    generator = np.random.default_rng(0)
    num_read = 0
    for _ in range(400):
        raw = bytearray(whole)
        for at in generator.integers(0, len(whole), 2):
            raw[at] = int(generator.integers(0, 256))
        damaged.write_bytes(raw)
        with suppress(ModelLoadError):
            entries = read_header(damaged)
            num_read += 1
            assert all(entry.start + entry.num_bytes <= len(whole) for entry in entries.values())
    assert num_read
