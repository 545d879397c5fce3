"""A second backend, as plain as can be: every operation functional, positions turned by real numbers, attention over
all pages of a row with a mask. What a compiling backend would trace; it proves that model files ask for no more.

Shapes: engine/models/ops.py; L = P * S keys of a row.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ostrya.engine.models.decoder import DecoderWeights, forward, logits
from ostrya.engine.models.ops import Embedding, Linear, Matrix, Norm
from ostrya.engine.models.source import WeightSource
from ostrya.engine.models.spec import Activation, Attention, DecoderSpec
from ostrya.engine.models.weights import read_weights
from ostrya.engine.plan import StepPlan


class ReferenceBuilder:
    """A Builder: closures over plain tensors."""

    dtype = torch.float32

    def linear(self, matrix: Matrix, bias_O: torch.Tensor | None = None) -> Linear:
        weight_OI = matrix.dense()
        return lambda x_TI: F.linear(x_TI, weight_OI, bias_O)

    def head(self, matrix: Matrix) -> Linear:
        return self.linear(matrix)

    def embedding(self, table: Matrix, scale: float) -> Embedding:
        table_VD = table.dense()
        return lambda token_ids_T: table_VD.index_select(0, token_ids_T) * scale

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceOps:
    """Ops of one step, from tensors alone."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    row_of_T: torch.Tensor
    page_table_RP: torch.Tensor

    @classmethod
    def of(cls, plan: StepPlan) -> "ReferenceOps":
        row_of = np.searchsorted(plan.query_start[1:], np.arange(plan.bucket.tokens), side="right")
        return cls(
            positions_T=torch.from_numpy(plan.positions),
            slots_T=torch.from_numpy(plan.slot_mapping).long(),
            row_of_T=torch.from_numpy(np.minimum(row_of, plan.bucket.rows - 1)),
            page_table_RP=torch.from_numpy(plan.page_table),
        )

    def add(self, x_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
        return x_TD + y_TD

    def gate(self, gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
        opened_TF = F.silu(gate_TF) if activation is Activation.SILU else F.gelu(gate_TF, approximate="tanh")
        return opened_TF * up_TF

    def rotate(self, qkv_TXH: torch.Tensor, mixer: Attention, norm: Norm | None) -> torch.Tensor:
        num_heads, head_dim = mixer.sizes.num_heads + mixer.sizes.num_kv_heads, mixer.sizes.head_dim
        qk_TCH, v_TKH = qkv_TXH.tensor_split([num_heads], dim=1)
        if norm is not None:
            qk_TCH = norm(qk_TCH)
        frequencies = [mixer.rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if mixer.rope.divisors is not None:
            frequencies = [f / divisor for f, divisor in zip(frequencies, mixer.rope.divisors, strict=True)]
        angles_T1h = torch.outer(self.positions_T.float(), torch.tensor(frequencies)).unsqueeze(1)
        cos_T1h, sin_T1h = angles_T1h.cos(), angles_T1h.sin()
        first_TCh, second_TCh = qk_TCH[..., 0::2], qk_TCH[..., 1::2]
        turned = first_TCh * cos_T1h - second_TCh * sin_T1h, first_TCh * sin_T1h + second_TCh * cos_T1h
        return torch.cat([torch.stack(turned, dim=-1).flatten(-2), v_TKH], dim=1)

    def attend(
        self, qkv_TXH: torch.Tensor, mixer: Attention, kv_pages_PSCH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_heads, num_kv_heads = mixer.sizes.num_heads, mixer.sizes.num_kv_heads
        q_TNH, kv_TCH = qkv_TXH.tensor_split([num_heads], dim=1)
        kv_pages_PSCH = kv_pages_PSCH.flatten(0, 1).index_copy(0, self.slots_T, kv_TCH).view(kv_pages_PSCH.shape)
        kv_TLCH = kv_pages_PSCH[self.page_table_RP].flatten(1, 2)[self.row_of_T]
        k_TLNH, v_TLNH = (part.repeat_interleave(num_heads // num_kv_heads, dim=2) for part in kv_TLCH.chunk(2, dim=2))
        behind_TL = self.positions_T[:, None] - torch.arange(kv_TLCH.shape[1])
        hidden_TL = behind_TL < 0
        if mixer.sizes.window_tokens is not None:
            hidden_TL = hidden_TL | (behind_TL >= mixer.sizes.window_tokens)
        scores_TNL = torch.einsum("tnh,tlnh->tnl", q_TNH, k_TLNH) * mixer.scale
        weights_TNL = scores_TNL.masked_fill(hidden_TL[:, None], float("-inf")).softmax(-1)
        return torch.einsum("tnl,tlnh->tnh", weights_TNL, v_TLNH).flatten(1), kv_pages_PSCH


def empty_pages(spec: DecoderSpec, *, num_pages: int, page_size: int) -> tuple[torch.Tensor, ...]:
    """pages_PSCH of each layer."""
    sizes = [layer.mixer.sizes for layer in spec.layers]
    return tuple(torch.zeros(num_pages, page_size, 2 * size.num_kv_heads, size.head_dim) for size in sizes)


class ReferenceStep:
    """A StepHandle that is done from the start."""

    def __init__(self, logits_RV: torch.Tensor) -> None:
        self.logits_RV = logits_RV

    def done(self) -> bool:
        return True

    def tokens(self) -> npt.NDArray[np.int32]:
        tokens: npt.NDArray[np.int32] = self.logits_RV.argmax(-1).int().numpy()
        return tokens

    def scores(self) -> None:
        pass


class ReferenceRunner:
    """A Runner that decodes greedily, in float32."""

    num_shapes = num_late_shapes = 0

    def __init__(self, source: WeightSource, *, num_pages: int, page_size: int) -> None:
        self.spec = source.spec
        self.weights: DecoderWeights = read_weights(source, ReferenceBuilder())
        self._kv = empty_pages(self.spec, num_pages=num_pages, page_size=page_size)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    def warm_up(self, buckets: object) -> None:
        pass

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> ReferenceStep:
        token_ids_T = torch.from_numpy(plan.token_ids)
        x_TD, self._kv = forward(ReferenceOps.of(plan), self.spec, self.weights, token_ids_T=token_ids_T, kv=self._kv)
        return ReferenceStep(logits(self.weights, x_TD, torch.from_numpy(plan.logits_index)))

    def close(self) -> None:
        pass
