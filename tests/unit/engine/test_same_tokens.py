"""Tokens do not depend on company, chunking, hits, preemption or overlap, whatever a request's sampling wants; and no
history of requests loses a page."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.engine.types import FinishReason, Grammar, TokenScore
from ostrya.prefix.chain import ChainKey, page_digests, root
from tests.unit.engine.bench import Bench

ROOT = root(ChainKey(model="fake", tokenizer_fingerprint="t"))


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop_after: int = 99
    """Of the tokens it would have, this one is a stop token."""
    wants: Mapping[str, object] = field(default_factory=dict)
    """More fields of Sampling."""
    priority: int = 0

    def submit(self, bench: Bench, request_id: str, *, stop_token_ids: frozenset[int] = frozenset()) -> None:
        bench.submit(
            request_id,
            self.prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            stop_token_ids=stop_token_ids,
            priority=self.priority,
            **self.wants,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Outcome:
    tokens: list[int]
    scores: list[TokenScore]
    reason: FinishReason | None

    @classmethod
    def of(cls, bench: Bench, request_id: str) -> "Outcome":
        return cls(bench.tokens[request_id], bench.scores[request_id], bench.reasons[request_id])


Wants = list[Mapping[str, object]]

OVERLAPPING: Wants = [
    {},
    {"min_p": 0.1, "typical_p": 0.9, "logit_bias": {7: 2.0}, "bad_words": ((3,), (4,))},
    {"min_tokens": 9},
    {"num_top": 2, "num_prompt_top": 1},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    {"frequency_penalty": 1.0, "num_top": 0, "num_prompt_top": 0},
]
"""The device knows all that the next token depends on."""
NEEDING_HOST: Wants = [
    {"bad_words": tuple((first, first + 1) for first in range(0, 999, 3)), "frequency_penalty": -1.0},
    {"grammar": Grammar(kind="regex", text="[a-d]{3}(xy|zz)*[0-9]{1,30}"), "presence_penalty": 0.5, "num_top": 1},
]
"""Every third token begins a bad word. One such row holds up every plan."""


@st.composite
def asks(draw: st.DrawFn, wants: Wants) -> Ask:
    """Prompts over few trunks, so that prefixes are shared at every depth."""
    trunk = draw(st.integers(0, 2))
    shared = draw(st.integers(0, 40))
    own = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    prompt = tuple(trunk * 100 + index for index in range(shared)) + tuple(own)
    temperature, seed = draw(st.sampled_from([0.0, 1.0])), draw(st.integers(0, 3))
    max_tokens, stop_after = draw(st.integers(1, 24)), draw(st.integers(0, 30))
    return Ask(prompt, max_tokens, temperature, seed, stop_after, draw(st.sampled_from(wants)))


def alone(ask: Ask, stop_token_ids: frozenset[int] = frozenset()) -> Outcome:
    bench = Bench(num_pages=200, overlap=False)
    ask.submit(bench, "x", stop_token_ids=stop_token_ids)
    bench.run()
    return Outcome.of(bench, "x")


BATCHES = st.one_of(
    st.lists(asks(OVERLAPPING), min_size=1, max_size=8),
    st.lists(asks(OVERLAPPING + NEEDING_HOST), min_size=1, max_size=8),
)


@given(BATCHES, st.sampled_from([16, 64, 512]), st.integers(20, 80), st.sampled_from([True, True, False]))
@settings(max_examples=80, deadline=None)
def test_batched_hit_chunked_preempted_and_overlapped_give_the_tokens_of_cold_and_alone(
    batch: list[Ask], chunk: int, num_pages: int, overlap: bool
) -> None:
    bench = Bench(
        num_pages=num_pages,
        max_step_tokens=max(chunk, 8),
        max_prefill_chunk_tokens=chunk,
        routing_stride=2,
        overlap=overlap,
    )
    whole = [alone(ask).tokens for ask in batch]
    stops = [frozenset(tokens[ask.stop_after : ask.stop_after + 1]) for ask, tokens in zip(batch, whole, strict=True)]
    expected = [alone(ask, stop) for ask, stop in zip(batch, stops, strict=True)]
    for ask, tokens, stop, outcome in zip(batch, whole, stops, expected, strict=True):
        end = next((at for at, token in enumerate(tokens) if token in stop), len(tokens)) + 1
        assert outcome.tokens == tokens[:end] or "min_tokens" in ask.wants
    for turn in ("cold", "hit"):
        for index, ask in enumerate(batch):
            ask.submit(bench, f"{turn}-{index}", stop_token_ids=stops[index])
        bench.run()
        assert [Outcome.of(bench, f"{turn}-{index}") for index in range(len(batch))] == expected
    assert bench.engine.load().num_late_shapes == 0


@pytest.mark.parametrize("wants", [OVERLAPPING, NEEDING_HOST + OVERLAPPING])
def test_tiny_pool_preempts_often_and_changes_no_token(wants: Wants) -> None:
    batch = [
        Ask(tuple(range(10 * row, 10 * row + 10)), 40, 1.0, row, wants=wants[row % len(wants)]) for row in range(8)
    ]
    bench = Bench(num_pages=20)
    for index, ask in enumerate(batch):
        ask.submit(bench, str(index))
    bench.run()
    assert bench.engine.load().num_preemptions > 5
    assert [Outcome.of(bench, str(index)) for index in range(8)] == [alone(ask) for ask in batch]


@given(st.integers(0, 2**32), st.integers(14, 60))
@settings(max_examples=60, deadline=None)
def test_random_history_keeps_every_invariant(seed: int, num_pages: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        num_pages=num_pages,
        max_step_tokens=rng.choice([8, 16, 64]),
        routing_stride=rng.choice([1, 2, 3]),
        overlap=rng.random() < 0.8,
    )
    prompts: dict[str, list[int]] = {}

    def submit(name: str) -> None:
        prompts[name] = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        stop = frozenset({rng.randrange(1000) for _ in range(100)})
        priority = rng.choice([0, 0, 1, -1])
        wants = rng.choice(OVERLAPPING + NEEDING_HOST)
        Ask(tuple(prompts[name]), rng.randrange(1, 20), 0.0, 0, wants=wants, priority=priority).submit(
            bench, name, stop_token_ids=stop
        )

    for turn in range(60):
        match rng.choice(["submit", "step", "step", "abort", "abort in flight", "submit in flight"]):
            case "submit":
                submit(str(turn))
            case "step":
                bench.step()
            case "abort" if prompts:
                bench.abort(rng.choice(list(prompts)))
            case "abort in flight" if prompts:
                bench.step(partial(bench.abort, rng.choice(list(prompts))))
            case "submit in flight":
                bench.step(once(partial(submit, str(turn))))
        bench.scheduler.pool.check()
        assert_prefix_closed(bench, prompts)
    bench.run()
    assert_prefix_closed(bench, prompts)


def once(act: Callable[[], None]) -> Callable[[], None]:
    """A step waits more than once."""
    acts = [act]
    return lambda: acts.pop()() if acts else None


def assert_prefix_closed(bench: Bench, prompts: dict[str, list[int]]) -> None:
    """Every matchable page's parent is matchable."""
    matchable = bench.scheduler.prefix._page_of
    explained = set()
    for request_id, prompt in prompts.items():
        digests = page_digests(ROOT, prompt + bench.tokens.get(request_id, []), page_size=4)
        known = [digest in matchable for digest in digests]
        assert known == sorted(known, reverse=True)
        explained |= set(digests)
    assert matchable.keys() <= explained
