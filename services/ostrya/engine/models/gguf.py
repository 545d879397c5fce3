"""A GGUF file as a weight source. Called by open_source."""

import reprlib
from pathlib import Path

import torch

from ostrya.engine.models.config import ModelConfig
from ostrya.engine.models.gguf_file import GgufFile
from ostrya.errors import ModelLoadError
from ostrya.gguf_header import Value

_ROPE_DIVISORS = "rope_freqs.weight"


class GgufSource:
    """Weights of a Llama-family GGUF file, whole or split. Its names and its rotary order are already the ones
    WeightSource asks for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GgufFile(path)
        self._unread = set(self._file.tensors) - {_ROPE_DIVISORS}
        self.config = _Metadata(self._file).config()

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._file.tensors:
            raise ModelLoadError(f"{self._path}: tensor {name} is missing")
        if (found := self._file.tensors[name].shape) != shape:
            raise ModelLoadError(f"{self._path}: tensor {name} has shape {list(found)}; expected {list(shape)}")

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self.require(name, tuple(out.shape))
        self._unread.discard(name)
        out_rows = out.view(-1, out.shape[-1])
        step = self._file.chunk_rows(name)
        for first in range(0, len(out_rows), step):
            last = min(first + step, len(out_rows))
            out_rows[first:last].copy_(torch.from_numpy(self._file.rows(name, first, last)))

    def unread(self) -> list[str]:
        return sorted(self._unread)


class _Metadata:
    """Typed access to the keys of one file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def config(self) -> ModelConfig:
        architecture = self._get("general.architecture", None)
        if architecture != "llama":
            raise self._error(f"architecture {reprlib.repr(architecture)} is not supported; supported: llama")
        self._refuse_variants()
        hidden_size = self._int("llama.embedding_length")
        num_heads = self._int("llama.attention.head_count")
        head_dim = self._int("llama.attention.key_length", hidden_size // max(num_heads, 1))
        self._expect("llama.attention.value_length", head_dim)
        self._expect("llama.rope.dimension_count", head_dim)
        embedding = self._file.tensors.get("token_embd.weight")
        config = ModelConfig(
            num_layers=self._int("llama.block_count"),
            hidden_size=hidden_size,
            mlp_size=self._int("llama.feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=self._int("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=self._int("llama.vocab_size", embedding.shape[0] if embedding else None),
            context_tokens=self._int("llama.context_length"),
            rope_theta=self._float("llama.rope.freq_base", 10000.0),
            rope_divisors=self._rope_divisors(),
            norm_eps=self._float("llama.attention.layer_norm_rms_epsilon", None),
            tied_embeddings="output.weight" not in self._file.tensors,
        )
        if problem := config.problem():
            raise self._error(problem)
        return config

    def _refuse_variants(self) -> None:
        if (experts := self._get("llama.expert_count", 0)) != 0:
            raise self._error(f"mixture of {reprlib.repr(experts)} experts is not supported; supported: dense llama")
        if (scaling := self._get("llama.rope.scaling.type", "none")) != "none":
            raise self._error(
                f"rope scaling {reprlib.repr(scaling)} is not supported; supported: none, llama3 (rope_freqs.weight)"
            )

    def _rope_divisors(self) -> tuple[float, ...] | None:
        if _ROPE_DIVISORS not in self._file.tensors:
            return None
        return tuple(self._file.rows(_ROPE_DIVISORS, 0, 1).reshape(-1).tolist())

    def _expect(self, key: str, value: int) -> None:
        if (found := self._int(key, value)) != value:
            raise self._error(f"{key} is {found}; supported: the head dimension, {value}")

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._error(
                f"metadata {key} is {'missing' if value is None else reprlib.repr(value)}; a number is needed"
            )
        return value

    def _float(self, key: str, default: float | None) -> float:
        value = self._get(key, default)
        if not isinstance(value, float):
            raise self._error(
                f"metadata {key} is {'missing' if value is None else reprlib.repr(value)}; a number is needed"
            )
        return value

    def _get(self, key: str, default: Value | None) -> Value | None:
        return self._file.metadata.get(key, default)

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: {what}")
