"""The seam between what a model computes (decoder.py) and how a backend does it: in place or not, in which weight
layout, by which kernel, on how many devices.

Shapes: S shards, T tokens (padded), D hidden, N query heads, K KV heads, X = N + 2K heads of one fused product
(queries, keys, values), H head dim, E = N * H, F a gate and what it gates side by side.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from ostrya.engine.models.quantized import Quantized
from ostrya.engine.models.spec import Activation, Attention, RoutedFfn

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x_TI of any float dtype -> y_TO in the dtype of the weights."""
Norm = Callable[[torch.Tensor], torch.Tensor]
"""Root-mean-square norm over the last dimension, float32 to float32: x * weight / sqrt(mean(x^2) + eps)."""
Experts = Callable[[torch.Tensor], torch.Tensor]
"""x_TD in float32 -> y_TD in float32, whole on every device: what a token's routed experts make of it together."""
Embedding = Callable[[torch.Tensor], torch.Tensor]
"""token_ids_T -> x_TD in float32."""

Kv = TypeVar("Kv")
"""What a backend keeps of one layer's keys and values."""


class Matrix(Protocol):
    """weight_OI of a product, not yet read: a backend reads what it wants to keep. Of one tensor, or of several below
    each other; of one shard, or of all (Builder.shard)."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of one shard."""
        ...

    @property
    def is_partial(self) -> bool:
        """A shard has some of the inputs only: results are added up over shards."""
        ...

    def dense(self) -> torch.Tensor:
        """[O, I], or [S, O, I] of all shards, in the dtype of the builder, which may keep the tensor."""
        ...

    def quantized(self) -> Quantized | None:
        """As the checkpoint holds it, of one shard; None where not all of it is at 4 or 8 bits in groups."""
        ...


class Builder(Protocol):
    """Makes operations of weights while a model is read. Takes over the tensors it is given."""

    @property
    def dtype(self) -> torch.dtype:
        """In which it wants matrices and biases; norms come in float32."""
        ...

    @property
    def shard(self) -> int | None:
        """Whose part of matrices and biases it wants: of one shard, or (None) of all, in a leading dimension S that the
        results of its products have too, unless they are added up. What is not divided comes without S."""
        ...

    def linear(self, matrix: Matrix, bias_O: torch.Tensor | None = None) -> Linear:
        """Its results are whole where the matrix is partial, else the shard's."""
        ...

    def head(self, matrix: Matrix) -> Linear:
        """To the shard's logits; the matrix may be the embedding's table, which is then read once for both."""
        ...

    def embedding(self, table: Matrix, scale: float) -> Embedding:
        """Rows of table_VD, scaled; the shard has a part of the rows."""
        ...

    def router(self, weight_ED: torch.Tensor) -> Linear:
        """A product in float32 that every device computes whole."""
        ...

    def experts(self, ffn: RoutedFfn, router: Linear, gate_up: Sequence[Matrix], down: Sequence[Matrix]) -> Experts:
        """`ffn` is a shard's; of each of its experts one fused gate and up, and one down. Chooses by models/routing.py,
        and adds up over shards."""
        ...

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        """`weight` is [D], or [heads, D] where each head has its own."""
        ...


class Ops(Protocol[Kv]):
    """The operations of one step. The first tensor of each may be overwritten by its result, and only that."""

    def add(self, x_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
        """x + y in float32: the residual stream."""
        ...

    def gate(self, gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(first half) * second half."""
        ...

    def routed(self, experts: Experts, x_TD: torch.Tensor) -> torch.Tensor:
        """y_TD of the experts; of tokens that are padding anything finite."""
        ...

    def rotate(self, qkv_TXH: torch.Tensor, mixer: Attention, norm: Norm | None) -> torch.Tensor:
        """Queries and keys normed, then turned by their tokens' positions; the pairs of a head lie side by side."""
        ...

    def attend(self, qkv_TXH: torch.Tensor, mixer: Attention, kv: Kv) -> tuple[torch.Tensor, Kv]:
        """Keeps this step's keys and values; then out_TE, attention of each row over its own, heads side by side.

        The result is overwritten by the next call.
        """
        ...
