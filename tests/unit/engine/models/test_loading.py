"""Checkpoints: every quantization as the gguf package reads it, both containers with the same logits, one clear line
when broken."""

import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file

from ostrya.engine.backends.cpu_weights import CpuBuilder
from ostrya.engine.models import reading
from ostrya.engine.models.gguf_file import SUPPORTED
from ostrya.engine.models.reading import Reader
from ostrya.engine.models.sharding import Region
from ostrya.engine.models.source import open_source
from ostrya.engine.models.spec import Rope
from ostrya.engine.models.weights import read_weights
from ostrya.errors import ModelLoadError
from tests.numerics.driver import row_plan
from tests.numerics.reference import ReferenceRunner
from tests.unit.engine.models.checkpoints import Tiny, stored_name, write_directory, write_gguf
from tests.unit.gguf_bytes import ARRAY, STRING, array, entry, insert, string

TINY = Tiny()
KINDS = SUPPORTED
PROMPT = list(range(3, 43))


def load(path: Path) -> None:
    read_weights(open_source(path), CpuBuilder(torch.float32, "auto"))


def logits(path: Path) -> torch.Tensor:
    """[1, V] after the prompt."""
    runner = ReferenceRunner(open_source(path), num_pages=8, page_size=16)
    return runner.execute(row_plan(PROMPT, page_size=16)).logits_RV[:1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_quantization_reads_as_the_gguf_package_reads_it(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, TINY.weights(), kind=GGMLQuantizationType[kind])
    source = open_source(path)
    for tensor in GGUFReader(path).tensors:
        expected = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        out = torch.empty(expected.shape, dtype=dtype)
        source.read_into(tensor.name, out, Region.whole(tuple(out.shape)))
        assert torch.equal(out, expected.to(dtype)), tensor.name
    assert source.unread() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_each_quantization_runs(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, TINY.weights(), kind=GGMLQuantizationType[kind])
    assert logits(path).isfinite().all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_file_and_directory_of_the_same_weights_give_the_same_logits(
    tied: bool, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a tensor is read in many parts."""
    monkeypatch.setattr(reading, "BLOCK_BYTES", 5000)
    tiny = Tiny(tied=tied)
    file = write_gguf(tmp_path / "m.gguf", tiny, tiny.weights())
    directory = write_directory(tmp_path / "m", tiny, tiny.weights(), shards=shards)
    assert open_source(file).spec == open_source(directory).spec
    assert torch.equal(logits(file), logits(directory))


def test_other_weights_give_other_logits(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "a.gguf", TINY, TINY.weights(seed=0))
    second = write_gguf(tmp_path / "b.gguf", TINY, TINY.weights(seed=1))
    assert not torch.allclose(logits(first), logits(second))


def rope_of(directory: Path) -> Rope:
    return open_source(directory).spec.layers[0].mixer.rope


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama3_rope_scaling_is_the_same_from_settings_and_from_a_rope_freqs_tensor(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", TINY, TINY.weights(), changed={"rope_scaling": LLAMA3})
    divisors = rope_of(directory).divisors
    assert divisors
    assert divisors[0] == 1.0
    assert divisors[-1] == 8.0
    assert list(divisors) == sorted(divisors)
    freqs = {"rope_freqs": np.array(divisors, np.float32)}
    file = write_gguf(tmp_path / "m.gguf", TINY, TINY.weights() | freqs)
    plain = write_directory(tmp_path / "plain", TINY, TINY.weights())
    # The file holds the divisors in float32, the settings give them in float64.
    assert torch.allclose(logits(file), logits(directory), atol=1e-5)
    assert not torch.allclose(logits(plain), logits(directory), atol=1e-3)


def test_rope_settings_are_found_where_transformers_5_puts_them(tmp_path: Path) -> None:
    nested = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}
    directory = write_directory(tmp_path / "m", TINY, TINY.weights(), changed=nested)
    assert rope_of(directory).theta == 777.0


def assert_one_line(path: Path, *words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert re.search(word, message), message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"general.architecture": "mamba"}, ["architecture 'mamba'", "supported: llama, qwen2"]),
        ({"llama.context_length": None}, ["llama.context_length is missing"]),
        ({"llama.attention.head_count_kv": 3}, ["4 heads", "3 KV heads"]),
        ({"llama.attention.key_length": 32}, ["attn_q.weight has shape"]),
        ({"llama.rope.dimension_count": 32}, ["rope.dimension_count is 32"]),
        ({"llama.expert_count": 8}, ["llama.expert_used_count is missing"]),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, ["9 experts per token are more than the 8"]),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, [r"blk\.0\.ffn_gate_inp\.weight is missing"]),
        ({"llama.rope.scaling.type": "yarn"}, ["'yarn'"]),
        ({"llama.block_count": 3}, ["blk.2.attn_norm.weight is missing"]),
        ({"llama.block_count": 1}, ["blk.1", "not part of a model of its kind"]),
        ({"llama.feed_forward_length": 1024}, ["ffn_gate.weight has shape", r"expected \[1024, 256\]"]),
    ],
)
def test_gguf_that_is_not_a_plain_llama_is_refused(
    changed: dict[str, int | str | None], words: list[str], tmp_path: Path
) -> None:
    assert_one_line(write_gguf(tmp_path / "m.gguf", TINY, TINY.weights(), changed=changed), *words)


def test_unsupported_quantization_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, TINY.weights(), kind=GGMLQuantizationType.TQ2_0)
    assert_one_line(path, "quantization TQ2_0", "supported: F32")


def test_a_gguf_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", Tiny(num_layers=1), Tiny(num_layers=1).weights()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 10, 23, 40, 100, 500, 1500, 2500, 5000, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        assert_one_line(cut, "cut.gguf")


def split(folder: Path, *, max_tensors: int = 9, name: str = "m") -> list[Path]:
    """The parts of TINY."""
    first = write_gguf(folder / f"{name}.gguf", TINY, TINY.weights(), max_tensors=max_tensors)
    return sorted(first.parent.glob(f"{name}-*.gguf"))


def test_a_split_gguf_is_read_whole_whichever_part_is_named(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", TINY, TINY.weights())
    parts = split(tmp_path)
    assert [part.name for part in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    expected = logits(whole)
    for part in parts:
        assert open_source(part).spec == open_source(whole).spec
        assert torch.equal(logits(part), expected)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = split(tmp_path)
    for gone in (parts[0], parts[2]):
        content = gone.read_bytes()
        gone.unlink()
        assert_one_line(parts[1], re.escape(gone.name), "is missing", "of 3 of a split model")
        gone.write_bytes(content)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    parts = split(tmp_path)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(parts[0].read_bytes())
    assert_one_line(alone, "alone.gguf", "split.no 0 and split.count 3", "by its name 0 and 1")
    parts[1].write_bytes(parts[2].read_bytes())
    assert_one_line(parts[0], parts[1].name, "split.no 2 and split.count 3; by its name 1 and 3")
    parts[1].write_bytes(write_gguf(tmp_path / "o.gguf", TINY, TINY.weights()).read_bytes())
    assert_one_line(parts[0], parts[1].name, "split.no 0 and split.count 1; by its name 1 and 3")
    other = split(tmp_path, max_tensors=8, name="other")
    assert len(other) == 3
    parts[1].write_bytes(other[1].read_bytes())
    assert_one_line(parts[0], "its 3 parts hold 19 tensors", "split.tensors.count is 20")


def test_a_part_cut_short_is_named(tmp_path: Path) -> None:
    parts = split(tmp_path)
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    assert_one_line(parts[0], re.escape(parts[1].name), "truncated")


def test_the_same_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    parts = split(tmp_path, max_tensors=10)
    assert len(parts) == 2
    raw = bytearray(parts[1].read_bytes())
    at = raw.index(b"split.no") + len(b"split.no") + 4
    first = bytearray(parts[0].read_bytes())
    start = first.index(b"split.no") + len(b"split.no") + 4
    assert (first[start], raw[at]) == (0, 1)
    first[start] = 1
    parts[1].write_bytes(first)
    assert_one_line(parts[0], re.escape(parts[1].name), "tensor token_embd.weight is in .*-00001-of-00002.gguf too")


def test_what_nobody_needs_may_be_anything(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, TINY.weights())
    expected = logits(path)
    nested = array(ARRAY, array(STRING, string(b"en")), array(STRING))
    insert(path, entry("general.author", STRING, string(b"Andr\xe9")), entry("general.languages", ARRAY, nested))
    assert torch.equal(logits(path), expected)


def test_a_needed_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, TINY.weights())
    insert(path, entry("llama.rope.scaling.type", STRING, string(b"\xff")))
    assert_one_line(path, r"m\.gguf: metadata llama\.rope\.scaling\.type is not UTF-8")


@pytest.mark.parametrize("seed", range(30))
def test_a_gguf_with_a_damaged_header_is_refused_or_read(seed: int, tmp_path: Path) -> None:
    tiny = Tiny(num_layers=1)
    damaged = bytearray(write_gguf(tmp_path / "m.gguf", tiny, tiny.weights()).read_bytes())
    generator = np.random.default_rng(seed)
    for at in generator.integers(0, 3000, 20):
        damaged[at] = int(generator.integers(0, 256))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with suppress(ModelLoadError):
        load(path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "mamba"}, ["model_type 'mamba'", "supported: llama"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["'gelu'"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["'yarn'"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["factor is missing"]),
        ({"hidden_size": "big"}, ["hidden_size is 'big'"]),
        ({"tie_word_embeddings": False}, ["lm_head.weight is missing"]),
        ({"vocab_size": 97}, ["embed_tokens.weight has shape", "expected"]),
    ],
)
def test_directory_that_is_not_a_plain_llama_is_refused(
    changed: dict[str, object], words: list[str], tmp_path: Path
) -> None:
    assert_one_line(write_directory(tmp_path / "m", TINY, TINY.weights(), changed=changed), *words)


def test_a_tensor_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm": np.ones(TINY.head_dim, np.float32)}
    assert_one_line(write_gguf(tmp_path / "m.gguf", TINY, TINY.weights() | extra), r"blk\.0\.attn_q_norm")


def test_broken_directories_are_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", TINY, TINY.weights(), shards=2)
    shard = directory / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    assert_one_line(directory, "model-00002-of-00002.safetensors")
    shard.unlink()
    assert_one_line(directory, "missing, though model.safetensors.index.json names it")
    (directory / "model.safetensors.index.json").write_text("[]")
    assert_one_line(directory, "weight_map")
    (directory / "config.json").write_text("{")
    assert_one_line(directory, "config.json: corrupt")
    (directory / "config.json").unlink()
    assert_one_line(directory, "config.json: no such file")
    assert_one_line(tmp_path / "nowhere", "no such file")


def test_what_is_wrong_with_the_last_file_is_known_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before memory is set aside, which is done inside of ahead()."""
    directory = write_directory(tmp_path / "m", TINY, TINY.weights(), shards=3)
    last = directory / "model-00003-of-00003.safetensors"
    held = load_file(last)
    monkeypatch.setattr(Reader, "read", nobody)
    monkeypatch.setattr(Reader, "ahead", nobody)
    name, values = next((name, values) for name, values in held.items() if values.ndim == 2)

    def refused(changed: dict[str, npt.NDArray[np.float32]], *words: str) -> None:
        save_file(changed, last)
        assert_one_line(directory, *words)

    others = {key: value for key, value in held.items() if key != name}
    refused(others, "model-00003-of-00003", f"{name} is missing, though model.safetensors.index.json says it is there")
    refused(others | {name: values[:-1]}, "model-00003-of-00003", f"tensor {name} has shape")
    refused(others | {name: values.astype(np.int8)}, f"tensor {name} has dtype I8; supported: F32, F16, BF16")
    last.write_bytes(last.read_bytes()[:-1])
    assert_one_line(directory, "model-00003-of-00003.safetensors: truncated")


def nobody(*arguments: object, **more: object) -> None:
    raise AssertionError("nobody is called")


def test_the_same_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", TINY, TINY.weights())
    first = directory / "model.safetensors"
    (directory / "twin.safetensors").write_bytes(first.read_bytes())
    assert_one_line(directory, "twin.safetensors: tensor .* is in model.safetensors too")


def test_a_missing_tensor_in_a_directory_is_named(tmp_path: Path) -> None:
    weights = TINY.weights()
    del weights["blk.1.ffn_up"]
    assert_one_line(write_directory(tmp_path / "m", TINY, weights), re.escape(stored_name("blk.1.ffn_up")))
