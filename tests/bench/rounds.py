"""Rounds in which all sides take turns, and what follows from their times. Called by tests.bench.peers.

A ratio is the median of the rounds' ratios: what slows the machine for a while slows both sides of a round.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.bench.sides import NotRun, Side

MAX_ROUNDS = 15
"""With more, two rows would have the same prompt."""
SETTLE_S = 0.05
"""Before a turn: threads of the side before spin for some milliseconds when their work is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to time: the answer to so many prompts at once, and, if it is longer, its first tokens alone."""

    what: str
    batch: int
    prompt_tokens: int
    num_new: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each round, by side. A side that is lost has fewer."""

    case: Case
    whole: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    net: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Without the first tokens' time; of answers of one token the whole."""

    def best(self, names: Iterable[str]) -> str | None:
        """The fastest of those that have figures."""
        return min(
            (name for name in names if self.net[name]), key=lambda name: statistics.median(self.net[name]), default=None
        )

    def ratio(self, ours: str, peer: str) -> float:
        """How many times as fast ours is."""
        return statistics.median(b / a for a, b in zip(self.net[ours], self.net[peer], strict=False))

    def tokens_per_s(self, name: str) -> tuple[float, float]:
        """Net, and of the whole: prompt tokens if the answers are of one token, else new ones."""
        case = self.case
        whole = case.batch * (case.prompt_tokens if case.num_new == 1 else case.num_new)
        net = whole if case.num_new == 1 else whole - case.batch
        return net / statistics.median(self.net[name]), whole / statistics.median(self.whole[name])


class Sides:
    """Those that run, in their order, and why the others do not."""

    def __init__(self) -> None:
        self.running: dict[str, Side] = {}
        self.not_run: dict[str, str] = {}

    def lose(self, name: str, why: NotRun) -> None:
        """A peer is left out from now on; without a side of our own there is nothing to compare: raises."""
        if name.startswith("ours"):
            raise why
        if side := self.running.pop(name, None):
            side.close()
        self.not_run[name] = str(why)
        print(f"{name}: not run: {why}", flush=True)

    def turn(self, name: str, prompts: Sequence[Sequence[int]], num_new: int) -> float | None:
        """Seconds; None when it is lost."""
        time.sleep(SETTLE_S)
        try:
            return self.running[name].generate_s(prompts, num_new)
        except NotRun as error:
            self.lose(name, error)
            return None

    def close(self) -> None:
        for side in self.running.values():
            side.close()


def measure(case: Case, sides: Sides, *, salt: int, rounds: int) -> Times:
    """All rounds of one case, after one turn each that does not count."""
    times = Times(case)
    for name in list(sides.running):
        sides.turn(name, prompts(case.batch, case.prompt_tokens, salt=salt), min(2, case.num_new))
    for number in range(1, rounds + 1):
        order = list(sides.running)
        for name in order if number % 2 else reversed(order):
            one, other = (prompts(case.batch, case.prompt_tokens, salt=salt + 2 * number + part) for part in (0, 1))
            whole_s = sides.turn(name, one, case.num_new)
            first_s = 0.0 if case.num_new == 1 or whole_s is None else sides.turn(name, other, 1)
            if whole_s is not None and first_s is not None:
                times.whole[name].append(whole_s)
                times.net[name].append(whole_s - first_s)
    return times


def prompts(count: int, length: int, *, salt: int) -> list[list[int]]:
    """Token ids without meaning; another salt shares no prefix."""
    return [[(7919 * (salt + 31 * row + 1) + 37 * at) % 40_000 + 100 for at in range(length)] for row in range(count)]
