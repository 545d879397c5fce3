"""The CPU runner on a tiny random model: batching and chunking change nothing, steps run behind the caller, shapes
are counted."""

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

from ostrya.engine.backends.cpu import CpuRunner, load_runner
from ostrya.engine.backends.kernels.linear import make_linear
from ostrya.engine.config import EngineConfig
from ostrya.engine.plan import Bucket
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [4, 5, 64])
def test_reordered_weights_multiply_like_plain_ones(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    x = torch.randn(num_rows, 64, generator=generator).to(dtype)
    # Another order of 64 products; bfloat16 results are rounded to 8 bits of values near 20.
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.13}[dtype]
    torch.testing.assert_close(make_linear(weight)(x), F.linear(x, weight), atol=tolerance, rtol=0)
