"""DeepSeek V4-Flash and V4.1-Flash: compressed and sparse attention, hash routing, Engram tables, two phases."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from ostrya.capacity.chips import Dtype
from ostrya.capacity.layers import MoeFfn, Part, Phase
from ostrya.capacity.mixers import CompressedAttention, Indexer
from ostrya.capacity.models.families import stacked
from ostrya.capacity.spec import BF16, FP8, MXFP4, Announced, Drafter, Layers, ModelSpec, Storage, Table

_STREAMS = 4
"""Residual streams of the hyper-connections (hc_mult)."""
_FP4_CACHE = Storage("fp4", 4.45, Dtype.BF16)
"""V4.1's cache: 4.5 bits for entries of 512 (a scale per 16), 4.25 for index keys of 128 (a scale per 32); together
they make the 890 bytes per token that its card states."""
_OVERLAPPING_RATIO = 4


def hyper_connection_params(hidden: int) -> int:
    """Of one layer, with its two norms: a mixing matrix before and after each of its two halves."""
    return 2 * hidden + 2 * (2 + _STREAMS) * _STREAMS * hidden


def v4_attention(window: CompressedAttention, ratio: int, *, indexer: Indexer) -> CompressedAttention:
    """The kind of layer that V4 has at a compression ratio: window alone, CSA with an indexer, or HCA."""
    if ratio == 0:
        return window
    if ratio <= _OVERLAPPING_RATIO:
        return replace(window, ratio=ratio, top_k=indexer.top_k, indexer=indexer)
    return replace(window, ratio=ratio)


def deepseek_v4(
    *,
    name: str,
    hidden: int,
    ratios: Sequence[int],
    num_hash_layers: int,
    window: CompressedAttention,
    indexer: Indexer,
    experts: MoeFfn,
    vocab_size: int,
    max_context_tokens: int,
    tied_embeddings: bool = False,
) -> ModelSpec:
    """One entry of `ratios` per layer. Experts are FP4, embedding and head bf16, all else FP8, as released."""
    hashed = replace(experts, hash_routed=True)
    pattern = [
        (v4_attention(window, ratio, indexer=indexer), hashed if layer < num_hash_layers else experts)
        for layer, ratio in enumerate(ratios)
    ]
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=stacked(pattern, num_norm_params=hyper_connection_params(hidden)),
        vocab_size=vocab_size,
        tied_embeddings=tied_embeddings,
        max_context_tokens=max_context_tokens,
        storage=FP8,
        storage_by_part=_STORED,
        kv_storage=FP8,
        num_final_norm_params=hidden,
    )


_STORED = MappingProxyType(
    {
        Part.ROUTED_EXPERTS: MXFP4,
        Part.EMBEDDING: BF16,
        Part.HEAD: BF16,
        Part.NORMS: BF16,
        Part.ROUTER: BF16,
        Part.VISION: BF16,
    }
)


def deepseek_v4_flash() -> ModelSpec:
    """Sources: config.json of deepseek-ai/DeepSeek-V4-Flash (as quoted in public tests); layer kinds from antirez/ds4.

    Announced: 284 B; 13.9 B active is the count of yzlnew/infra-skills (284.44 B, 13.90 B), embedding counted. Drafter:
    the checkpoint's MTP layer (window attention and experts, and two square projections).
    """
    hidden = 4096
    window = CompressedAttention(
        num_heads=64, head_dim=512, q_rank=1024, output_groups=8, output_rank=1024, window_tokens=128
    )
    experts = MoeFfn(num_experts=256, top_k=6, inner=2048, num_shared=1)
    spec = deepseek_v4(
        name="deepseek-v4-flash",
        hidden=hidden,
        ratios=(0, 0, *(4, 128) * 20, 4),
        num_hash_layers=3,
        window=window,
        indexer=Indexer(num_heads=64, head_dim=128, top_k=512),
        experts=experts,
        vocab_size=129280,
        max_context_tokens=1_048_576,
    )
    mtp = Layers(count=1, mixer=window, ffn=experts, num_norm_params=hyper_connection_params(hidden))
    return replace(
        spec,
        drafter=Drafter(
            name="MTP",
            hidden=hidden,
            layers=(mtp,),
            num_other_params=2 * hidden**2,
            max_draft_tokens=3,
            one_pass=False,
            storage=FP8,
            expert_storage=MXFP4,
        ),
        announced=Announced(num_params=284e9, num_params_active=13.9e9, active_counts_embedding=True),
    )


_V41_HIDDEN = 5120
_V41_WINDOW = CompressedAttention(
    num_heads=64, head_dim=512, q_rank=1280, output_groups=8, output_rank=1024, window_tokens=128
)
_V41_INDEXER = Indexer(num_heads=32, head_dim=128, top_k=512)
_V41_CANDIDATES = 2048 * 8
"""Entries that layer 20 leaves for the later choosers (candidate_topk_blocks x candidate_block_size)."""
_V41_ENTRY_SOURCES = frozenset({2, 8, 14, 20})
_V41_INDEX_SOURCES = frozenset({2, 8, 14, 20, 24, 28, 32, 36})
_V41_ENCODER_LAYERS = 20


def _v41_attention(layer: int) -> CompressedAttention:
    if layer < min(_V41_ENTRY_SOURCES):
        return _V41_WINDOW
    indexer = _V41_INDEXER if layer in _V41_INDEX_SOURCES else None
    if indexer is not None and layer > max(_V41_ENTRY_SOURCES):
        indexer = replace(indexer, candidates=_V41_CANDIDATES)
    return replace(
        _V41_WINDOW,
        ratio=2 if layer < _V41_ENCODER_LAYERS else 1,
        top_k=_V41_INDEXER.top_k,
        indexer=indexer,
        keeps_entries=layer in _V41_ENTRY_SOURCES,
    )


def deepseek_v4_1_flash() -> ModelSpec:
    """Sources: text_config of deepseek-ai/DeepSeek-V4.1-Flash (as quoted in public tests), sqliteai docs/DS41.md.

    A causal encoder of 20 layers reads the prompt (8 B active); the answer runs through encoder and decoder (16 B).
    Four layers keep entries and index keys, 890 bytes a token together; each layer keeps its window. Engram: two tables
    of 384 M rows of 256, of which a token reads 24 rows each. Drafter: DSpark of three layers with 128 experts, top
    three; its expert width is assumed to be the model's (it then has the announced 14.2 B).
    """
    experts = MoeFfn(num_experts=384, top_k=6, inner=2304, num_shared=1)
    norms = hyper_connection_params(_V41_HIDDEN)
    mixers = [_v41_attention(layer) for layer in range(40)]
    encoder = stacked([(mixer, experts) for mixer in mixers[:_V41_ENCODER_LAYERS]], num_norm_params=norms)
    decoder = stacked([(mixer, experts) for mixer in mixers[_V41_ENCODER_LAYERS:]], num_norm_params=norms)
    draft_experts = replace(experts, num_experts=128, top_k=3)
    return ModelSpec(
        name="deepseek-v4.1-flash",
        hidden=_V41_HIDDEN,
        layers=(*encoder, *(replace(group, phases=frozenset({Phase.DECODE})) for group in decoder)),
        vocab_size=129280,
        max_context_tokens=1_048_576,
        storage=FP8,
        storage_by_part=_STORED,
        kv_storage=_FP4_CACHE,
        num_final_norm_params=_V41_HIDDEN,
        tables=(
            Table(name="engram 1", num_params=384_006_168 * 256, num_params_read=24 * 256),
            Table(name="engram 14", num_params=384_016_682 * 256, num_params_read=24 * 256),
        ),
        # 32 layers of width 1,024 with a gated network of 2,816.
        num_vision_params=32 * (4 * 1024**2 + 3 * 1024 * 2816),
        drafter=Drafter(
            name="DSpark",
            hidden=_V41_HIDDEN,
            layers=(Layers(count=3, mixer=_V41_WINDOW, ffn=draft_experts, num_norm_params=norms),),
            num_other_params=3 * _V41_HIDDEN**2 + 2 * 129280 * 256,
            max_draft_tokens=5,
            one_pass=True,
            storage=FP8,
            expert_storage=MXFP4,
        ),
        announced=Announced(num_params=552e9, num_params_active=16e9, active_counts_embedding=True),
    )
