"""Spherical k-means with equal cluster sizes, its unconstrained control, and centroid matching.

Axes: N points, K clusters, D dimensions.

Source: ELDR (arXiv 2607.00466); balanced k-means after Malinen & Fränti (2014).
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix
from tqdm import tqdm

from calibration.transport import assign_with_capacity

FloatArray = NDArray[np.floating[Any]]
Float32Array = NDArray[np.float32]
IndexArray = NDArray[np.int64]

MIN_NORM = 1e-9


class SphericalKMeans:
    """K-means on unit vectors by cosine distance, each point at its nearest centroid.

    The control of the balanced variant: same initialisation and geometry, clusters of any size.

    Args:
        n_clusters: K.
        max_iter: most iterations, >= 1.
        random_state: seed of k-means++; unused with `init`.
        init: centroids to start from, shape (K, D); None draws them with k-means++.

    Attributes after `fit`:
        cluster_centers_: unit centroids; float32, shape (K, D).
        labels_: cluster of each point; int64, shape (N,).
        inertia_: sum over points of the cosine distance to their centroid.
        n_iter_: iterations run.
    """

    cluster_centers_: Float32Array
    labels_: IndexArray
    inertia_: float
    n_iter_: int

    def __init__(
        self,
        n_clusters: int,
        max_iter: int = 50,
        random_state: int = 1,
        init: FloatArray | None = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.max_iter = max_iter
        self.random_state = random_state
        self.init = init

    def fit(self, points_ND: FloatArray, *, show_progress: bool = False) -> Self:
        """Cluster the points.

        Args:
            points_ND: unit vectors; float32 or float64, shape (N, D), N >= K.
            show_progress: draw a progress bar on stderr.

        Raises:
            ValueError: a parameter is out of range, or the points are too few, not finite, or not
                of norm 1.
        """
        points_ND = self._check(points_ND)
        centers_KD = self._initial_centers(points_ND)
        state: Any = None
        iterations = range(1, self.max_iter + 1)
        for self.n_iter_ in tqdm(iterations, desc="k-means", disable=not show_progress):
            self.labels_, state = self._assign(1.0 - points_ND @ centers_KD.T, state)
            moved_KD = _mean_directions(points_ND, self.labels_, centers_KD)
            is_done = np.allclose(moved_KD, centers_KD)
            centers_KD = moved_KD
            if is_done:
                break
        self.cluster_centers_ = centers_KD
        cosines_N = np.einsum("nd,nd->n", points_ND, centers_KD[self.labels_])
        self.inertia_ = float((1.0 - cosines_N.astype(np.float64)).sum())
        return self

    def predict(self, points_ND: FloatArray) -> IndexArray:
        """Nearest centroid of each point, whatever the sizes; int64, shape (N,)."""
        nearest_N: IndexArray = (np.asarray(points_ND) @ self.cluster_centers_.T).argmax(axis=1)
        return nearest_N

    def _assign(self, cost_NK: FloatArray, state: Any) -> tuple[IndexArray, Any]:
        """Cluster of each point, and what the next iteration may start from."""
        return cost_NK.argmin(axis=1), None

    def _check(self, points_ND: FloatArray) -> Float32Array:
        if self.n_clusters < 1 or self.max_iter < 1:
            raise ValueError(
                f"n_clusters and max_iter must be >= 1, got {self.n_clusters}, {self.max_iter}"
            )
        points_ND = np.ascontiguousarray(points_ND, dtype=np.float32)
        if points_ND.ndim != 2 or len(points_ND) < self.n_clusters:
            raise ValueError(
                f"points must have shape (N >= n_clusters = {self.n_clusters}, D), "
                f"got {points_ND.shape}"
            )
        norms_N = np.linalg.norm(points_ND, axis=1)
        if not (np.abs(norms_N - 1.0) <= 1e-3).all():
            raise ValueError(
                f"points must be finite and of norm 1, got norms {norms_N.min()} to {norms_N.max()}"
            )
        return points_ND

    def _initial_centers(self, points_ND: Float32Array) -> Float32Array:
        if self.init is None:
            return kmeans_plus_plus(points_ND, self.n_clusters, self.random_state)
        centers_KD = np.array(self.init, dtype=np.float32)
        expected = (self.n_clusters, points_ND.shape[1])
        if centers_KD.shape != expected:
            raise ValueError(f"init must have shape {expected}, got {centers_KD.shape}")
        return centers_KD


class BalancedSphericalKMeans(SphericalKMeans):
    """Spherical k-means whose clusters hold at most ceil(N / K) points each.

    Every iteration finds an exact optimum of the capacity-constrained assignment. It is solved as
    a transport problem between N points and K clusters instead of the paper's linear assignment
    with replicated columns: the same optimum in 11 to 55 times less time (N = 1000 and 3000).
    Parameters and attributes are those of `SphericalKMeans`.
    """

    def _assign(self, cost_NK: FloatArray, state: Any) -> tuple[IndexArray, Any]:
        capacity = -(-len(cost_NK) // self.n_clusters)
        return assign_with_capacity(cost_NK.astype(np.float64), capacity, prices_K=state)


def kmeans_plus_plus(points_ND: Float32Array, n_clusters: int, seed: int) -> Float32Array:
    """Starting centroids among the points; float32, shape (K, D).

    The first is drawn uniformly, each next with probability proportional to the squared Euclidean
    distance to the nearest chosen one, uniformly if all distances are 0.
    """
    rng = np.random.default_rng(seed)
    chosen = [int(rng.integers(len(points_ND)))]
    nearest_N = np.full(len(points_ND), np.inf)
    for _ in range(1, n_clusters):
        cosines_N = (points_ND @ points_ND[chosen[-1]]).astype(np.float64)
        nearest_N = np.minimum(nearest_N, np.maximum(2.0 - 2.0 * cosines_N, 0.0))
        nearest_N[chosen] = 0.0  # rounding leaves a chosen point a little away from itself
        total = nearest_N.sum()
        weights_N = nearest_N / total if total > 0 else None
        chosen.append(int(rng.choice(len(points_ND), p=weights_N)))
    return points_ND[chosen]


def match_centroids(old_KD: FloatArray, new_KD: FloatArray) -> IndexArray:
    """Pair old centroids with new ones so that the sum of cosines is largest.

    Args:
        old_KD: unit centroids in use, shape (K', D) with K' <= K.
        new_KD: unit centroids of a refit, shape (K, D).

    Returns:
        Distinct rows p, int64, shape (K',): new_KD[p[k]] takes the place of old_KD[k].

    Raises:
        ValueError: the shapes do not allow it.
    """
    if old_KD.ndim != 2 or old_KD.shape[1:] != new_KD.shape[1:] or len(old_KD) > len(new_KD):
        raise ValueError(
            "old centroids must be at most as many as the new ones, and as long, got shapes "
            f"{old_KD.shape} and {new_KD.shape}"
        )
    _, permutation = linear_sum_assignment(old_KD @ new_KD.T, maximize=True)
    return np.asarray(permutation, dtype=np.int64)


def _mean_directions(
    points_ND: Float32Array, labels_N: IndexArray, centers_KD: Float32Array
) -> Float32Array:
    """Unit mean of each cluster's points; an empty cluster keeps its centroid."""
    members = csr_matrix(
        (np.ones(len(labels_N), np.float32), (labels_N, np.arange(len(labels_N)))),
        shape=(len(centers_KD), len(labels_N)),
    )
    sums_KD = np.asarray(members @ points_ND)
    norms_K = np.linalg.norm(sums_KD, axis=1)
    is_empty_K = np.bincount(labels_N, minlength=len(centers_KD)) == 0
    sums_KD /= np.maximum(norms_K, MIN_NORM)[:, None]
    sums_KD[is_empty_K] = centers_KD[is_empty_K]
    return sums_KD
