"""Models with experts or gated delta nets, most of them Qwen's: Qwen3-30B-A3B, Qwen3.8-27B, Qwen3.5-397B-A17B."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from ostrya.capacity.layers import DenseFfn, Ffn, MoeFfn, Part
from ostrya.capacity.mixers import GatedDeltaNet, GroupedAttention
from ostrya.capacity.models.families import every, stacked
from ostrya.capacity.spec import BF16, FP8, Announced, Drafter, Layers, ModelSpec

FULL_ATTENTION_INTERVAL = 4
"""Of the hybrids: three gated delta nets, one full attention (config field full_attention_interval)."""


def moe_like(
    *,
    name: str,
    hidden: int,
    attention: GroupedAttention,
    ffns: Sequence[Ffn],
    vocab_size: int,
    max_context_tokens: int,
    tied_embeddings: bool = False,
    announced: Announced | None = None,
) -> ModelSpec:
    """Qwen2, Qwen3 and Mixtral: equal grouped attention, and a feed-forward network for each layer."""
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=stacked([(attention, ffn) for ffn in ffns], num_norm_params=2 * hidden),
        vocab_size=vocab_size,
        tied_embeddings=tied_embeddings,
        max_context_tokens=max_context_tokens,
        num_final_norm_params=hidden,
        announced=announced,
    )


def qwen3_hybrid(
    *,
    name: str,
    num_layers: int,
    hidden: int,
    attention: GroupedAttention,
    delta_net: GatedDeltaNet,
    ffn: Ffn,
    vocab_size: int,
    max_context_tokens: int,
    interval: int = FULL_ATTENTION_INTERVAL,
    tied_embeddings: bool = False,
) -> ModelSpec:
    """Qwen3-Next, 3.5 and 3.8: every fourth layer is attention with an output gate."""
    mixers = every(interval, attention, delta_net, num_layers)
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=stacked([(mixer, ffn) for mixer in mixers], num_norm_params=2 * hidden),
        vocab_size=vocab_size,
        tied_embeddings=tied_embeddings,
        max_context_tokens=max_context_tokens,
        num_final_norm_params=hidden,
    )


def qwen3_30b_a3b() -> ModelSpec:
    """Source: config.json of Qwen/Qwen3-30B-A3B; its card says 30.5 B and 3.3 B active, embedding counted (3.35 B)."""
    return moe_like(
        name="qwen3-30b-a3b",
        hidden=2048,
        attention=GroupedAttention(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True),
        ffns=[MoeFfn(num_experts=128, top_k=8, inner=768, router_bias=False)] * 48,
        vocab_size=151936,
        max_context_tokens=40960,
        announced=Announced(num_params=30.5e9, num_params_active=3.3e9, active_counts_embedding=True),
    )


def qwen3_8_27b() -> ModelSpec:
    """Sources: Inferact/tpu-megakernels qwen/__init__.py, LoongForge#176, fak#447.

    Drafter: z-lab/Qwen3.8-27B-DFlash2, of which only "2B" and the block of eight are published. Vision tower: assumed
    0.46 B, as in Qwen3-VL (27 layers of 1,152), since its size is not published apart.
    """
    spec = qwen3_hybrid(
        name="qwen3.8-27b",
        num_layers=64,
        hidden=5120,
        attention=GroupedAttention(num_heads=24, num_kv_heads=4, head_dim=256, output_gate=True, qk_norm=True),
        delta_net=GatedDeltaNet(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128, conv_width=4),
        ffn=DenseFfn(inner=17408),
        vocab_size=248320,
        max_context_tokens=262144,
    )
    return replace(
        spec,
        announced=Announced(num_params=26.9e9),
        num_vision_params=460_000_000,
        drafter=Drafter(name="DFlash2", hidden=5120, num_other_params=2_000_000_000, max_draft_tokens=7, one_pass=True),
    )


def qwen3_5_397b_a17b() -> ModelSpec:
    """Source: config.json of Qwen/Qwen3.5-397B-A17B; stored as its FP8 release, which the published TPU points serve.

    Embedding and head stay bf16 there. Drafter: the checkpoint's one MTP layer, which has experts too. Vision tower:
    assumed 0.46 B, as above.
    """
    attention = GroupedAttention(num_heads=32, num_kv_heads=2, head_dim=256, output_gate=True, qk_norm=True)
    ffn = MoeFfn(num_experts=512, top_k=10, inner=1024, num_shared=1, shared_gate=True, router_bias=False)
    spec = qwen3_hybrid(
        name="qwen3.5-397b-a17b",
        num_layers=60,
        hidden=4096,
        attention=attention,
        delta_net=GatedDeltaNet(num_key_heads=16, num_value_heads=64, key_dim=128, value_dim=128, conv_width=4),
        ffn=ffn,
        vocab_size=248320,
        max_context_tokens=262144,
    )
    stays = dict.fromkeys((Part.EMBEDDING, Part.HEAD, Part.NORMS, Part.ROUTER, Part.VISION), BF16)
    return replace(
        spec,
        announced=Announced(num_params=397e9, num_params_active=17e9, active_counts_embedding=True),
        num_vision_params=460_000_000,
        drafter=Drafter(
            name="MTP",
            hidden=4096,
            layers=(Layers(count=1, mixer=attention, ffn=ffn, num_norm_params=2 * 4096),),
            num_other_params=2 * 4096**2,
            max_draft_tokens=3,
            one_pass=False,
            storage=FP8,
        ),
        storage=FP8,
        storage_by_part=MappingProxyType(stays),
    )
