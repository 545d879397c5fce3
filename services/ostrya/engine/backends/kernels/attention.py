"""Attention of a ragged batch over paged keys and values: the plain reference, and the fast version for CPU.

Shapes: T tokens (padded), R rows, N query heads, K KV heads, G = N / K query heads per KV head,
C = 2K (keys, then values), H head dim, E = N * H, P pages, S slots per page, B decode rows,
L keys of a row, Q queries of a row.
"""

import numpy as np
import torch
import torch.nn.functional as F

from ostrya.engine.models.spec import Attention
from ostrya.engine.plan import StepPlan

# Queries of a prefill row taken together. The kernel computes masked scores too, so smaller parts, each over its own
# keys only, skip most of what lies ahead of a causal row. 256 take 0.83 to 0.9 times as long as 128 over 1,024 keys and
# more, and as long over fewer: the kernel takes larger blocks of more queries.
_MAX_QUERIES = 256


def paged_attention_reference(
    q_TNH: torch.Tensor, kv_pages_PSCH: torch.Tensor, plan: StepPlan, mixer: Attention
) -> torch.Tensor:
    """out_TNH in float32, one row and one head at a time; padding tokens get 0. Every other kernel must equal this."""
    out_TNH = torch.zeros(q_TNH.shape, dtype=torch.float32)
    num_heads = q_TNH.shape[1]
    num_kv_heads = kv_pages_PSCH.shape[2] // 2
    for row in range(plan.num_rows):
        first, last = int(plan.query_start[row]), int(plan.query_start[row + 1])
        kv_len = int(plan.kv_lens[row])
        pages = torch.from_numpy(plan.page_table[row]).long()
        kv_LCH = kv_pages_PSCH[pages].flatten(0, 1)[:kv_len].float()
        visible_QL = torch.ones(last - first, kv_len, dtype=torch.bool).tril(kv_len - (last - first))
        if mixer.sizes.window_tokens is not None:
            visible_QL = visible_QL.triu(kv_len - (last - first) - mixer.sizes.window_tokens + 1)
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            scores_QL = q_TNH[first:last, head].float() @ kv_LCH[:, kv_head].T * mixer.scale
            weights_QL = scores_QL.masked_fill(~visible_QL, float("-inf")).softmax(-1)
            out_TNH[first:last, head] = weights_QL @ kv_LCH[:, num_kv_heads + kv_head]
    return out_TNH


class PagedAttention:
    """One kind of attention for one step: indices, masks and the place of the result are made once and serve every
    layer of the kind.

    Decode rows go together, padded to the longest of them; prefill rows go one by one over exactly their own keys.
    Padding tokens get 0.
    """

    def __init__(
        self, plan: StepPlan, mixer: Attention, *, num_tokens: int, page_size: int, dtype: torch.dtype
    ) -> None:
        """`num_tokens` is how much of the plan's padded length is computed."""
        sizes = mixer.sizes
        group_size = sizes.num_heads // sizes.num_kv_heads
        out_TKGH = torch.zeros(num_tokens, sizes.num_kv_heads, group_size, sizes.head_dim, dtype=dtype)
        self._out_TE = out_TKGH.view(num_tokens, -1)
        self._decode = _DecodeRows(plan, mixer, out_TKGH, page_size) if plan.num_decode_rows else None
        self._chunks = [
            _Chunk(plan, mixer, row, first, out_TKGH, page_size)
            for row in range(plan.num_decode_rows, plan.num_rows)
            for first in range(int(plan.query_start[row]), int(plan.query_start[row + 1]), _MAX_QUERIES)
        ]

    def __call__(self, q_TNH: torch.Tensor, kv_pages_PSCH: torch.Tensor) -> torch.Tensor:
        """out_TE, heads side by side; overwritten by the next call."""
        if self._decode:
            self._decode.attend(q_TNH, kv_pages_PSCH)
        for chunk in self._chunks:
            chunk.attend(q_TNH, kv_pages_PSCH)
        return self._out_TE


