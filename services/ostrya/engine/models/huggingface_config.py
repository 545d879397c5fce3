"""config.json of a Hugging Face directory typed; families ask. No torch."""

import json
import math
from pathlib import Path

from ostrya.capacity.layers import DenseFfn, MoeFfn
from ostrya.capacity.mixers import GroupedAttention
from ostrya.engine.models.spec import MAX_LAYERS, Activation, DecoderSpec, GatedFfn, LayerSpec, Rope, RoutedFfn
from ostrya.errors import ModelLoadError

Json = dict[str, object]

_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


class JsonConfig:
    """The configuration of one directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "config.json"
        self._values = _read_json(self._path)
        self.kind = self._values.get("model_type")
        self.refuse_set("quantization_config")
        # A model with a vision tower keeps its text model's settings apart.
        self._values = self._values | (self.entry("text_config") or {})

    @property
    def num_layers(self) -> int:
        return self.size("num_hidden_layers", highest=MAX_LAYERS)

    def attention(self, *, qk_norm: bool = False, qkv_bias: bool = False) -> GroupedAttention:
        self.refuse_set("attention_bias")
        num_heads = self.size("num_attention_heads")
        return GroupedAttention(
            num_heads=num_heads,
            num_kv_heads=self.size("num_key_value_heads", num_heads),
            head_dim=self.size("head_dim", self.size("hidden_size") // num_heads),
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
        )

    def ffn(self, activation: Activation) -> GatedFfn:
        self._require_activation(activation)
        return GatedFfn(sizes=DenseFfn(inner=self.size("intermediate_size")), activation=activation)

    def experts(
        self, activation: Activation, *, count: str, inner: str, renormalized: bool, shared_inner: int | None = None
    ) -> RoutedFfn:
        """`count` and `inner` are the fields that say so; `shared_inner` is that of one shared expert with a gate."""
        self._require_activation(activation)
        sizes = MoeFfn(
            num_experts=self.size(count),
            top_k=self.size("num_experts_per_tok"),
            inner=self.size(inner),
            num_shared=0 if shared_inner is None else 1,
            shared_inner=shared_inner,
            shared_gate=shared_inner is not None,
            router_bias=False,
        )
        return RoutedFfn(sizes=sizes, activation=activation, renormalized=renormalized)

    def _require_activation(self, activation: Activation) -> None:
        self.refuse_set("mlp_bias")
        found = self._values.get("hidden_activation") or self._values.get("hidden_act") or "silu"
        if not isinstance(found, str) or _ACTIVATIONS.get(found) != activation:
            raise self.error(f"hidden_act {found!r} is not supported; supported for {self.kind}: {activation}")

    def rope(self) -> Rope:
        # One object in transformers 5, spread over two keys before.
        nested = self.entry("rope_parameters") or self.entry("rope_scaling") or {}
        return self.rope_of({"rope_theta": self._values.get("rope_theta"), **nested})

    def rope_of(self, rope: Json, *, default_theta: float = 10000.0) -> Rope:
        """From settings as they stand in one object."""
        theta = self._number(rope, "rope_theta", default_theta)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return Rope(theta=theta)
        head_dim = self.attention().head_dim
        if kind == "linear":
            return Rope(theta=theta, divisors=(self._number(rope, "factor"),) * (head_dim // 2))
        if kind != "llama3":
            raise self.error(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")
        divisors = llama3_divisors(
            head_dim=head_dim,
            theta=theta,
            factor=self._number(rope, "factor"),
            low=self._number(rope, "low_freq_factor"),
            high=self._number(rope, "high_freq_factor"),
            original_context=self._number(rope, "original_max_position_embeddings"),
        )
        return Rope(theta=theta, divisors=divisors)

    def decoder(
        self, layers: tuple[LayerSpec, ...], *, embedding_scale: float = 1.0, tied_unless_said: bool = False
    ) -> DecoderSpec:
        return DecoderSpec(
            layers=layers,
            hidden=self.size("hidden_size"),
            vocab_size=self.size("vocab_size"),
            context_tokens=self.size("max_position_embeddings"),
            norm_eps=self.number("rms_norm_eps", 1e-6),
            embedding_scale=embedding_scale,
            tied_embeddings=bool(self._values.get("tie_word_embeddings", tied_unless_said)),
        )

    def size(self, key: str, default: int | None = None, *, highest: int | None = None) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._not_a_number(key, value)
        if value < 1 or (highest is not None and value > highest):
            allowed = "at least 1" if highest is None else f"from 1 to {highest}"
            raise self.error(f"{key} is {value}; it must be {allowed}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self._number(self._values, key, default)

    def entry(self, key: str, *, within: Json | None = None) -> Json | None:
        """An object, of the whole or within another; None if it is not there."""
        value = (self._values if within is None else within).get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{key} is {value!r}; an object is needed")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}; true or false is needed")
        return value

    def names(self, key: str) -> list[object] | None:
        """A list; None if it is not there."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, list):
            raise self.error(f"{key} is {value!r}; a list is needed")
        return value

    def refuse_set(self, *keys: str) -> None:
        """ModelLoadError for a field that is there and not empty: it means something that is not computed here."""
        for key in keys:
            if self._values.get(key):
                raise self.error(f"{key} is set; it is not supported")

    def error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {what}")

    def _number(self, values: Json, key: str, default: float | None = None) -> float:
        value = values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._not_a_number(key, value)
        return float(value)

    def _not_a_number(self, key: str, value: object) -> ModelLoadError:
        return self.error(f"{key} is {'missing' if value is None else repr(value)}; a number is needed")


def llama3_divisors(
    *, head_dim: int, theta: float, factor: float, low: float, high: float, original_context: float
) -> tuple[float, ...]:
    """Llama 3.1's context stretching: long waves are slowed by `factor`, short ones kept, those between blended."""
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        kept = (original_context / wavelength - low) / (high - low)
        kept = min(1.0, max(0.0, kept))
        divisors.append(1 / ((1 - kept) / factor + kept))
    return tuple(divisors)


def _read_json(path: Path) -> Json:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: corrupt: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: corrupt: an object is needed")
    return values
