"""Experts of every backend equal the plain ones, whatever tokens choose, on one device and divided among several."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostrya.engine.backends.collectives import Collectives
from ostrya.engine.backends.cpu_ops import gated
from ostrya.engine.backends.exchange import ProcessExchange, StackedExchange, exchanged
from ostrya.engine.backends.kernels.experts import GroupedExperts, experts_plain
from ostrya.engine.backends.kernels.linear import make_linear
from ostrya.engine.backends.static_experts import StaticExperts, blocks
from ostrya.engine.backends.static_ops import unchanged
from ostrya.engine.models.ops import Linear
from ostrya.engine.models.sharding import Axis, Mesh
from ostrya.engine.models.spec import Activation
from tests.fakes.collectives import together

NUM_EXPERTS, TOP_K = 8, 3
GATE = partial(gated, activation=Activation.SILU)
MESHES = [Mesh(expert=2), Mesh(tensor=2), Mesh(expert=2, tensor=2), Mesh(expert=4)]
COUNTS = [1, 5, 70]


@dataclass(frozen=True)
class Case:
    """Some tokens, their experts, and what comes out."""

    x_TD: torch.Tensor
    weights_Tk: torch.Tensor
    experts_Tk: torch.Tensor
    gate_up_EDF: torch.Tensor
    down_EID: torch.Tensor

    @property
    def expected_TD(self) -> torch.Tensor:
        return experts_plain(self.x_TD, self.weights_Tk, self.experts_Tk, self.gate_up_EDF, self.down_EID, GATE)

    def weights_of(self, mesh: Mesh, shard: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The first expert of a shard, and its part of both matrices."""
        group, num_groups = mesh.place((Axis.EXPERT,), shard)
        part, num_parts = mesh.place((Axis.TENSOR,), shard)
        gate_up_EDF, down_EID = (weight.chunk(num_groups)[group] for weight in (self.gate_up_EDF, self.down_EID))
        gate_EDI, up_EDI = (half.chunk(num_parts, dim=-1)[part] for half in gate_up_EDF.chunk(2, dim=-1))
        return group * len(down_EID), torch.cat([gate_EDI, up_EDI], -1), down_EID.chunk(num_parts, dim=1)[part]


