"""Tokens do not depend on company, chunking, hits or preemption; and no history of requests loses a page."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

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

    def submit(self, bench: Bench, request_id: str, *, stop_token_ids: frozenset[int] = frozenset()) -> None:
        bench.submit(
            request_id,
            self.prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            stop_token_ids=stop_token_ids,
        )


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """Prompts over few trunks, so that prefixes are shared at every depth."""
    trunk = draw(st.integers(0, 2))
    shared = draw(st.integers(0, 40))
    own = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    prompt = tuple(trunk * 100 + index for index in range(shared)) + tuple(own)
    temperature, seed = draw(st.sampled_from([0.0, 1.0])), draw(st.integers(0, 3))
    return Ask(prompt, draw(st.integers(1, 24)), temperature, seed, draw(st.integers(0, 30)))


def alone(ask: Ask) -> list[int]:
    bench = Bench(num_pages=200, overlap=False)
    ask.submit(bench, "x")
    bench.run()
    return bench.tokens["x"]


@given(st.lists(asks(), min_size=1, max_size=8), st.sampled_from([16, 64, 512]), st.integers(20, 80), st.booleans())
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
    whole = [alone(ask) for ask in batch]
    stops = [frozenset(tokens[ask.stop_after : ask.stop_after + 1]) for ask, tokens in zip(batch, whole, strict=True)]
    expected = [
        tokens[: next((i for i, token in enumerate(tokens) if token in stop), len(tokens)) + 1]
        for tokens, stop in zip(whole, stops, strict=True)
    ]
    for turn in ("cold", "hit"):
        for index, ask in enumerate(batch):
            ask.submit(bench, f"{turn}-{index}", stop_token_ids=stops[index])
        bench.run()
        assert [bench.tokens[f"{turn}-{index}"] for index in range(len(batch))] == expected
    assert bench.engine.load().num_late_shapes == 0


def test_tiny_pool_preempts_often_and_changes_no_token() -> None:
    batch = [Ask(tuple(range(start, start + 10)), 40, 1.0, start) for start in range(0, 80, 10)]
    bench = Bench(num_pages=20)
    for index, ask in enumerate(batch):
        ask.submit(bench, str(index))
    bench.run()
    assert bench.engine.load().num_preemptions > 5
    assert [bench.tokens[str(index)] for index in range(8)] == [alone(ask) for ask in batch]


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
        bench.submit(name, prompts[name], max_tokens=rng.randrange(1, 20), stop_token_ids=stop, priority=priority)

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
