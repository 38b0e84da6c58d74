"""How long a decode step takes: the law that replay and simulation share."""

from __future__ import annotations

from dataclasses import dataclass


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
