"""From measured steps to a cost model: non-negative least squares on relative errors.

Relative, since a step of 10 ms that is off by 5 matters as much as one of 1,000 that is off by 500. Coefficients below
zero mean nothing, and leaving them out one at a time need not end at the best; with five of them, all 31 choices of
those that are not zero are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from engine.errors import EngineError
from engine.sched.cost import CostModel

_UNITS_PER_US = (1, 1_000, 1_000_000, 1_000, 1_000_000)
"""Of each field of `CostModel`."""
_PARTS = (
    "the fixed part of a step",
    "a prompt token",
    "a prompt token's context",
    "an output token",
    "an output token's context",
)
_NEVER_FREE = (0, 1, 3)
_LARGEST_CONDITION = 1e4

Vector = npt.NDArray[np.float64]


class UnusableMeasurements(EngineError):
    """Measured steps from which no cost model follows; the message says why."""


def fit_cost(terms: Sequence[Sequence[int]], measured_us: Sequence[float]) -> CostModel:
    """The cost model that is closest to measured steps.

    Args:
        terms: for each step what each coefficient is multiplied with (`StepShape.terms`).
        measured_us: for each step, how long it took.

    Raises:
        UnusableMeasurements: a time that is not positive, steps too much alike to tell the coefficients apart, or times
            that do not grow with the work.
    """
    steps = np.asarray(terms, dtype=np.float64).reshape(-1, len(_PARTS))
    times = np.asarray(measured_us, dtype=np.float64)
    if not np.all(np.isfinite(times)) or np.any(times <= 0):
        raise UnusableMeasurements("a step was measured to take no time")
    relative = steps / times[:, np.newaxis]
    largest = relative.max(axis=0, initial=0.0)
    if not largest.all() or np.linalg.cond(relative / largest) > _LARGEST_CONDITION:
        raise UnusableMeasurements(
            f"{len(times)} measured steps are too few, or too much alike, to tell apart what tokens and contexts cost"
        )
    scaled = _non_negative(relative / largest)
    coefficients = [round(float(c * unit)) for c, unit in zip(scaled / largest, _UNITS_PER_US, strict=True)]
    for index in _NEVER_FREE:
        if coefficients[index] < 1:
            raise UnusableMeasurements(
                f"by these measurements {_PARTS[index]} costs nothing: something else must have kept this machine busy"
            )
    return CostModel(**dict(zip(CostModel.__struct_fields__, coefficients, strict=True)))


def _non_negative(columns: npt.NDArray[np.float64]) -> Vector:
    """The x >= 0 for which columns @ x is closest to all ones."""
    num_columns = columns.shape[1]
    target = np.ones(len(columns))
    best, best_error = np.zeros(num_columns), float(len(columns))
    for size in range(1, num_columns + 1):
        for chosen in combinations(range(num_columns), size):
            solution = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
            error = float(np.sum((columns[:, chosen] @ solution - target) ** 2))
            if solution.min() >= 0 and error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[list(chosen)] = solution
    return best
