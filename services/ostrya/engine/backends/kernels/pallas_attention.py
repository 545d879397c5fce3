"""Attention of a ragged batch over pages on TPU: the kernel that jax ships, as a function that torch_tpu can make an
operator of. It reads what a row has and no more. Its plain reference is attention.py.

Called by torchtpu_attention.py, where there is jax and a TPU; imports jax. Keys and values lie in pages as the kernel
wants them, each key beside its value.

Shapes: T tokens (padded), R rows, P pages of a row, N query heads, C = 2K (keys, then values), H head dim, A slots.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention


def write_and_attend(
    kv_ACH: jax.Array,
    q_TNH: jax.Array,
    kv_TCH: jax.Array,
    slots_T: jax.Array,
    kv_lens_R: jax.Array,
    page_table_RP: jax.Array,
    query_start: jax.Array,
    num_rows: jax.Array,
    page_size: int,
    scale: float,
    window_tokens: int | None,
) -> tuple[jax.Array, jax.Array]:
    """out_TNH, and kv_ACH with the tokens' keys and values at their slots. query_start is [R + 1], num_rows [1], both
    int32 as all but the first three."""
    num_slots, num_heads, head_dim = kv_ACH.shape
    k_TKH, v_TKH = jnp.split(kv_TCH, 2, axis=1)
    side_by_side_TCH = jnp.stack([k_TKH, v_TKH], axis=2).reshape(kv_TCH.shape)
    kv_ACH = kv_ACH.at[slots_T].set(side_by_side_TCH)
    out_TNH = ragged_paged_attention(
        q_TNH,
        kv_ACH.reshape(num_slots // page_size, page_size, num_heads, head_dim),
        kv_lens_R,
        page_table_RP,
        query_start,
        num_rows,
        sm_scale=scale,
        sliding_window=window_tokens,
    )
    return out_TNH, kv_ACH
