"""A model as data: which layers it has, how their weights are stored, what a request keeps in memory.

models/ holds ready specs and hf_config.py makes one of a config.json. Bytes and seconds come later: weights.py,
memory.py, costs.py, step.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ostrya.capacity.chips import Dtype
from ostrya.capacity.layers import Ffn, Mixer, MoeFfn, Part, Phase

__all__ = [
    "Announced",
    "Drafter",
    "Layers",
    "ModelSpec",
    "Part",
    "Phase",
    "Storage",
    "Table",
    "with_kv",
    "with_weights",
]


@dataclass(frozen=True, slots=True)
class Storage:
    """How a number is kept in HBM."""

    name: str
    bits: float
    """Per value, scales included."""
    multiplied_as: Dtype
    """The narrowest dtype in which the matrix unit can take it without rounding it again."""

    @property
    def num_bytes(self) -> float:
        return self.bits / 8


FP32 = Storage("fp32", 32, Dtype.BF16)
BF16 = Storage("bf16", 16, Dtype.BF16)
FP8 = Storage("fp8", 8, Dtype.FP8)
"""Scales per 128x128 block or per channel: below 0.01 bits a value, not counted."""
INT8 = Storage("int8", 8, Dtype.INT8)
MXFP4 = Storage("mxfp4", 4.25, Dtype.FP8)
"""One 8-bit scale per 32 values (OCP Microscaling Formats 1.0); every fp4 value is an fp8 value."""
INT4 = Storage("int4", 4.5, Dtype.BF16)
"""One bf16 scale per 32 values, as compressed-tensors writes Kimi K2's experts."""
NVFP4 = Storage("nvfp4", 4.5, Dtype.FP8)
"""One 8-bit scale per 16 values."""
Q4_1 = Storage("q4_1", 5, Dtype.BF16)
"""GGUF: 32 values with a float16 scale and minimum."""
Q8_0 = Storage("q8_0", 8.5, Dtype.BF16)
"""GGUF: 32 values with a float16 scale."""

STORAGES: Mapping[str, Storage] = MappingProxyType(
    {found.name: found for found in (FP32, BF16, FP8, INT8, MXFP4, INT4, NVFP4, Q4_1, Q8_0)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """`count` layers that are alike."""

    count: int
    mixer: Mixer
    ffn: Ffn
    num_norm_params: int = 0
    """Norms, residual mixers and the like of one layer; all are read for every token."""
    phases: frozenset[Phase] = frozenset(Phase)
    """In which these layers run over a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Parameters looked up by token or n-gram: they take memory and hardly any bandwidth."""

    name: str
    num_params: int
    num_params_read: int
    """Per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """Proposes tokens for the model to verify. It uses the model's own embedding and head."""

    name: str
    hidden: int
    layers: tuple[Layers, ...] = ()
    """Empty where only the total is published."""
    num_other_params: int = 0
    """Read for every draft beside the layers: taps of the model's hidden states, Markov heads."""
    max_draft_tokens: int
    one_pass: bool
    """True: one pass drafts the whole block (DSpark, DFlash). False: a pass per token (MTP, EAGLE)."""
    storage: Storage = BF16
    expert_storage: Storage | None = None
    """Of routed experts; None: as the rest."""

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """What its makers say, to test the spec against."""

    num_params: float
    num_params_active: float | None = None
    active_counts_embedding: bool = False
    """Makers differ in whether the looked-up embedding counts as active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model. Sizes count values, not bytes, unless the name says so."""

    name: str
    hidden: int
    layers: tuple[Layers, ...]
    vocab_size: int
    tied_embeddings: bool = False
    max_context_tokens: int
    storage: Storage = BF16
    """Of every weight that `storage_by_part` does not name."""
    storage_by_part: Mapping[Part, Storage] = field(default_factory=dict)
    kv_storage: Storage = BF16
    state_storage: Storage = FP32
    num_final_norm_params: int = 0
    tables: tuple[Table, ...] = ()
    num_vision_params: int = 0
    drafter: Drafter | None = None
    announced: Announced | None = None

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.layers)

    @property
    def is_moe(self) -> bool:
        return any(isinstance(group.ffn, MoeFfn) for group in self.layers)

    def storage_of(self, part: Part) -> Storage:
        return self.storage_by_part.get(part, self.storage)


_STAY = frozenset({Part.NORMS, Part.ROUTER, Part.VISION, Part.TABLES})
"""Parts that quantized checkpoints leave as they are."""
_STAY_16_BITS = frozenset({Part.EMBEDDING, Part.HEAD})
"""These too are not quantized; from fp32 to bf16 they are narrowed with the rest."""
_NARROWED = tuple(part for part in Part if part not in _STAY and part not in {Part.CACHE, Part.STATE, Part.DRAFTER})


def with_weights(spec: ModelSpec, storage: Storage) -> ModelSpec:
    """The model with every matrix that is wider than `storage` narrowed to it, embedding and head to 16 bits at most.

    Norms, routers, tables and the vision tower stay as they are, and so does a part that is narrower already.
    """

    def narrowed(part: Part) -> Storage:
        wanted = BF16 if part in _STAY_16_BITS and storage.bits < BF16.bits else storage
        return min(spec.storage_of(part), wanted, key=lambda kind: kind.bits)

    kept = {part: spec.storage_of(part) for part in _STAY}
    return replace(spec, storage_by_part=MappingProxyType(kept | {part: narrowed(part) for part in _NARROWED}))


def with_kv(spec: ModelSpec, storage: Storage) -> ModelSpec:
    """The model with its keys and values kept as `storage`; the recurrent state stays as it is."""
    return replace(spec, kv_storage=storage)
