"""What speculation costs and gives: a round drafts K tokens and verifies K + 1 rows; acceptance decides what is kept.

Acceptance length counts the tokens a round emits, the bonus token included (vLLM's convention): 1 to K + 1.
Per-position rates are the shares of rounds in which position 1, 2, ... was accepted: they never rise, and
length = 1 + their sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from ostrya.capacity.chips import Slice
from ostrya.capacity.memory import MAX_DRAFT_TOKENS, Placement
from ostrya.capacity.spec import Drafter, ModelSpec, Part
from ostrya.capacity.step import PEAK, Efficiency, StepTime, Work, mixed_step_time, step_time
from ostrya.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How a load is decoded: in rounds."""

    num_draft_tokens: int = 0
    acceptance_length: float = 1.0
    """Tokens a round emits."""


PLAIN = Drafting()
"""A token a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One draft and verify of `num_requests` requests."""

    num_requests: int
    num_draft_tokens: int
    draft: tuple[StepTime, ...]
    """Passes of the drafter; empty without one."""
    verify: StepTime

    @property
    def draft_s(self) -> float:
        return sum(step.seconds for step in self.draft)

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify.seconds

    @property
    def num_bytes(self) -> float:
        return sum(step.num_bytes for step in self.draft) + self.verify.num_bytes

    def tokens_per_s(self, length: float) -> float:
        """Of all requests together, at an acceptance length. ConfigError if no round can emit so many."""
        check_length(length, self.num_draft_tokens)
        return self.num_requests * length / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoice:
    """The number of drafted tokens that is fastest; 0 means that speculation does not pay."""

    num_draft_tokens: int
    tokens_per_s: float
    tokens_per_s_by_draft: tuple[float, ...]
    """Index: drafted tokens, from 0."""


def acceptance_length(rates: Sequence[float]) -> float:
    """1 + sum of per-position rates. ConfigError if a rate is outside [0, 1] or higher than the one before it."""
    for rate in rates:
        if not 0 <= rate <= 1:
            raise ConfigError([f"acceptance rate is {rate}; rates must be 0 to 1"])
    for before, after in pairwise(rates):
        if after > before:
            what = "a position is accepted only if the one before it was; give shares of rounds, not conditional rates"
            raise ConfigError([f"acceptance rate rises from {before} to {after}; {what}"])
    return 1 + sum(rates)


def check_length(length: float, num_draft_tokens: int) -> None:
    """ConfigError if a round of K drafted tokens cannot emit `length` on average."""
    if not 1 <= length <= num_draft_tokens + 1:
        limit = f"1 to {num_draft_tokens + 1} with {num_draft_tokens} drafted tokens"
        raise ConfigError([f"acceptance length is {length}; it must be {limit}"])


def draft_problems(spec: ModelSpec, num_draft_tokens: int, length: float | None) -> list[str]:
    """What the model's drafter, or any acceptance, forbids."""
    problems = []
    drafter = spec.drafter
    if drafter and num_draft_tokens > drafter.max_draft_tokens:
        most = f"{drafter.name} drafts at most {drafter.max_draft_tokens}"
        problems.append(f"{num_draft_tokens} tokens to draft are too many; {most}")
    if length is not None and not 1 <= length <= num_draft_tokens + 1:
        limit = f"with {num_draft_tokens} drafted tokens it is from 1 to {num_draft_tokens + 1}"
        problems.append(f"acceptance length is {length:g}; {limit}")
    return problems


def round_time(
    spec: ModelSpec,
    where: Slice,
    *,
    num_draft_tokens: int,
    num_requests: int = 1,
    context_tokens: float = 0.0,
    beside: Work | None = None,
    efficiency: Efficiency = PEAK,
    placement: Placement = Placement.SPREAD,
) -> Round:
    """One round with the model's drafter; 0 drafted tokens are a plain step. `beside`: a chunk of a prompt in the step
    that verifies.

    With no drafter drafting is free, as n-gram and suffix proposers nearly are. A drafter's passes over prompts are not
    counted.
    """
    if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ConfigError([f"drafted tokens are {num_draft_tokens}; they must be 0 to {MAX_DRAFT_TOKENS}"])

    def work(rows: int) -> Work:
        return Work(num_requests=num_requests, rows_per_request=rows, context_tokens=context_tokens)

    draft: tuple[StepTime, ...] = ()
    if spec.drafter is not None and num_draft_tokens:
        rows, passes = (num_draft_tokens, 1) if spec.drafter.one_pass else (1, num_draft_tokens)
        model = _as_model(spec, spec.drafter)
        draft = (step_time(model, where, work(rows), efficiency=efficiency, placement=placement),) * passes
    checked = work(num_draft_tokens + 1)
    return Round(
        num_requests=num_requests,
        num_draft_tokens=num_draft_tokens,
        draft=draft,
        verify=mixed_step_time(spec, where, checked, beside, efficiency=efficiency, placement=placement)
        if beside
        else step_time(spec, where, checked, efficiency=efficiency, placement=placement),
    )


def break_even_length(
    spec: ModelSpec,
    where: Slice,
    *,
    num_draft_tokens: int,
    num_requests: int = 1,
    context_tokens: float = 0.0,
    efficiency: Efficiency = PEAK,
    placement: Placement = Placement.SPREAD,
) -> float:
    """The acceptance length above which a round is faster than plain steps: round time / step time."""
    round_, plain = (
        round_time(
            spec,
            where,
            num_draft_tokens=drafted,
            num_requests=num_requests,
            context_tokens=context_tokens,
            efficiency=efficiency,
            placement=placement,
        )
        for drafted in (num_draft_tokens, 0)
    )
    return round_.seconds / plain.seconds


def best_draft(
    spec: ModelSpec,
    where: Slice,
    rates: Sequence[float],
    *,
    num_requests: int = 1,
    context_tokens: float = 0.0,
    efficiency: Efficiency = PEAK,
    placement: Placement = Placement.SPREAD,
) -> DraftChoice:
    """The fastest K of 0 to len(rates), from per-position acceptance rates."""
    acceptance_length(rates)
    speeds = tuple(
        round_time(
            spec,
            where,
            num_draft_tokens=drafted,
            num_requests=num_requests,
            context_tokens=context_tokens,
            efficiency=efficiency,
            placement=placement,
        ).tokens_per_s(acceptance_length(rates[:drafted]))
        for drafted in range(len(rates) + 1)
    )
    best = max(range(len(speeds)), key=lambda drafted: speeds[drafted])
    return DraftChoice(num_draft_tokens=best, tokens_per_s=speeds[best], tokens_per_s_by_draft=speeds)


def _as_model(spec: ModelSpec, drafter: Drafter) -> ModelSpec:
    """The drafter with the embedding and the head it shares: drafting reads the head again."""
    return ModelSpec(
        name=f"{spec.name}'s {drafter.name}",
        hidden=drafter.hidden,
        layers=drafter.layers,
        vocab_size=spec.vocab_size,
        tied_embeddings=spec.tied_embeddings,
        max_context_tokens=spec.max_context_tokens,
        storage=drafter.storage,
        storage_by_part=MappingProxyType(
            {
                Part.EMBEDDING: spec.storage_of(Part.EMBEDDING),
                Part.HEAD: spec.storage_of(Part.HEAD),
                Part.ROUTED_EXPERTS: drafter.expert_storage or drafter.storage,
            }
        ),
        kv_storage=spec.kv_storage,
        # Taps and Markov heads: read whole for every pass, like norms.
        num_final_norm_params=drafter.num_other_params,
    )
