"""Policies that ignore expert locality: what ELDR is compared with.

All take the arguments of `router.policy.Policy.choose`; none uses `scores_K`.

Axes: K decode replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from router.types import Decision, FloatArray, IntArray


class Random:
    """A replica drawn uniformly."""

    name = "random"
    needs_scores = False
    follows_batch = False
    resident_weight = 0.0

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(
        self,
        scores_K: FloatArray | None,
        loads_K: IntArray,
        domain: str | None,
        allowed: IntArray | None = None,
    ) -> Decision:
        """See `Policy.choose`."""
        candidates = _candidates(loads_K, allowed)
        return Decision(int(candidates[self._rng.integers(len(candidates))]))


class RoundRobin:
    """Replicas in turn; one that may not be chosen is skipped."""

    name = "rr"
    needs_scores = False
    follows_batch = False
    resident_weight = 0.0

    def __init__(self) -> None:
        self._next = 0

    def choose(
        self,
        scores_K: FloatArray | None,
        loads_K: IntArray,
        domain: str | None,
        allowed: IntArray | None = None,
    ) -> Decision:
        """See `Policy.choose`."""
        index = self._next % len(loads_K)
        if allowed is not None:
            position = int(np.searchsorted(allowed, index))
            index = int(allowed[position % len(allowed)])
        self._next = index + 1
        return Decision(index)


class JSQ:
    """Join the shortest queue: the fewest in-flight requests, ties drawn uniformly."""

    name = "jsq"
    needs_scores = False
    follows_batch = False
    resident_weight = 0.0

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(
        self,
        scores_K: FloatArray | None,
        loads_K: IntArray,
        domain: str | None,
        allowed: IntArray | None = None,
    ) -> Decision:
        """See `Policy.choose`."""
        return Decision(_shortest_queue(loads_K, _candidates(loads_K, allowed), self._rng))


class P2C:
    """Power of two choices: the less loaded of two replicas drawn; the first on ties."""

    name = "p2c"
    needs_scores = False
    follows_batch = False
    resident_weight = 0.0

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(
        self,
        scores_K: FloatArray | None,
        loads_K: IntArray,
        domain: str | None,
        allowed: IntArray | None = None,
    ) -> Decision:
        """See `Policy.choose`."""
        candidates = _candidates(loads_K, allowed)
        if len(candidates) == 1:
            return Decision(int(candidates[0]))
        i = int(self._rng.integers(len(candidates)))
        j = int(self._rng.integers(len(candidates) - 1))
        first, second = int(candidates[i]), int(candidates[j + (j >= i)])
        return Decision(second if loads_K[second] < loads_K[first] else first)


class Domain:
    """Oracle: JSQ inside the replicas of the request's label.

    An unknown or missing label, or one whose replicas may not be chosen, is spread over all.

    Args:
        domain_replicas: replica indices per label; indices beyond the pool are ignored.
        rng: draws between equally loaded replicas.
    """

    name = "domain"
    needs_scores = False
    follows_batch = False
    resident_weight = 0.0

    def __init__(
        self, domain_replicas: Mapping[str, Sequence[int]], rng: np.random.Generator
    ) -> None:
        self._replicas = {
            label: np.unique(np.asarray(indices, dtype=np.int64))
            for label, indices in domain_replicas.items()
        }
        self._rng = rng

    def choose(
        self,
        scores_K: FloatArray | None,
        loads_K: IntArray,
        domain: str | None,
        allowed: IntArray | None = None,
    ) -> Decision:
        """See `Policy.choose`."""
        candidates = _candidates(loads_K, allowed)
        if domain in self._replicas:
            home = np.intersect1d(self._replicas[domain], candidates, assume_unique=True)
            candidates = home if len(home) else candidates
        return Decision(_shortest_queue(loads_K, candidates, self._rng))


def _candidates(loads_K: IntArray, allowed: IntArray | None) -> IntArray:
    return np.arange(len(loads_K)) if allowed is None else allowed


def _shortest_queue(loads_K: IntArray, candidates: IntArray, rng: np.random.Generator) -> int:
    loads = loads_K[candidates]
    shortest = candidates[loads == loads.min()]
    return int(shortest[rng.integers(len(shortest))])
