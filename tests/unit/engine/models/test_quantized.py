"""Matrices at 4 and 8 bits: what a file holds, unpacked, is what it holds dequantized; rounding is to the nearest."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from ostrya.engine.models.gguf_file import SUPPORTED
from ostrya.engine.models.quantized import GROUP, Bits, Quantized, joined, rounded
from ostrya.engine.models.sharding import Region
from ostrya.engine.models.source import WeightSource, open_source
from tests.unit.engine.models.checkpoints import Tiny, write_directory, write_gguf

TINY = Tiny()
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
SHAPE = (TINY.mlp_size, TINY.hidden_size)


def read(source: WeightSource, name: str, shape: tuple[int, int]) -> tuple[Quantized | None, torch.Tensor]:
    """A matrix as it is held, and dequantized by the gguf package."""
    dense_OI = torch.empty(shape)
    source.read_into(name, dense_OI, Region.whole(shape))
    return source.quantized(name, Region.whole(shape)), dense_OI


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_what_a_file_holds_is_what_it_holds_dequantized(kind: str, architecture: str, tmp_path: Path) -> None:
    """Also where rows are put into another order, as those of a Qwen file's queries are."""
    weights = TINY.weights()
    path = write_gguf(
        tmp_path / "m.gguf", TINY, weights, kind=GGMLQuantizationType[kind], changed=changed_to(architecture)
    )
    source = open_source(path)
    for name, shape in (("blk.0.ffn_up.weight", SHAPE), ("blk.1.attn_q.weight", (TINY.hidden_size,) * 2)):
        quantized, dense_OI = read(source, name, shape)
        assert quantized is not None
        assert quantized.bits == BITS[kind]
        torch.testing.assert_close(quantized.dense(), dense_OI, atol=1e-6, rtol=1e-6)


def changed_to(architecture: str) -> dict[str, int | float | str | None]:
    """Metadata of a Llama under another name."""
    if architecture == "llama":
        return {}
    keys = {
        "block_count": TINY.num_layers,
        "context_length": TINY.context_tokens,
        "embedding_length": TINY.hidden_size,
        "feed_forward_length": TINY.mlp_size,
        "attention.head_count": TINY.num_heads,
        "attention.head_count_kv": TINY.num_kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in keys.items()}}


@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED if kind not in BITS])
def test_other_kinds_are_read_dequantized_only(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, TINY.weights(), kind=GGMLQuantizationType[kind])
    assert open_source(path).quantized("blk.0.ffn_up.weight", Region.whole(SHAPE)) is None


def test_a_directory_holds_none(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", TINY, TINY.weights())
    assert open_source(directory).quantized("blk.0.ffn_up.weight", Region.whole(SHAPE)) is None


def random_matrix(num_rows: int = 12, num_inputs: int = 3 * GROUP, *, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, num_inputs, generator=generator) + shift


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_rounding_moves_no_value_by_more_than_half_a_step(bits: Bits, shift: float) -> None:
    matrix_OI = random_matrix(shift=shift)
    quantized = rounded(matrix_OI, bits)
    half = 2 ** (bits - 1)
    assert quantized.q_OI.min() >= -half
    assert quantized.q_OI.max() <= half - 1
    step_OI = quantized.scale_OG.repeat_interleave(GROUP, dim=1)
    assert ((quantized.dense() - matrix_OI).abs() <= step_OI / 2 + 1e-5).all()
    values_OGg = matrix_OI.view(12, 3, GROUP)
    reach_OG = values_OGg.amax(-1) - values_OGg.amin(-1) if bits == 4 else values_OGg.abs().amax(-1)
    torch.testing.assert_close(quantized.scale_OG, reach_OG / (15 if bits == 4 else 127))


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_equal_values_stay_what_they_are(bits: Bits) -> None:
    for value in (0.0, 1.5, -2.0):
        torch.testing.assert_close(rounded(torch.full((2, GROUP), value), bits).dense(), torch.full((2, GROUP), value))


def test_joined_matrices_stand_below_each_other_in_the_bits_of_the_widest() -> None:
    first, second = rounded(random_matrix(4), 4), rounded(random_matrix(8), 8)
    both = joined([first, second])
    assert both.bits == 8
    assert torch.equal(both.dense(), torch.cat([first.dense(), second.dense()]))
