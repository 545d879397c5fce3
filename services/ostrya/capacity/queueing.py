"""How full a replica may be when requests arrive at random; an objective holds for 95 of 100 requests, by two margins.

- Requests in flight vary like a Poisson count. TPOT and memory are judged at mean + 1.645 sqrt(mean) requests, exceeded
  5 % of the time (square-root staffing), so a large batch needs a smaller margin than a small one.
- Prompts wait for one another. One lane computes them, and its wait is that of an M/D/1 queue: busy for a share rho of
  the time, W > x has probability rho exp(-2 (1 - rho) x / service); the exact mean, and an exponential tail.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf, log, sqrt

from ostrya.capacity.serving import Serving

LATE_RATIO = 0.05
"""Of requests, that may miss the objective."""
BURST_DEVIATIONS = 1.645
"""The normal distribution's 95th percentile, to go with LATE_RATIO."""


class Term(StrEnum):
    """What can forbid, or limit, a load."""

    MEMORY = "memory"
    TTFT = "ttft"
    TPOT = "tpot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What 95 of 100 requests have to see; inf where nothing was asked."""

    ttft_s: float = inf
    """To the first token, waiting included."""
    tpot_s: float = inf
    """Mean over the output tokens of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One slice under this load; `at` is the steady state with n requests in flight."""

    goal: Goal
    at: Callable[[int], Serving]
    max_requests: int

    def mean_requests(self, requests_per_s: float) -> float:
        """In flight when so many arrive; inf if memory cannot hold them. Between whole numbers of requests, linear."""
        if self.at(self.max_requests).requests_per_s < requests_per_s:
            return inf
        above = first(lambda n: self.at(n).requests_per_s >= requests_per_s, self.max_requests)
        upper = self.at(above).requests_per_s
        lower = self.at(above - 1).requests_per_s if above > 1 else 0.0
        return above - 1 + (requests_per_s - lower) / (upper - lower)

    def broken_by(self, requests_per_s: float) -> Term | None:
        """Which term a load of so many requests/s breaks, if any."""
        mean = self.mean_requests(requests_per_s)
        burst = self.max_requests + 1 if mean == inf else burst_of(mean)
        state = self.at(min(burst, self.max_requests))
        if state.tpot_s > self.goal.tpot_s:
            return Term.TPOT
        if burst > self.max_requests:
            return Term.MEMORY
        late_s = self.ttft_s(requests_per_s, state)
        return Term.TTFT if late_s > self.goal.ttft_s or late_s == inf else None

    def ttft_s(self, requests_per_s: float, state: Serving) -> float:
        return state.ttft_s + late_wait_s(requests_per_s=requests_per_s, service_s=state.ttft_s)

    def full_requests(self) -> int:
        """The largest batch within the objective if nothing were random."""

        def over(n: int) -> bool:
            return self.at(n).tpot_s > self.goal.tpot_s or self.at(n).ttft_s > self.goal.ttft_s

        return first(over, self.max_requests + 1) - 1


def burst_of(mean_requests: float) -> int:
    """Requests in flight that are exceeded 5 % of the time."""
    return max(1, ceil(mean_requests + BURST_DEVIATIONS * sqrt(mean_requests)))


def late_wait_s(*, requests_per_s: float, service_s: float) -> float:
    """The wait for a lane that 5 % of arrivals exceed; inf if the lane cannot keep up."""
    busy_ratio = requests_per_s * service_s
    if busy_ratio >= 1:
        return inf
    if busy_ratio <= LATE_RATIO:
        return 0.0
    return service_s * log(busy_ratio / LATE_RATIO) / (2 * (1 - busy_ratio))


def first(holds: Callable[[int], bool], last: int) -> int:
    """The smallest n in 1..last for which `holds`, which stays true once it is; at `last` it is taken to be."""
    low, high = 1, last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def fewest(enough: Callable[[int], bool]) -> int:
    """The smallest count that is `enough`."""
    upper = 1
    while not enough(upper):
        upper *= 2
    return first(enough, upper)
