"""The decoder's operations on CPU: in place where that saves a pass over memory. Called by cpu.py.

Shapes: see models/ops.py; h = H / 2 rotary pairs, C = 2K (keys, then values), P pages, S slots per page.
"""

import torch
import torch.nn.functional as F

from ostrya.engine.backends.kernels.attention import PagedAttention
from ostrya.engine.models.ops import Embedding, Experts, Norm
from ostrya.engine.models.spec import Activation, Attention, DecoderSpec, Rope
from ostrya.engine.plan import StepPlan


def look_up(table_VD: torch.Tensor, scale: float) -> Embedding:
    """An Embedding: rows of the table, scaled."""
    if scale == 1.0:
        return lambda token_ids_T: F.embedding(token_ids_T, table_VD).float()
    return lambda token_ids_T: F.embedding(token_ids_T, table_VD).float().mul_(scale)


class RmsNorm:
    """A Norm, written as x * weight * sqrt(D) / hypot(|x|, sqrt(D * eps)), which is four operators instead of the seven
    of F.rms_norm on CPU; at one row an operator costs 5-10 us, more than its arithmetic.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._weight = weight * size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, torch.hypot(length, self._floor)).mul_(self._weight)


class MixerTables:
    """What a model's kinds of attention need that no step changes."""

    def __init__(self, spec: DecoderSpec, *, num_positions: int) -> None:
        self.mixers = tuple(dict.fromkeys(layer.mixer for layer in spec.layers))
        """Each kind once."""
        self.index_of = {id(layer.mixer): self.mixers.index(layer.mixer) for layer in spec.layers}
        """By identity, because hashing a spec takes as long as a small operator and every layer of a step asks."""
        tables: dict[tuple[Rope, int], torch.Tensor] = {}
        for mixer in self.mixers:
            key = mixer.rope, mixer.sizes.head_dim
            if key not in tables:
                tables[key] = rotary_table(mixer.rope, head_dim=mixer.sizes.head_dim, num_positions=num_positions)
        self.rotary = tuple(tables[mixer.rope, mixer.sizes.head_dim] for mixer in self.mixers)
        """Of each mixer; equal ropes share one."""


class CpuOps:
    """Ops of one step; keys and values are kept in pages_PSCH."""

    def __init__(
        self, plan: StepPlan, tables: MixerTables, *, num_tokens: int, page_size: int, dtype: torch.dtype
    ) -> None:
        """`num_tokens` is how much of the plan's padded length is computed."""
        self._num_real = min(plan.num_tokens, num_tokens)
        positions_T = torch.from_numpy(plan.positions[:num_tokens])
        self._slots_T = torch.from_numpy(plan.slot_mapping[:num_tokens]).long()
        self._index_of = tables.index_of
        rotations = {id(table): table.index_select(0, positions_T) for table in tables.rotary}
        self._rotations_T1h = [rotations[id(table)] for table in tables.rotary]
        self._attention = [
            PagedAttention(plan, mixer, num_tokens=num_tokens, page_size=page_size, dtype=dtype)
            for mixer in tables.mixers
        ]

    def add(self, x_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
        return x_TD.add_(y_TD)

    def gate(self, gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
        return gated(gate_up_TF, activation)

    def routed(self, experts: Experts, x_TD: torch.Tensor) -> torch.Tensor:
        # Padding would have experts read that nobody needs.
        y_TD = experts(x_TD[: self._num_real])
        return F.pad(y_TD, (0, 0, 0, len(x_TD) - self._num_real))

    def rotate(self, qkv_TXH: torch.Tensor, mixer: Attention, norm: Norm | None) -> torch.Tensor:
        num_heads = mixer.sizes.num_heads + mixer.sizes.num_kv_heads
        qk_TCH = qkv_TXH.narrow(1, 0, num_heads)
        exact_TCH = qk_TCH.float()
        if norm is not None:
            exact_TCH = norm(exact_TCH)
        pairs_TCh2 = exact_TCH.view(len(exact_TCH), num_heads, -1, 2)
        torch.view_as_complex(pairs_TCh2).mul_(self._rotations_T1h[self._index_of[id(mixer)]])
        if exact_TCH is not qk_TCH:
            qk_TCH.copy_(exact_TCH)
        return qkv_TXH

    def attend(
        self, qkv_TXH: torch.Tensor, mixer: Attention, kv_pages_PSCH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = mixer.sizes
        kv_TCH = qkv_TXH.narrow(1, sizes.num_heads, 2 * sizes.num_kv_heads)
        kv_pages_PSCH.view(-1, 2 * sizes.num_kv_heads, sizes.head_dim).index_copy_(0, self._slots_T, kv_TCH)
        attention = self._attention[self._index_of[id(mixer)]]
        return attention(qkv_TXH.narrow(1, 0, sizes.num_heads), kv_pages_PSCH), kv_pages_PSCH


def gated(gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(first half) * second half."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    if activation is Activation.SILU:
        return F.silu(gate_TF).mul_(up_TF)
    return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)


def rotary_table(rope: Rope, *, head_dim: int, num_positions: int) -> torch.Tensor:
    """[num_positions, 1, h] complex64: what each pair of a head is multiplied with at each position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos(), angles.sin()).unsqueeze(1)
