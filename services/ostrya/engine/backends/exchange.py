"""Expert parallelism by all-to-all: each shard takes its part of the tokens, routes them, sends them to the shards that
have their experts, and adds up what comes back. Called by the experts of both interpreters (models/sharding.py).

Room is set aside for every token of a part at every shard, so none is ever dropped. That is also what it costs. The
residual stream is whole everywhere, so what is sent out stands there already, and what comes back is as much as a sum
over shards moves: by bytes this never pays, however many tokens there are, until a residual stream is divided. The
default is therefore the other way, own experts over all tokens; EngineConfig.expert_exchange_tokens asks for this one.

Shapes: S shards, T tokens, C = ceil(T / S) of a part, U = S * C, D hidden, k experts of a token.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from ostrya.engine.backends.collectives import Collectives

Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""x_TD -> weights_Tk, experts_Tk."""
Own = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""x_TD, weights_Tk, experts_Tk -> y_TD in float32: what the shard's own experts add."""


class Exchange(Protocol):
    """How shards hand each other tokens."""

    @property
    def num_shards(self) -> int: ...

    def part(self, x_UD: torch.Tensor) -> torch.Tensor:
        """x_CD, the shard's, of what is whole everywhere."""
        ...

    def swap(self, x_SCD: torch.Tensor) -> torch.Tensor:
        """[.., S, C, D] for each shard -> [.., S, C, D] of each shard."""
        ...

    def whole(self, x_CD: torch.Tensor) -> torch.Tensor:
        """x_UD everywhere, of each shard's part."""
        ...


class ProcessExchange:
    """An Exchange among processes."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.num_shards = collectives.size

    def part(self, x_UD: torch.Tensor) -> torch.Tensor:
        return x_UD.chunk(self.num_shards)[self._collectives.rank]

    def swap(self, x_SCD: torch.Tensor) -> torch.Tensor:
        return self._collectives.all_to_all(x_SCD.contiguous())

    def whole(self, x_CD: torch.Tensor) -> torch.Tensor:
        return self._collectives.gather(x_CD).flatten(0, 1)


class StackedExchange:
    """An Exchange among shards in a leading dimension; where that lies across devices, the compiler makes an all-to-all
    of the transpose."""

    def __init__(self, num_shards: int, divided: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`divided` says of a tensor that its first dimension lies across devices."""
        self.num_shards = num_shards
        self._divided = divided

    def part(self, x_UD: torch.Tensor) -> torch.Tensor:
        return self._divided(x_UD.view(self.num_shards, -1, x_UD.shape[-1]))

    def swap(self, x_SCD: torch.Tensor) -> torch.Tensor:
        return self._divided(self._divided(x_SCD).transpose(0, 1))

    def whole(self, x_CD: torch.Tensor) -> torch.Tensor:
        return x_CD.flatten(0, 1)


def exchanged(x_TD: torch.Tensor, exchange: Exchange, route: Route, own: Own, *, sent_as: torch.dtype) -> torch.Tensor:
    """y_TD in float32, whole everywhere. Tokens travel in `sent_as`, the dtype in which experts multiply."""
    num_shards, num_tokens = exchange.num_shards, x_TD.shape[0]
    x_CD = exchange.part(F.pad(x_TD, (0, 0, 0, -num_tokens % num_shards)))
    weights_Ck, experts_Ck = route(x_CD)
    x_UD = _at_all(x_CD.to(sent_as), exchange)
    # Numbers of experts are exact in float32, and one message is sooner there than two.
    weights_Uk, experts_Uk = _at_all(torch.cat([weights_Ck, experts_Ck.float()], dim=-1), exchange).chunk(2, dim=-1)
    y_UD = own(x_UD, weights_Uk, experts_Uk.long())
    y_SCD = y_UD.view(*y_UD.shape[:-2], num_shards, x_CD.shape[-2], y_UD.shape[-1])
    return exchange.whole(exchange.swap(y_SCD).sum(-3))[:num_tokens]


def _at_all(x_CD: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """x_UD of all parts: every shard gets every part whole, for any of its tokens may need it."""
    *leading, num_tokens, size = x_CD.shape
    sent_SCD = x_CD.unsqueeze(-3).expand(*leading, exchange.num_shards, num_tokens, size)
    return exchange.swap(sent_SCD).flatten(-3, -2)
