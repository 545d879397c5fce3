"""Experts with fixed shapes, for backends that compile: nothing depends on how many tokens an expert gets. Called by
static_ops.py.

Pairs of token and expert are put into blocks of one expert each: there are always enough blocks, so no pair is dropped,
and those left over multiply zeros. What it costs: each block reads its expert's matrices once, and a shard has room for
the worst case, that all tokens go to its experts. A kernel that skips empty blocks would not pay for that; without one,
dividing experts' inner values (axis `tensor`) saves products where dividing experts (axis `expert`) saves none.

Over trailing dimensions, so that it serves one shard, and all shards in a leading dimension S.

Shapes: T tokens, k experts of a token, M = T * k pairs, E experts of a shard, B blocks of N pairs, D hidden, I inner,
F = 2I.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Gate = Callable[[torch.Tensor], torch.Tensor]

_MIN_BLOCK, _MAX_BLOCK = 8, 128
"""Fewer rows than a TPU's sublanes are padded to them anyway; more than its matrix unit's side save no reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticExperts:
    """What the experts of a shard add: x_TD, or [S, T, D], and whole choices -> y_TD in float32, with S where there are
    shards in front."""

    gate_up_EDF: torch.Tensor
    """Or [S, E, D, F]."""
    down_EID: torch.Tensor
    first_expert: torch.Tensor
    """Of the shard: [], or [S, 1, 1]."""
    gate: Gate

    @property
    def dtype(self) -> torch.dtype:
        return self.down_EID.dtype

    def __call__(self, x_TD: torch.Tensor, weights_Tk: torch.Tensor, experts_Tk: torch.Tensor) -> torch.Tensor:
        num_experts, top_k = self.down_EID.shape[-3], experts_Tk.shape[-1]
        local_Tk = experts_Tk - self.first_expert
        is_here_Tk = (local_Tk >= 0) & (local_Tk < num_experts)
        num_blocks, block_size = blocks(x_TD.shape[-2], min(top_k, num_experts), num_experts)
        is_of_ME = local_Tk.flatten(-2).unsqueeze(-1) == torch.arange(num_experts, device=x_TD.device)
        place_M, expert_B = _placed(is_of_ME, num_blocks, block_size)
        # What goes elsewhere falls into a place behind the last block.
        num_places = num_blocks * block_size
        place_M = torch.where(is_here_Tk.flatten(-2), place_M, num_places)
        x_PD = _dealt(x_TD.to(self.dtype), place_M, top_k, num_places)
        x_BND = x_PD.view(*x_PD.shape[:-2], num_blocks, block_size, -1)
        is_expert_BE = expert_B.unsqueeze(-1) == torch.arange(num_experts, device=x_TD.device)
        gated_BNI = self.gate(x_BND @ _of_blocks(self.gate_up_EDF, is_expert_BE, expert_B))
        y_BND = gated_BNI @ _of_blocks(self.down_EID, is_expert_BE, expert_B)
        # The last place is never taken: not all blocks are full.
        y_MD = _rows(y_BND.flatten(-3, -2), place_M.clamp(max=num_places - 1)).float()
        y_TkD = y_MD.view(*is_here_Tk.shape, -1)
        return (y_TkD * weights_Tk.unsqueeze(-1)).sum(-2)


def blocks(num_tokens: int, top_k: int, num_experts: int) -> tuple[int, int]:
    """How many blocks of which size hold any choice: only the last block of an expert is not full."""
    num_pairs = num_tokens * top_k
    size = _MIN_BLOCK
    while size < _MAX_BLOCK and size * num_experts < num_pairs:
        size *= 2
    return min(num_pairs, num_pairs // size + min(num_experts, num_pairs)), size


def _placed(is_of_ME: torch.Tensor, num_blocks: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """place_M of each pair among all blocks' places, and expert_B."""
    taken_ME = is_of_ME.int().cumsum(-2)
    num_blocks_E = (taken_ME[..., -1, :] + block_size - 1) // block_size
    stop_E = num_blocks_E.cumsum(-1)
    first_place_E = (stop_E - num_blocks_E) * block_size
    place_M = ((first_place_E.unsqueeze(-2) + taken_ME - 1) * is_of_ME).sum(-1)
    block_B1 = torch.arange(num_blocks, device=is_of_ME.device).unsqueeze(-1)
    expert_B = (block_B1 >= stop_E.unsqueeze(-2)).sum(-1)
    return place_M, expert_B.clamp(max=is_of_ME.shape[-1] - 1)


def _dealt(x_TD: torch.Tensor, place_M: torch.Tensor, top_k: int, num_places: int) -> torch.Tensor:
    """The rows of tokens at their pairs' places; zeros elsewhere."""
    num_tokens = x_TD.shape[-2]
    # Row T is the zeros.
    token_P = place_M.new_full((*place_M.shape[:-1], num_places + 1), num_tokens)
    token_M = torch.arange(num_tokens * top_k, device=x_TD.device) // top_k
    token_P = token_P.scatter(-1, place_M, token_M.expand(place_M.shape))[..., :num_places]
    zeros = x_TD.new_zeros((*x_TD.shape[:-2], 1, x_TD.shape[-1]))
    return _rows(torch.cat([x_TD, zeros], dim=-2), token_P)


def _rows(x_TD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
    """x_PD. Of [S, T, D] or [T, D] by [S, P], or of [T, D] by [P]."""
    if index_P.dim() == 1:
        return x_TD.index_select(0, index_P)
    if x_TD.dim() == 2:
        return x_TD.index_select(0, index_P.flatten()).view(*index_P.shape, -1)
    return x_TD.gather(1, index_P.unsqueeze(-1).expand(-1, -1, x_TD.shape[-1]))


def _of_blocks(weight_EIO: torch.Tensor, is_expert_BE: torch.Tensor, expert_B: torch.Tensor) -> torch.Tensor:
    """weight_BIO of each block's expert."""
    if weight_EIO.dim() == 3:
        return weight_EIO.index_select(0, expert_B)
    # Of each shard's own: a product with ones and zeros stays on its device, where the compiler might gather all
    # experts for an index.
    chosen_SBX = is_expert_BE.to(weight_EIO.dtype) @ weight_EIO.flatten(-2)
    return chosen_SBX.view(*expert_B.shape, *weight_EIO.shape[-2:])
