"""How long `ostrya capacity` takes: a report and a search over all slices, of every ready model, and whole commands.

Figures are medians of rounds in this process, imports apart; the commands' are of new processes. Run by
`make bench-capacity`.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from ostrya.capacity.chips import SLICES, Slice
from ostrya.capacity.compare import compare
from ostrya.capacity.facts import Setup
from ostrya.capacity.models import models
from ostrya.capacity.published import Engine
from ostrya.capacity.queueing import Goal
from ostrya.capacity.remedies import remedies
from ostrya.capacity.render import as_text
from ostrya.capacity.report import report
from ostrya.capacity.search import Load, Market, search
from ostrya.capacity.spec import ModelSpec

GOAL_REPORT_S, GOAL_SEARCH_S = 0.3, 2.0
SETUP = Setup(
    context_tokens=4096,
    num_requests=1,
    prompt_tokens=8192,
    engine=Engine.SERVING,
    num_draft_tokens=1,
    acceptance_rates=(0.8,),
)
LOAD = Load(requests_per_s=50.0, prompt_tokens=7000, output_tokens=500, hit_ratio=0.5)
POSSIBLE, IMPOSSIBLE = Goal(ttft_s=1.0, tpot_s=0.05), Goal(ttft_s=1e-3, tpot_s=1e-4)
MARKET = Market(engine=Engine.SERVING)
COMMAND = ("-m", "ostrya.cli.main", "capacity", "--model", "kimi-k3")
REPORT = ("--slice", "tpu7x-16")
SEARCH = ("--slo", "ttft=1s,tpot=50ms", "--rate", "5/s", "--prompt", "8000", "--hit-ratio", "0.5")


def median_s(work: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def reported(spec: ModelSpec, where: Slice) -> str:
    return as_text(report(spec, where, SETUP))


def searched(spec: ModelSpec, goal: Goal) -> None:
    """With what would help, if nothing is found: that is what a person waits for."""
    answer = search(spec, goal, LOAD, MARKET)
    remedies(spec, goal, LOAD, MARKET, answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    slowest_report_s = slowest_search_s = 0.0
    print(f"{'model':22}{'report':>10}{'search':>10}{'refusal':>10}  ms")
    for name, spec in models().items():
        where = next(where for where, row in zip(SLICES, compare(spec, SETUP), strict=True) if row.decoding)
        report_s = median_s(partial(reported, spec, where), rounds)
        search_s, refusal_s = (median_s(partial(searched, spec, goal), rounds) for goal in (POSSIBLE, IMPOSSIBLE))
        print(f"{name:22}{report_s * 1e3:10.1f}{search_s * 1e3:10.1f}{refusal_s * 1e3:10.1f}")
        slowest_report_s = max(slowest_report_s, report_s)
        slowest_search_s = max(slowest_search_s, search_s, refusal_s)
    for what, words in (("a report", REPORT), ("a search", SEARCH)):
        command = (sys.executable, *COMMAND, *words)
        taken_s = median_s(partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL), rounds)
        print(f"{what}, the whole command: {taken_s:.2f} s")
    good = slowest_report_s <= GOAL_REPORT_S and slowest_search_s <= GOAL_SEARCH_S
    print(
        f"slowest report {slowest_report_s:.3f} s (goal: at most {GOAL_REPORT_S}), "
        f"slowest search over all slices {slowest_search_s:.3f} s (goal: at most {GOAL_SEARCH_S})"
    )
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
