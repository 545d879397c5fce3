"""The real model through the whole engine, float32: cold, hit, chunked, batched and preempted give the golden tokens.

The golden file is what `transformers` says, so equal to it is equal to each other (issue 2, done-when 3 and 4). Prompts
whose closest call is far above the noise of another summation order are used: a difference is a bug, never bad luck.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.engine.backends.base import Runner
from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.types import EngineRequest, Load, RequestId, Sampling
from ostrya.errors import ModelLoadError
from ostrya.text.source import resolve_model

NUM_NEW = 16
"""A page: every answer goes on into one more."""
CONTEXT_TOKENS = 512
NUM_PAGES = 512


class Case(TypedDict):
    prompt: list[int]
    output: list[int]
    min_margin: float


@dataclass(frozen=True, slots=True)
class Stack:
    """One loaded model; each test puts a fresh engine on it, whose pages overwrite the last one's."""

    runner: Runner
    config: EngineConfig

    def engine(self, *, num_pages: int = NUM_PAGES, chunk: int = 512, overlap: bool = True) -> Engine:
        config = msgspec.structs.replace(
            self.config, num_pages=num_pages, max_prefill_chunk_tokens=chunk, overlap=overlap
        )
        return Engine(self.runner, config, context_tokens=CONTEXT_TOKENS, eos_token_ids=())


def clear_cases() -> list[Case]:
    """Eight prompts of 31 to 269 tokens."""
    golden = json.loads(Path(__file__).with_name("golden_smollm2.json").read_text())
    return [cast("Case", golden["cases"][number]) for number in (17, 15, 7, 16, 8, 13, 4, 6)]


CASES = clear_cases()


def model_path() -> str:
    try:
        return str(resolve_model("smollm2-135m-instruct").path)
    except ModelLoadError as error:
        if os.environ.get("OSTRYA_REQUIRE_ALL") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    config = EngineConfig(
        model_path=model_path(),
        model_name="smollm2",
        tokenizer_fingerprint="",
        dtype="float32",
        num_pages=NUM_PAGES,
        max_running=8,
        num_threads=1,
        max_context_tokens=CONTEXT_TOKENS,
    )
    runner, _ = load_runner(config)
    yield Stack(runner, config)
    runner.close()


def submit(engine: Engine, index: int, *, priority: int = 0) -> None:
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=NUM_NEW)
    prompt = CASES[index]["prompt"]
    request_id = RequestId(str(index))
    engine.submit(EngineRequest(request_id=request_id, token_ids=prompt, sampling=sampling, priority=priority))


def run(engine: Engine, *, num_steps: int | None = None) -> dict[int, list[int]]:
    """Steps until idle, or that many; the new tokens of each request."""
    tokens: dict[int, list[int]] = {}
    while num_steps != 0 and (report := engine.step()) is not None:
        num_steps = None if num_steps is None else num_steps - 1
        for output in report.outputs:
            tokens.setdefault(int(output.request_id), []).extend(output.token_ids)
    if num_steps == 0:
        return tokens
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_referenced == 0
    return tokens


def golden(indexes: Sequence[int]) -> dict[int, list[int]]:
    return {index: CASES[index]["output"][:NUM_NEW] for index in indexes}


def test_no_call_of_these_prompts_is_close() -> None:
    assert min(case["min_margin"] for case in CASES) > 5e-3


@pytest.mark.parametrize("chunk", [16, 512])
def test_alone_cold_then_hit_gives_the_golden_tokens(stack: Stack, chunk: int) -> None:
    index = 2  # 71 tokens; the batch has one of 269
    engine = stack.engine(chunk=chunk)
    loads: list[Load] = []
    for _ in ("cold", "hit"):
        submit(engine, index)
        assert run(engine) == golden([index])
        loads.append(engine.load())
    assert [load.hit_tokens for load in loads] == [0, (len(CASES[index]["prompt"]) - 1) // 16 * 16]


@pytest.mark.parametrize("chunk", [16, 512])
def test_batch_of_eight_cold_then_hit_gives_the_golden_tokens(stack: Stack, chunk: int) -> None:
    engine = stack.engine(chunk=chunk)
    for _ in ("cold", "hit"):
        for index in range(8):
            submit(engine, index)
        assert run(engine) == golden(range(8))
    assert engine.load().hit_tokens > 0


def test_preempted_requests_give_the_golden_tokens(stack: Stack) -> None:
    # Room for the prompts and not for the answers; the first in rank comes last and takes pages from those who run.
    engine = stack.engine(num_pages=1 + sum(-(-len(case["prompt"]) // 16) for case in CASES))
    for index in range(1, 8):
        submit(engine, index)
    begun = run(engine, num_steps=8)
    submit(engine, 0, priority=1)
    rest = run(engine)
    assert engine.load().num_preemptions > 0
    assert {index: begun.get(index, []) + rest.get(index, []) for index in range(8)} == golden(range(8))


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 6)), min_size=2, max_size=6, unique_by=lambda a: a[0]
    ),
    chunk=st.sampled_from([16, 64, 512]),
    num_pages=st.integers(24, 60),
    overlap=st.booleans(),
)
@settings(max_examples=3, deadline=None, derandomize=True)
def test_any_arrivals_chunks_and_pool_give_the_golden_tokens(
    stack: Stack, arrivals: list[tuple[int, int]], chunk: int, num_pages: int, overlap: bool
) -> None:
    engine = stack.engine(num_pages=num_pages, chunk=chunk, overlap=overlap)
    tokens: dict[int, list[int]] = {}
    for index, num_steps_before in arrivals:
        for _ in range(num_steps_before):
            report = engine.step()
            for output in report.outputs if report else ():
                tokens.setdefault(int(output.request_id), []).extend(output.token_ids)
        submit(engine, index)
    for index, rest in run(engine).items():
        tokens.setdefault(index, []).extend(rest)
    assert tokens == golden([index for index, _ in arrivals])
