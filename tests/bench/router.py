"""Decision time of a router: hash + match + score, tokens given. `python -m tests.bench.router` exits 1 above the goal.

64 replicas, prompts of 8,192 tokens, about 1 M indexed blocks: every replica holds the contexts of its own
conversations and, with others, shared system prompts. Each prompt continues a known context at a random depth (cut
anywhere, often with no match at all), so look-ups end in different places. All prompts are different token arrays.
"""

import random
import statistics
import sys
import time
from array import array
from dataclasses import dataclass

from ostrya.prefix.chain import ChainKey, RoutingDigest, page_digests, root, routing_digests
from ostrya.prefix.events import Stored
from ostrya.prefix.index import PrefixIndex
from ostrya.router.pick import choose
from ostrya.router.types import FleetSnapshot, KnowledgeLevel, Load, ReplicaView, WorkerId

NUM_REPLICAS = 64
NUM_TOKENS = 8_192
NUM_BLOCKS = 1_000_000
NUM_PROMPTS = 3_000
GOAL_P50_S = 200e-6
ROOT = root(ChainKey(model="bench", tokenizer_fingerprint="bench"))


@dataclass(frozen=True)
class Geometry:
    """How tokens are cut into routing blocks."""

    page_size: int
    stride: int

    def digests(self, tokens: "array[int]") -> list[RoutingDigest]:
        return routing_digests(page_digests(ROOT, tokens, page_size=self.page_size), stride=self.stride)


def random_tokens(rng: random.Random, count: int) -> "array[int]":
    tokens = array("I", rng.randbytes(4 * count))
    return array("I", [token & 0xFFFF for token in tokens])


def filled(rng: random.Random, geometry: Geometry) -> tuple[PrefixIndex, list[int], list["array[int]"]]:
    """An index of NUM_BLOCKS distinct blocks, its slots, and real contexts that prompts may continue.

    Blocks of real contexts are hashed; the rest are random digests, which cost a look-up the same.
    """
    index = PrefixIndex(max_entries=2 * NUM_BLOCKS)
    slots = [index.add_slot() for _ in range(NUM_REPLICAS)]
    systems = [random_tokens(rng, 2_048) for _ in range(8)]
    contexts = [rng.choice(systems) + random_tokens(rng, NUM_TOKENS - 2_048) for _ in range(300)]
    for context in contexts:
        digests = geometry.digests(context)
        for slot in rng.sample(slots, rng.choice((1, 1, 2, 4, 16))):
            index.apply(slot, [Stored(tuple(digests[: rng.randrange(1, len(digests) + 1)]))])
    while index.num_entries < NUM_BLOCKS:
        noise = tuple(RoutingDigest(rng.getrandbits(64)) for _ in range(1_000))
        index.apply(rng.choice(slots), [Stored(noise)])
    return index, slots, contexts


def prompts(rng: random.Random, contexts: list["array[int]"]) -> list["array[int]"]:
    """Each keeps a random part of a known context, perhaps nothing, and goes on with tokens of its own."""
    made = []
    for _ in range(NUM_PROMPTS):
        kept = rng.choice((0, rng.randrange(NUM_TOKENS), rng.randrange(NUM_TOKENS), NUM_TOKENS - 64))
        made.append(rng.choice(contexts)[:kept] + random_tokens(rng, NUM_TOKENS - kept))
    return made


def fleet(rng: random.Random, slots: list[int], geometry: Geometry) -> FleetSnapshot:
    views = tuple(
        ReplicaView(
            worker_id=WorkerId(f"worker-{number:02d}"),
            slot=slot,
            max_running=64,
            page_size=geometry.page_size,
            routing_stride=geometry.stride,
            load=Load(
                num_running=rng.randrange(64),
                num_waiting=rng.choice((0, 0, 5)),
                queued_tokens=rng.choice((0, rng.randrange(20_000))),
                free_pages=rng.randrange(1_000),
                reusable_pages=rng.randrange(4_000),
                total_pages=6_000,
                prefill_tokens_per_s=8_000 + rng.random() * 1_000,
            ),
            load_age_s=rng.random() * 0.3,
            own_requests=rng.randrange(40),
            own_prefill_tokens=rng.choice((0, rng.randrange(20_000))),
        )
        for number, slot in enumerate(slots)
    )
    return FleetSnapshot(replicas=views, level=KnowledgeLevel.FRESH, index_age_s=0.0)


def measure(geometry: Geometry) -> float:
    """Prints the parts and the whole; returns the p50 in seconds."""
    rng = random.Random(7)
    index, slots, contexts = filled(rng, geometry)
    fleets = [fleet(rng, slots, geometry) for _ in range(32)]
    parts: dict[str, list[float]] = {"hash": [], "match": [], "score": [], "decision": []}
    num_matched = 0
    for number, tokens in enumerate(prompts(rng, contexts)):
        snapshot = fleets[number % len(fleets)]
        started = time.perf_counter()
        digests = geometry.digests(tokens)
        hashed = time.perf_counter()
        depths = index.depths(digests)
        matched = time.perf_counter()
        choose(snapshot, depths, num_tokens=NUM_TOKENS, first_digest=digests[0], seed=number)
        scored = time.perf_counter()
        num_matched += bool(depths)
        spans = (hashed - started, matched - hashed, scored - matched, scored - started)
        for name, span in zip(parts, spans, strict=True):
            parts[name].append(span)
    block = geometry.page_size * geometry.stride
    print(
        f"{NUM_REPLICAS} replicas, {NUM_TOKENS:,}-token prompts, {index.num_entries:,} indexed blocks, pages of "
        f"{geometry.page_size} tokens, routing blocks of {block}; {num_matched / NUM_PROMPTS:.0%} of prompts match"
    )
    for name, spans_s in parts.items():
        cuts = statistics.quantiles(spans_s, n=100)
        print(f"  {name:8}  " + "  ".join(f"p{p} {cuts[p - 1] * 1e6:7.1f} us" for p in (50, 95, 99)))
    return statistics.median(parts["decision"])


def main() -> int:
    p50_s = measure(Geometry(page_size=64, stride=2))
    measure(Geometry(page_size=16, stride=2))
    print(f"goal: p50 <= {GOAL_P50_S * 1e6:.0f} us with routing blocks of 128 tokens: {p50_s * 1e6:.1f} us")
    return 0 if p50_s <= GOAL_P50_S else 1


if __name__ == "__main__":
    sys.exit(main())
