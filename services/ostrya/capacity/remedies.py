"""What would make a refused load possible. Each remedy is tried before it is told."""

from dataclasses import dataclass, replace
from math import inf

from ostrya.capacity.chips import SLICES, Slice, find_slice
from ostrya.capacity.memory import fit
from ostrya.capacity.published import Engine
from ostrya.capacity.queueing import Goal, Term
from ostrya.capacity.search import Answer, Load, Market, Offer, Refusal, search
from ostrya.capacity.serving import mean_context_tokens
from ostrya.capacity.spec import FP8, ModelSpec, with_weights
from ostrya.capacity.speculation import PLAIN, round_time
from ostrya.capacity.step import Work, step_time
from ostrya.capacity.values import duration
from ostrya.capacity.weights import weight_bytes

_RATIO_STEPS = 100
"""Hit ratios are tried in hundredths."""
_MARGIN_RATIO = 1.05
"""By which a relaxed objective is looser than what a request alone takes, so that a second one may come."""


def nearest(answer: Answer) -> Refusal | None:
    """The slice that misses by the smallest share, one that holds the model if there is any."""
    return min(
        answer.refusals,
        key=lambda one: (one.term is Term.MEMORY, one.value / one.allowed, one.slice_name),
        default=None,
    )


def remedies(spec: ModelSpec, goal: Goal, load: Load, market: Market, answer: Answer) -> tuple[str, ...]:
    """Sentences, for an answer without offers; empty if nothing helps."""
    close = nearest(answer)
    if close is None or answer.offers:
        return ()
    tried = _Tried(spec=spec, goal=goal, load=load, market=market, where=find_slice(close.slice_name))
    told = [tried.other_slice(), tried.narrow_weights(), tried.fused()]
    if close.term is Term.MEMORY:
        told.append(tried.shorter())
    else:
        assert close.ttft_s is not None
        assert close.tpot_s is not None
        told.append(tried.hit_ratio())
        if close.ttft_s <= goal.ttft_s:
            told.append(tried.speculation(close.tpot_s))
        told.append(tried.objective(close.ttft_s, close.tpot_s))
    return tuple(one for one in told if one)


def goal_text(goal: Goal) -> str:
    """ttft=1 s, tpot=20 ms."""
    terms = (("ttft", goal.ttft_s), ("tpot", goal.tpot_s))
    return ", ".join(f"{name}={duration(seconds)}" for name, seconds in terms if seconds < inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """Every method: a sentence if it helps, else None."""

    spec: ModelSpec
    goal: Goal
    load: Load
    market: Market
    where: Slice
    """The slice that is nearest to the objective."""

    def other_slice(self) -> str | None:
        if len(self.market.slices) >= len(SLICES):
            return None
        best = search(self.spec, self.goal, self.load, replace(self.market, slices=SLICES)).best
        return f"another slice: {_named(best)}" if best else None

    def narrow_weights(self) -> str | None:
        narrow = with_weights(self.spec, FP8)
        if weight_bytes(narrow) >= weight_bytes(self.spec):
            return None
        best = search(narrow, self.goal, self.load, self.market).best
        return f"weights in fp8 (--dtype fp8): {_named(best)}" if best else None

    def fused(self) -> str | None:
        """The same work in one kernel."""
        if self.market.engine is Engine.FUSED:
            return None
        best = search(self.spec, self.goal, self.load, replace(self.market, engine=Engine.FUSED)).best
        return f"one fused kernel, published to batch 8 (--engine fused): {_named(best)}" if best else None

    def shorter(self) -> str | None:
        """Prompt and answer so much shorter that one request fits."""
        drafted = self.market.drafting.num_draft_tokens
        room = fit(self.spec, self.where, context_tokens=0, num_draft_tokens=drafted, placement=self.market.placement)
        if not (room.max_requests and room.max_context_tokens):
            return None
        return f"at most {room.max_context_tokens:,} tokens of prompt and answer together, on {self.where.name}"

    def hit_ratio(self) -> str | None:
        """The smallest that would do on the nearest slice."""
        if not self._here(load=replace(self.load, hit_ratio=1.0)):
            return None
        low, high = int(self.load.hit_ratio * _RATIO_STEPS), _RATIO_STEPS
        while low < high:
            middle = (low + high) // 2
            enough = self._here(load=replace(self.load, hit_ratio=middle / _RATIO_STEPS))
            low, high = (low, middle) if enough else (middle + 1, high)
        return f"a hit ratio of {high / _RATIO_STEPS:.2f} or more, on {self.where.name}"

    def speculation(self, tpot_s: float) -> str | None:
        """The acceptance length that would bring a request alone below the objective."""
        drafter = self.spec.drafter
        if drafter is None or self.market.drafting != PLAIN:
            return None
        context_tokens = mean_context_tokens(
            self.spec, self.load.prompt_tokens, self.load.output_tokens, drafter.max_draft_tokens
        )
        efficiency, placement = self.market.efficiency, self.market.placement
        work = Work(num_requests=1, context_tokens=context_tokens)
        plain_s = step_time(self.spec, self.where, work, efficiency=efficiency, placement=placement).seconds
        round_s = round_time(
            self.spec,
            self.where,
            num_draft_tokens=drafter.max_draft_tokens,
            context_tokens=context_tokens,
            efficiency=efficiency,
            placement=placement,
        ).seconds
        # What prompts of others add to an output token stays as it is.
        left_s = self.goal.tpot_s - (tpot_s - plain_s)
        if left_s <= 0 or (length := round_s / left_s) > drafter.max_draft_tokens + 1:
            return None
        drafts = f"{drafter.max_draft_tokens} tokens drafted by {drafter.name}"
        return f"speculation: {drafts} at an acceptance length of {length:.1f} or more, on {self.where.name}"

    def objective(self, ttft_s: float, tpot_s: float) -> str | None:
        """A looser one that the nearest slice keeps."""
        relaxed = Goal(
            ttft_s=self.goal.ttft_s if ttft_s <= self.goal.ttft_s else ttft_s * _MARGIN_RATIO,
            tpot_s=self.goal.tpot_s if tpot_s <= self.goal.tpot_s else tpot_s * _MARGIN_RATIO,
        )
        best = self._here(goal=relaxed)
        return f"an objective of {goal_text(relaxed)}: {_named(best)}" if best else None

    def _here(self, *, goal: Goal | None = None, load: Load | None = None) -> Offer | None:
        market = replace(self.market, slices=(self.where,))
        return search(self.spec, goal or self.goal, load or self.load, market).best


def _named(offer: Offer) -> str:
    replicas = "1 replica" if offer.num_replicas == 1 else f"{offer.num_replicas} replicas"
    return f"{replicas} on {offer.slice_name}"
