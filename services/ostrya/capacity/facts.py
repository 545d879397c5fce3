"""Every figure that `ostrya capacity` tells of a model on a slice; report.py fills them in, render.py makes text.

The classes are the JSON's schema: field names are its keys, with units, and what has a limit has an estimate beside it.
"""

from dataclasses import dataclass

from ostrya.capacity.memory import CHUNK_TOKENS, Placement
from ostrya.capacity.published import Engine
from ostrya.capacity.speculation import acceptance_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is asked."""

    context_tokens: int
    """In the cache of each request while it decodes."""
    num_requests: int
    prompt_tokens: int
    """Of the prompt whose time to first token is told."""
    engine: Engine
    """Whose efficiency the estimate has."""
    placement: Placement = Placement.SPREAD
    chunk_tokens: int = CHUNK_TOKENS
    """Of a prompt in one step; the limit computes it whole."""
    num_draft_tokens: int = 0
    """0: no speculation."""
    acceptance_rates: tuple[float, ...] = ()
    """By position; empty if unknown."""
    acceptance_length: float | None = None
    """Tokens a round emits, if known without rates."""

    @property
    def length(self) -> float | None:
        """Tokens a round emits, from either; None if neither is known."""
        rates = self.acceptance_rates[: self.num_draft_tokens]
        return acceptance_length(rates) if rates else self.acceptance_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """What physics allows, and what to expect."""

    limit: float
    estimate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """The weights of one part."""

    part: str
    num_params: int
    num_params_active: int
    storage: str
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model is, wherever it runs."""

    name: str
    num_layers: int
    max_context_tokens: int
    num_params: int
    num_params_active_decode: int
    num_params_active_prefill: int
    num_params_active_with_embedding: int | None
    """While decoding, the looked-up embedding counted too; None unless its makers count so."""
    parts: tuple[PartFacts, ...]
    """The largest first."""
    weights_bytes: float
    drafter: str | None
    drafter_bytes: float
    kv_storage: str
    kv_bytes_per_token: float
    """What one more token adds beyond all windows."""
    window_bytes_per_request: float
    """What full windows hold."""
    state_storage: str
    state_bytes_per_request: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFacts:
    """What the slice is."""

    name: str
    generation: str
    topology: str
    """Value of the node label cloud.google.com/gke-tpu-topology."""
    accelerator: str
    """Value of the node label cloud.google.com/gke-tpu-accelerator."""
    machine_type: str
    num_chips: int
    num_hosts: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    """By dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitFacts:
    """Bytes over the whole slice, at the batch and context asked for."""

    hbm_bytes: int
    usable_bytes: float
    weights_bytes: float
    drafter_bytes: float
    scratch_bytes: float
    cache_bytes: float
    state_bytes: float
    free_bytes: float
    max_requests: int
    max_context_tokens: int
    max_requests_by_placement: dict[str, int]
    """At the context asked for, whichever placement was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Plain decoding at one batch."""

    num_requests: int
    tpot_s: Both
    tokens_per_s: Both
    tokens_per_s_per_user: Both
    tokens_per_s_per_chip: Both


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, alone on the slice and without a prefix hit."""

    prompt_tokens: int
    ttft_s: Both
    prefill_tokens_per_s: Both
    limit_bound_by: str
    """What most of the limit goes to."""
    bound_by: str
    """As limit_bound_by, of the estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One term of a decoding step."""

    name: str
    num_bytes: float
    num_flops: float
    seconds: Both
    share_ratio: Both
    bound_by: str
    """In the estimate: memory or compute, or the name again where neither counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Rounds of K drafted tokens beside plain steps."""

    num_draft_tokens: int
    drafter: str | None
    """None: drafting is taken as free."""
    acceptance_length: float | None
    """None: unknown, and so are speeds."""
    round_s: Both
    break_even_length: Both
    """Round time / step time: the acceptance length above which speculation pays."""
    tokens_per_s: Both | None
    speedup_ratio: Both | None
    tokens_per_s_by_draft: tuple[Both, ...]
    """Index: drafted tokens, from 0; empty without acceptance rates by position."""
    best_num_draft_tokens: int | None
    """By the estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """What it is worth to find the head of a prompt in the cache."""

    hit_tokens: int
    saves_s: Both


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One model on one slice."""

    model: ModelFacts
    slice: SliceFacts
    setup: Setup
    fitted_generations: tuple[str, ...]
    """Of the points behind the estimate; on another one it is carried over."""
    fitted_num_chips: tuple[int, ...]
    """Of the slices behind the estimate."""
    fitted_min_requests: int
    """The smallest batch behind the estimate."""
    fitted_max_requests: int
    """The largest batch behind the estimate."""
    warning: str | None
    """How the estimate reaches beyond them."""
    fit: FitFacts
    decoding: Decoding
    prompt: Prompt
    bounds: tuple[Bound, ...]
    """Of the decoding step; the largest of the estimate first."""
    bound_by: str
    batches: tuple[Decoding, ...]
    """At the context asked for, up to the largest batch that fits."""
    speculation: Speculation | None
    prefix_hits: tuple[PrefixHit, ...]
