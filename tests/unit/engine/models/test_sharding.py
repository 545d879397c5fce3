"""The arithmetic of shards: together they are the model, each is a model of its own; what cannot be divided says so."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from ostrya.engine.backends.cpu_weights import CpuBuilder
from ostrya.engine.models import gguf_file, reading
from ostrya.engine.models.sharding import Axis, Mesh, Part, Range, Region, Sharding, divide_heads
from ostrya.engine.models.source import WeightSource, cut, open_source
from ostrya.engine.models.weights import read_weights
from ostrya.errors import ConfigError
from tests.fakes.collectives import alone
from tests.numerics.driver import Driver
from tests.numerics.family_files import write_gguf_family
from tests.numerics.reference import ReferenceRunner
from tests.numerics.tiny_families import FAMILIES
from tests.unit.engine.models.checkpoints import Tiny, write_directory, write_gguf
from tests.unit.engine.models.test_quantized import changed_to

PROMPTS = [[(7 * row + 3 * at) % 90 + 3 for at in range(length)] for row, length in enumerate((5, 33, 1, 17))]


@given(group=st.integers(1, 9), num_kv_heads=st.integers(1, 9), num_shards=st.integers(1, 16))
def test_every_query_head_is_computed_once_and_beside_its_keys(group: int, num_kv_heads: int, num_shards: int) -> None:
    num_heads = group * num_kv_heads
    if num_shards > num_heads:
        return
    heads = divide_heads(num_heads, num_kv_heads, num_shards)
    assert len(heads.queries) == len(heads.keys) == num_shards
    assert sorted(head for shard in heads.queries for head in shard if head is not None) == list(range(num_heads))
    local_group = heads.num_heads // heads.num_kv_heads
    for queries, keys in zip(heads.queries, heads.keys, strict=True):
        assert (len(queries), len(keys)) == (heads.num_heads, heads.num_kv_heads)
        for place, head in enumerate(queries):
            assert head is None or keys[place // local_group] == head // group


@pytest.mark.parametrize(
    ("heads", "local"),
    [((32, 8, 4), (8, 2)), ((32, 8, 16), (2, 1)), ((9, 3, 2), (6, 2)), ((9, 3, 4), (3, 1)), ((4, 1, 4), (1, 1))],
)
def test_heads_are_divided_copied_or_filled_up(heads: tuple[int, int, int], local: tuple[int, int]) -> None:
    found = divide_heads(*heads)
    assert (found.num_heads, found.num_kv_heads) == local


def test_a_cut_takes_ranges_and_leaves_zeros() -> None:
    values = torch.arange(1, 13).view(4, 3)
    rows, columns = Part(3, (Range(0, 3, 4), Range(2, 0, 1))), Part(2, (Range(0, 1, 3),))
    assert cut(values, (rows, columns)).tolist() == [[11, 12], [0, 0], [2, 3]]
    assert Part(64, (Range(32, 0, 32),)).in_units_of(32) == Part(2, (Range(1, 0, 1),))
    assert Part(64, (Range(32, 0, 16),)).in_units_of(32) is None
    assert cut(values, (rows.only(0), columns)).tolist() == [[11, 12]]
    assert cut(values, (Part(4, (Range(1, 0, 2),)).only(2), columns)).tolist() == [[5, 6]]


def parts_of(source: WeightSource, name: str, shape: tuple[int, ...], num_shards: int) -> list[torch.Tensor]:
    sharding = Sharding(source.spec, Mesh(tensor=num_shards))
    parts = []
    for shard in range(num_shards):
        region = sharding.region(name, shape, shard)
        out = torch.full(region.local_shape, torch.nan)
        source.read_into(name, out, region)
        parts.append(out)
    return parts


@pytest.mark.parametrize("container", ["gguf", "directory"])
def test_shards_of_a_checkpoint_are_its_parts(container: str, tmp_path: Path) -> None:
    tiny = Tiny()
    path = tmp_path / "m"
    path = (
        write_gguf(path, tiny, tiny.weights()) if container == "gguf" else write_directory(path, tiny, tiny.weights())
    )
    source = open_source(path)
    attention, hidden = source.spec.layers[0].mixer.sizes, tiny.hidden_size
    inner = source.spec.layers[0].ffn.sizes.inner
    q_size, kv_size = (n * attention.head_dim for n in (attention.num_heads, attention.num_kv_heads))
    shapes = {
        "token_embd.weight": ((tiny.vocab_size, hidden), 0),
        "blk.0.attn_q.weight": ((q_size, hidden), 0),
        "blk.1.attn_v.weight": ((kv_size, hidden), 0),
        "blk.0.attn_output.weight": ((hidden, q_size), 1),
        "blk.1.ffn_down.weight": ((hidden, inner), 1),
    }
    for name, (shape, dim) in shapes.items():
        whole = torch.empty(shape)
        source.read_into(name, whole, Region.whole(shape))
        assert torch.equal(torch.cat(parts_of(source, name, shape, 2), dim), whole), name
    norm = parts_of(source, "blk.0.attn_norm.weight", (hidden,), 2)
    assert torch.equal(*norm)


@pytest.mark.parametrize("container", ["gguf", "directory"])
@pytest.mark.parametrize("part", [Part(128, (Range(64, 0, 64),)), Part(64, ())])
def test_what_a_shard_has_nothing_for_is_zero(container: str, part: Part, tmp_path: Path) -> None:
    """Heads that fill up, in rows and in columns; with quantized values, too."""
    tiny = Tiny()
    write, path = (write_gguf, tmp_path / "m.gguf") if container == "gguf" else (write_directory, tmp_path / "m")
    source = open_source(write(path, tiny, tiny.weights()))
    packed = open_source(write_gguf(tmp_path / "q.gguf", tiny, tiny.weights(), kind=GGMLQuantizationType.Q8_0))
    name, shape = "blk.0.attn_q.weight", (256, 256)
    whole = torch.empty(shape)
    source.read_into(name, whole, Region.whole(shape))
    for parts in ((part, Part.whole(256)), (Part.whole(256), part), (part, part)):
        region, expected = Region(shape, parts), cut(whole, parts)
        out = torch.full(region.local_shape, torch.nan)
        source.read_into(name, out, region)
        assert torch.equal(out, expected)
        quantized = packed.quantized(name, region)
        assert quantized is not None
        torch.testing.assert_close(quantized.dense(), expected, atol=0.005, rtol=0)


@pytest.mark.parametrize("container", ["gguf", "directory"])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_a_shard_reads_its_own_bytes_once(
    container: str, num_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what lies between is not cheaper to read, too."""
    monkeypatch.setattr(reading, "GAP_BYTES", 0)
    tiny = Tiny(num_heads=4, num_kv_heads=4, tied=False)
    write, path = (write_gguf, tmp_path / "m.gguf") if container == "gguf" else (write_directory, tmp_path / "m")
    path = write(path, tiny, tiny.weights())
    divided, whole = 0, 0
    for name, shape in tiny.shapes().items():
        num_bytes = 4 * math.prod(shape)
        divided, whole = (divided, whole + num_bytes) if "norm" in name else (divided + num_bytes, whole)
    for shard in range(num_shards):
        source = open_source(path)
        collectives = alone(shard, num_shards)
        builder = CpuBuilder(torch.float32, "auto", collectives if num_shards > 1 else None)
        read_weights(source, builder, Sharding(source.spec, Mesh(tensor=num_shards)))
        assert source.num_bytes_read == divided // num_shards + whole


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_shards_of_a_quantized_matrix_are_its_parts(
    kind: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows and in columns, read in many blocks, as the file holds them and dequantized."""
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", 2048)
    monkeypatch.setattr(reading, "GAP_BYTES", 0)
    tiny = Tiny()
    path = write_gguf(
        tmp_path / "m.gguf", tiny, tiny.weights(), kind=GGMLQuantizationType[kind], changed=changed_to(architecture)
    )
    source = open_source(path)
    for name, shape, dim in (
        ("blk.0.attn_q.weight", (256, 256), 0),
        ("blk.1.ffn_down.weight", (256, 512), 1),
        ("blk.0.attn_output.weight", (256, 256), 1),
    ):
        whole = source.quantized(name, Region.whole(shape))
        assert whole is not None
        sharding = Sharding(source.spec, Mesh(tensor=2))
        quantized = [source.quantized(name, sharding.region(name, shape, shard)) for shard in range(2)]
        held = [one.dense() for one in quantized if one is not None]
        assert torch.equal(torch.cat(held, dim), whole.dense()), name
        torch.testing.assert_close(torch.cat(parts_of(source, name, shape, 2), dim), whole.dense())


@pytest.mark.parametrize("container", ["gguf", "directory"])
def test_a_shard_reads_its_experts_and_its_part_of_each(container: str, tmp_path: Path) -> None:
    family, path = FAMILIES["qwen3-moe"], tmp_path / "m"
    source = open_source(write_gguf_family(path, family) if container == "gguf" else family.write(path))
    num_experts, hidden, inner = 16, family.size("hidden_size"), family.size("moe_intermediate_size")
    sharding = Sharding(source.spec, Mesh(expert=2, tensor=2))
    stored = family.weights()
    for name, part, shape, dim in (
        ("ffn_up_exps", "up_proj", (num_experts, inner, hidden), 1),
        ("ffn_down_exps", "down_proj", (num_experts, hidden, inner), 2),
    ):
        whole = np.stack([stored[f"model.layers.1.mlp.experts.{i}.{part}.weight"] for i in range(num_experts)])
        for shard in range(4):
            region = sharding.region(f"blk.1.{name}.weight", shape, shard)
            out = torch.full(region.local_shape, torch.nan)
            source.read_into(f"blk.1.{name}.weight", out, region)
            expected = torch.from_numpy(whole).chunk(2)[shard // 2].chunk(2, dim)[shard % 2]
            assert torch.equal(out, expected)
            one = torch.full(region.only(5).local_shape, torch.nan)
            source.read_into(f"blk.1.{name}.weight", one, region.only(5))
            assert torch.equal(one, expected[5:6])


def test_experts_that_other_shards_have_are_no_part_of_another_model(tmp_path: Path) -> None:
    source = open_source(FAMILIES["qwen3-moe"].write(tmp_path / "m"))
    region = Sharding(source.spec, Mesh(expert=2)).region("blk.1.ffn_up_exps.weight", (16, 32, 64), 0)
    source.read_into("blk.1.ffn_up_exps.weight", torch.empty(region.local_shape), region)
    unread = source.unread()
    assert not any("layers.1.mlp.experts" in name and "up_proj" in name for name in unread)
    assert any("layers.1.mlp.experts" in name for name in unread)
    assert any("layers.0.mlp.experts" in name and "up_proj" in name for name in unread)


def test_experts_at_four_bits_are_read_as_the_file_has_them(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf_family(path, FAMILIES["qwen3-moe"], quantization=GGMLQuantizationType.Q4_1)
    source = open_source(path)
    sharding = Sharding(source.spec, Mesh(expert=2))
    name, shape = "blk.0.ffn_down_exps.weight", (16, 64, 32)
    dense = torch.empty(shape)
    source.read_into(name, dense, Region.whole(shape))
    for place in (0, 7):
        found = source.quantized(name, sharding.region(name, shape, 1).only(place))
        assert found is not None
        assert torch.equal(found.dense(), dense[8 + place])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_all_shards_in_a_leading_dimension_give_the_whole_models_tokens(
    name: str, num_shards: int, tmp_path: Path
) -> None:
    path = FAMILIES[name].write(tmp_path / "m")
    tokens = [
        Driver(runner, page_size=4, context_tokens=64).generate(PROMPTS, num_new=8, chunk=16)
        for runner in (
            ReferenceRunner(open_source(path), num_pages=64, page_size=4),
            ReferenceRunner(open_source(path), num_pages=64, page_size=4, num_stacked=num_shards),
        )
    ]
    assert tokens[0] == tokens[1]
    assert len({token for row in tokens[0] for token in row}) > 4


@pytest.mark.parametrize("exchange_tokens", [None, 5])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe-mixed"])
@pytest.mark.parametrize(("num_shards", "num_groups"), [(2, 2), (4, 2), (4, 4)])
def test_experts_divided_among_shards_in_a_leading_dimension_give_the_whole_models_tokens(
    name: str, num_shards: int, num_groups: int, exchange_tokens: int | None, tmp_path: Path
) -> None:
    source = open_source(FAMILIES[name].write(tmp_path / "m"))
    divided = ReferenceRunner(
        source,
        num_pages=64,
        page_size=4,
        num_stacked=num_shards,
        num_expert_groups=num_groups,
        exchange_tokens=exchange_tokens,
    )
    whole = ReferenceRunner(source, num_pages=64, page_size=4)
    found, expected = (
        Driver(runner, page_size=4, context_tokens=64).generate(PROMPTS, num_new=8, chunk=16)
        for runner in (divided, whole)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("name", "mesh", "words"),
    [
        ("qwen3", Mesh(expert=2), "expert_parallel is 2; the model has no experts; possible at tensor_parallel 2: 1"),
        (
            "mixtral-of-6",
            Mesh(expert=4),
            "expert_parallel is 4; 6 experts of a layer do not divide by it; possible at tensor_parallel 4: 1, 2",
        ),
        (
            "mixtral-of-6",
            Mesh(tensor=32),
            "expert_parallel is 1; 48 inner values of an expert do not divide by the 32 devices it then has; "
            "possible at tensor_parallel 32: 2",
        ),
    ],
)
def test_experts_that_cannot_be_divided_say_how_they_can(name: str, mesh: Mesh, words: str, tmp_path: Path) -> None:
    family = FAMILIES[name.split("-")[0]]
    changes = {"num_local_experts": 6, "num_attention_heads": 32} if name != "qwen3" else {}
    spec = open_source(replace(family, config={**family.config, **changes}).write(tmp_path / "m")).spec
    with pytest.raises(ConfigError, match=re.escape(words)):
        Sharding(spec, mesh)


@pytest.mark.parametrize(
    ("num_shards", "words"),
    [
        (3, "tensor_parallel is 3; 128 tokens of the vocabulary do not divide by it; possible here: 1, 2, 4"),
        (8, "tensor_parallel is 8; that is more than the 4 attention heads; possible here: 1, 2, 4"),
    ],
)
def test_what_cannot_be_divided_says_what_can(num_shards: int, words: str, tmp_path: Path) -> None:
    spec = open_source(FAMILIES["qwen3"].write(tmp_path / "m")).spec
    with pytest.raises(ConfigError, match=re.escape(words)):
        Sharding(spec, Mesh(tensor=num_shards))


def test_a_dimension_over_two_axes_goes_by_expert_first() -> None:
    mesh = Mesh(expert=2, tensor=3)
    assert [mesh.place((Axis.EXPERT, Axis.TENSOR), shard) for shard in range(6)] == [(n, 6) for n in range(6)]
    assert [mesh.place((Axis.EXPERT,), shard)[0] for shard in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [mesh.place((Axis.TENSOR,), shard)[0] for shard in range(6)] == [0, 1, 2, 0, 1, 2]
