"""Mixture-of-experts models with windows between full attention: Reflection Beam, gpt-oss, Muse Spark."""

from types import MappingProxyType

from ostrya.capacity.layers import DenseFfn, MoeFfn, Part
from ostrya.capacity.mixers import GroupedAttention
from ostrya.capacity.models.families import every, stacked
from ostrya.capacity.spec import MXFP4, NVFP4, Announced, Drafter, ModelSpec

_BEAM_LAYERS = 52
_BEAM_HIDDEN = 5120


def beam_1_0_501b() -> ModelSpec:
    """Source: transformers' `beam` configuration; 501 B, 23 B active.

    bf16 as first released (an FP8 release exists: narrow it). Every sixth layer sees everything. Assumed, since not
    published there: that the last layers of 52 are windows, and a context of 262,144. The output gate is as wide as
    the queries and layers have four norms (NVIDIA Megatron-Bridge, beam_config). Drafter: DFlash2; only "2B" is known.
    """

    def attention(window: int | None) -> GroupedAttention:
        return GroupedAttention(
            num_heads=48, num_kv_heads=8, head_dim=128, window_tokens=window, output_gate=True, qk_norm=True
        )

    dense, experts = DenseFfn(inner=20480), MoeFfn(num_experts=256, top_k=8, inner=2560)
    mixers = every(6, attention(None), attention(512), _BEAM_LAYERS)
    pattern = [(mixer, dense if layer < 3 else experts) for layer, mixer in enumerate(mixers)]
    return ModelSpec(
        name="beam-1.0-501b",
        hidden=_BEAM_HIDDEN,
        layers=stacked(pattern, num_norm_params=4 * _BEAM_HIDDEN),
        vocab_size=151936,
        max_context_tokens=262144,
        num_final_norm_params=_BEAM_HIDDEN,
        drafter=Drafter(
            name="DFlash2", hidden=_BEAM_HIDDEN, num_other_params=2_000_000_000, max_draft_tokens=7, one_pass=True
        ),
        announced=Announced(num_params=501e9, num_params_active=23e9),
    )


def gpt_oss(
    *,
    name: str,
    num_layers: int,
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window_tokens: int,
    experts: MoeFfn,
    vocab_size: int,
    max_context_tokens: int,
    tied_embeddings: bool = False,
    announced: Announced | None = None,
) -> ModelSpec:
    """Windows and full attention in turn, the first a window; biases and sinks; experts MXFP4, all else bf16."""

    def attention(window: int | None) -> GroupedAttention:
        return GroupedAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window_tokens=window,
            qkv_bias=True,
            output_bias=True,
            sinks=True,
        )

    mixers = every(2, attention(None), attention(window_tokens), num_layers)
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=stacked([(mixer, experts) for mixer in mixers], num_norm_params=2 * hidden),
        vocab_size=vocab_size,
        tied_embeddings=tied_embeddings,
        max_context_tokens=max_context_tokens,
        storage_by_part=MappingProxyType({Part.ROUTED_EXPERTS: MXFP4}),
        num_final_norm_params=hidden,
        announced=announced,
    )


def gpt_oss_120b() -> ModelSpec:
    """Source: config.json of openai/gpt-oss-120b; its model card (2508.10925) counts 116.83 B and 5.13 B active."""
    return gpt_oss(
        name="gpt-oss-120b",
        num_layers=36,
        hidden=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        window_tokens=128,
        experts=MoeFfn(num_experts=128, top_k=4, inner=2880, biases=True),
        vocab_size=201088,
        max_context_tokens=131072,
        announced=Announced(num_params=116.83e9, num_params_active=5.13e9),
    )


_MUSE_HIDDEN = 8192


def muse_spark_1_2() -> ModelSpec:
    """Source: Inferact/tpu-megakernels musespark/config.py and layout.py. 816 B; here for its published TPU points.

    Experts are NVFP4 in a latent of 4,096 and all else bf16, as first published; published.py has what else was
    measured. The announced 42 B active are not what its shapes add up to: experts, projections, gates and head make
    44 B. Context: assumed 262,144.
    """

    def attention(window: int | None) -> GroupedAttention:
        return GroupedAttention(
            num_heads=128, num_kv_heads=16, head_dim=64, window_tokens=window, output_gate=True, qk_norm=True
        )

    experts = MoeFfn(num_experts=256, top_k=8, inner=4096, latent=4096)
    # From zero: 1, 5, ..., 61 see everything.
    mixers = [attention(None if layer % 4 == 1 else 2048) for layer in range(62)]
    return ModelSpec(
        name="muse-spark-1.2",
        hidden=_MUSE_HIDDEN,
        layers=stacked([(mixer, experts) for mixer in mixers], num_norm_params=7 * _MUSE_HIDDEN),
        vocab_size=202048,
        max_context_tokens=262144,
        storage_by_part=MappingProxyType({Part.ROUTED_EXPERTS: NVFP4}),
        num_final_norm_params=_MUSE_HIDDEN,
        announced=Announced(num_params=816e9),
    )
