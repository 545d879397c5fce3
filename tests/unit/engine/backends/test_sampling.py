"""Sampling: the right distribution, exact nuclei, greedy as its limit, and no influence between rows."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from ostrya.engine.backends.kernels.sampling import keep_nucleus, sample
from ostrya.engine.plan import Entries, Mask, Processors, StepPlan
from tests.numerics.driver import Running, make_plan

CHI_SQUARE = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}
"""By degrees of freedom: one chance in a thousand to be above; the seeds are fixed."""

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


def entries(*of: tuple[int, int, float]) -> Entries:
    """(row, token, value) each."""
    return Entries(
        row=np.array([row for row, _, _ in of], np.int32),
        token=np.array([token for _, token, _ in of], np.int32),
        value=np.array([value for _, _, value in of], np.float32),
    )


def processed(
    plan: StepPlan,
    *,
    bias: Sequence[tuple[int, int, float]] = (),
    seen: Sequence[tuple[int, int, float]] = (),
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> StepPlan:
    """The plan with processors, the same for all rows but for the entries."""
    size = plan.bucket.rows
    return replace(
        plan,
        processors=Processors(
            bias=entries(*bias),
            seen=entries(*seen),
            repetition_penalty=np.full(size, repetition_penalty, np.float32),
            presence_penalty=np.full(size, presence_penalty, np.float32),
            frequency_penalty=np.full(size, frequency_penalty, np.float32),
            min_p=np.full(size, min_p, np.float32),
            typical_p=np.full(size, typical_p, np.float32),
        ),
    )


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
    assert chi_square < CHI_SQUARE[7]


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


SEEN = {0: 0.0, 2: 3.0, 5: 1.0, 6: 0.0}
"""Token: how often the output has it."""
BIAS = {1: 1.5, 2: -0.75, 3: -math.inf}


def penalized(logits: list[float], *, repetition: float = 1, presence: float = 0, frequency: float = 0) -> list[float]:
    """By the definitions, token by token."""
    out = list(logits)
    for token, count in SEEN.items():
        logit = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] = logit - frequency * count - (presence if count else 0)
    return out


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def likely(shares: list[float], min_p: float) -> list[float]:
    kept = [share if share >= min_p * max(shares) else 0.0 for share in shares]
    return [share / sum(kept) for share in kept]


def nucleus(shares: list[float], *, top_k: int = 8, top_p: float = 1.0) -> list[float]:
    kept, reached = set[int](), 0.0
    for token in sorted(range(len(shares)), key=lambda token: -shares[token])[:top_k]:
        if reached < top_p:
            kept.add(token)
            reached += shares[token]
    return [share / reached if token in kept else 0.0 for token, share in enumerate(shares)]


def typical(shares: list[float], typical_p: float) -> list[float]:
    entropy = -sum(share * math.log(share) for share in shares)
    order = sorted(range(len(shares)), key=lambda token: abs(-math.log(shares[token]) - entropy))
    kept, reached = set[int](), 0.0
    for token in order:
        if reached >= typical_p:
            break
        kept.add(token)
        reached += shares[token]
    return [share / reached if token in kept else 0.0 for token, share in enumerate(shares)]


LOGITS = [1.4, -0.3, 2.0, 0.2, -1.1, 0.9, -0.6, 0.0]
EACH: dict[str, tuple[dict[str, float], list[float]]] = {
    "temperature": ({"temperature": 0.6}, softmax([logit / 0.6 for logit in LOGITS])),
    "top_k": ({"top_k": 4}, nucleus(softmax(LOGITS), top_k=4)),
    "top_p": ({"top_p": 0.75}, nucleus(softmax(LOGITS), top_p=0.75)),
    "repetition": ({"repetition_penalty": 1.7}, softmax(penalized(LOGITS, repetition=1.7))),
    "presence": ({"presence_penalty": 0.8}, softmax(penalized(LOGITS, presence=0.8))),
    "frequency": ({"frequency_penalty": -0.4}, softmax(penalized(LOGITS, frequency=-0.4))),
    "all penalties": (
        {"repetition_penalty": 0.6, "presence_penalty": -0.5, "frequency_penalty": 0.3},
        softmax(penalized(LOGITS, repetition=0.6, presence=-0.5, frequency=0.3)),
    ),
    "bias": ({}, softmax([logit + BIAS.get(token, 0) for token, logit in enumerate(LOGITS)])),
    "min_p": ({"min_p": 0.2}, likely(softmax(LOGITS), 0.2)),
    "typical_p": ({"typical_p": 0.6}, typical(softmax(LOGITS), 0.6)),
}


@pytest.mark.parametrize("name", EACH)
def test_each_parameter_gives_its_exact_distribution(name: str) -> None:
    settings, expected = EACH[name]
    n = 8192
    noise = np.random.default_rng(1).random(n, dtype=np.float32).tolist()
    old = {name: settings[name] for name in ("temperature", "top_p") if name in settings}
    new = {name: value for name, value in settings.items() if name not in (*old, "top_k")}
    plan = processed(
        plan_of(n, uniform=noise, top_k=int(settings.get("top_k", 0)), **old),
        bias=[(row, token, value) for row in range(n) for token, value in BIAS.items()] if name == "bias" else (),
        seen=[(row, token, count) for row in range(n) for token, count in SEEN.items()]
        if "pen" in str(settings)
        else (),
        **new,
    )
    counts = torch.bincount(sample(torch.tensor(LOGITS).expand(n, -1).contiguous(), plan), minlength=8).tolist()
    assert [count > 0 for count in counts] == [share > 0 for share in expected]
    chi_square = sum(
        (count - n * share) ** 2 / (n * share) for count, share in zip(counts, expected, strict=True) if share
    )
    assert chi_square < CHI_SQUARE[sum(share > 0 for share in expected) - 1]


def test_rows_with_processors_are_the_same_alone_and_together_and_change_no_other() -> None:
    logits = some_logits(8, 3000, seed=4)
    noise = np.random.default_rng(2).random(8).tolist()
    settings: list[dict[str, float]] = [{}, {"min_p": 0.05}, {"typical_p": 0.7}, {"repetition_penalty": 2.0}] * 2
    plan = replace(plan_of(8, uniform=noise), temperature=np.array([1, 1, 1, 1, 0, 0, 0, 0], np.float32))
    seen = [(row, token, float(token % 3)) for row in (3, 7) for token in range(0, 3000, 2)]
    bias = [(row, token, 2.0 * row) for row in (2, 6) for token in range(50)]
    together = processed(plan, seen=seen, bias=bias)
    assert together.processors is not None
    for row, of_row in enumerate(settings):
        for name, value in of_row.items():
            getattr(together.processors, name)[row] = value
    tokens = sample(logits.clone(), together).tolist()
    assert [tokens[row] for row in (0, 4)] == [sample(logits.clone(), plan).tolist()[row] for row in (0, 4)]
    for row, of_row in enumerate(settings):
        alone = processed(
            plan_of(1, temperature=float(plan.temperature[row]), uniform=[noise[row]]),
            seen=[(0, token, count) for at, token, count in seen if at == row],
            bias=[(0, token, value) for at, token, value in bias if at == row],
            **of_row,
        )
        assert sample(logits[row].expand(4, -1).contiguous(), alone)[0] == tokens[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_forbidden_still_chooses_a_token(temperature: float) -> None:
    plan = processed(
        plan_of(1, temperature=temperature, uniform=[0.5]), bias=[(0, token, -math.inf) for token in range(8)]
    )
    assert 0 <= int(sample(torch.tensor(LOGITS).expand(4, -1).contiguous(), plan)[0]) < 8


def test_min_p_of_one_is_greedy_and_typical_p_of_almost_nothing_is_the_most_typical() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -3.0]).expand(4, -1)
    for uniform in (0.0, 0.5, LARGEST_BELOW_ONE):
        assert int(sample(logits.clone(), processed(plan_of(1, uniform=[uniform]), min_p=1.0))[0]) == 0
        # Surprises 0.41, 1.41, 2.41, 5.41; entropy 0.87: the first is closest.
        assert int(sample(logits.clone(), processed(plan_of(1, uniform=[uniform]), typical_p=1e-6))[0]) == 0


@pytest.mark.parametrize(("num_words", "vocab"), [(2, 64), (2, 50), (2, 80)])
def test_a_mask_leaves_what_its_bits_allow_and_other_rows_alone(num_words: int, vocab: int) -> None:
    logits = some_logits(4, vocab, seed=6)
    words = np.random.default_rng(3).integers(-(2**31), 2**31, (2, num_words)).astype(np.int32)
    plan = processed(plan_of(4, temperature=0.0))
    assert plan.processors is not None
    masked = replace(plan, processors=replace(plan.processors, mask=Mask(row=np.array([3, 1], np.int32), words=words)))
    expected = logits.clone()
    for row, words_W in ((3, words[0]), (1, words[1])):
        for token in range(vocab):
            if token >= 32 * num_words or not int(words_W[token // 32]) >> (token % 32) & 1:
                expected[row, token] = -math.inf
    tokens = sample(logits, masked)
    assert torch.equal(logits, expected)
    assert tokens.tolist() == expected.argmax(-1).tolist()
