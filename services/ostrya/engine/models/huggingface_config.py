"""config.json of a Hugging Face directory as a ModelConfig. No torch."""

import json
import math
from pathlib import Path

from ostrya.engine.models.config import ModelConfig
from ostrya.errors import ModelLoadError

Json = dict[str, object]


class JsonConfig:
    """Typed access to the configuration of one directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "config.json"
        self._values = _read_json(self._path)

    def model_config(self) -> ModelConfig:
        """ModelLoadError for what this engine would compute wrongly."""
        self._refuse_variants()
        hidden_size, num_heads = self._int("hidden_size"), self._int("num_attention_heads")
        head_dim = self._int("head_dim", hidden_size // max(num_heads, 1))
        rope = self._rope()
        config = ModelConfig(
            num_layers=self._int("num_hidden_layers"),
            hidden_size=hidden_size,
            mlp_size=self._int("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=self._int("num_key_value_heads", num_heads),
            head_dim=head_dim,
            vocab_size=self._int("vocab_size"),
            context_tokens=self._int("max_position_embeddings"),
            rope_theta=self._float(rope, "rope_theta", 10000.0),
            rope_divisors=self._rope_divisors(rope, head_dim),
            norm_eps=self._float(self._values, "rms_norm_eps", 1e-6),
            tied_embeddings=bool(self._values.get("tie_word_embeddings", False)),
        )
        if problem := config.problem():
            raise self._error(problem)
        return config

    def _refuse_variants(self) -> None:
        if (kind := self._values.get("model_type")) != "llama":
            raise self._error(f"model_type {kind!r} is not supported; supported: llama")
        if (activation := self._values.get("hidden_act", "silu")) != "silu":
            raise self._error(f"hidden_act {activation!r} is not supported; supported: silu")
        for key in ("attention_bias", "mlp_bias", "quantization_config"):
            if self._values.get(key):
                raise self._error(f"{key} is set; it is not supported")

    def _rope(self) -> Json:
        """The rotary settings: one dictionary in transformers 5, spread over two keys before."""
        nested = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if not isinstance(nested, dict):
            raise self._error(f"rope settings are {nested!r}; an object is needed")
        return {"rope_theta": self._values.get("rope_theta", 10000.0), **nested}

    def _rope_divisors(self, rope: Json, head_dim: int) -> tuple[float, ...] | None:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        if kind != "llama3":
            raise self._error(f"rope scaling {kind!r} is not supported; supported: default, llama3")
        return llama3_divisors(
            head_dim=head_dim,
            theta=self._float(rope, "rope_theta"),
            factor=self._float(rope, "factor"),
            low=self._float(rope, "low_freq_factor"),
            high=self._float(rope, "high_freq_factor"),
            original_context=self._float(rope, "original_max_position_embeddings"),
        )

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._error(f"{key} is {'missing' if value is None else repr(value)}; a number is needed")
        return value

    def _float(self, values: Json, key: str, default: float | None = None) -> float:
        value = values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._error(f"{key} is {'missing' if value is None else repr(value)}; a number is needed")
        return float(value)

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {what}")


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