def case(num_tokens: int, *, is_skewed: bool = False, hidden: int = 24, inner: int = 16) -> Case:
    """With `is_skewed` all tokens go to the same experts."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores_TE = torch.randn(1 if is_skewed else num_tokens, NUM_EXPERTS, generator=generator).expand(num_tokens, -1)
    weights_Tk, experts_Tk = scores_TE.softmax(-1).topk(TOP_K)
    return Case(
        x_TD=torch.randn(num_tokens, hidden, generator=generator),
        weights_Tk=weights_Tk,
        experts_Tk=experts_Tk,
        gate_up_EDF=torch.randn(NUM_EXPERTS, hidden, 2 * inner, generator=generator) / hidden**0.5,
        down_EID=torch.randn(NUM_EXPERTS, inner, hidden, generator=generator) / inner**0.5,
    )


def on_cpu(case: Case, mesh: Mesh = Mesh(), shard: int = 0) -> GroupedExperts:
    first, gate_up_EDF, down_EID = case.weights_of(mesh, shard)
    gate_up, down = (
        [make_linear(weight_IO.T.contiguous()) for weight_IO in weights_EIO] for weights_EIO in (gate_up_EDF, down_EID)
    )
    return GroupedExperts(gate_up, down, GATE, first=first)


def with_fixed_shapes(case: Case, mesh: Mesh, shards: Sequence[int]) -> StaticExperts:
    """Of one shard, or of several in a leading dimension."""
    firsts, gate_up, down = zip(*(case.weights_of(mesh, shard) for shard in shards), strict=True)
    if len(shards) == 1:
        return StaticExperts(gate_up_EDF=gate_up[0], down_EID=down[0], first_expert=torch.tensor(firsts[0]), gate=GATE)
    return StaticExperts(
        gate_up_EDF=torch.stack(gate_up),
        down_EID=torch.stack(down),
        first_expert=torch.tensor(firsts)[:, None, None],
        gate=GATE,
    )


def assert_close(found_TD: torch.Tensor, case: Case) -> None:
    # Another order of some 24 products of values near 1.
    torch.testing.assert_close(found_TD, case.expected_TD, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("is_skewed", [False, True])
@pytest.mark.parametrize("num_tokens", COUNTS)
def test_experts_on_one_device_equal_the_plain_ones(num_tokens: int, is_skewed: bool) -> None:
    one = case(num_tokens, is_skewed=is_skewed)
    for own in (on_cpu(one), with_fixed_shapes(one, Mesh(), [0])):
        assert_close(own(one.x_TD, one.weights_Tk, one.experts_Tk), one)


@pytest.mark.parametrize("is_skewed", [False, True])
@pytest.mark.parametrize("num_tokens", COUNTS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_shards_add_is_the_whole_over_all_tokens_and_by_all_to_all(
    mesh: Mesh, num_tokens: int, is_skewed: bool
) -> None:
    one, shards = case(num_tokens, is_skewed=is_skewed), range(mesh.num_shards)
    stacked = with_fixed_shapes(one, mesh, shards)
    assert_close(stacked(one.x_TD, one.weights_Tk, one.experts_Tk).sum(0), one)
    assert_close(sum(on_cpu(one, mesh, s)(one.x_TD, one.weights_Tk, one.experts_Tk) for s in shards), one)  # type: ignore[arg-type]

    def route(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was chosen before, found again by the token's first value; padding chooses as the first token."""
        at = (x_TD[..., :1] == one.x_TD[:, 0]).int().argmax(-1)
        return one.weights_Tk[at], one.experts_Tk[at]

    everywhere = StackedExchange(mesh.num_shards, divided=unchanged)
    assert_close(exchanged(one.x_TD, everywhere, route, stacked, sent_as=torch.float32), one)

    def of_one(collectives: Collectives) -> list[torch.Tensor]:
        owns = (on_cpu(one, mesh, collectives.rank), with_fixed_shapes(one, mesh, [collectives.rank]))
        exchange = ProcessExchange(collectives)
        return [exchanged(one.x_TD, exchange, route, own, sent_as=torch.float32) for own in owns]

    for found in together(mesh.num_shards, of_one):
        for found_TD in found:
            assert_close(found_TD, one)


def test_a_token_has_the_same_bits_alone_and_beside_any_others() -> None:
    # Of a size at which oneDNN takes another kernel for few rows.
    one = case(70, hidden=576, inner=1536)
    own = on_cpu(one)
    together_TD = own(one.x_TD, one.weights_Tk, one.experts_Tk)
    for size in (1, 2, 3, 4, 16):
        for start in range(0, 70, size):
            at = slice(start, start + size)
            alone_TD = own(one.x_TD[at], one.weights_Tk[at], one.experts_Tk[at])
            assert torch.equal(alone_TD, together_TD[at])


def test_an_expert_that_no_token_chose_is_not_read() -> None:
    called: list[int] = []

    def linear(expert: int) -> Linear:
        def product(x_TI: torch.Tensor) -> torch.Tensor:
            called.append(expert)
            return x_TI

        return product

    own = GroupedExperts([linear(i) for i in range(4)], [linear(i) for i in range(4)], lambda x: x, first=2)
    own(torch.ones(2, 5), torch.ones(2, 2), torch.tensor([[0, 3], [5, 3]]))
    assert called == [1, 1, 3, 3]


@given(data=st.data(), num_tokens=st.integers(1, 300), num_experts=st.integers(1, 20))
def test_blocks_hold_any_choice(data: st.DataObject, num_tokens: int, num_experts: int) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    num_blocks, size = blocks(num_tokens, top_k, num_experts)
    cuts = sorted(data.draw(st.lists(st.integers(0, num_tokens * top_k), max_size=num_experts - 1)))
    counts = [stop - start for start, stop in zip([0, *cuts], [*cuts, num_tokens * top_k], strict=True)]
    assert sum(-(-count // size) for count in counts) <= num_blocks
