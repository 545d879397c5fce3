"""Llama 1 to 3.3, SmolLM2: grouped-query attention, rotary positions, SiLU-gated networks, no biases."""

from ostrya.engine.models.family import Family, alike

LLAMA = Family(
    gguf_architecture="llama", config_kinds=("llama",), from_gguf=alike, from_config=alike, gguf_halves_apart=False
)
