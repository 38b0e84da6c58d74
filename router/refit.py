"""Centroids for a pool that has changed, or for traffic that has: arrays in, arrays out.

A refit is a plain function of a `RefitJob`, so it runs on any thread while requests are routed, and
gives the same result in the live router, in replay and in a test. Who may ask for one, and when, is
decided by `RefitPlanner` from counters and a given clock.

Axes: R rows (signatures of recent requests), K decode replicas, C centroids in use, D signature
length.

Source: ELDR's artifact refits balanced k-means on a rolling window, seeded with the centroids in
use, and matches the result to replicas by assignment; it refits always and takes every result. Ours
also lets K change, asks for a reason first, and takes a refit for drift only if it is better on
requests that it was not fitted on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calibration.clustering import BalancedSphericalKMeans, match_centroids
from calibration.signature import Float32Array, IndexArray
from calibration.transport import assign_with_capacity

MAX_ITERATIONS = 20
HOLDOUT_SHARE = 0.25
ROWS_PER_REPLICA = 8
"""Below this many rows of live traffic a replica, calibration signatures are added."""


class RefitReason(StrEnum):
    """Why centroids are fitted anew."""

    POOL = "pool"
    """Replicas and centroids do not pair up."""
    DRIFT = "drift"
    """Requests are farther from the centroids, or less evenly spread, than they were."""


@dataclass(frozen=True, slots=True, eq=False)
class RefitJob:
    """What a refit needs, taken at one moment; nothing in it is changed afterwards.

    Attributes:
        reason: why; decides whether the result must be better to be taken.
        replica_ids: the pool; the result has one centroid for each.
        owned_K: row of `centroids_CD` that each replica holds, -1 for none; int64 (K,).
        centroids_CD: unit centroids in use; float32 (C, D).
        rows: unit signatures, at least K; float32 (D,) each.
        seed: seed of the draw of centroids for replicas that have none.
        min_gain: least gain in mean cosine for a refit for drift, >= 0.
        space: name of the signature space, that is of IDF and mask; first part of the tags.
    """

    reason: RefitReason
    replica_ids: tuple[str, ...]
    owned_K: IndexArray
    centroids_CD: Float32Array
    rows: Sequence[Float32Array]
    seed: int
    min_gain: float
    space: str


@dataclass(frozen=True, slots=True, eq=False)
class RefitResult:
    """Centroids for a pool.

    Attributes:
        job: what was asked.
        is_accepted: whether they are to be used; always so after a change of the pool.
        centroids_KD: unit centroids, row k for `job.replica_ids[k]`; float32 (K, D).
        tags: name of each centroid, from its content.
        similarity: mean over rows of the cosine to the nearest centroid in force afterwards.
        skew: share of rows at the most frequent nearest centroid, times K; 1 is even.
        gain: what the refit adds to the mean cosine of held-out rows when every replica takes an
            equal share of them; None after a change of the pool.
        moved_share: share of rows whose nearest replica has changed; 0 when not accepted.
    """

    job: RefitJob
    is_accepted: bool
    centroids_KD: Float32Array
    tags: tuple[str, ...]
    similarity: float
    skew: float
    gain: float | None
    moved_share: float


@dataclass(frozen=True, slots=True)
class RefitSettings:
    """When to refit; plain values. See `app.config.RefitConfig` for units and defaults."""

    when: Literal["never", "pool", "online"] = "pool"
    settle_s: float = 5.0
    window_s: float = 30.0
    interval_s: float = 10.0
    max_drop: float = 0.05
    max_skew_ratio: float = 1.5
    min_gain: float = 0.01


class RefitPlanner:
    """Says when a refit is due. Owned by the router's event loop; given the time.

    A refit for the pool is due when replicas and centroids have not paired up for `settle_s` since
    the last change. A refit for drift is due when, over `interval_s` and enough requests, the mean
    similarity has dropped by `max_drop` below its level after the last refit, or the most frequent
    home takes `max_skew_ratio` times the share it had then. An attempt, taken or not, sets the
    levels anew, so the same drift does not ask twice. After a refit that was taken one more attempt
    is made when its window has passed: until then the window also held requests from before.
    """

    def __init__(self, settings: RefitSettings, now: float) -> None:
        self._settings = settings
        self._pool_changed_at = now
        self._checked_at = now
        self._not_before = now
        self._follow_up_at: float | None = None
        self._level: tuple[float, float] | None = None  # similarity, skew

    def pool_changed(self, now: float) -> None:
        """Replicas came or went."""
        self._pool_changed_at = now

    def set_level(self, similarity: float, skew: float) -> None:
        """What counts as no drift; without it, the first interval that is looked at sets it."""
        self._level = (similarity, skew)

    def due(self, now: float, is_paired: bool) -> RefitReason | None:
        """Whether a refit that needs no look at the traffic is due."""
        if self._settings.when == "never" or now < self._not_before:
            return None
        if not is_paired:
            is_settled = now - self._pool_changed_at >= self._settings.settle_s
            return RefitReason.POOL if is_settled else None
        if self._follow_up_at is not None and now >= self._follow_up_at:
            self._follow_up_at = None
            return RefitReason.DRIFT
        return None

    def is_check_due(self, now: float, num_requests: int, num_replicas: int) -> bool:
        """Whether there is enough new traffic to look for drift."""
        return (
            self._settings.when == "online"
            and now >= self._not_before
            and now - self._checked_at >= self._settings.interval_s
            and num_requests >= ROWS_PER_REPLICA * num_replicas
        )

    def check(self, now: float, similarity: float, skew: float) -> bool:
        """Whether the traffic since the last check has drifted."""
        self._checked_at = now
        if self._level is None:
            self._level = (similarity, skew)
            return False
        level, level_skew = self._level
        is_far = similarity < level - self._settings.max_drop
        is_skewed = skew > level_skew * self._settings.max_skew_ratio
        if similarity > level + self._settings.max_drop / 2:
            self._level = (similarity, level_skew)  # so that a later drop is seen
        return is_far or is_skewed

    def finished(self, now: float, result: RefitResult) -> None:
        """An attempt has ended, taken or not."""
        self.set_level(result.similarity, result.skew)
        self._checked_at = now
        is_online = self._settings.when == "online"
        if result.is_accepted and is_online:
            self._follow_up_at = now + self._settings.window_s

    def failed(self, now: float) -> None:
        """An attempt failed, or was overtaken by another change: try again after a while."""
        self._not_before = now + self._settings.interval_s


def run_refit(job: RefitJob) -> RefitResult:
    """Fit balanced centroids on the job's rows and give each replica the one nearest to its own.

    Raises:
        ValueError: the rows are fewer than the replicas, not of norm 1, or of another length.
    """
    rows_RD = np.stack(job.rows)
    num_replicas = len(job.replica_ids)
    keeps_K = job.owned_K >= 0
    old_KD = job.centroids_CD[job.owned_K[keeps_K]]
    is_drift = job.reason is RefitReason.DRIFT
    is_held_R = np.zeros(len(rows_RD), dtype=bool)
    num_held = int(HOLDOUT_SHARE * len(rows_RD))
    if is_drift and len(rows_RD) - num_held >= num_replicas:
        rng = np.random.default_rng(job.seed)
        is_held_R[rng.choice(len(rows_RD), num_held, replace=False)] = True
    fit_RD = rows_RD[~is_held_R]
    seeds_KD = _with_seeds(fit_RD, old_KD, num_replicas, job.seed)
    estimator = BalancedSphericalKMeans(num_replicas, max_iter=MAX_ITERATIONS, init=seeds_KD)
    fitted_KD = estimator.fit(fit_RD).cluster_centers_
    new_KD = np.empty_like(fitted_KD)
    matched = match_centroids(old_KD, fitted_KD)
    new_KD[keeps_K] = fitted_KD[matched]
    new_KD[~keeps_K] = np.delete(fitted_KD, matched, axis=0)

    gain, is_accepted = None, True
    if is_drift and keeps_K.all():
        judged_RD = rows_RD[is_held_R] if is_held_R.any() else rows_RD
        gain = balanced_similarity(judged_RD, new_KD) - balanced_similarity(judged_RD, old_KD)
        is_accepted = gain >= job.min_gain
    in_force_KD = new_KD if is_accepted else old_KD
    similarity, skew = spread(rows_RD, in_force_KD)
    return RefitResult(
        job=job,
        is_accepted=is_accepted,
        centroids_KD=in_force_KD,
        tags=tuple(centroid_tag(job.space, centroid_D) for centroid_D in in_force_KD),
        similarity=similarity,
        skew=skew,
        gain=gain,
        moved_share=_moved_share(rows_RD, old_KD, keeps_K, new_KD) if is_accepted else 0.0,
    )


def spread(rows_RD: Float32Array, centroids_KD: Float32Array) -> tuple[float, float]:
    """Mean cosine to the nearest centroid, and the largest share of a centroid times K."""
    cosines_RK = rows_RD @ centroids_KD.T
    sizes_K = np.bincount(cosines_RK.argmax(axis=1), minlength=len(centroids_KD))
    best = float(cosines_RK.max(axis=1).mean(dtype=np.float64))
    return best, float(sizes_K.max() * len(centroids_KD) / len(rows_RD))


def balanced_similarity(rows_RD: Float32Array, centroids_KD: Float32Array) -> float:
    """Mean cosine to the assigned centroid when each takes at most ceil(R / K) rows, at best.

    One figure for both faults of centroids: far from the traffic, or unevenly used.
    """
    cosines_RK = (rows_RD @ centroids_KD.T).astype(np.float64)
    capacity = -(-len(rows_RD) // len(centroids_KD))
    labels_R, _ = assign_with_capacity(1.0 - cosines_RK, capacity)
    return float(cosines_RK[np.arange(len(rows_RD)), labels_R].mean())


def signature_space(idf_LE: Float32Array, layer_mask: IndexArray) -> str:
    """Name of a signature space: vectors of two spaces cannot be compared."""
    return _digest(np.ascontiguousarray(idf_LE, "<f4").tobytes() + layer_mask.tobytes())


def centroid_tag(space: str, centroid_D: Float32Array) -> str:
    """Name of a centroid: equal for equal vectors of one space, on every machine."""
    return f"{space}-{_digest(np.ascontiguousarray(centroid_D, '<f4').tobytes())}"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _with_seeds(
    rows_RD: Float32Array, old_KD: Float32Array, num_replicas: int, seed: int
) -> Float32Array:
    """The old centroids, and for each further replica a row drawn as k-means++ draws."""
    rng = np.random.default_rng(seed)
    seeds = list(old_KD)
    nearest_R = np.full(len(rows_RD), 2.0)
    if seeds:
        nearest_R = 1.0 - (rows_RD @ old_KD.T).max(axis=1).astype(np.float64)
    while len(seeds) < num_replicas:
        weights_R = np.maximum(nearest_R, 0.0)
        total = weights_R.sum()
        row = rng.choice(len(rows_RD), p=weights_R / total if total > 0 else None)
        seeds.append(rows_RD[row])
        nearest_R = np.minimum(nearest_R, 1.0 - rows_RD @ rows_RD[row])
    return np.stack(seeds)


def _moved_share(
    rows_RD: Float32Array, old_KD: Float32Array, keeps_K: NDArray[np.bool_], new_KD: Float32Array
) -> float:
    """Share of rows whose nearest replica is another one than before."""
    if not len(old_KD):
        return 1.0
    before_R = np.flatnonzero(keeps_K)[(rows_RD @ old_KD.T).argmax(axis=1)]
    after_R = (rows_RD @ new_KD.T).argmax(axis=1)
    return float((before_R != after_R).mean())
