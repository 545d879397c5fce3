"""What would make a refused load possible. Each remedy is tried before it is told."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from ostrya.capacity.chips import SLICES, Chip, Slice, find_slice
from ostrya.capacity.estimate import FACTORS
from ostrya.capacity.published import Engine
from ostrya.capacity.queueing import Goal, Term, first
from ostrya.capacity.search import Answer, Load, Market, Offer, Refusal, search
from ostrya.capacity.spec import FP8, ModelSpec, with_weights
from ostrya.capacity.speculation import PLAIN, Drafting
from ostrya.capacity.values import duration
from ostrya.capacity.weights import weight_bytes

_RATIO_STEPS = 100
"""Hit ratios are tried in hundredths."""
_LENGTH_STEPS = 10
"""And acceptance lengths in tenths."""
_CHUNKS = (4096, 8192, 16384, 32768)
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
    told = [tried.other_slice(), tried.narrow_weights(), tried.fused(), tried.shorter()]
    if close.term is not Term.MEMORY:
        assert close.ttft_s is not None
        assert close.tpot_s is not None
        told += [tried.hit_ratio(), tried.chunk(), tried.speculation(), tried.objective(close.ttft_s, close.tpot_s)]
    return tuple(one for one in told if one)


def smallest_slice(chip: Chip, num_devices: int) -> Slice | None:
    """Of this chip, with so many devices."""
    return next((one for one in SLICES if one.chip == chip and one.num_devices >= num_devices), None)


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
        """The same work in one kernel, where such a kernel was measured."""
        if self.market.engine is Engine.FUSED:
            return None
        measured = tuple(one for one in self.market.slices if (Engine.FUSED, one.chip.name) in FACTORS)
        best = search(self.spec, self.goal, self.load, replace(self.market, engine=Engine.FUSED, slices=measured)).best
        return f"one fused kernel for all layers (--engine fused): {_named(best)}" if best else None

    def shorter(self) -> str | None:
        """The longest prompt with which the nearest slice does."""
        prompt = self.load.prompt_tokens
        cut = _smallest(1, prompt - 1, lambda cut: self._here(load=replace(self.load, prompt_tokens=prompt - cut)))
        return None if cut is None else f"prompts of at most {prompt - cut:,} tokens, on {self.where.name}"

    def hit_ratio(self) -> str | None:
        """The smallest that would do on the nearest slice."""
        low = int(self.load.hit_ratio * _RATIO_STEPS)
        steps = _smallest(
            low, _RATIO_STEPS, lambda steps: self._here(load=replace(self.load, hit_ratio=steps / _RATIO_STEPS))
        )
        return None if steps is None else f"a hit ratio of {steps / _RATIO_STEPS:.2f} or more, on {self.where.name}"

    def chunk(self) -> str | None:
        """More of a prompt in one step: fewer steps for it, and a longer stall for the others."""
        for tokens in (one for one in _CHUNKS if one > self.market.chunk_tokens):
            if best := self._here(market=replace(self.market, chunk_tokens=tokens)):
                return f"prompts in chunks of {tokens:,} tokens (--chunk {tokens}): {_named(best)}"
        return None

    def speculation(self) -> str | None:
        """The smallest acceptance length that would do on the nearest slice, with all that the drafter can draft."""
        drafter = self.spec.drafter
        if drafter is None or self.market.drafting != PLAIN:
            return None
        most = drafter.max_draft_tokens

        def here(steps: int) -> Offer | None:
            drafting = Drafting(num_draft_tokens=most, acceptance_length=steps / _LENGTH_STEPS)
            return self._here(market=replace(self.market, drafting=drafting))

        steps = _smallest(_LENGTH_STEPS, (most + 1) * _LENGTH_STEPS, here)
        if steps is None:
            return None
        length = f"at an acceptance length of {steps / _LENGTH_STEPS:.1f} or more"
        return f"speculation: {most} tokens drafted by {drafter.name} {length}, on {self.where.name}"

    def objective(self, ttft_s: float, tpot_s: float) -> str | None:
        """A looser one that the nearest slice keeps."""
        relaxed = Goal(
            ttft_s=self.goal.ttft_s if ttft_s <= self.goal.ttft_s else ttft_s * _MARGIN_RATIO,
            tpot_s=self.goal.tpot_s if tpot_s <= self.goal.tpot_s else tpot_s * _MARGIN_RATIO,
        )
        best = self._here(goal=relaxed)
        return f"an objective of {goal_text(relaxed)}: {_named(best)}" if best else None

    def _here(
        self, *, goal: Goal | None = None, load: Load | None = None, market: Market | None = None
    ) -> Offer | None:
        """The offer of the nearest slice under other terms."""
        return search(
            self.spec, goal or self.goal, load or self.load, replace(market or self.market, slices=(self.where,))
        ).best


def _smallest(low: int, high: int, does: Callable[[int], object]) -> int | None:
    """The smallest number from `low` to `high` that does, if what does goes on doing; None if not even `high` does."""
    if low > high or not does(high):
        return None
    return low - 1 + first(lambda count: bool(does(low - 1 + count)), high - low + 1)


def _named(offer: Offer) -> str:
    replicas = "1 replica" if offer.num_replicas == 1 else f"{offer.num_replicas:,} replicas"
    return f"{replicas} on {offer.slice_name}"
