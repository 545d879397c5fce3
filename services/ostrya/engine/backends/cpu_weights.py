"""How the CPU backend keeps a model's matrices: dense, at 4 or 8 bits, or both, each for the row counts at which it was
measured to be faster. Called by cpu.py.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from ostrya.engine.backends.collectives import Collectives
from ostrya.engine.backends.cpu_ops import RmsNorm, gated, look_up
from ostrya.engine.backends.exchange import ProcessExchange, exchanged
from ostrya.engine.backends.kernels.experts import GroupedExperts
from ostrya.engine.backends.kernels.linear import make_linear
from ostrya.engine.backends.kernels.quantized import fits_kernel, make_quantized_linear, packed_bits
from ostrya.engine.buckets import MIN_ROWS
from ostrya.engine.config import Weights
from ostrya.engine.models.ops import Embedding, Experts, Linear, Matrix, Norm
from ostrya.engine.models.quantized import Bits, Quantized, rounded
from ostrya.engine.models.routing import route
from ostrya.engine.models.sharding import Axis, Mesh
from ostrya.engine.models.spec import RoutedFfn

_ANY_ROWS = 1 << 30
_MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
_MEASURED_BYTES = 128 << 20
"""Of dense matrices run through at each row count: more than caches hold, and little of a large model."""
_NUM_ROUNDS = 3
_MIN_GAIN = 1.1
"""Less is within what other processes make of a measurement, and not worth another rounding."""
_HOPELESS = 0.7
"""How fast the quantized copies may be before more rows are not tried: beyond the kernel's best they only fall back."""


@dataclass(slots=True)
class _Both:
    """A Linear with two copies of its matrix."""

    quantized: Linear
    dense: Linear
    bits: Bits
    num_inputs: int
    dense_bytes: int
    quantized_bytes: int
    max_rows: int = 0
    """Up to which the quantized copy is taken."""

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return (self.quantized if x_TI.shape[0] <= self.max_rows else self.dense)(x_TI)


@dataclass(slots=True)
class _Part:
    """The layers' matrices, or the head's."""

    max_bits: Bits | None
    """What is wider is rounded to it; None: nothing is."""
    both: list[_Both] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """How many matrices are kept in one way only, by its name."""
    num_values: int = 0
    few_bits: float = 0.0
    """Of all of them together, as few rows read them, and ..."""
    many_bits: float = 0.0
    """... as more do."""

    def count(self, shape: tuple[int, int], few_bits: float, many_bits: float) -> None:
        """A matrix was kept at so many bits a value."""
        num_values = math.prod(shape)
        self.num_values += num_values
        self.few_bits += num_values * few_bits
        self.many_bits += num_values * many_bits

    @property
    def width(self) -> "Width":
        """Once it is chosen up to how many rows quantized copies are taken."""
        num_values = max(1, self.num_values)
        return Width(self.both[0].max_rows if self.both else 0, self.few_bits / num_values, self.many_bits / num_values)


@dataclass(frozen=True, slots=True)
class Width:
    """How many bits of memory a value of some matrices takes, on average."""

    few_rows: int
    few_bits: float
    """Where at most few_rows rows are multiplied."""
    many_bits: float
    """Where there are more."""

    def bits(self, few: bool) -> float:
        return self.few_bits if few else self.many_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How matrices are kept in the end."""

    layers: Width
    head: Width

    layer_rows: int
    """Up to so many rows, a row of the layers' products has the same bits whatever stands beside it, or nothing; above,
    from MIN_ROWS rows up."""
    head_rows: int
    """The same of the head's."""
    description: str


