"""What the expert cache tells and counts.

Axes: L MoE layers, E experts, B slots of a layer, R rows. A row is one cache: a layer of the
runtime, or a layer of one of many requests that a replay steps together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.floating[Any]]


class Load(NamedTuple):
    """One expert to copy into a slot; a tuple, as a step may make dozens.

    Attributes:
        expert: logical id, in [0, E).
        slot: destination, in [0, B).
        evicted: expert whose weights the slot held, -1 when it was empty.
    """

    expert: int
    slot: int
    evicted: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One execution of a layer with all its experts resident.

    Attributes:
        loads: copies to finish before the pass runs; no slot occurs twice.
        experts: experts the pass executes, ascending; None stands for the whole demand of a step
            that needs one pass only.
    """

    loads: tuple[Load, ...]
    experts: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one layer does in one step; equal on all ranks that saw the same demand and scores.

    Attributes:
        passes: in order; more than one when the demand exceeds the capacity.
    """

    passes: tuple[Pass, ...]

    @property
    def num_loads(self) -> int:
        """Demand misses of the step."""
        return sum(len(one.loads) for one in self.passes)


@dataclass(frozen=True)
class Ledger:
    """Counts of R caches; int64 (R,) each, written by the cache that owns them.

    Attributes:
        accesses: A, distinct experts asked for, summed over steps (the union of a batch).
        demand: D, experts loaded because a step needed them.
        proactive: P, experts loaded ahead of their step.
        evictions: experts that lost their slot.
        steps: accesses to the layer, whatever the batch.
        passes: executions of the layer; more than `steps` when demands exceeded the capacity.
        overflows: steps whose demand exceeded the capacity.
    """

    accesses: IntArray
    demand: IntArray
    proactive: IntArray
    evictions: IntArray
    steps: IntArray
    passes: IntArray
    overflows: IntArray

    @classmethod
    def empty(cls, num_rows: int) -> Ledger:
        """All counts at 0."""
        return cls(*(np.zeros(num_rows, dtype=np.int64) for _ in range(7)))

    def totals(self, rows: slice = slice(None)) -> Totals:
        """Sums over rows."""
        return Totals(
            *(
                int(counts_R[rows].sum())
                for counts_R in (
                    self.accesses,
                    self.demand,
                    self.proactive,
                    self.evictions,
                    self.steps,
                    self.passes,
                    self.overflows,
                )
            )
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of a `Ledger`, with the metrics of CacheRouter (arXiv 2609.04895).

    Ratios are NaN before the first access.
    """

    accesses: int
    demand: int
    proactive: int
    evictions: int
    steps: int
    passes: int
    overflows: int

    @property
    def loads(self) -> int:
        """D + P."""
        return self.demand + self.proactive

    @property
    def hit(self) -> float:
        """1 - D / A: the share of accesses that found their expert resident."""
        return (self.accesses - self.demand) / self.accesses if self.accesses else float("nan")

    @property
    def adj_hit(self) -> float:
        """(A - D) / (A + P): a hit rate that charges for proactive loads.

        Not a cost: of two caches with equal traffic it prefers the one that prefetches.
        """
        if not self.accesses:
            return float("nan")
        return (self.accesses - self.demand) / (self.accesses + self.proactive)

    def loads_per_token(self, num_tokens: int) -> float:
        """(D + P) / T, experts of all layers."""
        return self.loads / num_tokens if num_tokens else float("nan")

    def bytes_per_token(self, num_tokens: int, expert_bytes: float) -> float:
        """(D + P) x expert bytes / T."""
        return self.loads_per_token(num_tokens) * expert_bytes

    def pressure(self, capacity: int) -> float:
        """Mean demand of a step over the capacity of a layer; over 1 no step fits."""
        return self.accesses / (self.steps * capacity) if self.steps else float("nan")
