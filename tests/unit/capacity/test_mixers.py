"""What each kind of mixer counts, worked out by hand: on small sizes that cannot be confused, and in ready models."""

import pytest

from ostrya.capacity.costs import Work, costs
from ostrya.capacity.layers import Mixer, Part, Phase
from ostrya.capacity.mixers import (
    CompressedAttention,
    GatedDeltaNet,
    GroupedAttention,
    Indexer,
    KimiDeltaAttention,
    LatentAttention,
)
from ostrya.capacity.models import find_model

HIDDEN = 7
GROUPED = GroupedAttention(num_heads=6, num_kv_heads=2, head_dim=5)
WINDOW = GroupedAttention(num_heads=6, num_kv_heads=2, head_dim=5, window_tokens=100)
RICH = GroupedAttention(
    num_heads=6,
    num_kv_heads=2,
    head_dim=5,
    output_gate=True,
    qk_norm=True,
    qkv_bias=True,
    output_bias=True,
    sinks=True,
)
LATENT = LatentAttention(num_heads=3, q_rank=11, kv_rank=20, nope_dim=5, rope_dim=4, value_dim=8)
WIDE_QUERIES = LatentAttention(
    num_heads=3, q_rank=None, kv_rank=20, nope_dim=5, rope_dim=4, value_dim=8, output_gate=True
)
KDA = KimiDeltaAttention(num_heads=3, head_dim=4, conv_width=2, full_rank_gate=True)
LOW_RANK_KDA = KimiDeltaAttention(num_heads=3, head_dim=4, conv_width=2, full_rank_gate=False)
GDN = GatedDeltaNet(num_key_heads=2, num_value_heads=6, key_dim=3, value_dim=4, conv_width=2)


def compressed(
    ratio: int, *, top_k: int | None = None, indexer: Indexer | None = None, keeps_entries: bool = True
) -> CompressedAttention:
    return CompressedAttention(
        num_heads=3,
        head_dim=10,
        q_rank=4,
        output_groups=2,
        output_rank=5,
        window_tokens=8,
        ratio=ratio,
        top_k=top_k,
        indexer=indexer,
        keeps_entries=keeps_entries,
    )


ALONE = compressed(0)
CSA = compressed(4, top_k=16, indexer=Indexer(num_heads=2, head_dim=6, top_k=16))
CHOOSER = compressed(
    4, top_k=16, indexer=Indexer(num_heads=2, head_dim=6, top_k=16, candidates=20), keeps_entries=False
)
"""Chooses among another layer's entries, of which an earlier layer left 20."""
FOLLOWER = compressed(4, top_k=16, keeps_entries=False)
"""Uses another layer's entries, and its choice."""
HCA = compressed(20)

_COMPRESSED_PARAMS = 4 * 7 + 4 + 4 * 30 + 7 * 10 + 10 + 30 * 5 + 2 * 5 * 7 + 3
"""Queries through a rank with its norm, one KV head with its norm, grouped output through a rank, a sink per head."""
_INDEXER_PARAMS = 2 * 6 * 4 + 2 * 7
"""Of the 2 index heads: queries out of the rank, and a weight of each for every token."""


@pytest.mark.parametrize(
    ("mixer", "params", "state", "shards", "written"),
    [
        # Queries and output are 30 wide, keys and values 10 each.
        pytest.param(GROUPED, 7 * (30 + 30 + 10 + 10), 0, 2, 20, id="grouped"),
        # Gate; norms of a query's and a key's head; biases of q, k, v and of the output; sinks.
        pytest.param(RICH, 7 * (80 + 30) + (5 + 5) + (30 + 10 + 10) + 7 + 6, 0, 2, 20, id="grouped, all options"),
        # Queries through the rank and its norm; latent, its norm, keys and values out of it; output of 3 heads of 8.
        pytest.param(
            LATENT, (7 * 11 + 11 + 11 * 27) + 7 * 24 + 20 + 20 * 3 * (5 + 8) + 24 * 7, 0, 1, 20 + 4, id="latent"
        ),
        pytest.param(
            WIDE_QUERIES,
            7 * 27 + 7 * 24 + 20 + 20 * 3 * (5 + 8) + 2 * 24 * 7,
            0,
            1,
            20 + 4,
            id="latent with whole queries and a gate",
        ),
        # q, k, v, output and gate; decay through one head's width, its bias and scale; beta; 3 convolutions; norm.
        pytest.param(
            KDA, 5 * 7 * 12 + (7 * 4 + 4 * 12) + 12 + 3 + 7 * 3 + 3 * 12 * 2 + 4, 3 * 4 * 4, 3, 0, id="kimi delta"
        ),
        pytest.param(
            LOW_RANK_KDA,
            4 * 7 * 12 + 2 * (7 * 4 + 4 * 12) + 12 + 3 + 7 * 3 + 3 * 12 * 2 + 4,
            3 * 4 * 4,
            3,
            0,
            id="kimi delta with a narrow gate",
        ),
        # q and k of 6, v, gate and output of 24; beta and decay; convolution; decay's bias and scale; norm.
        pytest.param(
            GDN,
            7 * (6 + 6 + 3 * 24) + 7 * (6 + 6) + (6 + 6 + 24) * 2 + 6 + 6 + 4,
            6 * 3 * 4,
            6,
            0,
            id="gated delta net",
        ),
        pytest.param(ALONE, _COMPRESSED_PARAMS, 0, 1, 10, id="window alone"),
        # Small ratios overlap: entries and index keys twice as wide, each with a gate, 4 positions and a norm.
        pytest.param(
            CSA,
            _COMPRESSED_PARAMS + _INDEXER_PARAMS + (2 * 7 * 20 + 4 * 20 + 10) + (2 * 7 * 12 + 4 * 12 + 6),
            0,
            1,
            10 + (10 + 6) / 4,
            id="CSA",
        ),
        pytest.param(CHOOSER, _COMPRESSED_PARAMS + _INDEXER_PARAMS, 0, 1, 10, id="CSA that keeps no entries"),
        pytest.param(FOLLOWER, _COMPRESSED_PARAMS, 0, 1, 10, id="CSA that keeps and chooses nothing"),
        pytest.param(HCA, _COMPRESSED_PARAMS + 2 * 7 * 10 + 20 * 10 + 10, 0, 1, 10 + 10 / 20, id="HCA"),
    ],
)
def test_a_mixer_has_these_sizes(mixer: Mixer, params: int, state: int, shards: int, written: float) -> None:
    assert mixer.num_params(HIDDEN) == params
    assert mixer.num_state_values == state
    assert mixer.num_cache_shards == shards
    assert mixer.num_written_values == written