class CpuBuilder:
    """A Builder; `choose` ends it."""

    def __init__(
        self,
        dtype: torch.dtype,
        weights: Weights,
        collectives: Collectives | None = None,
        *,
        mesh: Mesh | None = None,
        exchange_tokens: int | None = None,
    ) -> None:
        """Without collectives, of a model that is whole here. Steps of `exchange_tokens` and more are sent to their
        experts (exchange.py)."""
        self.dtype = dtype
        self.num_bytes = 0
        """Of the weights kept so far."""
        self._mesh, self._exchange_tokens = mesh or Mesh(), exchange_tokens
        self._experts: list[GroupedExperts] = []
        self.shard = 0 if collectives is None else collectives.rank
        self._collectives = collectives
        self._is_auto = weights == "auto" and dtype is torch.bfloat16
        self._dense_name = "bf16" if dtype is torch.bfloat16 else "f32"
        max_bits: Bits | None = 4 if weights == "int4" else 8 if weights == "int8" else None
        self._layers = _Part(max_bits)
        # Files at 4 bits have this one at 8: it decides between tokens.
        self._head = _Part(max_bits and 8)

    def linear(self, matrix: Matrix, bias_O: torch.Tensor | None = None) -> Linear:
        product = self._kept(self._layers, matrix, bias_O)
        if self._collectives is None or not matrix.is_partial:
            return product
        assert bias_O is None, "it would be added once a shard"
        add_up = self._collectives.add_up
        return lambda x_TI: add_up(product(x_TI).float())

    def head(self, matrix: Matrix) -> Linear:
        return self._kept(self._head, matrix, None)

    def embedding(self, table: Matrix, scale: float) -> Embedding:
        quantized = table.quantized() if self._head.max_bits else None
        if quantized is None:
            table_VD = table.dense()
            rows, num_bytes = look_up(table_VD, scale), table_VD.nbytes
        else:
            rows, num_bytes = _look_up_quantized(quantized, scale), quantized.nbytes
        self.num_bytes += num_bytes
        return rows if self._collectives is None else _of_all_shards(rows, table.shape[0], self._collectives)

    def router(self, weight_ED: torch.Tensor) -> Linear:
        self.num_bytes += weight_ED.nbytes
        product = make_linear(weight_ED)
        # Fewer rows take another kernel, whose last bits could choose other experts.
        return lambda x_TD: product(F.pad(x_TD, (0, 0, 0, max(0, MIN_ROWS - len(x_TD)))))[: len(x_TD)]

    def experts(self, ffn: RoutedFfn, router: Linear, gate_up: Sequence[Matrix], down: Sequence[Matrix]) -> Experts:
        group, _ = self._mesh.place((Axis.EXPERT,), self.shard)
        own = GroupedExperts(
            [self._kept(self._layers, matrix, None) for matrix in gate_up],
            [self._kept(self._layers, matrix, None) for matrix in down],
            partial(gated, activation=ffn.activation),
            first=group * ffn.sizes.num_experts,
        )
        self._experts.append(own)
        collectives = self._collectives
        exchange = None if collectives is None else ProcessExchange(collectives)

        def mix(x_TD: torch.Tensor) -> torch.Tensor:
            if exchange is not None and self._exchange_tokens is not None and len(x_TD) >= self._exchange_tokens:
                return exchanged(x_TD, exchange, lambda x_CD: route(router(x_CD), ffn), own, sent_as=self.dtype)
            y_TD = own(x_TD.to(self.dtype), *route(router(x_TD), ffn))
            return y_TD if collectives is None else collectives.add_up(y_TD)

        return mix

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        self.num_bytes += weight.nbytes
        return RmsNorm(weight, eps)

    def choose(self, max_rows: int) -> Kept:
        """Measures both copies of the matrices that have two, at 1 to `max_rows` rows, and drops what is slower."""
        layer_rows, layers = self._chosen(self._layers, max_rows)
        for experts in self._experts:
            experts.exact_rows = layer_rows
        head_rows, head = self._chosen(self._head, max_rows)
        return Kept(
            layer_rows=layer_rows,
            head_rows=head_rows,
            description=f"layers {layers}; head {head}",
            layers=self._layers.width,
            head=self._head.width,
        )

    def _kept(self, part: _Part, matrix: Matrix, bias_O: torch.Tensor | None) -> Linear:
        quantized, was_rounded = self._quantized(part, matrix)
        quantized_bytes = 0 if quantized is None else round(quantized.q_OI.numel() * packed_bits(quantized.bits) / 8)
        self.num_bytes += quantized_bytes
        if quantized is not None and part.max_bits is not None:
            part.kinds[f"{quantized.bits} bits{' (rounded)' if was_rounded else ''}"] += 1
            part.count(matrix.shape, packed_bits(quantized.bits), packed_bits(quantized.bits))
            return make_quantized_linear(quantized, bias_O)
        weight_OI = matrix.dense()
        self.num_bytes += weight_OI.nbytes
        dense_bits = 8 * weight_OI.itemsize
        part.count(matrix.shape, dense_bits if quantized is None else packed_bits(quantized.bits), dense_bits)
        if quantized is None:
            part.kinds[self._dense_name] += 1
            return make_linear(weight_OI, bias_O)
        both = _Both(
            quantized=make_quantized_linear(quantized, bias_O),
            dense=make_linear(weight_OI, bias_O),
            bits=quantized.bits,
            num_inputs=matrix.shape[1],
            dense_bytes=weight_OI.nbytes,
            quantized_bytes=quantized_bytes,
        )
        part.both.append(both)
        return both

    def _quantized(self, part: _Part, matrix: Matrix) -> tuple[Quantized | None, bool]:
        """None: dense; else also whether it has been rounded."""
        if not fits_kernel(matrix.shape) or not (self._is_auto or part.max_bits):
            return None, False
        quantized = matrix.quantized()
        if part.max_bits is None or (quantized is not None and quantized.bits <= part.max_bits):
            return quantized, False
        return rounded(matrix.dense() if quantized is None else quantized.dense(), part.max_bits), True

    def _chosen(self, part: _Part, max_rows: int) -> tuple[int, str]:
        kinds = [f"{kind} x {count}" if len(part.kinds) > 1 else kind for kind, count in part.kinds.items()]
        if not part.both:
            return (0 if self._dense_name in part.kinds else _ANY_ROWS), ", ".join(kinds)
        limit, measured = 0, list[str]()
        # Where one matrix is dense, fewer are padded.
        first_rows = MIN_ROWS if part.kinds else 1
        for rows in (rows for rows in _MEASURED_ROWS if first_rows <= rows <= max(first_rows, max_rows)):
            gain = _gain(part.both, rows)
            unit = "" if measured else " row" if rows == 1 else " rows"
            measured.append(f"{gain:.2f} at {rows}{unit}")
            if gain >= _MIN_GAIN:
                limit = rows
            elif gain < _HOPELESS:
                break
        for both in part.both:
            both.max_rows = limit
            if not limit:
                both.quantized = both.dense
                self.num_bytes -= both.quantized_bytes
        bits = f"{' and '.join(sorted({str(both.bits) for both in part.both}))} bits"
        kinds.append(f"{bits} up to {limit} rows, {self._dense_name} beyond" if limit else self._dense_name)
        return (0 if part.kinds else limit), f"{', '.join(kinds)} ({bits}: {', '.join(measured)} times as fast)"


