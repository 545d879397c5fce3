"""How the CPU backend keeps matrices: the kernel computes what the matrix says, a row is never changed by another, and
of two copies the one is taken that was faster."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType

from ostrya.engine.backends import cpu_weights
from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.backends.cpu_weights import CpuBuilder, Kept
from ostrya.engine.backends.kernels.quantized import make_quantized_linear
from ostrya.engine.config import EngineConfig, Weights
from ostrya.engine.models.ops import Linear
from ostrya.engine.models.quantized import Bits, Quantized, rounded
from ostrya.errors import ConfigError
from tests.numerics.driver import Driver
from tests.numerics.family_files import write_gguf_family
from tests.numerics.tiny_families import FAMILIES
from tests.unit.engine.models.checkpoints import Tiny, write_directory, write_gguf

TINY = Tiny()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@dataclass(frozen=True)
class Held:
    """A Matrix that is there already."""

    weight_OI: torch.Tensor
    bits: Bits | None = None
    is_partial: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight_OI.shape[0], self.weight_OI.shape[1]

    def dense(self) -> torch.Tensor:
        return self.weight_OI.bfloat16()

    def quantized(self) -> Quantized | None:
        return rounded(self.weight_OI, self.bits) if self.bits else None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_outputs", [16, 48, 4096 + 64])  # the last is packed in two parts
@pytest.mark.parametrize("is_biased", [False, True])
def test_the_kernel_computes_what_the_matrix_says(bits: Bits, num_outputs: int, is_biased: bool) -> None:
    matrix = rounded(random(num_outputs, 96), bits)
    bias_O = random(num_outputs).bfloat16() if is_biased else None
    x_TI = random(5, 96)
    expected_TO = F.linear(x_TI, matrix.dense(), None if bias_O is None else bias_O.float())
    found_TO = make_quantized_linear(matrix, bias_O)(x_TI).float()
    # Inputs, scales and results are rounded to 8 bits each.
    assert (found_TO - expected_TO).abs().max() < 0.02 * expected_TO.abs().max()


@pytest.mark.parametrize(("gain", "copies"), [(0.5, 0), (2.0, 1)])
def test_what_is_kept_is_counted(gain: float, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_weights, "_gain", lambda both, rows: gain)
    builder = CpuBuilder(torch.bfloat16, "auto")
    builder.linear(Held(random(64, 96), bits=4))
    builder.head(Held(random(64, 96), bits=8))
    builder.norm(torch.ones(7), 1e-5)
    builder.choose(4)
    # Nibbles, and scale and offset in bfloat16 for 32 of them.
    packed = 64 * (96 // 2 + 4 * 96 // 32)
    assert builder.num_bytes == 2 * (2 * 64 * 96) + 4 * 7 + copies * (packed + 2 * packed)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_alone_and_beside_any_others(bits: Bits) -> None:
    multiply = make_quantized_linear(rounded(random(80, 192), bits))
    x_TI = random(37, 192)
    together_TO = multiply(x_TI)
    for num_rows in (1, 2, 3, 4, 5, 16):
        apart_TO = torch.cat([multiply(part_TI) for part_TI in x_TI.split(num_rows)])  # type: ignore[no-untyped-call]
        assert torch.equal(apart_TO, together_TO)


def kept(weights: Weights, matrices: Sequence[Held], head: Held, *, max_rows: int = 16) -> tuple[Kept, list[Linear]]:
    builder = CpuBuilder(torch.bfloat16, weights)
    linears = [builder.linear(matrix) for matrix in matrices]
    linears.append(builder.head(head))
    return builder.choose(max_rows), linears


WIDE, EIGHT, FOUR = Held(random(32, 64)), Held(random(32, 64), 8), Held(random(32, 64), 4)
ODD = Held(random(24, 64), 4)
"""Of a shape that the kernel does not take."""


@pytest.mark.parametrize(
    ("weights", "layers", "head", "expected"),
    [
        ("int4", [WIDE, EIGHT, FOUR], WIDE, "layers 4 bits (rounded) x 2, 4 bits x 1; head 8 bits (rounded)"),
        ("int4", [FOUR], FOUR, "layers 4 bits; head 4 bits"),
        ("int8", [WIDE, EIGHT, FOUR], EIGHT, "layers 8 bits (rounded) x 1, 8 bits x 1, 4 bits x 1; head 8 bits"),
        ("int4", [ODD, FOUR], FOUR, "layers bf16 x 1, 4 bits x 1; head 4 bits"),
        ("bf16", [WIDE, FOUR], EIGHT, "layers bf16; head bf16"),
        ("auto", [WIDE, WIDE], WIDE, "layers bf16; head bf16"),
    ],
)
def test_what_is_asked_for_is_kept_and_said(weights: Weights, layers: list[Held], head: Held, expected: str) -> None:
    assert kept(weights, layers, head)[0].description == expected


@pytest.mark.parametrize(
    ("weights", "layers", "is_any"), [("int4", [FOUR], True), ("int4", [ODD, FOUR], False), ("bf16", [FOUR], False)]
)
def test_padding_is_needed_where_one_matrix_is_dense(weights: Weights, layers: list[Held], is_any: bool) -> None:
    assert (kept(weights, layers, FOUR)[0].layer_rows > 1000) == is_any


@pytest.mark.parametrize(
    ("gains", "max_rows", "limit", "reason"),
    [
        ([3.0, 2.5, 2.0, 0.8, 0.4], 64, 4, "3.00 at 1 row, 2.50 at 2, 2.00 at 4, 0.80 at 8, 0.40 at 16"),
        # One count measured while something else ran does not decide for the others.
        ([0.9, 2.5, 1.2, 0.5], 64, 4, "0.90 at 1 row, 2.50 at 2, 1.20 at 4, 0.50 at 8"),
        ([0.6], 64, 0, "0.60 at 1 row"),
        ([3.0, 2.5, 2.0], 4, 4, "3.00 at 1 row, 2.50 at 2, 2.00 at 4"),
    ],
)
def test_of_two_copies_the_faster_is_taken(
    gains: list[float], max_rows: int, limit: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter(gains)
    monkeypatch.setattr(cpu_weights, "_gain", lambda both, rows: next(measured))
    found, (linear, _) = kept("auto", [FOUR], WIDE, max_rows=max_rows)
    assert next(measured, None) is None
    words = f"4 bits up to {limit} rows, bf16 beyond" if limit else "bf16"
    assert found.description == f"layers {words} (4 bits: {reason} times as fast); head bf16"
    assert (found.layer_rows, found.head_rows) == (limit, 0)
    four, wide = make_quantized_linear(rounded(FOUR.weight_OI, 4)), FOUR.dense()
    for num_rows in (1, 2, 4, 8, 32):
        x_TI = random(num_rows, 64).bfloat16()
        if num_rows <= limit:
            assert torch.equal(linear(x_TI), four(x_TI))
        else:
            torch.testing.assert_close(linear(x_TI), F.linear(x_TI, wide), atol=0.1, rtol=0.02)


def test_both_copies_are_measured() -> None:
    found, _ = kept("auto", [FOUR, FOUR], EIGHT)
    assert "(4 bits: " in found.description
    assert "(8 bits: " in found.description


def test_beside_a_dense_matrix_the_rows_that_are_padded_to_are_measured() -> None:
    assert " at 4 rows times as fast)" in kept("auto", [FOUR, WIDE], WIDE, max_rows=1)[0].description


def test_in_float32_auto_is_dense() -> None:
    builder = CpuBuilder(torch.float32, "auto")
    builder.linear(FOUR)
    assert builder.choose(16).description.startswith("layers f32")


def config_of(path: Path, weights: Weights, dtype: str = "bfloat16") -> EngineConfig:
    return msgspec.structs.replace(
        EngineConfig(model_path=str(path), model_name="tiny", tokenizer_fingerprint="", page_size=4, num_pages=64),
        weights=weights,
        dtype=dtype,
        num_threads=1,
    )


@pytest.mark.parametrize("weights", ["auto", "int4", "int8"])
@pytest.mark.parametrize("is_file", [True, False])
def test_a_model_runs_alone_and_in_a_batch(weights: Weights, is_file: bool, tmp_path: Path) -> None:
    path = (
        write_gguf(tmp_path / "m.gguf", TINY, TINY.weights(), kind=GGMLQuantizationType.Q4_1)
        if is_file
        else write_directory(tmp_path / "m", TINY, TINY.weights())
    )
    runner, model = load_runner(config_of(path, weights))
    driver = Driver(runner, page_size=4, context_tokens=TINY.context_tokens)
    prompts = [list(range(3, 3 + length)) for length in (5, 9, 2)]
    together = driver.generate(prompts, num_new=6)
    driver.release_all()
    alone = [driver.generate([prompt], num_new=6)[0] for prompt in prompts]
    runner.close()
    assert model.weights.startswith("layers ")
    if weights != "auto":
        assert alone == together


@pytest.mark.parametrize("weights", ["auto", "int4", "bf16"])
def test_experts_run_alone_and_in_a_batch_as_the_file_has_them(weights: Weights, tmp_path: Path) -> None:
    path = write_gguf_family(tmp_path / "m.gguf", FAMILIES["qwen3-moe"], quantization=GGMLQuantizationType.Q4_1)
    runner, model = load_runner(config_of(path, weights))
    driver = Driver(runner, page_size=4, context_tokens=128)
    prompts = [list(range(3, 3 + length)) for length in (5, 9, 2)]
    together = driver.generate(prompts, num_new=6)
    driver.release_all()
    alone = [driver.generate([prompt], num_new=6)[0] for prompt in prompts]
    runner.close()
    if weights == "int4":
        assert model.weights.startswith("layers 4 bits;")
    if weights != "auto":
        assert alone == together


@pytest.mark.parametrize(("weights", "dtype"), [("f32", "bfloat16"), ("int4", "float32"), ("bf16", "float32")])
def test_weights_that_do_not_go_with_the_dtype_are_refused(weights: Weights, dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"weights is {weights} and dtype {dtype}"):
        config_of(Path("m"), weights, dtype).check()
