"""What the metadata of a GGUF file says of its model, typed; families ask. No torch."""

import reprlib

from ostrya.capacity.layers import DenseFfn, MoeFfn
from ostrya.capacity.mixers import GroupedAttention
from ostrya.engine.models.gguf_file import GgufFile
from ostrya.engine.models.spec import MAX_LAYERS, Activation, DecoderSpec, GatedFfn, LayerSpec, Rope, RoutedFfn
from ostrya.errors import ModelLoadError
from ostrya.gguf_header import Value

ROPE_DIVISORS = "rope_freqs.weight"


class GgufMetadata:
    """The keys of one file. Names go without the architecture before them."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = file.metadata.get("general.architecture")

    @property
    def num_layers(self) -> int:
        return self.size("block_count", highest=MAX_LAYERS)

    def attention(self, *, qk_norm: bool = False, qkv_bias: bool = False) -> GroupedAttention:
        num_heads = self.size("attention.head_count")
        head_dim = self.size("attention.key_length", self.size("embedding_length") // num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (found := self.size(key, head_dim)) != head_dim:
                raise self.error(f"{self._key(key)} is {found}; supported: the head dimension, {head_dim}")
        return GroupedAttention(
            num_heads=num_heads,
            num_kv_heads=self.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
        )

    def ffn(self, activation: Activation) -> GatedFfn:
        if (experts := self._get("expert_count", 0)) != 0:
            raise self.error(
                f"mixture of {reprlib.repr(experts)} experts is not supported; supported: dense {self.architecture}"
            )
        return GatedFfn(sizes=DenseFfn(inner=self.size("feed_forward_length")), activation=activation)

    @property
    def has_experts(self) -> bool:
        return self._get("expert_count", 0) != 0

    def experts(self, activation: Activation, *, renormalized: bool, shared_inner: int | None = None) -> RoutedFfn:
        """`shared_inner` is that of one shared expert with a gate."""
        sizes = MoeFfn(
            num_experts=self.size("expert_count"),
            top_k=self.size("expert_used_count"),
            # Mixtral's files have no other width.
            inner=self.size("expert_feed_forward_length", self.size("feed_forward_length")),
            num_shared=0 if shared_inner is None else 1,
            shared_inner=shared_inner,
            shared_gate=shared_inner is not None,
            router_bias=False,
        )
        return RoutedFfn(sizes=sizes, activation=activation, renormalized=renormalized)

    def rope(self) -> Rope:
        theta = self.number("rope.freq_base", 10000.0)
        kind = self._get("rope.scaling.type", "none")
        if kind == "linear":
            factor = self.number("rope.scaling.factor")
            return Rope(theta=theta, divisors=(factor,) * (self.attention().head_dim // 2))
        if kind != "none":
            supported = f"none, linear, llama3 ({ROPE_DIVISORS})"
            raise self.error(f"rope scaling {reprlib.repr(kind)} is not supported; supported: {supported}")
        if ROPE_DIVISORS not in self._file.tensors:
            return Rope(theta=theta)
        return Rope(theta=theta, divisors=tuple(self._file.vector(ROPE_DIVISORS).tolist()))

    def decoder(self, layers: tuple[LayerSpec, ...], *, embedding_scale: float = 1.0) -> DecoderSpec:
        embedding = self._file.tensors.get("token_embd.weight")
        return DecoderSpec(
            layers=layers,
            hidden=self.size("embedding_length"),
            vocab_size=self.size("vocab_size", embedding.shape[0] if embedding else None),
            context_tokens=self.size("context_length"),
            norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            embedding_scale=embedding_scale,
            tied_embeddings="output.weight" not in self._file.tensors,
        )

    def size(self, name: str, default: int | None = None, *, highest: int | None = None) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._not_a_number(name, value)
        if value < 1 or (highest is not None and value > highest):
            allowed = "at least 1" if highest is None else f"from 1 to {highest}"
            raise self.error(f"metadata {self._key(name)} is {value}; it must be {allowed}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, float):
            raise self._not_a_number(name, value)
        return value

    def refuse_set(self, *names: str) -> None:
        """ModelLoadError for a number that is there and not 0: it means something that is not computed here."""
        for name in names:
            if value := self._get(name, 0):
                raise self.error(f"metadata {self._key(name)} is {reprlib.repr(value)}; it is not supported")

    def error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: {what}")

    def _not_a_number(self, name: str, value: Value | None) -> ModelLoadError:
        found = "missing" if value is None else reprlib.repr(value)
        return self.error(f"metadata {self._key(name)} is {found}; a number is needed")

    def _get(self, name: str, default: Value | None) -> Value | None:
        return self._file.metadata.get(self._key(name), default)

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"
