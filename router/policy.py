"""Routing policies that look at expert locality, and the factory for all policies.

A policy is a plain object: arrays in, `Decision` out. It reads no clock and no environment, so the
same object runs in the live router, in replay, in the simulator and in a unit test.

Axes: K decode replicas, B replicas in the locality band.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from router.baselines import JSQ, P2C, Domain, Random, RoundRobin
from router.types import Decision, FallbackReason, FloatArray, IntArray


class Policy(Protocol):
    """Chooses one decode replica. Not thread-safe: one policy object belongs to one router."""

    @property
    def name(self) -> str:
        """Spelling in configuration, metrics and results."""
        ...

    @property
    def needs_scores(self) -> bool:
        """Whether `choose` uses `scores_K`; if not, the caller need not compute them."""
        ...

    @property
    def follows_batch(self) -> bool:
        """Whether `scores_K` are to compare with what runs on each replica, not with centroids."""
        ...

    @property
    def resident_weight(self) -> float:
        """What `scores_K` gain on a replica whose cache holds all experts of the prompt.

        In cosine; in proportion for a part of them. 0: caches do not count.
        """
        ...

    def choose(
        self,
        scores_K: FloatArray | None,
        loads_K: IntArray,
        domain: str | None,
        allowed: IntArray | None = None,
    ) -> Decision:
        """Pick a replica; may advance the policy's own random or round-robin state.

        Args:
            scores_K: cosine of the signature with each replica's centroid, or its mean cosine with
                the requests that run there (`follows_batch`), and what `resident_weight` adds;
                shape (K,); NaN for a replica without either; None without a signature.
            loads_K: in-flight requests per replica; int64, shape (K,), >= 0, K >= 1.
            domain: label of the request; only the domain oracle reads it.
            allowed: ascending indices that may be chosen, at least one; None allows all K.
        """
        ...


def least_loaded(loads_K: IntArray, allowed: IntArray | None = None) -> int:
    """Lowest index among the allowed replicas with the fewest in-flight requests."""
    if allowed is None:
        return int(loads_K.argmin())
    return int(allowed[loads_K[allowed].argmin()])


def locality_band(scores_K: FloatArray, tau: float) -> IntArray:
    """Decode replicas whose centroid is nearly as close as the closest one.

    Args:
        scores_K: cosine of the request's signature with each centroid, shape (K,), in [-1, 1],
            K >= 1; NaN (no centroid) is never in the band.
        tau: width of the band, in cosine units; 0 keeps only the maximum and exact ties.

    Returns:
        Ascending replica indices; int64, shape (B,), 1 <= B <= K.

    Raises:
        ValueError: scores_K is empty or all NaN, or tau is negative.

    Source: ELDR (arXiv 2607.00466), online routing rule. A one-member band stays as it is; the
    authors' later variant, which widens it to the two nearest, is not this rule.
    """
    if not tau >= 0:
        raise ValueError(f"tau must be >= 0, got {tau}")
    if scores_K.size == 0:
        raise ValueError("scores_K must have at least one replica, got an empty array")
    best = np.fmax.reduce(scores_K)
    if best != best:
        raise ValueError("scores_K must have at least one score, got only NaN (no centroids)")
    return np.flatnonzero(scores_K >= best - tau)


class Band:
    """The paper's rule: the least loaded replica of the locality band, lowest index on ties.

    A replica without a centroid is in no band; it is chosen only when no replica has a score.

    Args:
        tau: width of the band, in cosine units, in [0, 1]; the paper uses 0.1 everywhere.

    Source: ELDR (arXiv 2607.00466).
    """

    name = "band"
    needs_scores = True
    follows_batch = False
    resident_weight = 0.0

    def __init__(self, tau: float = 0.1) -> None:
        if not 0 <= tau <= 1:
            raise ValueError(f"tau must be in [0, 1], got {tau}")
        self.tau = tau

    def choose(
        self,
        scores_K: FloatArray | None,
        loads_K: IntArray,
        domain: str | None,
        allowed: IntArray | None = None,
    ) -> Decision:
        """See `Policy.choose`."""
        if scores_K is None:
            return Decision(least_loaded(loads_K, allowed), None, FallbackReason.NO_SIGNATURE)
        if allowed is not None:
            scores_K = _outside_as_nan(scores_K, allowed)
        best = np.fmax.reduce(scores_K)
        if best != best:
            return Decision(least_loaded(loads_K, allowed), None, FallbackReason.NO_CENTROID)
        band = locality_band(scores_K, self.tau)
        return Decision(least_loaded(loads_K, band), len(band))


CACHED_LIVE = {"lambda_": 0.12, "max_load": 2.0, "resident_weight": 1.3}
"""What `live` takes where decode replicas load experts: loads are most of a step there, and fuller,
purer batches save more of them than they cost."""
BLIND_LIVE = {"lambda_": 0.2, "max_load": 2.0, "resident_weight": 0.0}
"""The same where caches are not to count."""
MIN_MEAN_LOAD = 1.0  # requests a replica; with less in flight, relative load means nothing
FEW_REQUESTS = 4.0  # requests a replica; see `Live`


class Soft:
    """Locality against load without an edge: argmax of cosine - lambda * (load - mean) / mean.

    The mean is over the replicas that may be chosen, and the divisor at least MIN_MEAN_LOAD. Ties
    go to the smaller load, then to the lowest index. A replica without a centroid gets the smallest
    score there is, so only its low load can attract requests.

    Args:
        lambda_: cosine given up per relative unit of load above the mean, >= 0.
        max_load: most load of a replica, as a multiple of the mean, >= 1. The bound is never
            tighter than the mean and MIN_MEAN_LOAD; infinity lifts it.

    Source: ours; beats the hard band at P50 and P99 in replay of published traces.
    """

    name = "soft"
    needs_scores = True
    follows_batch = False
    resident_weight = 0.0

    def __init__(self, lambda_: float = 0.5, max_load: float = float("inf")) -> None:
        if not 0 <= lambda_ < float("inf"):
            raise ValueError(f"lambda must be >= 0 and finite, got {lambda_}")
        if not max_load >= 1:
            raise ValueError(f"max_load must be >= 1, got {max_load}")
        self.lambda_ = lambda_
        self.max_load = max_load

    def choose(
        self,
        scores_K: FloatArray | None,
        loads_K: IntArray,
        domain: str | None,
        allowed: IntArray | None = None,
    ) -> Decision:
        """See `Policy.choose`."""
        if scores_K is None:
            return Decision(least_loaded(loads_K, allowed), None, FallbackReason.NO_SIGNATURE)
        scores = scores_K if allowed is None else scores_K[allowed]
        loads = loads_K if allowed is None else loads_K[allowed]
        total = int(np.add.reduce(loads))
        mean = total / len(loads)
        # The mean itself would take the same from every replica.
        cost = loads * self._weight(max(mean, MIN_MEAN_LOAD))
        value = scores - cost
        chosen = _best(value, loads)
        if math.isnan(value[chosen]):
            worst = np.fmin.reduce(scores)
            if worst != worst:
                return Decision(least_loaded(loads_K, allowed), None, FallbackReason.NO_CENTROID)
            value = np.where(np.isnan(scores), worst, scores) - cost
            chosen = _best(value, loads)
        if self.max_load < math.inf:
            after = (total + 1) / len(loads)
            limit = max(self.max_load * after, after + MIN_MEAN_LOAD)
            if loads.item(chosen) + 1 > limit:
                value[loads + 1 > limit] = -math.inf  # never all: the least load is below the mean
                chosen = _best(value, loads)
        return Decision(chosen if allowed is None else int(allowed[chosen]))

    def _weight(self, mean: float) -> float:
        """Cosine that one request more than the mean is worth."""
        return self.lambda_ / mean


class Live(Soft):
    """`Soft` against what runs on each replica now, with bounded load: our default.

    Scores are the mean cosine of the request with the requests that run on a replica, in which the
    replica's centroid counts as eight. So homes move with the traffic, and a batch that has
    come together draws its like. The load bound keeps one batch from attracting everything.

    Load weighs more where little runs, by the factor 1 + FEW_REQUESTS / mean load: in a small batch
    nearly every expert of one more request is new, whoever runs there, and an idle replica would
    take it at no cost to others.

    Where replicas load experts on demand, a replica also gains by what its cache holds of the
    experts that the prompt chose. That spreads requests that are alike over the caches that suit
    them, where the cosine alone would heap them up on one replica.

    Args:
        lambda_: see `Soft`.
        max_load: see `Soft`.
        resident_weight: see `Policy.resident_weight`; >= 0.

    Source: ours; fewer distinct experts and a lower P99 than `band` and `soft` in replay of
    published traces (router/README.md).
    """

    name = "live"
    follows_batch = True

    def __init__(
        self, lambda_: float = 0.4, max_load: float = 1.5, resident_weight: float = 0.0
    ) -> None:
        super().__init__(lambda_, max_load)
        if not 0 <= resident_weight < float("inf"):
            raise ValueError(f"resident_weight must be >= 0 and finite, got {resident_weight}")
        self.resident_weight = resident_weight

    def _weight(self, mean: float) -> float:
        return self.lambda_ / mean * (1 + FEW_REQUESTS / mean)


def make_policy(
    name: str,
    *,
    tau: float = 0.1,
    lambda_: float | None = None,
    max_load: float | None = None,
    resident_weight: float | None = None,
    seed: int = 1,
    domain_replicas: Mapping[str, Sequence[int]] | None = None,
    caches_experts: bool = False,
) -> Policy:
    """Build a policy from its name in the configuration.

    Args:
        name: one of random, rr, jsq, p2c, domain, band, soft, live.
        tau: band width of `band`.
        lambda_: load weight of `soft` and `live`; None: what each has by itself.
        max_load: load bound of `live`, as a multiple of the mean; None: its own.
        resident_weight: see `Policy.resident_weight`, for `live`; None: its own.
        seed: seed of the random draws of random, jsq, p2c and domain.
        domain_replicas: replica indices per label, for `domain`.
        caches_experts: whether decode replicas load experts on demand; `live` has other defaults
            then.

    Raises:
        ValueError: the name is unknown, or a value the policy uses is out of range.
    """
    weight = {} if lambda_ is None else {"lambda_": lambda_}
    bound = {} if max_load is None else {"max_load": max_load}
    resident = {} if resident_weight is None else {"resident_weight": resident_weight}
    cached = BLIND_LIVE if resident_weight == 0 else CACHED_LIVE
    live = {**(cached if caches_experts else {}), **weight, **bound, **resident}
    makers: dict[str, Callable[[], Policy]] = {
        "random": lambda: Random(np.random.default_rng(seed)),
        "rr": RoundRobin,
        "jsq": lambda: JSQ(np.random.default_rng(seed)),
        "p2c": lambda: P2C(np.random.default_rng(seed)),
        "domain": lambda: Domain(domain_replicas or {}, np.random.default_rng(seed)),
        "band": lambda: Band(tau),
        "soft": lambda: Soft(**weight),
        "live": lambda: Live(**live),
    }
    if name not in makers:
        raise ValueError(f"unknown routing policy {name!r}: use one of {', '.join(makers)}")
    return makers[name]()


def _best(value: FloatArray, loads: IntArray) -> int:
    """Index of the largest value, on ties of the smaller load, then the lowest; of a NaN if any."""
    best = int(value.argmax())
    last = len(value) - 1 - int(value[::-1].argmax())
    if best == last or math.isnan(value[best]):
        return best
    return least_loaded(loads, np.flatnonzero(value == value[best]))


def _outside_as_nan(scores_K: FloatArray, allowed: IntArray) -> FloatArray:
    masked_K = np.full_like(scores_K, np.nan)
    masked_K[allowed] = scores_K[allowed]
    return masked_K
