"""Nonlinear least squares for a handful of unknowns, in plain Python; estimate.py fits its factors with it."""

from collections.abc import Callable, Sequence

_STEP = 1e-4
"""Of the finite differences; unknowns are logarithms, so it is a relative step."""
_MAX_ROUNDS = 100
_CONVERGED = 1e-8


def least_squares(errors: Callable[[Sequence[float]], list[float]], start: Sequence[float]) -> list[float]:
    """The unknowns that minimize the sum of squared errors, by the method of Levenberg and Marquardt from `start`."""
    found, damping = list(start), 1e-2
    current = errors(found)
    for _ in range(_MAX_ROUNDS):
        slopes = [
            [(after - before) / _STEP for after, before in zip(errors(_moved(found, at)), current, strict=True)]
            for at in range(len(found))
        ]
        change = _solved(
            [
                [_dot(one, other) + (damping if row == column else 0.0) for column, other in enumerate(slopes)]
                for row, one in enumerate(slopes)
            ],
            [-_dot(one, current) for one in slopes],
        )
        candidate = [value + delta for value, delta in zip(found, change, strict=True)]
        tried = errors(candidate)
        gained = _dot(current, current) - _dot(tried, tried)
        if gained <= 0:
            damping *= 4
            continue
        found, current, damping = candidate, tried, max(damping / 3, 1e-9)
        if gained < _CONVERGED:
            break
    return found


def _moved(values: Sequence[float], at: int) -> list[float]:
    return [value + _STEP * (index == at) for index, value in enumerate(values)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination; the matrix is symmetric and positive definite, so pivots need no search."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at, pivot in enumerate(rows):
        for below in range(at + 1, len(rows)):
            factor = rows[below][at] / pivot[at]
            rows[below] = [value - factor * above for value, above in zip(rows[below], pivot, strict=True)]
    solution = [0.0] * len(rows)
    for at in reversed(range(len(rows))):
        known = sum(rows[at][column] * solution[column] for column in range(at + 1, len(rows)))
        solution[at] = (rows[at][-1] - known) / rows[at][at]
    return solution
