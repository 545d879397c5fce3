"""Twenty requests through a whole engine, as every backend must answer them: prompts that share beginnings, chunks,
steps with prefill beside decoding, overlap. Deterministic: several processes that run it make the same plans.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

import msgspec

from ostrya.engine.backends.base import Runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.types import EngineRequest, RequestId, Sampling, TokenScore

NUM_REQUESTS, NUM_NEW = 20, 64
CONTEXT_TOKENS = 256

GREEDY = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=NUM_NEW)
SAMPLED = (
    GREEDY,
    Sampling(temperature=1.5, top_k=5, top_p=1, seed=11, max_tokens=NUM_NEW),
    Sampling(temperature=0.7, top_k=0, top_p=0.9, seed=12, max_tokens=NUM_NEW),
    Sampling(temperature=2.0, top_k=40, top_p=0.95, seed=13, max_tokens=NUM_NEW, min_p=0.01),
    Sampling(
        temperature=0, top_k=0, top_p=1, seed=0, max_tokens=NUM_NEW, repetition_penalty=1.3, frequency_penalty=0.2
    ),
    Sampling(temperature=1, top_k=0, top_p=1, seed=14, max_tokens=NUM_NEW, typical_p=0.8, logit_bias={7: 2.0}),
    Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=NUM_NEW, num_top=3, num_prompt_top=2),
)
"""One of each kind of row, mixed in a batch."""


def real_config(model_path: str, **changes: object) -> EngineConfig:
    """For a real model and prompts of any length."""
    made = EngineConfig(
        model_path=model_path,
        model_name="m",
        tokenizer_fingerprint="",
        dtype="float32",
        num_pages=512,
        max_running=8,
        max_context_tokens=1024,
        max_inter_token_s=0,
        num_threads=1,
    )
    return msgspec.structs.replace(made, **changes)


def config(model_path: str, **changes: object) -> EngineConfig:
    """Small pages, chunks and batches, so that little text meets all of it."""
    small = {
        "page_size": 4,
        "max_step_tokens": 32,
        "max_prefill_chunk_tokens": 16,
        "max_context_tokens": CONTEXT_TOKENS,
    }
    return real_config(model_path, **{**small, **changes})


def answers_at_once(
    runner: Runner, config: EngineConfig, prompts: Sequence[list[int]], *, num_new: int = NUM_NEW
) -> dict[str, list[int]]:
    """What an engine over the runner answers greedily to prompts that all come at the beginning."""
    engine = Engine(
        runner, config, context_tokens=config.max_context_tokens or CONTEXT_TOKENS, eos_token_ids=(), clock=_ticks()
    )
    engine.warm_up()
    sampling = msgspec.structs.replace(GREEDY, max_tokens=num_new)
    for number, prompt in enumerate(prompts):
        engine.submit(EngineRequest(request_id=RequestId(str(number)), token_ids=prompt, sampling=sampling))
    tokens: dict[str, list[int]] = {}
    while (report := engine.step()) is not None:
        for output in report.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.scheduler.pool.check()
    return tokens


def answers(
    runner: Runner, config: EngineConfig, *, vocab_size: int, sampled: bool = False
) -> tuple[dict[str, list[int]], dict[str, list[TokenScore]]]:
    """What an engine over the runner answers to each request, and the scores it gives; some of them are hits."""
    engine = Engine(runner, config, context_tokens=CONTEXT_TOKENS, eos_token_ids=(), clock=_ticks())
    engine.warm_up()
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[TokenScore]] = {}
    left = [_request(number, vocab_size, sampled=sampled) for number in range(NUM_REQUESTS)]
    num_steps = 0
    while True:
        # Three to begin with, then one every fourth step: prompts arrive while others are answered.
        if left and (num_steps % 4 == 0 or not tokens):
            for _ in range(3 if num_steps == 0 else 1):
                engine.submit(left.pop(0))
        report = engine.step()
        num_steps += 1
        for output in report.outputs if report else ():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            scores.setdefault(output.request_id, []).extend(output.prompt_scores + output.scores)
        if report is None and not left:
            break
    assert engine.load().hit_tokens > 0, "prompts that share beginnings hit"
    engine.scheduler.pool.check()
    return tokens, scores


def _ticks() -> Callable[[], float]:
    """The same time in every process: who is next depends on how fast steps were, and they must not differ in that."""
    return partial(next, count(0.0, 0.01))


def _request(number: int, vocab_size: int, *, sampled: bool) -> EngineRequest:
    """Prompts of 3 to 90 tokens; five beginnings, four ways to go on."""
    beginning, ending = number % 5, number // 5
    shared = [(5 * at + at * at // 3 + 7 * beginning) % (vocab_size - 3) + 3 for at in range(1 + 19 * beginning)]
    own = [(11 * at + 13 * ending + 5) % (vocab_size - 3) + 3 for at in range(2 + 4 * ending)]
    sampling = SAMPLED[number % len(SAMPLED)] if sampled else GREEDY
    return EngineRequest(request_id=RequestId(str(number)), token_ids=shared + own, sampling=sampling)


def differences(found: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> list[str]:
    """Where each request that differs does so first; empty when none does."""
    assert found.keys() == expected.keys()
    return [
        f"request {name}: token {next(i for i, (a, b) in enumerate(zip(found[name], tokens, strict=True)) if a != b)}"
        for name, tokens in expected.items()
        if found[name] != tokens
    ]
