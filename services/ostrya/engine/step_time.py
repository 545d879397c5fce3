"""How long a step takes, learned from steps: seconds ≈ base + b · rows + c · prompt tokens + d · KV tokens. Pure.

Recursive least squares of relative errors, so that a step of 4 ms counts as much as one of a second. A step makes old
ones forgotten only in the direction that it tells of itself (Cao and Schwartz, "A directional forgetting algorithm
based on the decomposition of the information matrix", Automatica 36, 2000): hours of decoding leave the cost of a
prompt token as it was. Where steps never differ, say in their number of rows, the sum is right and its parts are
anybody's guess.
"""

import numpy as np
import numpy.typing as npt

from ostrya.engine.plan import StepPlan
from ostrya.engine.types import StepTime, Work

F64 = npt.NDArray[np.float64]

MIN_STEPS = 20
"""Before so many nothing is said."""
FORGETTING = 0.05
"""Of what is known in a step's direction: about the last twenty of its kind count."""
MIN_STEP_S, MAX_STEP_S = 1e-6, 3600.0
"""Anything else was not measured."""
UNITS = np.array([1e-2, 1e-3, 1e-4, 1e-6])
"""Of the four coefficients, so that all are near 1."""
LIMITS = np.array([MAX_STEP_S, 10.0, 10.0, 0.1]) / UNITS
"""No device is slower. Nothing is negative: more work takes no less time."""
MAX_TOKENS = 10**9
PRIOR = 1e-6
"""Information about each coefficient before the first step, which has about 1."""
SURPRISE = 3.0
"""An error counts as so many usual ones at most, so that an outlier moves little."""
CHANGE_STEPS = 10
"""So many surprises in a row are no outliers: steps have changed, ..."""
CHANGE_KEEPS = 0.01
"""... and what was known counts so much."""
NOISE_MEMORY = 0.95
MIN_NOISE = 0.02
"""The usual relative error is at least this, or two equal steps would make every third an outlier."""
TINY, TOLERANCE = 1e-30, 1e-6
"""Against division by what rounding makes 0, and for what it makes a little more than 1."""
SWEEPS = 8
"""Of coordinate descent over four coefficients; the next step goes on from there."""


def work(plan: StepPlan) -> Work:
    """What a step computes, padding not counted."""
    return Work(
        rows=plan.num_rows,
        prefill_tokens=plan.num_tokens - plan.num_decode_rows,
        kv_tokens=int(plan.kv_lens.sum()),
    )


class StepTimeFit:
    """Of one engine."""

    def __init__(self) -> None:
        self._forget_all()

    def _forget_all(self) -> None:
        self._num_steps: int = 0
        self._noise: float = 1.0
        self._num_surprises: int = 0
        self._coefficients: F64 = np.zeros(4)
        self._information: F64 = PRIOR * np.eye(4)

    @property
    def step_time(self) -> StepTime:
        """All 0 = not yet known."""
        if self._num_steps < MIN_STEPS:
            return StepTime()
        return StepTime(*(self._coefficients * UNITS).tolist())

    def expected_s(self, work: Work) -> float:
        """Finite and not negative; 0 = not yet known."""
        return self.step_time.seconds(work)

    def learn(self, work: Work, step_s: float) -> None:
        """A step has ended that did not compile. What cannot be true is ignored."""
        amounts = (work.rows, work.prefill_tokens, work.kv_tokens)
        if not MIN_STEP_S <= step_s <= MAX_STEP_S or not all(0 <= amount <= MAX_TOKENS for amount in amounts):
            return
        terms = np.array((1, *amounts)) * UNITS
        expected_s = float(terms @ self._coefficients)
        scale_s = step_s
        if self._num_steps >= MIN_STEPS:
            # By what was expected: a step that is short by chance is not worth more than one that is long by chance.
            scale_s = min(max(expected_s, step_s / SURPRISE), step_s * SURPRISE)
        error = (step_s - expected_s) / scale_s
        if self._num_steps >= MIN_STEPS:
            error = self._unsurprised(error)
        self._num_steps += 1
        self._take_in(terms / scale_s, error)

    def _unsurprised(self, error: float) -> float:
        most = SURPRISE * self._noise
        noise = NOISE_MEMORY * self._noise + (1 - NOISE_MEMORY) * min(abs(error), most)
        self._noise = max(MIN_NOISE, noise)
        self._num_surprises = self._num_surprises + 1 if abs(error) > most else 0
        if self._num_surprises == CHANGE_STEPS:
            self._num_surprises = 0
            self._information = CHANGE_KEEPS * self._information + PRIOR * np.eye(4)
        return min(max(error, -most), most)

    def _take_in(self, terms: F64, error: float) -> None:
        known = self._information @ terms
        about_it = max(float(terms @ known), TINY)
        self._information += np.outer(terms, terms) - FORGETTING / about_it * np.outer(known, known)
        try:
            gain = np.linalg.solve(self._information, terms)
        except np.linalg.LinAlgError:
            gain = np.zeros(4)
        if not 0 < float(terms @ gain) < 1 + TOLERANCE:  # rounding has eaten what was known
            self._forget_all()
            return
        wanted = self._coefficients + gain * error
        is_allowed = (wanted >= 0).all() and (wanted <= LIMITS).all()
        self._coefficients = wanted if is_allowed else _nearest_allowed(wanted, self._information)


def _nearest_allowed(wanted: F64, information: F64) -> F64:
    """The coefficients within limits that fit the steps best: a clipped one is made up for by the others."""
    away = np.clip(wanted, 0, LIMITS) - wanted
    for _ in range(SWEEPS):
        for index in range(4):
            own = information[index, index]
            best = away[index] - float(information[index] @ away) / max(own, TINY)
            away[index] = min(max(wanted[index] + best, 0.0), LIMITS[index]) - wanted[index]
    return np.clip(wanted + away, 0, LIMITS)
