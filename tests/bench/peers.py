"""The engine beside llama.cpp, vLLM and transformers: same model, threads and machine, turn by turn in one run.

Decoding is the time beyond the first token. llama.cpp computes with the 4-bit file itself, the others with what is
dequantized from it. A peer that is not installed or dies is left out, with the reason. Then what a worker of ours takes
to start, and its memory. Run by `make bench-peers`.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ostrya.text.packaged import packaged_file
from tests.bench import serving
from tests.bench.rounds import MAX_ROUNDS, Case, Sides, Times, measure, prompts
from tests.bench.sides import NotRun, Side

MODEL = "smollm2-135m-instruct"
PROMPT_TOKENS, NUM_NEW, PREFILL_TOKENS = 128, 64, 2048
SHARED_TOKENS, TAIL_TOKENS = 1024, 32
GOAL_HIT_RATIO, GOAL_START_S, GOAL_RESIDENT_MB = 0.15, 5.0, 600
NUM_STARTS = 3

OURS = ("ours auto", "ours bf16")
LLAMA, VLLM, TRANSFORMERS = "llama.cpp q4_1", "vLLM bf16", "transformers bf16"
ALONE = ("ours int4",)
"""At no more than 4 bits whatever the batch: for whoever asks for it."""
DEFAULT = (*OURS, LLAMA, VLLM, TRANSFORMERS)
FLOAT32 = ("ours f32", "transformers f32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A ratio to report: the best of some of our sides against the best of some peers."""

    ours: Sequence[str] = OURS
    peers: Sequence[str]
    goal_ratio: float | None = None


F32 = Pair(ours=FLOAT32[:1], peers=FLOAT32[1:])
MANY = (
    Pair(peers=[VLLM], goal_ratio=1.3),
    Pair(peers=[TRANSFORMERS], goal_ratio=2.5),
    Pair(peers=[LLAMA]),
    F32,
)


def decode(batch: int) -> Case:
    return Case(what=f"decode, batch {batch}", batch=batch, prompt_tokens=PROMPT_TOKENS, num_new=NUM_NEW)


