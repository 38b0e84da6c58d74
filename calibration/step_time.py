"""How long a decode step takes: the law that replay and simulation share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls


@dataclass(frozen=True, slots=True)
class StepTimeLaw:
    """Linear step time; the unit is the caller's (seconds, or the time of an empty step).

    Attributes:
        base: time of an empty step.
        per_request: added by each request of the batch.
        per_distinct: added by each distinct expert of the batch, mean over layers.
        per_load: added by each expert that must be loaded first, mean over layers.
    """

    base: float = 1.0
    per_request: float = 0.01
    per_distinct: float = 0.09
    per_load: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base", "per_request", "per_distinct", "per_load"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"step-time law: {name} must be >= 0 and finite, got {value}")
        if self.base + self.per_request + self.per_distinct <= 0:
            raise ValueError("step-time law: a step would take no time; give one term a value")

    def __call__(self, batch: float, distinct: float, loads: float = 0.0) -> float:
        """Time of a step.

        Args:
            batch: requests in it.
            distinct: distinct experts, mean over layers.
            loads: experts loaded for it, mean over layers.
        """
        return (
            self.base
            + self.per_request * batch
            + self.per_distinct * distinct
            + self.per_load * loads
        )


def fit_step_time(
    batch: ArrayLike, distinct: ArrayLike, loads: ArrayLike, times: ArrayLike
) -> tuple[StepTimeLaw, float]:
    """Fit the law to measured steps by non-negative least squares.

    A term that does not vary in the measurements cannot be told from the base and gets 0.

    Args:
        batch: requests of each step; S >= 2 values.
        distinct: distinct experts of each step, mean over layers.
        loads: experts loaded for each step, mean over layers.
        times: time of each step, > 0.

    Returns:
        The law, in the unit of `times`, and R squared: the share of the variance of the times that
        the law explains; 0 if they do not vary, below 0 if their mean explains more.

    Raises:
        ValueError: the four differ in length, have fewer than two values, or one is not finite or
            out of range.
    """
    names = ("batch", "distinct", "loads", "times")
    columns = [np.asarray(values, dtype=np.float64) for values in (batch, distinct, loads, times)]
    sizes = {column.shape for column in columns}
    if len(sizes) != 1 or columns[0].ndim != 1 or len(columns[0]) < 2:
        shapes = ", ".join(f"{n} {c.shape}" for n, c in zip(names, columns, strict=True))
        raise ValueError(f"need one value a step for at least 2 steps, got {shapes}")
    for name, column in zip(names, columns, strict=True):
        if not np.isfinite(column).all() or column.min() < 0:
            raise ValueError(f"{name} must be finite and >= 0, got {column.min()} as the least")
    *terms, times_S = columns
    if times_S.min() <= 0:
        raise ValueError(f"times must be > 0, got {times_S.min()}")
    design = np.stack(
        [np.ones_like(times_S), *(term if np.ptp(term) > 0 else 0 * term for term in terms)], axis=1
    )
    # Columns of one size: the solver's tolerance is absolute.
    scales = np.maximum(np.abs(design).max(axis=0), 1e-300)
    solution, _ = nnls(design / scales, times_S / times_S.mean())
    coefficients = (solution / scales * times_S.mean()).tolist()
    law = StepTimeLaw(*coefficients)
    residual = times_S - design @ np.array(coefficients)
    variance = float(((times_S - times_S.mean()) ** 2).sum())
    r_squared = 1 - float((residual**2).sum()) / variance if variance > 0 else 0.0
    return law, r_squared
