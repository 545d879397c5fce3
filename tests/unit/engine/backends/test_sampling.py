"""Sampling: the right distribution, exact nuclei, greedy as its limit, and no influence between rows."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from ostrya.engine.backends.kernels.sampling import keep_nucleus, sample
from ostrya.engine.plan import StepPlan
from tests.numerics.driver import Running, make_plan

LARGEST_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def plan_of(
    rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, uniform: Sequence[float] = ()
) -> StepPlan:
    """`rows` decode rows that want a token."""
    plan = make_plan([(Running([0], [1]), 1)] * rows, page_size=4, pages_per_row=1)
    size = plan.bucket.rows
    noise = np.zeros(size, np.float32)
    noise[: len(uniform)] = uniform
    return replace(
        plan,
        temperature=np.full(size, temperature, np.float32),
        top_k=np.full(size, top_k, np.int32),
        top_p=np.full(size, top_p, np.float32),
        uniform=noise,
        wants_token=np.ones(size, np.bool_),
    )


def draw(
    logits_V: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, n: int = 1024
) -> torch.Tensor:
    """Tokens at n evenly spread uniforms: their shares equal the probabilities up to 1/n each."""
    uniform = ((np.arange(n) + 0.5) / n).tolist()
    plan = plan_of(n, temperature=temperature, top_k=top_k, top_p=top_p, uniform=uniform)
    return sample(logits_V.expand(plan.bucket.rows, -1).contiguous(), plan)[:n]


def some_logits(rows: int, vocab: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_equal_the_softmax(temperature: float) -> None:
    logits = some_logits(1, 20)[0]
    counts = torch.bincount(draw(logits, temperature=temperature), minlength=20)
    expected = (logits.double() / temperature).softmax(-1) * 1024
    assert (counts - expected).abs().max() <= 1


def test_random_noise_gives_the_distribution_within_sampling_error() -> None:
    logits = some_logits(1, 8, seed=3)[0]
    noise = np.random.default_rng(0).random(8192, dtype=np.float32).tolist()
    plan = plan_of(8192, uniform=noise)
    counts = torch.bincount(sample(logits.expand(8192, -1).contiguous(), plan), minlength=8)
    expected = logits.double().softmax(-1) * 8192
    chi_square = ((counts - expected) ** 2 / expected)[expected > 5].sum()
    assert chi_square < 24.3  # 7 degrees of freedom, one chance in a thousand; the seed is fixed


def test_temperature_zero_is_greedy_beside_random_rows() -> None:
    logits = some_logits(4, 50)
    plan = plan_of(4, uniform=[0.3, 0.6, 0.9, 0.1])
    temperature = plan.temperature.copy()
    temperature[[0, 2]] = 0
    tokens = sample(logits, replace(plan, temperature=temperature))
    assert tokens[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_BELOW_ONE])
def test_top_k_of_one_is_greedy_even_among_equals(uniform: float) -> None:
    logits = some_logits(4, 3000).to(torch.bfloat16).float()
    logits[1, [7, 5, 1500]] = 100.0
    plan = plan_of(4, top_k=1, uniform=[uniform] * 4)
    assert sample(logits, plan).tolist() == logits.argmax(-1).tolist()


def test_top_k_keeps_exactly_the_largest() -> None:
    logits = some_logits(1, 3000)[0]
    for top_k in (2, 5, 40):
        seen = set(draw(logits, top_k=top_k, temperature=100.0).tolist())
        assert seen == set(logits.topk(top_k).indices.tolist())


def kept(weights: Sequence[float], *, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    out = keep_nucleus(
        torch.tensor([weights], dtype=torch.float64), torch.tensor([top_k]), torch.tensor([top_p]).double()
    )
    return out[0].nonzero().flatten().tolist()


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    weights = [1.0, 5.0, 2.0, 0.0, 8.0]
    assert kept(weights, top_p=0.4) == [4]
    assert kept(weights, top_p=0.5) == [4]
    assert kept(weights, top_p=0.51) == [1, 4]
    assert kept(weights, top_p=0.9) == [1, 2, 4]
    assert kept(weights, top_p=1e-9) == [4]


def test_top_p_counts_what_top_k_left() -> None:
    # Of 8, 5, 2, 1 top_k 2 leaves 8 and 5; 8/13 = 0.615.
    assert kept([1.0, 5.0, 2.0, 8.0], top_k=2, top_p=0.61) == [3]
    assert kept([1.0, 5.0, 2.0, 8.0], top_k=2, top_p=0.62) == [1, 3]


def test_among_equals_the_lower_token_is_kept() -> None:
    assert kept([2.0, 1.0, 2.0, 2.0, 1.0], top_k=2) == [0, 2]
    assert kept([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0, 1]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.99), (1500, 1.0), (2500, 0.95), (5000, 0.7)])
def test_nuclei_wider_than_the_first_candidates_are_exact(top_k: int, top_p: float) -> None:
    weights = some_logits(1, 4000, seed=5).mul(0.1).double().exp()
    out = keep_nucleus(weights, torch.tensor([top_k]), torch.tensor([top_p]).double())
    ordered, order = weights[0].sort(descending=True, stable=True)
    ordered, order = ordered[: top_k or 4000], order[: top_k or 4000]
    before = (ordered.cumsum(0) - ordered) / ordered.sum()
    assert out[0].nonzero().flatten().tolist() == sorted(order[before < np.float32(top_p)].tolist())


def test_a_token_depends_on_its_own_row_alone() -> None:
    logits = some_logits(8, 5000, seed=9)
    noise = np.random.default_rng(1).random(8).tolist()
    plan = replace(
        plan_of(8, uniform=noise),
        temperature=np.array([0, 1, 0.7, 1.5, 0, 1, 2, 0.1], np.float32),
        top_k=np.array([0, 0, 50, 0, 3, 2000, 0, 0], np.int32),
        top_p=np.array([1, 0.9, 1, 0.999, 1, 0.99, 1, 0.5], np.float32),
    )
    together = sample(logits, plan)
    for row in range(8):
        alone = plan_of(
            1,
            temperature=float(plan.temperature[row]),
            top_k=int(plan.top_k[row]),
            top_p=float(plan.top_p[row]),
            uniform=[noise[row]],
        )
        assert sample(logits[row].expand(4, -1).contiguous(), alone)[0] == together[row]


@pytest.mark.parametrize("uniform", [0.0, LARGEST_BELOW_ONE])
def test_the_ends_of_the_noise_never_choose_an_impossible_token(uniform: float) -> None:
    logits = some_logits(4, 1000)
    logits[:, [0, 1, 998, 999]] = float("-inf")
    assert set(sample(logits, plan_of(4, uniform=[uniform] * 4)).tolist()).isdisjoint({0, 1, 998, 999})
