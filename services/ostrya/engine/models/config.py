"""What a checkpoint says about its model, in one form whatever file it came from. No torch."""

from dataclasses import dataclass

# A table of rotary angles is kept for every position; beyond this the number is more likely damage than meant.
_MAX_CONTEXT_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder: grouped-query attention, rotary positions, SiLU-gated MLP, RMS norms, no biases."""

    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    rope_theta: float
    rope_divisors: tuple[float, ...] | None
    """[head_dim / 2] each rotary frequency is divided by its entry (how Llama 3.1 stretches its context); None = all
    1."""
    norm_eps: float
    tied_embeddings: bool

    def problem(self) -> str | None:
        """The first thing that cannot work, in words; None when all is well."""
        sizes = {
            "number of layers": self.num_layers,
            "hidden size": self.hidden_size,
            "MLP size": self.mlp_size,
            "number of heads": self.num_heads,
            "number of KV heads": self.num_kv_heads,
            "head dimension": self.head_dim,
            "vocabulary size": self.vocab_size,
            "context length": self.context_tokens,
        }
        for name, value in sizes.items():
            if value < 1:
                return f"{name} is {value}; it must be at least 1"
        if self.context_tokens > _MAX_CONTEXT_TOKENS:
            return f"context length is {self.context_tokens}; supported: at most {_MAX_CONTEXT_TOKENS}"
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} heads do not divide among {self.num_kv_heads} KV heads"
        if self.head_dim % 2:
            return f"head dimension is {self.head_dim}; rotary positions need an even one"
        if self.rope_divisors is not None and len(self.rope_divisors) != self.head_dim // 2:
            return f"{len(self.rope_divisors)} rope frequencies; expected {self.head_dim // 2}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the engine must know of a model that is ready to run."""

    context_tokens: int
    vocab_size: int
    load_s: float
