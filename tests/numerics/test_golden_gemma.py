"""Gemma 3 270M's real weights in float32 give the tokens of `transformers` on the same file; one prompt is longer than
the sliding window.
"""

import json
import os
from pathlib import Path
from typing import TypedDict, cast

import pytest

from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.config import EngineConfig
from ostrya.errors import ModelLoadError
from ostrya.text.source import resolve_model
from tests.numerics.driver import Driver


class Case(TypedDict):
    prompt: list[int]
    output: list[int]
    min_margin: float


CASES = cast("list[Case]", json.loads(Path(__file__).with_name("golden_gemma3.json").read_text())["cases"])
WINDOW_TOKENS, CONTEXT_TOKENS = 512, 1024


def model_path() -> str:
    try:
        return str(resolve_model("gemma-3-270m").path)
    except ModelLoadError as error:
        if os.environ.get("OSTRYA_REQUIRE_ALL") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


def test_real_weights_give_the_tokens_of_transformers() -> None:
    assert max(len(case["prompt"]) for case in CASES) > WINDOW_TOKENS
    config = EngineConfig(
        model_path=model_path(),
        model_name="gemma",
        tokenizer_fingerprint="",
        dtype="float32",
        num_pages=128,
        max_context_tokens=CONTEXT_TOKENS,
        num_threads=1,
    )
    runner, _ = load_runner(config)
    driver = Driver(runner, page_size=config.page_size, context_tokens=CONTEXT_TOKENS)
    produced = driver.generate([case["prompt"] for case in CASES], num_new=len(CASES[0]["output"]))
    runner.close()
    for number, (case, output) in enumerate(zip(CASES, produced, strict=True)):
        assert output == case["output"], f"prompt {number}, closest call {case['min_margin']:.1e}"
