"""Which tokens of a step get log probabilities, and whose they are. Called by batch.py and engine.py; no torch."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from ostrya.engine.plan import Scores, Scoring, StepPlan
from ostrya.engine.sequence import Row
from ostrya.engine.types import TokenScore


@dataclass(frozen=True, slots=True)
class RowScores:
    """What one row of a step got."""

    own: TokenScore | None = None
    """Of the token that it chose."""
    prompt: tuple[TokenScore, ...] = ()


def wanted(rows: Seq[Row]) -> Scoring | None:
    """What the plan of `rows` asks for; None for nothing."""
    own: list[tuple[int, int]] = []
    index: list[int] = []
    target: list[int] = []
    num_top: list[int] = []
    first = 0
    for number, row in enumerate(rows):
        sampling = row.sequence.request.sampling
        if sampling.num_top is not None and row.wants_token:
            own.append((number, sampling.num_top))
        if row.sequence.num_unscored > 0 and sampling.num_prompt_top is not None:
            positions = _prompt_positions(row)
            index += [first + position - row.start for position in positions]
            target += row.sequence.token_ids[positions.start + 1 : positions.stop + 1]
            num_top += [sampling.num_prompt_top] * len(positions)
        first += row.num_tokens
    if not own and not index:
        return None
    return Scoring(
        row=np.array([number for number, _ in own], np.int32),
        index=np.array(index, np.int32),
        target=np.array(target, np.int32),
        num_top=np.array([*(top for _, top in own), *num_top], np.int32),
    )


def by_row(plan: StepPlan, scores: Scores) -> dict[int, RowScores]:
    """The scores of each row that asked."""
    assert plan.scoring is not None
    found = [
        TokenScore(logprob, tuple(ids[:num_top]), tuple(logprobs[:num_top]))
        for logprob, ids, logprobs, num_top in zip(
            scores.logprob.tolist(),
            scores.top_ids.tolist(),
            scores.top_logprobs.tolist(),
            plan.scoring.num_top.tolist(),
            strict=True,
        )
    ]
    own = dict(zip(plan.scoring.row.tolist(), found, strict=False))
    prompt: dict[int, list[TokenScore]] = {}
    rows = np.searchsorted(plan.query_start[: plan.num_rows], plan.scoring.index, side="right") - 1
    for row, score in zip(rows.tolist(), found[len(own) :], strict=True):
        prompt.setdefault(row, []).append(score)
    return {row: RowScores(own.get(row), tuple(prompt.get(row, ()))) for row in own.keys() | prompt.keys()}


def _prompt_positions(row: Row) -> range:
    """The row's positions whose next token is a prompt token without a score."""
    sequence = row.sequence
    num_scored = len(sequence.prompt_scores)
    start = max(row.start, num_scored)
    end = min(row.start + row.num_tokens, num_scored + sequence.num_unscored)
    return range(start, max(start, end))