def _look_up_quantized(table: Quantized, scale: float) -> Embedding:
    return lambda token_ids_T: table.rows(token_ids_T).dense().mul_(scale)


def _of_all_shards(rows: Embedding, num_rows: int, collectives: Collectives) -> Embedding:
    """Each shard has `num_rows` tokens."""
    first = collectives.rank * num_rows

    def look_up_here(token_ids_T: torch.Tensor) -> torch.Tensor:
        local_T = token_ids_T - first
        is_elsewhere_T1 = ((local_T < 0) | (local_T >= num_rows)).unsqueeze(-1)
        return collectives.add_up(rows(local_T.clamp(0, num_rows - 1)).masked_fill_(is_elsewhere_T1, 0.0))

    return look_up_here


def _gain(both: Sequence[_Both], rows: int) -> float:
    """How many times as fast the quantized copies are."""
    num_bytes, chosen = 0, list[_Both]()
    for one in both:
        if chosen and num_bytes > _MEASURED_BYTES:
            break
        chosen.append(one)
        num_bytes += one.dense_bytes
    inputs = {one.num_inputs: torch.randn(rows, one.num_inputs, dtype=torch.bfloat16) for one in chosen}
    quantized_s = dense_s = float("inf")
    for _ in range(_NUM_ROUNDS):
        began = time.perf_counter()
        for one in chosen:
            one.quantized(inputs[one.num_inputs])
        between = time.perf_counter()
        for one in chosen:
            one.dense(inputs[one.num_inputs])
        quantized_s = min(quantized_s, between - began)
        dense_s = min(dense_s, time.perf_counter() - between)
    return dense_s / quantized_s
