"""The decoder's operations with fixed shapes: what backends that compile trace. No value is looked at on the host.

Written over trailing dimensions, so that they serve one shard, and all shards in a leading dimension S (sharding.py).
In plain torch, so that they are proved on CPU (tests/numerics/reference.py).

Shapes: see models/ops.py; S shards, h = H / 2 rotary pairs, C = 2K (keys, then values), R rows, P pages of a row,
A page_size * pages of the pool: slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from ostrya.engine.backends.exchange import Exchange, exchanged
from ostrya.engine.backends.static_experts import StaticExperts
from ostrya.engine.models.ops import Embedding, Experts, Linear, Matrix, Norm
from ostrya.engine.models.routing import route
from ostrya.engine.models.spec import Activation, Attention, DecoderSpec, Rope, RoutedFfn

AddUp = Callable[[torch.Tensor], torch.Tensor]
Placed = Callable[[torch.Tensor], torch.Tensor]
StaticAttention = Callable[[torch.Tensor, torch.Tensor, Attention, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""q_TNH, kv_TCH, the kind, and what is kept of the layer -> out_TE, and what is kept with kv_TCH in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """What every StaticAttention needs of a step."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    """int64"""
    page_table_RP: torch.Tensor


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


class StaticBuilder:
    """A Builder: closures over tensors that `placed` has put on the device, and `kept` lists.

    Weights lie as [in, out]: x @ w.T is 4 to 16 times slower on XLA:CPU.
    """

    def __init__(
        self,
        *,
        shard: int | None,
        first_token: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        placed: Placed = unchanged,
        add_up: AddUp = unchanged,
        expert_group: torch.Tensor | None = None,
        exchange: Exchange | None = None,
        exchange_tokens: int | None = None,
    ) -> None:
        """`first_token`: of the shard's part of the vocabulary, [] or [S, 1]. `add_up`: the sum over shards, of the
        shard's tensor or of one with S in front. `expert_group`: of a model with experts, where the shard stands on
        the axis `expert`, [] or [S, 1]; None = it has all of them. Steps of `exchange_tokens` and more go to their
        experts through `exchange`."""
        self.shard, self.dtype = shard, dtype
        self._first_token = placed(first_token)
        self._placed, self._add_up = placed, add_up
        self._expert_group = placed(torch.zeros_like(first_token) if expert_group is None else expert_group)
        self._exchange, self._exchange_tokens = exchange, exchange_tokens

    def linear(self, matrix: Matrix, bias_O: torch.Tensor | None = None) -> Linear:
        product = self._product(matrix, bias_O)
        return (lambda x_TI: self._add_up(product(x_TI).float())) if matrix.is_partial else product

    def head(self, matrix: Matrix) -> Linear:
        return self._product(matrix, None)

    def embedding(self, table: Matrix, scale: float) -> Embedding:
        table_VD = self._placed(table.dense().contiguous())
        num_tokens = table.shape[0]

        def look_up(token_ids_T: torch.Tensor) -> torch.Tensor:
            local_T = token_ids_T - self._first_token
            is_here_T1 = ((local_T >= 0) & (local_T < num_tokens)).unsqueeze(-1)
            # The same row of every shard's part, right in the one that has the token: a gather that is the shard's own.
            rows_TD = table_VD.index_select(-2, token_ids_T % num_tokens).float()
            return self._add_up(torch.where(is_here_T1, rows_TD, 0.0)) * scale

        return look_up

    def router(self, weight_ED: torch.Tensor) -> Linear:
        weight_DE = self._placed(weight_ED.T.contiguous())
        return lambda x_TD: x_TD @ weight_DE

    def experts(self, ffn: RoutedFfn, router: Linear, gate_up: Sequence[Matrix], down: Sequence[Matrix]) -> Experts:
        group = self._expert_group
        own = StaticExperts(
            gate_up_EDF=self._stacked(gate_up),
            down_EID=self._stacked(down),
            first_expert=(group.unsqueeze(-1) if group.dim() else group) * ffn.sizes.num_experts,
            gate=partial(gated, activation=ffn.activation),
        )

        def mix(x_TD: torch.Tensor) -> torch.Tensor:
            if self._exchange is None or self._exchange_tokens is None or x_TD.shape[0] < self._exchange_tokens:
                return self._add_up(own(x_TD, *route(router(x_TD), ffn)))
            return exchanged(x_TD, self._exchange, lambda x_CD: route(router(x_CD), ffn), own, sent_as=own.dtype)

        return mix

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        weight = self._placed(weight)
        return lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def _stacked(self, matrices: Sequence[Matrix]) -> torch.Tensor:
        """[E, in, out], or [S, E, in, out]."""
        dense = [matrix.dense().transpose(-1, -2) for matrix in matrices]
        return self._placed(torch.stack(dense, dim=-3))

    def _product(self, matrix: Matrix, bias_O: torch.Tensor | None) -> Linear:
        weight_IO = self._placed(matrix.dense().transpose(-1, -2).contiguous())
        if bias_O is None:
            return lambda x_TI: _times(x_TI.to(weight_IO.dtype), weight_IO)
        bias_1O = self._placed(bias_O.unsqueeze(-2))
        return lambda x_TI: _times(x_TI.to(weight_IO.dtype), weight_IO) + bias_1O


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOps:
    """Ops of one step, from tensors alone."""

    positions_T: torch.Tensor
    attention: StaticAttention
    _rotations: dict[tuple[Rope, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Made once a step for all layers with that rope."""

    def add(self, x_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
        return x_TD + y_TD

    def gate(self, gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
        return gated(gate_up_TF, activation)

    def routed(self, experts: Experts, x_TD: torch.Tensor) -> torch.Tensor:
        return experts(x_TD)

    def rotate(self, qkv_TXH: torch.Tensor, mixer: Attention, norm: Norm | None) -> torch.Tensor:
        sizes = mixer.sizes
        qk_TCH, v_TKH = qkv_TXH.tensor_split([sizes.num_heads + sizes.num_kv_heads], dim=-2)
        exact_TCH = qk_TCH.float()
        if norm is not None:
            exact_TCH = norm(exact_TCH)
        key = mixer.rope, sizes.head_dim
        if key not in self._rotations:
            self._rotations[key] = rotation(self.positions_T, mixer.rope, head_dim=sizes.head_dim)
        cos_T1h, sin_T1h = self._rotations[key]
        first_TCh, second_TCh = exact_TCH[..., 0::2], exact_TCH[..., 1::2]
        turned = first_TCh * cos_T1h - second_TCh * sin_T1h, first_TCh * sin_T1h + second_TCh * cos_T1h
        return torch.cat([torch.stack(turned, dim=-1).flatten(-2).to(qk_TCH.dtype), v_TKH], dim=-2)

    def attend(
        self, qkv_TXH: torch.Tensor, mixer: Attention, kv_ACH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_TNH, kv_TCH = qkv_TXH.tensor_split([mixer.sizes.num_heads], dim=-2)
        return self.attention(q_TNH, kv_TCH, mixer, kv_ACH)


def gated(gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    opened_TF = F.silu(gate_TF) if activation is Activation.SILU else F.gelu(gate_TF, approximate="tanh")
    return opened_TF * up_TF


def rotation(positions_T: torch.Tensor, rope: Rope, *, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos_T1h, sin_T1h."""
    exponents_h = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies_h = 1.0 / (rope.theta**exponents_h)
    if rope.divisors is not None:
        frequencies_h = frequencies_h / torch.tensor(rope.divisors)
    angles_T1h = torch.outer(positions_T.float(), frequencies_h.to(positions_T.device)).unsqueeze(1)
    return angles_T1h.cos(), angles_T1h.sin()


def kv_shape(spec: DecoderSpec, layer: int, *, num_slots: int) -> tuple[int, int, int]:
    """[A, C, H] of a layer of one shard."""
    sizes = spec.layers[layer].mixer.sizes
    return num_slots, 2 * sizes.num_kv_heads, sizes.head_dim


def _times(x_TI: torch.Tensor, weight_IO: torch.Tensor) -> torch.Tensor:
    """x @ weight of each shard. Not matmul where x has no S: that transposes the weights of all shards into one."""
    if weight_IO.dim() == 2 or x_TI.dim() == weight_IO.dim():
        return x_TI @ weight_IO
    return torch.bmm(x_TI.expand(weight_IO.shape[0], -1, -1), weight_IO)