@pytest.mark.parametrize(
    ("mixer", "context", "cached", "read_by_rows"),
    [
        pytest.param(GROUPED, 400, 400 * 20, {1: 400 * 20, 3: 400 * 20}, id="grouped"),
        pytest.param(WINDOW, 40, 40 * 20, {1: 40 * 20}, id="short of the window"),
        pytest.param(WINDOW, 400, 100 * 20, {1: 100 * 20, 3: 100 * 20}, id="beyond the window"),
        pytest.param(LATENT, 400, 400 * 24, {1: 400 * 24, 3: 400 * 24}, id="latent"),
        pytest.param(KDA, 400, 0, {1: 0, 3: 0}, id="kimi delta"),
        pytest.param(GDN, 400, 0, {1: 0, 3: 0}, id="gated delta net"),
        pytest.param(ALONE, 400, 8 * 10, {1: 8 * 10, 3: 8 * 10}, id="window alone"),
        # Each row takes 16 entries of its own, until all 100 are read. Index keys are compared whatever is chosen.
        pytest.param(
            CSA,
            400,
            8 * 10 + 100 * 16,
            {1: 80 + 16 * 10 + 100 * 6, 3: 80 + 48 * 10 + 600, 10: 80 + 100 * 10 + 600},
            id="CSA",
        ),
        pytest.param(CSA, 4, 4 * 10 + 1 * 16, {1: 4 * 10 + 1 * 10 + 1 * 6}, id="CSA, one entry"),
        pytest.param(CHOOSER, 400, 80, {1: 80 + 160 + 20 * 6, 3: 80 + 480 + 20 * 6}, id="CSA among candidates"),
        pytest.param(CHOOSER, 40, 80, {1: 80 + 10 * 10 + 10 * 6}, id="CSA with fewer entries than candidates"),
        pytest.param(FOLLOWER, 400, 80, {1: 80 + 160, 3: 80 + 480}, id="CSA of another's choice"),
        pytest.param(HCA, 400, 80 + 20 * 10, {1: 80 + 20 * 10, 3: 80 + 20 * 10}, id="HCA"),
    ],
)
def test_a_mixer_keeps_and_reads_so_much(
    mixer: Mixer, context: float, cached: float, read_by_rows: dict[int, float]
) -> None:
    assert mixer.num_cached_values(context) == cached
    assert {rows: mixer.num_read_values(context, rows) for rows in read_by_rows} == read_by_rows


@pytest.mark.parametrize(
    ("mixer", "context", "flops"),
    [
        # A multiplication and an addition per value, once for the score and once for the sum.
        pytest.param(GROUPED, 400, (2 + 2) * 30 * 400, id="grouped"),
        pytest.param(WINDOW, 40, 4 * 30 * 40, id="short of the window"),
        pytest.param(WINDOW, 400, 4 * 30 * 100, id="beyond the window"),
        # Per value of the state: decay, prediction (2), rank-one update (2), reading (2).
        pytest.param(KDA, 400, (1 + 2 + 2 + 2) * 48, id="kimi delta"),
        pytest.param(GDN, 400, (1 + 2 + 2 + 2) * 72, id="gated delta net"),
        pytest.param(ALONE, 400, 4 * 30 * 8, id="window alone"),
        # The index has scores and no sums.
        pytest.param(CSA, 400, 4 * 30 * (8 + 16) + 2 * 12 * 100, id="CSA"),
        pytest.param(CSA, 4, 4 * 30 * (4 + 1) + 2 * 12 * 1, id="CSA, one entry"),
        pytest.param(CHOOSER, 400, 4 * 30 * (8 + 16) + 2 * 12 * 20, id="CSA among candidates"),
        pytest.param(FOLLOWER, 400, 4 * 30 * (8 + 16), id="CSA of another's choice"),
        pytest.param(HCA, 400, 4 * 30 * (8 + 20), id="HCA"),
    ],
)
@pytest.mark.parametrize("phase", list(Phase))
def test_a_token_costs_so_many_flops_in_either_phase(mixer: Mixer, context: float, flops: float, phase: Phase) -> None:
    assert mixer.num_flops(context, phase) == flops