PREFILL = Case(what=f"prefill of {PREFILL_TOKENS} tokens", batch=1, prompt_tokens=PREFILL_TOKENS, num_new=1)
PLAN: tuple[tuple[Case, Sequence[Pair]], ...] = (
    # Ours with the weights that llama.cpp has, at 4 bits.
    (
        decode(1),
        (Pair(ours=OURS[:1], peers=[LLAMA], goal_ratio=1.2), Pair(peers=[VLLM]), Pair(peers=[TRANSFORMERS]), F32),
    ),
    (decode(8), MANY),
    (decode(16), MANY),
    (PREFILL, (Pair(peers=[VLLM, TRANSFORMERS], goal_ratio=1.0), Pair(peers=[LLAMA]), F32)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """Where the peers are, and the model as each of them reads it."""

    transformers: str
    llama: str
    vllm: str
    threads: int
    gguf: Path
    directory: Path
    """For logs, and for the weights as vLLM reads them."""

    def start(self, name: str) -> Side:
        """Raises NotRun."""
        gguf, threads = str(self.gguf), str(self.threads)
        side = partial(Side, name, directory=self.directory)
        who, _, kind = name.partition(" ")
        match who:
            case "ours":
                return side(sys.executable, "tests.bench.side_ours", gguf, kind, threads)
            case "llama.cpp":
                return side(self.llama, "tests.bench.side_llama", gguf, threads)
            case "vLLM":
                return side(self.vllm, "tests.bench.side_vllm", self._exported(), threads)
            case _:
                return side(self.transformers, "tests.bench.side_transformers", gguf, kind, threads)

    def _exported(self) -> str:
        """vLLM reads no GGUF."""
        out = self.directory / "exported"
        if not out.exists():
            command = [self.transformers, "-m", "tests.bench.side_transformers", "--export", str(self.gguf), str(out)]
            try:
                subprocess.run(command, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise NotRun(f"its weights could not be exported: {error}") from error
        return str(out)


def report(times: Times, pairs: Sequence[Pair], not_run: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """Lines, and whether the goal in each holds."""
    yield f"{times.case.what:35} tok/s    whole answers", True
    for name in filter(times.net.get, list(times.net)):
        net, whole = times.tokens_per_s(name)
        yield f"  {name:30} {net:8.1f} {whole:8.1f}", True
    for pair in pairs:
        ours, peer = times.best(pair.ours), times.best(pair.peers)
        goal = f"  (goal {pair.goal_ratio})" if pair.goal_ratio else ""
        lost = "; ".join(f"{name} not run: {not_run[name]}" for name in pair.peers if name in not_run)
        if ours and peer:
            ratio = times.ratio(ours, peer)
            holds = ratio >= (pair.goal_ratio or 0)
            said = f"{goal}{'' if holds else '  MISSED'}{f'  ({lost})' if lost else ''}"
            yield f"  {f'{ours} / {peer}':39} {ratio:5.2f} x{said}", holds
        elif lost:
            yield f"  {lost}{goal}", True


def hits(sides: Sides, rounds: int) -> Iterator[tuple[str, bool]]:
    """The first token of a prompt of which most is cached, in parts of what it takes cold; ours alone."""
    for name in [name for name in sides.running if name.startswith("ours")]:
        ratios = []
        for number in range(rounds):
            [shared] = prompts(1, SHARED_TOKENS, salt=20_000 + number)
            [first, second] = prompts(2, TAIL_TOKENS, salt=number)
            cold_s, hit_s = (sides.turn(name, [shared + tail], 1) or 0.0 for tail in (first, second))
            ratios.append(hit_s / cold_s)
        ratio = statistics.median(ratios)
        text = f"{SHARED_TOKENS} of {SHARED_TOKENS + TAIL_TOKENS} tokens cached, {name}: {ratio:.1%} of cold"
        yield f"{text}  (goal {GOAL_HIT_RATIO:.0%})", ratio <= GOAL_HIT_RATIO


def worker(install: Install, weights: str) -> Iterator[tuple[str, bool]]:
    """Start and memory of a worker."""
    [prompt] = prompts(1, PREFILL_TOKENS, salt=0)
    serve = partial(serving.serve, install.gguf, weights, threads=install.threads, directory=install.directory)
    runs = [serve(prompt=prompt) for _ in range(NUM_STARTS)]
    start_s = statistics.median(run.start_s for run in runs)
    yield f"start to SERVING, warm disk, {weights}: {start_s:.2f} s  (goal {GOAL_START_S:g})", start_s <= GOAL_START_S
    last, kv_mb = runs[-1], runs[-1].kv_bytes / 1e6
    beyond_mb = last.worked.total_bytes / 1e6 - kv_mb
    yield f"resident, worker and engine process, {weights}, as the kernel counts it (VmRSS):", True
    yield f"  serving, nothing done yet: {last.idle}", True
    yield f"  after {PREFILL_TOKENS} + {serving.NUM_NEW} tokens: {last.worked}, {kv_mb:.0f} MB of it KV pages", True
    yield f"  beyond KV pages: {beyond_mb:.0f} MB  (goal {GOAL_RESIDENT_MB})", beyond_mb <= GOAL_RESIDENT_MB


def vllm_start(install: Install) -> Iterator[tuple[str, bool]]:
    """The second start of this run: its files are in memory. Of the engine, without the HTTP server."""
    try:
        with closing(install.start(VLLM)) as side:
            yield f"start of vLLM's engine, warm disk: {side.start_s:.2f} s", True
    except NotRun as error:
        yield f"start of vLLM's engine: not run: {error}", True


def run(install: Install, names: Sequence[str], rounds: int) -> Iterator[tuple[str, bool]]:
    """All lines as they are known, and whether the goal in each holds."""
    with closing(Sides()) as sides:
        for name in names:
            try:
                sides.running[name] = install.start(name)
            except NotRun as error:
                sides.lose(name, error)
        for number, (case, pairs) in enumerate(PLAN):
            times = measure(case, sides, salt=1000 * (number + 1), rounds=rounds)
            yield from report(times, pairs, sides.not_run)
        yield from hits(sides, rounds)
    if VLLM in names and VLLM not in sides.not_run:
        yield from vllm_start(install)
    for weights in ("auto", "int4"):
        yield from worker(install, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for peer in ("transformers", "llama", "vllm"):
        parser.add_argument(f"--{peer}", required=True, help="python of its venv")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, choices=range(1, MAX_ROUNDS), metavar="ROUNDS")
    parser.add_argument("--sides", nargs="*", default=DEFAULT, choices=(*DEFAULT, *ALONE, *FLOAT32), metavar="SIDE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ostrya-peers-") as directory:
        install = Install(
            transformers=asked.transformers,
            llama=asked.llama,
            vllm=asked.vllm,
            threads=asked.threads,
            gguf=packaged_file(MODEL),
            directory=Path(directory),
        )
        print(f"{asked.threads} threads, {PROMPT_TOKENS}-token prompts, {NUM_NEW} new tokens, {asked.rounds} rounds")
        all_hold = True
        for line, holds in run(install, asked.sides, asked.rounds):
            print(line, flush=True)
            all_hold &= holds
    raise SystemExit(not all_hold)


if __name__ == "__main__":
    main()
