"""What a published measurement is: which model, where, under which load, and what it is used for.

published.py has all of them.
"""

from dataclasses import dataclass
from enum import StrEnum

from ostrya.capacity.layers import Part
from ostrya.capacity.memory import CHUNK_TOKENS
from ostrya.capacity.spec import Storage


class Use(StrEnum):
    """What a published point is used for."""

    FITTED = "fitted"
    HELD_OUT = "held out"
    NOT_COMPARABLE = "not comparable"


class Measure(StrEnum):
    """What the published figure is."""

    TOKENS_PER_S = "tok/s"
    """Output tokens of all requests, decoding alone."""
    TPOT_MS = "ms TPOT"
    """Time per output token under a load of prompts and answers."""
    WAVE_TPOT_MS = "ms TPOT, waves"
    """The same where all requests have equal lengths: they start together, and no prompt disturbs decoding."""
    WAVE_TTFT_MS = "ms TTFT, waves"
    """Time to first token, mean over requests that arrive together and whose prompts are computed one by one."""
    WAVE_TOKENS_PER_S = "tok/s, waves"
    """Output tokens of all requests, from the arrival of a wave to its end."""
    SERVED_TOKENS_PER_S = "served tok/s"
    """Output tokens of all requests under a load of prompts and answers."""


class Engine(StrEnum):
    """Whose efficiency a point shows."""

    FUSED = "fused"
    """One kernel for all layers, dense caches, a handful of requests (Inferact/tpu-megakernels)."""
    SERVING = "serving"
    """Paged caches, continuous batching (tpu-inference, SGLang-JAX)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published figure and the set-up it was measured in."""

    name: str
    engine: Engine
    model: str
    """A name in models; only a description where the point is not comparable."""
    slice_name: str
    measure: Measure
    value: float
    source: str
    use: Use
    num_requests: int = 1
    prompt_tokens: int = 1
    output_tokens: int = 1024
    weights: tuple[tuple[Part, Storage], ...] = ()
    """Parts that were stored otherwise than in the ready spec."""
    num_draft_tokens: int = 0
    acceptance_length: float = 1.0
    chunk_tokens: int = CHUNK_TOKENS
    forced: bool = False
    """The acceptance was set by the benchmark, not earned by a drafter."""
    repeats_fitted: bool = False
    """The same measured time as a fitted point, in other words: no evidence of its own."""
    reason: str = ""
    """Why it is held out, known to be missed, or not comparable."""

    @property
    def generation(self) -> str:
        """Of the chips."""
        return self.slice_name.rpartition("-")[0]