class _DecodeRows:
    """All rows with one token."""

    def __init__(self, plan: StepPlan, mixer: Attention, out_TKGH: torch.Tensor, page_size: int) -> None:
        self._scale = mixer.scale
        self._num_rows = plan.num_decode_rows
        self._out_BKGH = out_TKGH[: self._num_rows]
        kv_lens_B1 = plan.kv_lens[: self._num_rows, None]
        first_keys_B1 = np.maximum(0, kv_lens_B1 - _window(mixer, kv_lens_B1.max()))
        first_pages_B1 = first_keys_B1 // page_size
        num_pages = int((-(-kv_lens_B1 // page_size) - first_pages_B1).max())
        columns_BP = np.minimum(first_pages_B1 + np.arange(num_pages, dtype=np.int32), plan.bucket.pages - 1)
        pages_BP = plan.page_table[np.arange(self._num_rows)[:, None], columns_BP]
        self._pages = torch.from_numpy(pages_BP).view(-1)
        keys_BL = first_pages_B1 * page_size + np.arange(num_pages * page_size, dtype=np.int32)
        hidden_BL = torch.from_numpy((keys_BL >= kv_lens_B1) | (keys_BL < first_keys_B1))
        bias_BL = torch.zeros(hidden_BL.shape, dtype=out_TKGH.dtype).masked_fill_(hidden_BL, float("-inf"))
        self._bias_B11L = bias_BL[:, None, None]

    def attend(self, q_TNH: torch.Tensor, kv_pages_PSCH: torch.Tensor) -> None:
        kv_BLCH = _gather(kv_pages_PSCH, self._pages, self._num_rows)
        k_BKLH, v_BKLH = kv_BLCH.transpose(1, 2).chunk(2, dim=1)
        # A KV head's query heads stand as rows of one product: in bfloat16 4-8 times faster than enable_gqa, which
        # takes them singly.
        q_BKGH = q_TNH[: self._num_rows].view(self._out_BKGH.shape)
        out_BKGH = F.scaled_dot_product_attention(q_BKGH, k_BKLH, v_BKLH, attn_mask=self._bias_B11L, scale=self._scale)
        self._out_BKGH.copy_(out_BKGH)


class _Chunk:
    """Up to _MAX_QUERIES consecutive tokens of one prefill row."""

    def __init__(
        self, plan: StepPlan, mixer: Attention, row: int, first: int, out_TKGH: torch.Tensor, page_size: int
    ) -> None:
        self._scale = mixer.scale
        row_end = int(plan.query_start[row + 1])
        self._tokens = slice(first, min(first + _MAX_QUERIES, row_end))
        self._out_QKGH = out_TKGH[self._tokens]
        end = int(plan.kv_lens[row]) - (row_end - self._tokens.stop)
        num_queries = self._tokens.stop - first
        window = _window(mixer, end)
        first_page = max(0, end - num_queries - window + 1) // page_size
        self._pages = torch.from_numpy(plan.page_table[row, first_page : -(-end // page_size)])
        num_keys = self._num_keys = end - first_page * page_size
        hidden_QL = torch.full((num_queries, num_keys), float("-inf"), dtype=out_TKGH.dtype)
        self._bias_QL = hidden_QL.triu(num_keys - num_queries + 1)
        if window < end:
            self._bias_QL += hidden_QL.tril_(num_keys - num_queries - window)

    def attend(self, q_TNH: torch.Tensor, kv_pages_PSCH: torch.Tensor) -> None:
        group_size = self._out_QKGH.shape[2]
        kv_LCH = _gather(kv_pages_PSCH, self._pages, 1)[0, : self._num_keys]
        k_KLH, v_KLH = kv_LCH.transpose(0, 1).chunk(2)
        # KV heads are the batch; a group's query heads see the same keys through a stride of 0, and all share the mask.
        q_KGQH = q_TNH[self._tokens].view(self._out_QKGH.shape).permute(1, 2, 0, 3)
        k_KGLH = k_KLH[:, None].expand(-1, group_size, -1, -1)
        v_KGLH = v_KLH[:, None].expand(-1, group_size, -1, -1)
        out_KGQH = F.scaled_dot_product_attention(q_KGQH, k_KGLH, v_KGLH, attn_mask=self._bias_QL, scale=self._scale)
        self._out_QKGH.copy_(out_KGQH.permute(2, 0, 1, 3))


def _window(mixer: Attention, kv_len: int) -> int:
    """How many tokens a query sees, itself included, of `kv_len` at most."""
    return min(kv_len, mixer.sizes.window_tokens or kv_len)


def _gather(kv_pages_PSCH: torch.Tensor, pages: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, L, C, H]: these pages of each row laid end to end."""
    num_pages, _, num_heads, head_dim = kv_pages_PSCH.shape
    picked = kv_pages_PSCH.view(num_pages, -1).index_select(0, pages)
    return picked.view(num_rows, -1, num_heads, head_dim)
