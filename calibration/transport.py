"""Exact assignment of N points to K clusters of limited size, for N much larger than K.

Axes: N points, K clusters.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
Float64Array = NDArray[np.float64]
IndexArray = NDArray[np.int64]

TOLERANCE = 1e-12
"""Gains below this are rounding noise of costs around 1."""
PRICE_STEPS = 10
"""Most price raises per cluster before single points are passed; more gained nothing in trials."""


def assign_with_capacity(
    cost_NK: NDArray[np.floating[Any]],
    capacity: int,
    prices_K: Float64Array | None = None,
) -> tuple[IndexArray, Float64Array]:
    """Assign every point to a cluster at the least total cost, at most `capacity` to a cluster.

    Every point first goes where cost plus price is least: an optimum for the sizes that result.
    Then single points are passed along shortest paths in the graph of clusters, where a -> b costs
    what the cheapest point of a loses by moving to b. That keeps the assignment optimal for its new
    sizes. First overfull clusters are emptied, then sizes change as long as that lowers the cost;
    at the end no change of sizes can. Any prices give the optimum, good ones leave few paths.

    Args:
        cost_NK: finite costs of order 1, shape (N, K).
        capacity: most points of a cluster; capacity * K >= N.
        prices_K: prices returned for similar costs; None: zeros.

    Returns:
        Cluster of each point, int64, shape (N,); and prices, float64, shape (K,), >= 0: each point
        is where cost plus price is least, and only full clusters have a price above 0.

    Raises:
        ValueError: the points do not fit, or a cost is not finite.
    """
    exact_NK = np.ascontiguousarray(cost_NK, dtype=np.float64)
    num_points, num_clusters = exact_NK.shape
    if capacity * num_clusters < num_points:
        raise ValueError(
            f"{num_points} points do not fit in {num_clusters} clusters of at most {capacity}"
        )
    if not np.isfinite(exact_NK).all():
        raise ValueError("cost_NK must be finite, got NaN or infinity")
    prices_K = np.zeros(num_clusters) if prices_K is None else np.array(prices_K, np.float64)
    _level_prices(exact_NK, capacity, prices_K)
    graph = _ClusterGraph(exact_NK, (exact_NK + prices_K).argmin(axis=1))
    while graph.push(graph.sizes_K > capacity, graph.sizes_K < capacity, np.inf):
        pass
    while graph.push(graph.sizes_K > 0, graph.sizes_K < capacity, -TOLERANCE):
        pass
    return graph.labels_N, graph.prices(capacity)


def _level_prices(cost_NK: Float64Array, capacity: int, prices_K: Float64Array) -> None:
    """Raise the price of the fullest cluster until it is just full, many times over.

    Only a start: when it ends, some clusters are still a little over or under.
    """
    num_clusters = len(prices_K)
    priced_NK = cost_NK + prices_K
    labels_N = priced_NK.argmin(axis=1)
    sizes_K = np.bincount(labels_N, minlength=num_clusters)
    for _ in range(PRICE_STEPS * num_clusters):
        if np.maximum(sizes_K - capacity, 0).sum() <= num_clusters:
            return  # passing single points is cheaper now
        k = int(sizes_K.argmax())
        members = np.flatnonzero(labels_N == k)
        excess = len(members) - capacity
        rows = priced_NK[members]
        own = rows[:, k].copy()
        rows[:, k] = np.inf
        next_best = rows.argmin(axis=1)
        margins = rows[np.arange(len(members)), next_best] - own
        leaving = np.argpartition(margins, excess - 1)[:excess]
        raised = margins[leaving].max()
        prices_K[k] += raised
        priced_NK[:, k] += raised
        labels_N[members[leaving]] = next_best[leaving]
        sizes_K[k] -= excess
        sizes_K += np.bincount(next_best[leaving], minlength=num_clusters)


class _ClusterGraph:
    """The labels, and the cheapest point to move for every pair of clusters."""

    def __init__(self, cost_NK: Float64Array, labels_N: IndexArray) -> None:
        self.cost_NK = cost_NK
        self.labels_N = labels_N
        num_clusters = cost_NK.shape[1]
        self.sizes_K = np.bincount(labels_N, minlength=num_clusters)
        self.into_KK = np.full((num_clusters, num_clusters), np.inf)  # [b, a]: cost of a -> b
        self.point_KK = np.zeros((num_clusters, num_clusters), dtype=np.int64)
        for k in range(num_clusters):
            self._refresh(k)

    def push(self, is_source_K: BoolArray, is_target_K: BoolArray, below: float) -> bool:
        """Pass a point along the cheapest path from a source to a target.

        Returns:
            False, and nothing changes, if no path costs less than `below`.
        """
        distance_K, parent_K = self._paths_from(is_source_K)
        ends = np.flatnonzero(is_target_K & (parent_K >= 0))
        if len(ends) == 0:
            return False
        end = int(ends[distance_K[ends].argmin()])
        if not distance_K[end] < below:
            return False
        path = [end]
        while parent_K[path[-1]] >= 0:
            path.append(int(parent_K[path[-1]]))
            assert len(path) <= len(parent_K), "negative cycle between clusters"
        for b, a in pairwise(path):
            self.labels_N[self.point_KK[b, a]] = b
        self.sizes_K[path[-1]] -= 1
        self.sizes_K[end] += 1
        for k in path:
            self._refresh(k)
        return True

    def prices(self, capacity: int) -> Float64Array:
        """Length of the shortest path from each cluster to one with room; 0 for the latter."""
        has_room_K = self.sizes_K < capacity
        if not has_room_K.any():
            has_room_K[:] = True
        price_K = np.where(has_room_K, 0.0, np.inf)
        for _ in range(len(price_K)):
            shorter_K = (self.into_KK + price_K[:, None]).min(axis=0)
            if not (shorter_K < price_K - TOLERANCE).any():
                break
            price_K = np.minimum(price_K, shorter_K)
        price_K -= min(price_K.min(), 0.0)
        return price_K

    def _paths_from(self, is_source_K: BoolArray) -> tuple[Float64Array, IndexArray]:
        """Bellman-Ford from all sources at once: length and predecessor, -1 at a path's start."""
        num_clusters = len(is_source_K)
        distance_K = np.where(is_source_K, 0.0, np.inf)
        parent_K = np.full(num_clusters, -1)
        for _ in range(num_clusters):
            via_KK = self.into_KK + distance_K
            nearest_K = via_KK.argmin(axis=1)
            shorter_K = via_KK[np.arange(num_clusters), nearest_K]
            improved_K = shorter_K < distance_K - TOLERANCE
            if not improved_K.any():
                break
            distance_K[improved_K] = shorter_K[improved_K]
            parent_K[improved_K] = nearest_K[improved_K]
        return distance_K, parent_K

    def _refresh(self, a: int) -> None:
        """Recompute the edges that leave cluster a."""
        members = np.flatnonzero(self.labels_N == a)
        if len(members) == 0:
            self.into_KK[:, a] = np.inf
            return
        loss = self.cost_NK[members]
        loss -= loss[:, a].copy()[:, None]
        cheapest_K = loss.argmin(axis=0)
        self.into_KK[:, a] = loss[cheapest_K, np.arange(len(cheapest_K))]
        self.into_KK[a, a] = np.inf
        self.point_KK[:, a] = members[cheapest_K]
