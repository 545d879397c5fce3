"""What fits: keys and values per token, state per request, and so the largest batch and context on a slice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import floor

from ostrya.capacity.chips import SLICES, Slice
from ostrya.capacity.layers import Mixer
from ostrya.capacity.spec import Layers, ModelSpec
from ostrya.capacity.weights import drafter_bytes, weight_bytes
from ostrya.errors import ConfigError

USABLE_RATIO = 0.9
"""Of HBM, for all that is placed there: vLLM's default gpu_memory_utilization. At 0.977 a compiler's own scratch space
did not fit any more (vllm-project/tpu-inference#2923)."""
CHUNK_TOKENS = 2048
"""Of a prompt in one step, unless asked otherwise: as sgl-project/sglang-jax's cookbook serves GLM-4.5-Air. The largest
step, for which activations need room, has one chunk and what all requests decode."""
MAX_REQUESTS = 1_000_000
"""More than this at once is a typing error."""
MAX_DRAFT_TOKENS = 64
"""Beyond any drafter that exists: suffix decoding stops at about 32."""
ACTIVATION_BYTES = 2
"""bf16."""
_LIVE_ACTIVATIONS = 8
"""Vectors as wide as the model that one token keeps at a time, on every device: residual, norms, q/k/v and gate,
outputs before and after a collective, double-buffered. Assumed; compilers differ."""
_LOGIT_BYTES = 4


class Placement(StrEnum):
    """Where a request's cache and state lie."""

    SPREAD = "spread"
    """Once in the slice: requests (data-parallel attention) or positions are spread over the devices."""
    TENSOR_PARALLEL = "tensor-parallel"
    """Heads are spread; on more devices than KV heads, heads are copied. An MLA latent is copied to every device."""


class DoesNotFit(ConfigError):
    """The model, or the batch asked for, is larger than the slice: by how many bytes, and which slice would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bytes over the whole slice."""

    usable_bytes: float
    weights_bytes: float
    drafter_bytes: float
    """0 unless speculation is asked for."""
    scratch_bytes: float
    cache_bytes_per_request: float
    """At the context asked for, copies counted."""
    state_bytes_per_request: float
    """All checkpoints that speculation keeps."""
    num_requests: int
    """Asked for."""
    max_requests: int
    """At the context asked for; 0 if the weights alone do not fit."""
    max_context_tokens: int
    """At the number of requests asked for; at most the model's own; 0 if not even an empty context fits."""

    @property
    def needed_bytes(self) -> float:
        per_request = self.cache_bytes_per_request + self.state_bytes_per_request
        return self.weights_bytes + self.drafter_bytes + self.scratch_bytes + self.num_requests * per_request

    @property
    def free_bytes(self) -> float:
        """Negative: how much is missing."""
        return self.usable_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0


def num_copies(mixer: Mixer, *, num_devices: int, placement: Placement) -> float:
    """How often the slice holds one request's cache of this layer."""
    if placement is Placement.SPREAD:
        return 1.0
    return max(1.0, num_devices / mixer.num_cache_shards)


def kv_bytes_per_token(spec: ModelSpec) -> float:
    """What one more token of context adds, once every window is full; one copy."""
    # Beyond all windows the cache grows linearly, so any two long contexts give the slope.
    long = float(spec.max_context_tokens)
    return (kv_bytes(spec, 2 * long) - kv_bytes(spec, long)) / long


def window_bytes(spec: ModelSpec) -> float:
    """What one request's full windows hold; one copy."""
    return round(kv_bytes(spec, spec.max_context_tokens) - kv_bytes_per_token(spec) * spec.max_context_tokens)


def kv_bytes(
    spec: ModelSpec,
    context_tokens: float,
    *,
    num_devices: int = 1,
    placement: Placement = Placement.SPREAD,
    drafting: bool = False,
) -> float:
    """What one request keeps in its cache after so many tokens, copies counted; the drafter's too where it drafts."""
    drafter = spec.drafter.layers if drafting and spec.drafter else ()
    values = sum(
        group.count
        * group.mixer.num_cached_values(context_tokens)
        * num_copies(group.mixer, num_devices=num_devices, placement=placement)
        for group in (*spec.layers, *drafter)
    )
    return values * spec.kv_storage.num_bytes


def state_bytes(spec: ModelSpec, *, num_devices: int = 1, placement: Placement = Placement.SPREAD) -> float:
    """Recurrent state of one request, whatever its length, copies counted; the convolutions' few values are not."""
    return sum(layer_state_bytes(spec, group, num_devices=num_devices, placement=placement) for group in spec.layers)


def layer_state_bytes(spec: ModelSpec, group: Layers, *, num_devices: int, placement: Placement) -> float:
    """Recurrent state of one request in all layers of the group; what a step moves (costs.py) is a multiple of it."""
    copies = num_copies(group.mixer, num_devices=num_devices, placement=placement)
    return group.count * group.mixer.num_state_values * copies * spec.state_storage.num_bytes


def activation_bytes(spec: ModelSpec) -> float:
    """What one token of a step keeps on every device."""
    return spec.hidden * ACTIVATION_BYTES * _LIVE_ACTIVATIONS


def logit_bytes(spec: ModelSpec) -> float:
    """Of one row. The head is split over the vocabulary, so logits exist once; sampling keeps a second copy."""
    return 2 * spec.vocab_size * _LOGIT_BYTES


def fit(
    spec: ModelSpec,
    where: Slice,
    *,
    context_tokens: int,
    num_requests: int = 1,
    num_draft_tokens: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
    placement: Placement = Placement.SPREAD,
) -> Fit:
    """What the slice's memory holds. ConfigError for numbers that make no sense; not fitting is a value, no error."""
    _check(spec, context_tokens, num_requests, num_draft_tokens)
    usable = where.hbm_bytes * USABLE_RATIO
    weights, drafter = weight_bytes(spec), drafter_bytes(spec) if num_draft_tokens else 0.0
    rows = num_draft_tokens + 1
    row = activation_bytes(spec) * where.num_devices
    scratch = rows * (row + logit_bytes(spec))
    # One per row of a round, of which acceptance chooses.
    state = state_bytes(spec, num_devices=where.num_devices, placement=placement) * (1 + num_draft_tokens)

    def cache(tokens: int) -> float:
        return kv_bytes(spec, tokens, num_devices=where.num_devices, placement=placement, drafting=num_draft_tokens > 0)

    room = usable - weights - drafter - chunk_tokens * row
    per_request = cache(context_tokens) + state + scratch
    return Fit(
        usable_bytes=usable,
        weights_bytes=weights,
        drafter_bytes=drafter,
        scratch_bytes=chunk_tokens * row + num_requests * scratch,
        cache_bytes_per_request=cache(context_tokens),
        state_bytes_per_request=state,
        num_requests=num_requests,
        max_requests=min(MAX_REQUESTS, max(0, floor(room / per_request))),
        max_context_tokens=_longest(spec, lambda tokens: num_requests * (cache(tokens) + state + scratch) <= room),
    )


def require_fit(
    spec: ModelSpec,
    where: Slice,
    *,
    context_tokens: int,
    num_requests: int = 1,
    num_draft_tokens: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
    placement: Placement = Placement.SPREAD,
    candidates: Sequence[Slice] = SLICES,
) -> Fit:
    """As fit(), but DoesNotFit says by how many bytes, and the smallest slice of the same generation that would do."""

    def on(slice_: Slice) -> Fit:
        return fit(
            spec,
            slice_,
            context_tokens=context_tokens,
            num_requests=num_requests,
            num_draft_tokens=num_draft_tokens,
            chunk_tokens=chunk_tokens,
            placement=placement,
        )

    found = on(where)
    if found.fits:
        return found
    larger = sorted(
        (other for other in candidates if other.chip.name == where.chip.name), key=lambda other: other.num_chips
    )
    enough = next((other.name for other in larger if on(other).fits), None)
    would = f"{enough} would do" if enough else f"no {where.chip.name} slice would do"
    asked = f"{spec.name} with {num_requests} x {context_tokens} tokens"
    needs = f"needs {found.needed_bytes / 1e9:.1f} GB of {where.name}'s {found.usable_bytes / 1e9:.1f} GB usable"
    raise DoesNotFit([f"{asked} {needs}: {-found.free_bytes:.0f} bytes too many; {would}"])


def _check(spec: ModelSpec, context_tokens: int, num_requests: int, num_draft_tokens: int) -> None:
    problems = []
    if not 0 <= context_tokens <= spec.max_context_tokens:
        limit = f"0 to {spec.max_context_tokens}, the limit of {spec.name}"
        problems.append(f"context is {context_tokens} tokens; it must be {limit}")
    if not 1 <= num_requests <= MAX_REQUESTS:
        problems.append(f"number of requests is {num_requests}; it must be 1 to {MAX_REQUESTS}")
    if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        problems.append(f"drafted tokens are {num_draft_tokens}; they must be 0 to {MAX_DRAFT_TOKENS}")
    if problems:
        raise ConfigError(problems)


def _longest(spec: ModelSpec, fits: Callable[[int], bool]) -> int:
    """The most tokens for which `fits` holds, by bisection: it never becomes true again once false."""
    low, high = 0, spec.max_context_tokens
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
