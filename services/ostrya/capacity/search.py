"""The cheapest slice and number of replicas that keep an objective under a load, or which term forbids it.

Uses the estimate, never the limit, and the margins of queueing.py. Not counted: that replicas share bursts through the
router, and that requests with a common prefix share its cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from ostrya.capacity.chips import SLICES, Slice
from ostrya.capacity.estimate import efficiency
from ostrya.capacity.memory import CHUNK_TOKENS, Placement, fit
from ostrya.capacity.published import Engine
from ostrya.capacity.queueing import Goal, Replica, Term, burst_of, fewest
from ostrya.capacity.serving import Serving, mean_context_tokens, num_cached_tokens, prefill, serving
from ostrya.capacity.spec import ModelSpec
from ostrya.capacity.speculation import PLAIN, Drafting, draft_problems, round_time
from ostrya.capacity.step import Efficiency
from ostrya.errors import ConfigError

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What arrives, at random, over all replicas."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    hit_ratio: float = 0.0
    """Of prompt tokens, that come from the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """What there is to choose from, and how it is judged."""

    engine: Engine
    """Whose efficiency is expected."""
    slices: Sequence[Slice] = SLICES
    prices: Mapping[str, float] | None = None
    """Per chip-hour, by generation; generations without one are left out. None: fewest chips win."""
    placement: Placement = Placement.SPREAD
    chunk_tokens: int = CHUNK_TOKENS
    drafting: Drafting = PLAIN

    def efficiency(self, where: Slice) -> Efficiency:
        """What to expect on a slice."""
        return efficiency(self.engine, where.chip.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """So many replicas on one kind of slice. Figures are of one replica unless the name says otherwise."""

    slice_name: str
    generation: str
    num_replicas: int
    num_chips_total: int
    price_per_hour_total: float | None
    """In the currency of the prices; None without one."""
    price_per_million_output_tokens: float | None
    requests_per_s: float
    mean_requests: float
    """In flight."""
    burst_requests: int
    """In flight, exceeded 5 % of the time; TTFT and TPOT are of this batch."""
    max_requests: int
    """That memory and the objective leave room for."""
    utilisation_ratio: float
    """Of the requests/s of a replica that is always at max_requests."""
    ttft_s: float
    tpot_s: float
    limited_by: Term | None
    """What one replica fewer would break; None if one is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A slice on which no number of replicas helps."""

    slice_name: str
    generation: str
    term: Term
    value: float
    """What the slice needs (bytes) or takes for a single request (seconds)."""
    allowed: float
    ttft_s: float | None = None
    """Of a request alone on the slice; None where the model does not fit."""
    tpot_s: float | None = None
    bound_by: str | None = None
    """The largest part of the decoding step, or of the prompt's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Offers, the cheapest first, and why the other slices are out."""

    offers: tuple[Offer, ...]
    refusals: tuple[Refusal, ...]

    @property
    def best(self) -> Offer | None:
        return self.offers[0] if self.offers else None

    @property
    def best_by_generation(self) -> tuple[Offer, ...]:
        found: dict[str, Offer] = {}
        for offer in self.offers:
            found.setdefault(offer.generation, offer)
        return tuple(found.values())


def search(spec: ModelSpec, goal: Goal, load: Load, market: Market) -> Answer:
    """Every slice that can carry the load, the cheapest first. ConfigError for numbers that make no sense."""
    check(spec, goal, load, market)
    offers: list[Offer] = []
    refusals: list[Refusal] = []
    for where in market.slices:
        if market.prices is not None and where.chip.name not in market.prices:
            continue
        found = _on(spec, where, goal, load, market)
        if isinstance(found, Offer):
            offers.append(found)
        else:
            refusals.append(found)

    def rank(offer: Offer) -> tuple[float, int, float]:
        return offer.price_per_hour_total or 0.0, offer.num_chips_total, offer.tpot_s

    return Answer(offers=tuple(sorted(offers, key=rank)), refusals=tuple(refusals))


def check(spec: ModelSpec, goal: Goal, load: Load, market: Market) -> None:
    """ConfigError with all that makes no sense."""
    drafting = market.drafting
    problems = draft_problems(spec, drafting.num_draft_tokens, drafting.acceptance_length)
    for name, seconds in (("ttft", goal.ttft_s), ("tpot", goal.tpot_s)):
        if not seconds > 0:
            problems.append(f"{name} is {seconds:g} s; it must be above 0")
    if not 0 < load.requests_per_s < inf:
        problems.append(f"the rate is {load.requests_per_s:g} requests/s; it must be above 0 and finite")
    if load.prompt_tokens < 1 or load.output_tokens < 1:
        counts = f"{load.prompt_tokens} and {load.output_tokens}"
        problems.append(f"prompt and output are {counts} tokens; each must be 1 or more")
    if not 0 <= load.hit_ratio <= 1:
        problems.append(f"the hit ratio is {load.hit_ratio:g}; it must be from 0 to 1")
    context, most = load.prompt_tokens + load.output_tokens, spec.max_context_tokens
    if context > most:
        problems.append(f"prompt and output are {context:,} tokens together; {spec.name}'s limit is {most:,}")
    if load.output_tokens == 1 and goal.tpot_s < inf:
        problems.append("an output of 1 token is the prompt's last step and has no tpot; leave tpot out")
    if problems:
        raise ConfigError(problems)


def _on(spec: ModelSpec, where: Slice, goal: Goal, load: Load, market: Market) -> Offer | Refusal:
    """One slice."""
    context_tokens = load.prompt_tokens + load.output_tokens
    room = fit(
        spec,
        where,
        context_tokens=context_tokens,
        num_draft_tokens=market.drafting.num_draft_tokens,
        chunk_tokens=market.chunk_tokens,
        placement=market.placement,
    )
    out = Refusal(
        slice_name=where.name,
        generation=where.chip.name,
        term=Term.MEMORY,
        value=room.needed_bytes,
        allowed=room.usable_bytes,
    )
    if room.max_requests < 1:
        return out

    @cache
    def at(num_requests: int) -> Serving:
        return serving(
            spec,
            where,
            num_requests=num_requests,
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            hit_ratio=load.hit_ratio,
            drafting=market.drafting,
            chunk_tokens=market.chunk_tokens,
            efficiency=market.efficiency(where),
            placement=market.placement,
        )

    alone = at(1)
    terms = ((Term.TPOT, alone.tpot_s, goal.tpot_s), (Term.TTFT, alone.ttft_s, goal.ttft_s))
    term, value, allowed = max(terms, key=lambda one: one[1] / one[2])
    if value > allowed:
        return replace(
            out,
            term=term,
            value=value,
            allowed=allowed,
            ttft_s=alone.ttft_s,
            tpot_s=alone.tpot_s,
            bound_by=_bound_by(spec, where, term, load, market),
        )
    replica = Replica(goal=goal, at=at, max_requests=room.max_requests)
    # Enough replicas always do: a request alone keeps the objective, and then hardly any meets another.
    num_replicas = fewest(lambda count: replica.broken_by(load.requests_per_s / count) is None)
    return _offer(where, load, replica, num_replicas, market.prices)


def _bound_by(spec: ModelSpec, where: Slice, term: Term, load: Load, market: Market) -> str:
    """What takes longest for a request alone."""
    if term is Term.TPOT:
        drafted = market.drafting.num_draft_tokens
        return round_time(
            spec,
            where,
            num_draft_tokens=drafted,
            context_tokens=mean_context_tokens(spec, load.prompt_tokens, load.output_tokens, drafted),
            efficiency=market.efficiency(where),
            placement=market.placement,
        ).verify.bound_by
    return (
        prefill(
            spec,
            where,
            load.prompt_tokens,
            cached_tokens=num_cached_tokens(load.prompt_tokens, load.hit_ratio),
            chunk_tokens=market.chunk_tokens,
            efficiency=market.efficiency(where),
            placement=market.placement,
        )
        .steps[0]
        .bound_by
    )


def _offer(where: Slice, load: Load, replica: Replica, num_replicas: int, prices: Mapping[str, float] | None) -> Offer:
    requests_per_s = load.requests_per_s / num_replicas
    mean = replica.mean_requests(requests_per_s)
    burst = burst_of(mean)
    full = replica.full_requests()
    num_chips = num_replicas * where.num_chips
    price = None if prices is None else num_chips * prices[where.chip.name]
    output_tokens_per_hour = load.requests_per_s * load.output_tokens * _SECONDS_PER_HOUR
    return Offer(
        slice_name=where.name,
        generation=where.chip.name,
        num_replicas=num_replicas,
        num_chips_total=num_chips,
        price_per_hour_total=price,
        price_per_million_output_tokens=None if price is None else price / output_tokens_per_hour * 1e6,
        requests_per_s=requests_per_s,
        mean_requests=mean,
        burst_requests=burst,
        max_requests=full,
        utilisation_ratio=requests_per_s / replica.at(full).requests_per_s,
        ttft_s=replica.ttft_s(requests_per_s, replica.at(burst)),
        tpot_s=replica.at(burst).tpot_s,
        limited_by=replica.broken_by(load.requests_per_s / (num_replicas - 1)) if num_replicas > 1 else None,
    )
