"""The operations of compiling backends (engine/backends/static_ops.py), run eagerly on CPU: a second backend, as plain
as can be; also with all shards in a leading dimension, as the annotated interpreter has them.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from ostrya.engine.backends.exchange import StackedExchange
from ostrya.engine.backends.static_ops import StaticBuilder, StaticOps, TokenInputs, kv_shape, unchanged
from ostrya.engine.buckets import Growth
from ostrya.engine.models.decoder import DecoderWeights, forward, logits
from ostrya.engine.models.sharding import Mesh, Sharding
from ostrya.engine.models.source import WeightSource
from ostrya.engine.models.spec import Attention, DecoderSpec
from ostrya.engine.models.weights import read_weights
from ostrya.engine.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainAttention:
    """A StaticAttention that gathers a row's keys for each of its tokens. Keys and values lie in kv_ACH, which is
    written in place.

    Shapes: static_ops.py; L = P * page_size keys of a row, G query heads of a KV head.
    """

    tokens: TokenInputs
    row_of_T: torch.Tensor
    page_size: int

    def __call__(
        self, q_TNH: torch.Tensor, kv_TCH: torch.Tensor, mixer: Attention, kv_ACH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = mixer.sizes
        kv_ACH.index_copy_(kv_ACH.dim() - 3, self.tokens.slots_T, kv_TCH)
        kv_TLCH = self._keys(kv_ACH).index_select(-4, self.row_of_T)
        k_TLKH, v_TLKH = kv_TLCH.float().chunk(2, dim=-2)
        q_TKGH = q_TNH.float().reshape(*q_TNH.shape[:-2], sizes.num_kv_heads, -1, sizes.head_dim)
        scores_TKGL = torch.einsum("...tkgh,...tlkh->...tkgl", q_TKGH, k_TLKH) * mixer.scale
        weights_TKGL = scores_TKGL.masked_fill(self._hidden(kv_TLCH.shape[-3], mixer)[:, None, None], -1e30).softmax(-1)
        out_TKGH = torch.einsum("...tkgl,...tlkh->...tkgh", weights_TKGL, v_TLKH)
        return out_TKGH.flatten(-3).to(q_TNH.dtype), kv_ACH

    def _keys(self, kv_ACH: torch.Tensor) -> torch.Tensor:
        """kv_RLCH: the pages of each row."""
        *leading, num_slots, num_heads, head_dim = kv_ACH.shape
        table_RP = self.tokens.page_table_RP
        pages = kv_ACH.view(*leading, num_slots // self.page_size, -1).index_select(-2, table_RP.flatten())
        return pages.view(*leading, len(table_RP), -1, num_heads, head_dim)

    def _hidden(self, num_keys: int, mixer: Attention) -> torch.Tensor:
        """[T, L] whether a key is ahead of the token, or behind its window."""
        behind_TL = self.tokens.positions_T[:, None] - torch.arange(num_keys)
        hidden_TL = behind_TL < 0
        if mixer.sizes.window_tokens is not None:
            hidden_TL = hidden_TL | (behind_TL >= mixer.sizes.window_tokens)
        return hidden_TL


def static_ops(plan: StepPlan, *, page_size: int) -> StaticOps:
    """Of a plan, as it stands."""
    row_of = np.searchsorted(plan.query_start[1:], np.arange(plan.bucket.tokens), side="right")
    tokens = TokenInputs(
        positions_T=torch.from_numpy(plan.positions),
        slots_T=torch.from_numpy(plan.slot_mapping).long(),
        page_table_RP=torch.from_numpy(plan.page_table),
    )
    row_of_T = torch.from_numpy(np.minimum(row_of, plan.bucket.rows - 1))
    attention = PlainAttention(tokens=tokens, row_of_T=row_of_T, page_size=page_size)
    return StaticOps(positions_T=tokens.positions_T, attention=attention)


def empty_kv(spec: DecoderSpec, *leading: int, num_slots: int) -> tuple[torch.Tensor, ...]:
    """kv_ACH of each layer."""
    return tuple(torch.zeros(*leading, *kv_shape(spec, i, num_slots=num_slots)) for i in range(len(spec.layers)))


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

    num_shapes = num_late_shapes = num_cached_shapes = 0
    growth = Growth()

    def __init__(
        self,
        source: WeightSource,
        *,
        num_pages: int,
        page_size: int,
        num_stacked: int = 0,
        num_expert_groups: int = 1,
        exchange_tokens: int | None = None,
    ) -> None:
        """`num_stacked` shards in a leading dimension; 0 = one whole model without it."""
        mesh = Mesh(expert=num_expert_groups, tensor=max(1, num_stacked // num_expert_groups))
        sharding = Sharding(source.spec, mesh)
        self.spec, self.vocab_size = sharding.local, source.spec.vocab_size
        if num_stacked:
            shards_S1 = torch.arange(num_stacked)[:, None]
            builder = StaticBuilder(
                shard=None,
                first_token=shards_S1 * self.spec.vocab_size,
                add_up=partial(torch.sum, dim=0),
                expert_group=shards_S1 // mesh.tensor,
                exchange=StackedExchange(num_stacked, divided=unchanged),
                exchange_tokens=exchange_tokens,
            )
        else:
            builder = StaticBuilder(shard=0, first_token=torch.tensor(0))
        self.weights: DecoderWeights = read_weights(source, builder, sharding)
        leading = (num_stacked,) if num_stacked else ()
        self._kv = empty_kv(self.spec, *leading, num_slots=num_pages * page_size)
        self._page_size = page_size

    def warm_up(self, buckets: object) -> None:
        pass

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> ReferenceStep:
        ops = static_ops(plan, page_size=self._page_size)
        token_ids_T = torch.from_numpy(plan.token_ids)
        x_TD, self._kv = forward(ops, self.spec, self.weights, token_ids_T=token_ids_T, kv=self._kv)
        logits_RV = logits(self.weights, x_TD, torch.from_numpy(plan.logits_index))
        return ReferenceStep(logits_RV if logits_RV.dim() == 2 else logits_RV.transpose(0, 1).flatten(1))

    def close(self) -> None:
        pass
