"""The CPU runner on a tiny random model: batching and chunking change nothing, steps run behind the caller, shapes
are counted."""

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ostrya.engine.backends import cpu
from ostrya.engine.backends.cpu import CpuRunner, load_runner
from ostrya.engine.backends.kernels.linear import make_linear
from ostrya.engine.config import AUTO_PAGES, EngineConfig
from ostrya.engine.models.reading import Reader
from ostrya.engine.plan import Bucket
from ostrya.engine.world import ALONE, World
from ostrya.errors import ConfigError, ModelLoadError
from tests.numerics.driver import Driver, row_plan
from tests.unit.engine.models.checkpoints import Tiny, write_gguf

TINY = Tiny()
PROMPTS = [
    [(7 * row + 3 * at) % 90 + 3 for at in range(length)] for row, length in enumerate((5, 33, 1, 64, 17, 2, 40, 90))
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TINY, TINY.weights())
    return EngineConfig(
        model_path=str(path),
        model_name="tiny",
        tokenizer_fingerprint="",
        dtype="float32",
        page_size=4,
        num_pages=256,
        num_threads=1,
    )


@pytest.fixture
def runner(config: EngineConfig) -> Iterator[CpuRunner]:
    runner, _ = load_runner(config)
    yield runner
    runner.close()


@pytest.fixture
def driver(runner: CpuRunner) -> Driver:
    return Driver(runner, page_size=4, context_tokens=TINY.context_tokens)


def test_the_loaded_model_says_what_it_is(config: EngineConfig) -> None:
    runner, model = load_runner(config)
    runner.close()
    assert (model.context_tokens, model.vocab_size) == (128, 96)
    assert runner.vocab_size == 96
    assert model.load_s > 0


def test_alone_together_and_in_chunks_the_tokens_are_the_same(driver: Driver) -> None:
    together = driver.generate(PROMPTS, num_new=12)
    driver.release_all()
    for prompt, expected in zip(PROMPTS, together, strict=True):
        for chunk in (3, 16, 512):
            driver.release_all()
            assert driver.generate([prompt], num_new=12, chunk=chunk) == [expected]


def test_decode_rows_and_prefill_chunks_share_a_step(driver: Driver) -> None:
    expected = driver.generate(PROMPTS[:3], num_new=2)
    driver.release_all()
    first, second, third = (driver.sequence(prompt, num_new=2) for prompt in PROMPTS[:3])
    driver.prefill(first)
    driver.step([(first, 1), (second, 20)])
    driver.step([(second, 13), (third, 1)][::-1])
    driver.step([(second, 1), (third, 1)])
    assert [s.token_ids[-2:] for s in (first, second, third)] == expected


def test_pages_with_a_cached_prefix_serve_another_sequence(driver: Driver) -> None:
    shared = PROMPTS[3][:32]
    [expected] = driver.generate([[*shared, 5, 6, 7]], num_new=8)
    driver.release_all()
    owner = driver.sequence([*shared, 9], num_new=8)
    driver.prefill(owner)
    other = driver.sequence([*shared, 5, 6, 7], num_new=8)
    other.pages[:8] = owner.pages[:8]
    other.num_computed = 32
    driver.prefill(other)
    for _ in range(7):
        driver.step([(other, 1), (owner, 1)])
    assert other.token_ids[35:] == expected


def test_bfloat16_runs_and_mostly_agrees_with_float32(config: EngineConfig, driver: Driver) -> None:
    expected = driver.generate(PROMPTS, num_new=1)
    runner, _ = load_runner(_with_dtype(config))
    rounded = Driver(runner, page_size=4, context_tokens=TINY.context_tokens).generate(PROMPTS, num_new=1)
    runner.close()
    assert sum(a == b for a, b in zip(expected, rounded, strict=True)) >= len(PROMPTS) // 2


def _with_dtype(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, dtype="bfloat16")


def test_shapes_are_counted_and_late_after_warm_up(runner: CpuRunner) -> None:
    known = row_plan(PROMPTS[0], page_size=4)
    runner.warm_up([known.bucket, Bucket(4, 4, 2)])
    assert (runner.num_shapes, runner.num_late_shapes) == (2, 0)
    runner.execute(known).tokens()
    assert (runner.num_shapes, runner.num_late_shapes) == (2, 0)
    for _ in range(2):
        runner.execute(row_plan(PROMPTS[1], page_size=4)).tokens()
    assert (runner.num_shapes, runner.num_late_shapes) == (3, 1)


