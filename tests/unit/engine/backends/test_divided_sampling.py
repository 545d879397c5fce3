"""Tokens chosen from parts of the vocabulary are those chosen from the whole, ties and all."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.engine.backends.kernels.divided_sampling import num_candidates, sample_divided
from ostrya.engine.backends.kernels.sampling import sample
from ostrya.engine.plan import StepPlan
from tests.fakes.collectives import together
from tests.numerics.driver import Running, make_plan

VOCAB, ROWS = 24, 4
VALUES = [-torch.inf, -3.0, -1.5, -0.0, 0.0, 1.0, 1.5, 2.0]
"""Few, so that most are equal to others."""


def plan_of(temperature: list[float], top_k: list[int], top_p: list[float]) -> StepPlan:
    rows = [(Running([1], [1]), 1) for _ in range(ROWS)]
    return replace(
        make_plan(rows, page_size=4, pages_per_row=1),
        temperature=np.array(temperature, np.float32),
        top_k=np.array(top_k, np.int32),
        top_p=np.array(top_p, np.float32),
        uniform=np.array([0.0, 0.3, 0.7, 0.999], np.float32),
    )


@given(
    picks=st.lists(st.sampled_from(VALUES), min_size=ROWS * VOCAB, max_size=ROWS * VOCAB),
    temperature=st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=ROWS, max_size=ROWS),
    top_k=st.lists(st.integers(0, VOCAB), min_size=ROWS, max_size=ROWS),
    top_p=st.lists(st.sampled_from([0.3, 0.9, 1.0]), min_size=ROWS, max_size=ROWS),
    num_parts=st.sampled_from([2, 3]),
)
@settings(max_examples=60, deadline=None)
def test_parts_choose_what_the_whole_chooses(
    picks: list[float], temperature: list[float], top_k: list[int], top_p: list[float], num_parts: int
) -> None:
    plan = plan_of(temperature, top_k, top_p)
    logits_RV = torch.tensor(picks).view(ROWS, VOCAB)
    logits_RV[:, 5] = 1.25  # something is allowed
    expected = sample(logits_RV.clone(), plan).tolist()
    parts = logits_RV.tensor_split(num_parts, dim=1)
    for tokens_R in together(num_parts, lambda c: sample_divided(parts[c.rank].contiguous(), plan, c)):
        assert tokens_R.tolist() == expected


@pytest.mark.parametrize(
    ("temperature", "top_k", "expected"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0], 1),
        ([0, 1, 0, 1], [9, 5, 0, 3], 5),
        ([0, 1, 0, 0], [0, 0, 0, 0], None),
        ([0, 1, 0, 0], [0, 257, 0, 0], None),
    ],
)
def test_only_rows_that_need_few_candidates_do_without_the_whole(
    temperature: list[float], top_k: list[int], expected: int | None
) -> None:
    assert num_candidates(plan_of(temperature, top_k, [1.0] * ROWS)) == expected