def test_latent_attention_is_absorbed_where_it_decodes_and_expanded_over_a_prompt() -> None:
    # Scores over latent and rotation, sums over the latent; or over the keys of 5 + 4 and the values of 8 of a head.
    assert LATENT.num_flops(400, Phase.DECODE) == 2 * 3 * (24 + 20) * 400
    assert LATENT.num_flops(400, Phase.PREFILL) == 2 * 3 * (9 + 8) * 400


@pytest.mark.parametrize(
    ("name", "work", "num_bytes", "num_flops"),
    [
        pytest.param(
            "llama-3.1-8b",
            Work(num_requests=2, rows_per_request=4, context_tokens=1000),
            # Keys and values of 8 heads of 128, bf16. The four rows see 1,001 to 1,004 tokens.
            2 * 32 * (1000 + 4) * 2 * 8 * 128 * 2,
            2 * 32 * (1001 + 1002 + 1003 + 1004) * 4 * 32 * 128,
            id="grouped",
        ),
        pytest.param(
            "gpt-oss-120b",
            Work(num_requests=1, context_tokens=100_000),
            (18 * 100_000 + 18 * 128 + 36) * 2 * 8 * 64 * 2,
            (18 * 100_001 + 18 * 128) * 4 * 64 * 64,
            id="half of them windows",
        ),
        pytest.param(
            "kimi-k3",
            Work(num_requests=1, context_tokens=100_000),
            24 * 100_001 * (512 + 64),
            24 * 100_001 * 2 * 96 * (512 + 64 + 512),
            id="latent, decoding",
        ),
        pytest.param(
            "kimi-k3",
            Work(num_requests=1, context_tokens=100_000, phase=Phase.PREFILL),
            24 * 100_001 * (512 + 64),
            24 * 100_001 * 2 * 96 * (128 + 64 + 128),
            id="latent, prompt",
        ),
        pytest.param(
            "deepseek-v4-flash",
            Work(num_requests=1, context_tokens=65_536),
            # 43 windows of 128; of 16,384 entries 21 layers read 512 and all index keys, of 512 entries 20 read all.
            43 * 512 * (128 + 1) + 21 * (512 * (512 + 1 / 4) + 128 * (16_384 + 1 / 4)) + 20 * 512 * (512 + 1 / 128),
            4 * 64 * 512 * (43 * 128 + 21 * 512 + 20 * 65_537 / 128) + 21 * 2 * 64 * 128 * 65_537 / 4,
            id="compressed",
        ),
        pytest.param(
            "deepseek-v4.1-flash",
            Work(num_requests=1, context_tokens=100_000),
            # 4.45 bits. 38 layers read 512 entries. Three index 50,000 entries of two tokens, one 100,000, and four
            # the 16,384 candidates it leaves; the first four keep entries and index keys.
            (
                40 * 512 * (128 + 1)
                + 38 * 512 * 512
                + 128 * (3 * 50_000 + 100_000 + 4 * 16_384)
                + (512 + 128) * (3 / 2 + 1)
            )
            * 4.45
            / 8,
            4 * 64 * 512 * (40 * 128 + 38 * 512) + 2 * 32 * 128 * (3 * 100_001 / 2 + 100_001 + 4 * 16_384),
            id="compressed and shared, decoding",
        ),
        pytest.param(
            "deepseek-v4.1-flash",
            Work(num_requests=1, rows_per_request=2, context_tokens=100_000, phase=Phase.PREFILL),
            # The first 20 layers; each of the two rows chooses its own 512.
            (20 * 512 * (128 + 2) + 18 * 512 * 2 * 512 + 128 * 3 * 50_000 + 2 * (512 + 128) * 3 / 2) * 4.45 / 8,
            2 * (4 * 64 * 512 * (20 * 128 + 18 * 512) + 2 * 32 * 128 * 3 * 100_001.5 / 2),
            id="compressed and shared, prompt",
        ),
    ],
)
def test_attention_moves_and_computes_so_much(name: str, work: Work, num_bytes: float, num_flops: float) -> None:
    found = next(part for part in costs(find_model(name), [work]) if part.part is Part.CACHE)
    assert found.num_bytes == pytest.approx(num_bytes)
    assert found.num_flops == pytest.approx(num_flops)
