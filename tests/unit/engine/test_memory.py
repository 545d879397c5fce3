"""What fits: as many pages as there is room for and no more; what cannot fit is refused, with what does help."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostrya.capacity.chips import TPU7X, V6E
from ostrya.capacity.memory import USABLE_RATIO
from ostrya.engine import memory
from ostrya.engine.backends.cpu_weights import CpuBuilder
from ostrya.engine.config import AUTO_PAGES, EngineConfig
from ostrya.engine.models.sharding import Mesh, Sharding, problem_of
from ostrya.engine.models.source import open_source
from ostrya.engine.models.spec import DecoderSpec, RoutedFfn
from ostrya.engine.models.weights import read_weights
from ostrya.errors import ConfigError
from tests.fakes.collectives import alone
from tests.numerics.tiny_families import FAMILIES
from tests.unit.engine.models.checkpoints import Tiny, write_directory

CONFIG = EngineConfig(model_path="/", model_name="tiny", tokenizer_fingerprint="", num_pages=AUTO_PAGES, page_size=4)
TPU = msgspec.structs.replace(CONFIG, backend="xla")
GIB = 1 << 30


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DecoderSpec:
    """Of a model whose numbers are powers of two."""
    tiny = Tiny(num_heads=8, num_kv_heads=8, vocab_size=128, tied=False)
    return open_source(write_directory(tmp_path_factory.mktemp("m"), tiny, tiny.weights())).spec


sizes = st.integers(0, 1 << 40)


@given(limit=sizes, weights=sizes, scratch=sizes, page=st.integers(1, 1 << 30))
def test_one_page_more_would_not_fit(limit: int, weights: int, scratch: int, page: int) -> None:
    def fit(**more: int) -> int:
        given = {"limit_bytes": limit, "weights_bytes": weights, "scratch_bytes": scratch, "page_bytes": page} | more
        return memory.pages_that_fit(**given)

    num_pages = fit()
    room = limit * USABLE_RATIO - weights - scratch
    assert num_pages == 0 or num_pages * page <= room
    assert num_pages == memory.MAX_PAGES or (num_pages + 1) * page > room
    assert fit(limit_bytes=limit + page) >= num_pages >= fit(weights_bytes=weights + page)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tensor=2), Mesh(tensor=8), Mesh(expert=2, tensor=2)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_weights_are_counted_to_the_byte(
    dtype: Literal["float32", "bfloat16"], mesh: Mesh, family: str, tmp_path: Path
) -> None:
    """Where matrices are dense and nothing is kept twice, what capacity counts is what a backend keeps."""
    if family == "llama":
        tiny = Tiny(num_heads=8, num_kv_heads=8, vocab_size=128, tied=False)
        source = open_source(write_directory(tmp_path / "m", tiny, tiny.weights()))
    else:
        source = open_source(FAMILIES[family].write(tmp_path / "m"))
    if problem_of(source.spec, mesh):
        return
    config = EngineConfig(model_path="/", model_name="tiny", tokenizer_fingerprint="", dtype=dtype)
    sharding = Sharding(source.spec, mesh)
    builder = CpuBuilder(getattr(torch, dtype), "auto", alone(0, mesh.num_shards), mesh=mesh)
    read_weights(source, builder, sharding)
    builder.choose(4)
    assert builder.num_bytes - kept_twice(sharding, config) == memory.least_weight_bytes(sharding.local, config)


def kept_twice(sharding: Sharding, config: EngineConfig) -> int:
    """What this backend has copies of: a tied table, to look up in, a norm of queries and keys for each head, in
    float32, and in each group of experts the whole router."""
    local = sharding.local
    width = {"bfloat16": 2, "float32": 4}[config.dtype]
    num_bytes = local.vocab_size * local.hidden * width if local.tied_embeddings else 0
    for sizes in (layer.mixer.sizes for layer in local.layers):
        if sizes.qk_norm:
            num_bytes += (4 * (sizes.num_heads + sizes.num_kv_heads) - 2 * width) * sizes.head_dim
    routed = [layer.ffn.sizes.num_experts for layer in local.layers if isinstance(layer.ffn, RoutedFfn)]
    return num_bytes + 4 * sum(routed) * (sharding.mesh.expert - 1) * local.hidden


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_narrow_weights_take_at_least_what_is_counted(weights: str, tied: bool, tmp_path: Path) -> None:
    tiny = Tiny(tied=tied)
    source = open_source(write_directory(tmp_path / "m", tiny, tiny.weights()))
    config = msgspec.structs.replace(CONFIG, weights=weights)
    builder = CpuBuilder(torch.bfloat16, config.weights)
    read_weights(source, builder)
    builder.choose(4)
    counted = memory.least_weight_bytes(source.spec, config)
    # Not counted: that the table is dense for looking up where the file has no integers, and then there twice if tied.
    table = tiny.vocab_size * tiny.hidden_size
    assert counted + table * (2 if tied else 0.75) == builder.num_bytes
    dense = memory.least_weight_bytes(source.spec, CONFIG)
    assert counted < dense


def test_a_page_is_what_its_tokens_take_in_all_layers(spec: DecoderSpec) -> None:
    assert memory.page_bytes(spec, CONFIG) == 2 * 4 * (2 * 8) * 32 * 2
    halves = Sharding(spec, Mesh(tensor=2)).local
    assert 2 * memory.page_bytes(halves, CONFIG) == memory.page_bytes(spec, CONFIG)
    assert memory.page_bytes(spec, msgspec.structs.replace(CONFIG, dtype="float32")) == 2 * memory.page_bytes(
        spec, CONFIG
    )


def accounted(
    spec: DecoderSpec, config: EngineConfig = CONFIG, *, limit_bytes: int | None, least: int = 1 << 30
) -> int:
    found = memory.accounted(
        spec,
        config,
        limit_bytes=limit_bytes,
        weights_bytes=3 << 20,
        scratch_bytes=1 << 20,
        least=lambda num_pages: min(num_pages, least),
    )
    assert found.free_bytes == found.limit_bytes - (4 << 20) - found.num_pages * found.page_bytes
    return found.num_pages


def test_the_device_with_the_least_room_decides(spec: DecoderSpec) -> None:
    alone = accounted(spec, limit_bytes=10 << 20)
    assert alone == ((9 << 20) - (4 << 20)) // memory.page_bytes(spec, CONFIG)
    assert accounted(spec, limit_bytes=10 << 20, least=alone - 1) == alone - 1


def test_a_number_that_was_asked_for_stays_though_it_may_be_too_large(spec: DecoderSpec) -> None:
    config = msgspec.structs.replace(CONFIG, num_pages=77)
    assert accounted(spec, config, limit_bytes=1, least=5) == 77


def test_auto_says_why_there_is_no_answer(spec: DecoderSpec) -> None:
    with pytest.raises(ConfigError, match="num_pages is auto, but how much memory there is is not known here; set"):
        accounted(spec, limit_bytes=None)
    with pytest.raises(ConfigError, match=r"no KV page of 8\.0 KiB has room: weights take 3\.0 MiB and the large"):
        accounted(spec, limit_bytes=4 << 20)
    # On another device there is none.
    with pytest.raises(ConfigError, match="no KV page"):
        accounted(spec, limit_bytes=10 << 20, least=1)


def refusal(spec: DecoderSpec, config: EngineConfig, limit_bytes: int, *, num_shards: int = 1, **more: object) -> str:
    with pytest.raises(ConfigError) as refused:
        memory.require_room(spec, config, Mesh(tensor=num_shards), limit_bytes=limit_bytes, **more)  # type: ignore[arg-type]
    (problem,) = refused.value.problems
    assert "\n" not in problem
    return problem


def least(spec: DecoderSpec, config: EngineConfig, num_shards: int = 1) -> int:
    local = Sharding(spec, Mesh(tensor=num_shards)).local
    return memory.least_weight_bytes(local, config) + 2 * memory.page_bytes(local, config)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_exactly_what_cannot_fit_is_refused(spec: DecoderSpec, num_shards: int, weights: str) -> None:
    config = msgspec.structs.replace(CONFIG, weights=weights)
    mesh, needed = Mesh(tensor=num_shards), least(spec, config, num_shards)
    memory.require_room(spec, config, mesh, limit_bytes=needed)
    memory.require_room(spec, config, mesh, limit_bytes=None)
    said = refusal(spec, config, needed - 1, num_shards=num_shards)
    devices = "1 device" if num_shards == 1 else f"each of {num_shards} devices"
    assert re.search(
        rf"tiny needs \S+ [KM]iB for weights and \S+ [KM]iB for the fewest KV pages on {devices}; the", said
    )
    assert "set memory_limit_bytes if a device has more" in said


def test_what_is_told_to_help_does(spec: DecoderSpec) -> None:
    dense, int8, int4 = (
        least(spec, msgspec.structs.replace(CONFIG, weights=kind)) for kind in ("bf16", "int8", "int4")
    )
    assert int4 < int8 < dense
    assert "weights int8 would do" in refusal(spec, CONFIG, int8)
    assert "weights int4 would do" in refusal(spec, CONFIG, int8 - 1)
    assert "would do" not in refusal(spec, CONFIG, int4 - 1)
    assert "weights int8 would do" in refusal(spec, msgspec.structs.replace(CONFIG, dtype="float32"), int8)
    four = least(spec, TPU, 4)
    assert "tensor_parallel 4 would do;" in refusal(spec, TPU, four)
    assert "tensor_parallel 8 would do;" in refusal(spec, TPU, four - 1, num_shards=2)
    assert "would do" not in refusal(spec, TPU, least(spec, TPU, 8) - 1)
    assert "tensor_parallel 4 would do, such as on v6e-4;" in refusal(spec, TPU, four, chip=V6E)
    assert "tensor_parallel 4 would do, such as on tpu7x-4;" in refusal(spec, TPU, four, chip=TPU7X)


def test_the_table_adds_up(spec: DecoderSpec) -> None:
    found = memory.accounted(spec, CONFIG, limit_bytes=20 * GIB, weights_bytes=2 * GIB, scratch_bytes=GIB)
    assert found.num_pages == memory.MAX_PAGES
    assert memory.rows(found) == {
        "weights": "2.0 GiB (10%)",
        "scratch": "1.0 GiB (5%)",
        "kv": "8.0 GiB (40%)",
        "free": "9.0 GiB (45%)",
        "limit": "20.0 GiB",
    }
    unknown = msgspec.structs.replace(found, limit_bytes=0)
    assert memory.rows(unknown)["weights"] == "2.0 GiB"
    assert "free" not in memory.rows(unknown)


def test_more_tokens_in_a_step_take_more_scratch(spec: DecoderSpec) -> None:
    plain = memory.scratch_bytes(spec, CONFIG)
    assert memory.scratch_bytes(spec, msgspec.structs.replace(CONFIG, max_step_tokens=1024)) > plain
    assert memory.scratch_bytes(spec, msgspec.structs.replace(CONFIG, max_running=64)) > plain
    assert memory.scratch_bytes(replace(spec, vocab_size=1024), CONFIG) > plain


@pytest.mark.parametrize(
    ("settings", "num_pages"),
    [({}, 4096), ({"backend": "xla"}, 0), ({"backend": "torchtpu", "num_pages": 9}, 9), ({"num_pages": 0}, 0)],
)
def test_off_cpu_auto_is_the_default(settings: dict[str, object], num_pages: int) -> None:
    config = EngineConfig(model_path="/", model_name="m", tokenizer_fingerprint="", **settings)  # type: ignore[arg-type]
    assert config.num_pages == num_pages
    config.check()


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_limit_bytes is 0; it must be at least 1"):
        msgspec.structs.replace(CONFIG, memory_limit_bytes=0).check()
