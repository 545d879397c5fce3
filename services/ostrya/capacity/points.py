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
    WAVE_ITL_MS = "ms ITL, waves"
    """Time between tokens where all requests have equal lengths: a wave arrives together, its prompts are computed one
    by one, and then all decode together."""
    WAVE_TPOT_MS = "ms TPOT, waves"
    """In such waves, the mean over requests of the time from the first token to the last: with the wait for the prompts
    that were computed in between."""
    WAVE_TTFT_MS = "ms TTFT, waves"
    """In such waves, the mean time to first token."""
    WAVE_TOKENS_PER_S = "tok/s, waves"
    """Output tokens of all requests, from the arrival of a wave to its end."""
    LINE_TTFT_MS = "ms TTFT, line"
    """Mean time to first token of three times as many requests of one output token: the first arrive together, and
    whoever is done is replaced at the end of the line."""
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
