"""The Llama-family decoder, one step over a ragged batch: mathematics only.

Called by a backend, which brings the matrix product, the KV pages and the attention kernel.

Shapes: T tokens (padded), R rows (sequences), D hidden, N query heads, K KV heads, C = 2K (keys, then values),
H head dim, V vocabulary, P pages, S slots per page. The residual stream and the norms are float32 whatever the
weights are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ostrya.engine.models.config import ModelConfig
from ostrya.engine.models.layers import Linear, MakeLinear, RmsNorm, rotary_table, rotate_, silu_gate
from ostrya.engine.models.source import WeightSource
from ostrya.errors import ModelLoadError

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(q_TNH, kv_pages_PSCH) -> out_TD: attention of this step's rows over their pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """The arrays of a StepPlan that the model itself needs, on its device."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One block. qkv and gate_up are fused: fewer, larger products."""

    attn_norm: RmsNorm
    qkv: Linear
    attn_output: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


class Llama:
    """Weights and the forward pass. Holds no sequence state."""

    def __init__(
        self, source: WeightSource, *, dtype: torch.dtype, context_tokens: int, make_linear: MakeLinear
    ) -> None:
        self.config = source.config
        reader = _Reader(source, dtype, make_linear)
        self._embedding_VD = reader.matrix("token_embd", (self.config.vocab_size, self.config.hidden_size))
        self._layers = [reader.layer(i) for i in range(self.config.num_layers)]
        self._norm = reader.norm("output_norm")
        self._head = make_linear(self._embedding_VD) if self.config.tied_embeddings else reader.head()
        reader.finish()
        self._rotary = rotary_table(
            num_positions=context_tokens,
            head_dim=self.config.head_dim,
            theta=self.config.rope_theta,
            divisors=self.config.rope_divisors,
        )

    def forward(self, step: StepTensors, kv_pages: Sequence[torch.Tensor], attend: Attend) -> torch.Tensor:
        """x_TD, what `logits` takes; writes this step's keys and values into kv_pages (one per layer)."""
        dtype = self._embedding_VD.dtype
        x_TD = F.embedding(step.token_ids_T, self._embedding_VD).float()
        rotation_T1h = self._rotary.index_select(0, step.positions_T)
        for layer, kv_pages_PSCH in zip(self._layers, kv_pages, strict=True):
            normed_TD = layer.attn_norm(x_TD).to(dtype)
            x_TD.add_(self._attention(layer, normed_TD, rotation_T1h, step.slots_T, kv_pages_PSCH, attend))
            normed_TD = layer.mlp_norm(x_TD).to(dtype)
            x_TD.add_(layer.down(silu_gate(layer.gate_up(normed_TD))))
        return x_TD

    def logits(self, x_TD: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
        """logits_RV in float32 of the tokens at `index_R`, of whatever forward() returned."""
        x_RD = x_TD.index_select(0, index_R)
        return self._head(self._norm(x_RD).to(self._embedding_VD.dtype)).float()

    def _attention(
        self,
        layer: Layer,
        normed_TD: torch.Tensor,
        rotation_T1h: torch.Tensor,
        slots_T: torch.Tensor,
        kv_pages_PSCH: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        config = self.config
        qkv_TE = layer.qkv(normed_TD)
        qkv_TXH = qkv_TE.view(qkv_TE.shape[0], -1, config.head_dim)
        rotate_(qkv_TXH.narrow(1, 0, config.num_heads + config.num_kv_heads), rotation_T1h)
        q_size, kv_size = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
        kv_pages_PSCH.view(-1, kv_size).index_copy_(0, slots_T, qkv_TE.narrow(1, q_size, kv_size))
        return layer.attn_output(attend(qkv_TXH.narrow(1, 0, config.num_heads), kv_pages_PSCH))


class _Reader:
    """Reads and fuses weights; every name and shape the model needs is in here."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, make_linear: MakeLinear) -> None:
        self._source = source
        self._config: ModelConfig = source.config
        self._dtype = dtype
        self._make_linear = make_linear

    def matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        self._source.require(f"{name}.weight", shape)
        out = torch.empty(shape, dtype=self._dtype)
        self._source.read_into(f"{name}.weight", out)
        return out

    def norm(self, name: str) -> RmsNorm:
        self._source.require(f"{name}.weight", (self._config.hidden_size,))
        weight_D = torch.empty(self._config.hidden_size, dtype=torch.float32)
        self._source.read_into(f"{name}.weight", weight_D)
        return RmsNorm(weight_D, self._config.norm_eps)

    def head(self) -> Linear:
        return self._make_linear(self.matrix("output", (self._config.vocab_size, self._config.hidden_size)))

    def layer(self, i: int) -> Layer:
        config, block = self._config, f"blk.{i}"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return Layer(
            attn_norm=self.norm(f"{block}.attn_norm"),
            qkv=self._fused({f"{block}.attn_q": q_size, f"{block}.attn_k": kv_size, f"{block}.attn_v": kv_size}),
            attn_output=self._make_linear(self.matrix(f"{block}.attn_output", (config.hidden_size, q_size))),
            mlp_norm=self.norm(f"{block}.ffn_norm"),
            gate_up=self._fused({f"{block}.ffn_gate": config.mlp_size, f"{block}.ffn_up": config.mlp_size}),
            down=self._make_linear(self.matrix(f"{block}.ffn_down", (config.hidden_size, config.mlp_size))),
        )

    def finish(self) -> None:
        """A tensor nobody read (a bias, a query norm) means another model than the one computed here."""
        if unread := self._source.unread():
            raise ModelLoadError(
                f"{len(unread)} tensors of the checkpoint are not part of a plain llama model, first {unread[0]}; "
                "biases, query norms and experts are not supported"
            )

    def _fused(self, rows_of: dict[str, int]) -> Linear:
        for name, num_rows in rows_of.items():
            self._source.require(f"{name}.weight", (num_rows, self._config.hidden_size))
        out = torch.empty((sum(rows_of.values()), self._config.hidden_size), dtype=self._dtype)
        first = 0
        for name, num_rows in rows_of.items():
            self._source.read_into(f"{name}.weight", out[first : first + num_rows])
            first += num_rows
        return self._make_linear(out)