def test_execute_returns_before_the_step_has_run(config: EngineConfig) -> None:
    device = ThreadPoolExecutor(1)
    with torch.inference_mode():
        runner = CpuRunner(config, device)
    free = threading.Event()
    device.submit(free.wait, 10)
    handle = runner.execute(row_plan(PROMPTS[0], page_size=4))
    assert not handle.done()
    free.set()
    assert handle.tokens().shape == (4,)
    assert handle.done()
    runner.close()


def test_a_failing_step_raises_where_its_tokens_are_asked_for(runner: CpuRunner) -> None:
    plan = row_plan(PROMPTS[0], page_size=4)
    handle = runner.execute(replace(plan, token_ids=np.full_like(plan.token_ids, 10_000)))
    with pytest.raises(IndexError):
        handle.tokens()


def test_a_context_beyond_the_models_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="max_context_tokens is 129; the model allows 1 to 128"):
        load_runner(msgspec.structs.replace(config, max_context_tokens=129))


def test_a_model_that_cannot_be_read_is_refused(config: EngineConfig, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"bad\.gguf is corrupt or truncated"):
        load_runner(msgspec.structs.replace(config, model_path=str(path)))


def test_auto_makes_as_many_pages_as_the_limit_has_room_for(config: EngineConfig) -> None:
    """And they serve."""
    limit = 12 << 20
    runner, model = load_runner(msgspec.structs.replace(config, num_pages=AUTO_PAGES, memory_limit_bytes=limit))
    memory = model.memory
    assert memory is not None
    assert memory.limit_bytes == limit
    assert {len(pages) for pages in runner._kv_pages} == {memory.num_pages}
    assert memory.kv_bytes == sum(pages.nbytes for pages in runner._kv_pages)
    used = memory.weights_bytes + memory.scratch_bytes + memory.kv_bytes
    assert 0.9 * limit - memory.page_bytes < used <= 0.9 * limit
    # A tied table is kept once to look up and once to multiply with.
    assert memory.weights_bytes == 4 * sum(map(math.prod, TINY.shapes().values())) + 4 * 96 * 256
    driver = Driver(runner, page_size=4, context_tokens=TINY.context_tokens)
    assert len(driver.generate(PROMPTS[:1], num_new=2)[0]) == 2
    runner.close()


def test_what_cannot_fit_is_refused_before_a_weight_is_read(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: object, **more: object) -> None:
        raise AssertionError("nothing may be read")

    monkeypatch.setattr(Reader, "read", read)
    monkeypatch.setattr(Reader, "ahead", read)
    with pytest.raises(
        ConfigError, match=r"needs \S+ MiB for weights and .* on 1 device; the limit is 3\.0 MiB; weights int8"
    ):
        load_runner(msgspec.structs.replace(config, memory_limit_bytes=3 << 20))


def test_the_limit_is_what_is_available_shared_by_all_processes(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available_bytes", lambda: 1000)
    worlds = [ALONE, World(rank=1, size=4, rendezvous="h:1"), World(rank=1, size=4, rendezvous="h:1", num_hosts=2)]
    assert [cpu._memory_limit_bytes(config, world) for world in worlds] == [1000, 250, 500]
    monkeypatch.setattr(cpu, "available_bytes", lambda: None)
    assert cpu._memory_limit_bytes(config, ALONE) is None
    runner, model = load_runner(config)
    runner.close()
    assert model.memory is not None
    assert (model.memory.limit_bytes, model.memory.num_pages) == (0, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [4, 5, 64])
def test_reordered_weights_multiply_like_plain_ones(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    x = torch.randn(num_rows, 64, generator=generator).to(dtype)
    # Another order of 64 products; bfloat16 results are rounded to 8 bits of values near 20.
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.13}[dtype]
    torch.testing.assert_close(make_linear(weight)(x), F.linear(x, weight), atol=tolerance, rtol=0)
