"""Moonshot's models: Kimi K3 (KDA and NoPE-MLA, latent experts) and Kimi K2.5 (DeepSeek-V3's shape)."""

from types import MappingProxyType

from ostrya.capacity.layers import DenseFfn, MoeFfn, Part
from ostrya.capacity.mixers import GroupedAttention, KimiDeltaAttention, LatentAttention
from ostrya.capacity.models.families import stacked
from ostrya.capacity.spec import BF16, FP8, INT4, MXFP4, Announced, Drafter, Layers, ModelSpec, Storage

_K3_LAYERS = 93
_K3_HIDDEN = 7168
_K3_MLA_LAYERS = frozenset({*range(4, _K3_LAYERS, 4), _K3_LAYERS})
"""From one: 4, 8, …, 92, and the last."""
_MOONVIT_PARAMS = 400_000_000
"""MoonViT's announced size (Kimi-VL, 2504.07491); K3's and K2.5's towers of 27 layers are assumed to have it."""


def kimi_k3() -> ModelSpec:
    """Sources: the config as validated by inference-sim#1635, lablup/mlxcel#1334 and vLLM 0.29's kimi_linear.py.

    Experts are MXFP4 and all else bf16, as released; keys and values fp8, as vLLM on TPU keeps them. Of the attention
    residuals (a softmax over a few sums every 12 layers) only their vectors count, with the norms. Drafter:
    RedHatAI/Kimi-K3-speculator.dspark, which the published points used: five grouped-attention layers, five taps, and
    a Markov head of rank 256 (its config.json, as quoted in TensorRT-LLM's tests).
    """
    kda = KimiDeltaAttention(num_heads=96, head_dim=128, conv_width=4, full_rank_gate=True)
    mla = LatentAttention(
        num_heads=96, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, output_gate=True
    )
    experts = MoeFfn(num_experts=896, top_k=16, inner=3072, num_shared=2, latent=3584)
    pattern = [
        (mla if layer in _K3_MLA_LAYERS else kda, DenseFfn(inner=33792) if layer == 1 else experts)
        for layer in range(1, _K3_LAYERS + 1)
    ]
    draft_attention = GroupedAttention(num_heads=96, num_kv_heads=16, head_dim=64, window_tokens=2048, qk_norm=True)
    return ModelSpec(
        name="kimi-k3",
        hidden=_K3_HIDDEN,
        layers=stacked(pattern, num_norm_params=4 * _K3_HIDDEN),
        vocab_size=163840,
        max_context_tokens=1_048_576,
        storage_by_part=MappingProxyType({Part.ROUTED_EXPERTS: MXFP4}),
        kv_storage=FP8,
        num_final_norm_params=_K3_HIDDEN,
        num_vision_params=_MOONVIT_PARAMS,
        drafter=Drafter(
            name="DSpark",
            hidden=_K3_HIDDEN,
            layers=(Layers(count=5, mixer=draft_attention, ffn=DenseFfn(inner=14336), num_norm_params=2 * _K3_HIDDEN),),
            # Five taps of hidden states; a lookup and a projection of the Markov head.
            num_other_params=5 * _K3_HIDDEN**2 + 2 * 163840 * 256,
            max_draft_tokens=7,
            one_pass=True,
        ),
        announced=Announced(num_params=2.78e12, num_params_active=104e9),
    )


def deepseek_v3_like(
    *,
    name: str,
    num_layers: int,
    num_dense_layers: int,
    hidden: int,
    dense_inner: int,
    attention: LatentAttention,
    experts: MoeFfn,
    vocab_size: int,
    max_context_tokens: int,
    tied_embeddings: bool = False,
    storage: Storage = BF16,
    expert_storage: Storage | None = None,
    num_vision_params: int = 0,
    announced: Announced | None = None,
) -> ModelSpec:
    """MLA everywhere; the first layers dense, the others with experts (DeepSeek-V3, 2412.19437)."""
    dense = [(attention, DenseFfn(inner=dense_inner))] * num_dense_layers
    sparse = [(attention, experts)] * (num_layers - num_dense_layers)
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=stacked([*dense, *sparse], num_norm_params=2 * hidden),
        vocab_size=vocab_size,
        tied_embeddings=tied_embeddings,
        max_context_tokens=max_context_tokens,
        storage=storage,
        storage_by_part=MappingProxyType({Part.ROUTED_EXPERTS: expert_storage or storage}),
        num_final_norm_params=hidden,
        num_vision_params=num_vision_params,
        announced=announced,
    )


def kimi_k2_5() -> ModelSpec:
    """Sources: config.json of moonshotai/Kimi-K2.5; NVIDIA Megatron-Bridge KimiK2Provider; flashinfer-bench#352.

    Only routed experts are INT4, in groups of 32 (card of eatang/Kimi-K2.5-2layer, which quotes the ignore list).
    Announced: "1T", which is 1.03e12 by count, and 32 B active. No drafter ships with it.
    """
    return deepseek_v3_like(
        name="kimi-k2.5",
        num_layers=61,
        num_dense_layers=1,
        hidden=7168,
        dense_inner=18432,
        attention=LatentAttention(num_heads=64, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        experts=MoeFfn(num_experts=384, top_k=8, inner=2048, num_shared=1),
        vocab_size=163840,
        max_context_tokens=262144,
        expert_storage=INT4,
        num_vision_params=_MOONVIT_PARAMS,
        announced=Announced(num_params=1.03e12, num_params_active=32e9),
    )
