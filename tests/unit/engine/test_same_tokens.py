"""Tokens do not depend on company, chunking, hits or preemption; and no history of requests loses a page."""

import random
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

    def submit(self, bench: Bench, request_id: str) -> None:
        bench.submit(request_id, self.prompt, max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """Prompts over few trunks, so that prefixes are shared at every depth."""
    trunk = draw(st.integers(0, 2))
    shared = draw(st.integers(0, 40))
    own = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    prompt = tuple(trunk * 100 + index for index in range(shared)) + tuple(own)
    return Ask(prompt, draw(st.integers(1, 24)), draw(st.sampled_from([0.0, 1.0])), draw(st.integers(0, 3)))


def alone(ask: Ask) -> list[int]:
    bench = Bench(num_pages=200)
    ask.submit(bench, "x")
    bench.run()
    return bench.tokens["x"]


@given(st.lists(asks(), min_size=1, max_size=8), st.sampled_from([16, 64, 512]), st.integers(20, 80))
@settings(max_examples=60, deadline=None)
def test_batched_hit_chunked_and_preempted_give_the_tokens_of_cold_and_alone(
    batch: list[Ask], chunk: int, num_pages: int
) -> None:
    bench = Bench(num_pages=num_pages, max_step_tokens=max(chunk, 8), max_prefill_chunk_tokens=chunk, routing_stride=2)
    expected = [alone(ask) for ask in batch]
    for turn in ("cold", "hit"):
        for index, ask in enumerate(batch):
            ask.submit(bench, f"{turn}-{index}")
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
    bench = Bench(num_pages=num_pages, max_step_tokens=rng.choice([8, 16, 64]), routing_stride=rng.choice([1, 2, 3]))
    prompts: dict[str, list[int]] = {}
    for turn in range(60):
        match rng.choice(["submit", "step", "step", "abort", "abort in flight"]):
            case "submit":
                prompts[str(turn)] = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
                bench.submit(str(turn), prompts[str(turn)], max_tokens=rng.randrange(1, 20))
            case "step":
                bench.step()
            case "abort" if prompts:
                bench.abort(rng.choice(list(prompts)))
            case "abort in flight" if prompts:
                bench.step(partial(bench.abort, rng.choice(list(prompts))))
        bench.scheduler.pool.check()
        assert_prefix_closed(bench, prompts)
    bench.run()
    assert_prefix_closed(bench, prompts)


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
