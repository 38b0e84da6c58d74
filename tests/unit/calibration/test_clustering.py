from __future__ import annotations

import numpy as np
import pytest

from calibration.clustering import (
    BalancedSphericalKMeans,
    SphericalKMeans,
    kmeans_plus_plus,
    match_centroids,
)
from calibration.transport import assign_with_capacity


def build_points(sizes, spread=0.05, dims=12, seed=0):
    """Unit vectors in groups of the given sizes, and the group of each."""
    rng = np.random.default_rng(seed)
    centers = rng.random((len(sizes), dims)) ** 3
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    group_N = np.repeat(np.arange(len(sizes)), sizes)
    points_ND = np.abs(centers[group_N] + rng.normal(size=(len(group_N), dims)) * spread)
    points_ND /= np.linalg.norm(points_ND, axis=1, keepdims=True)
    return points_ND.astype(np.float32), group_N


@pytest.fixture(params=[SphericalKMeans, BalancedSphericalKMeans])
def estimator(request):
    return request.param


class TestBoth:
    def test_finds_even_groups(self, estimator):
        points_ND, group_N = build_points([20, 20, 20], spread=0.01)
        labels_N = estimator(3).fit(points_ND).labels_
        assert len(set(zip(labels_N.tolist(), group_N.tolist(), strict=True))) == 3

    def test_attributes(self, estimator):
        points_ND, _ = build_points([30, 20, 10])
        model = estimator(4).fit(points_ND)
        assert model.cluster_centers_.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(model.cluster_centers_, axis=1), 1, atol=1e-5)
        assert model.labels_.shape == (60,)
        assert 1 <= model.n_iter_ <= 50
        expected = sum(
            1 - points_ND[n] @ model.cluster_centers_[model.labels_[n]] for n in range(60)
        )
        assert model.inertia_ == pytest.approx(float(expected), abs=1e-4)

    def test_predict_is_nearest(self, estimator):
        points_ND, _ = build_points([30, 20, 10])
        model = estimator(3).fit(points_ND)
        assert model.predict(model.cluster_centers_).tolist() == [0, 1, 2]

    def test_repeatable(self, estimator):
        points_ND, _ = build_points([30, 20, 10])
        first, second = estimator(4).fit(points_ND), estimator(4).fit(points_ND)
        np.testing.assert_array_equal(first.cluster_centers_, second.cluster_centers_)
        np.testing.assert_array_equal(first.labels_, second.labels_)

    def test_init_is_used_and_not_changed(self, estimator):
        points_ND, _ = build_points([20, 20])
        init = points_ND[[0, 30]].copy()
        model = estimator(2, init=init, max_iter=1).fit(points_ND)
        np.testing.assert_array_equal(init, points_ND[[0, 30]])
        assert (model.cluster_centers_ @ init.T).argmax(axis=1).tolist() == [0, 1]

    def test_identical_points(self, estimator):
        points_ND = np.tile(np.array([[0.6, 0.8]], dtype=np.float32), (7, 1))
        model = estimator(3).fit(points_ND)
        np.testing.assert_allclose(model.cluster_centers_, points_ND[:3], atol=1e-6)
        assert model.inertia_ == pytest.approx(0.0, abs=1e-5)

    @pytest.mark.parametrize(
        ("options", "points", "message"),
        [
            ({"n_clusters": 0}, np.eye(3), "must be >= 1"),
            ({"n_clusters": 2, "max_iter": 0}, np.eye(3), "must be >= 1"),
            ({"n_clusters": 4}, np.eye(3), r"N >= n_clusters = 4"),
            ({"n_clusters": 2}, np.eye(3) * 2, "norm 1"),
            ({"n_clusters": 2}, np.full((3, 3), np.nan), "norm 1"),
            ({"n_clusters": 2, "init": np.eye(3)}, np.eye(3), "init must have shape"),
        ],
    )
    def test_refuses(self, estimator, options, points, message):
        with pytest.raises(ValueError, match=message):
            estimator(**options).fit(points)


def test_balanced_sizes_where_vanilla_is_lopsided():
    points_ND, _ = build_points([80, 10, 10], spread=0.02)
    vanilla = np.bincount(SphericalKMeans(3).fit(points_ND).labels_, minlength=3)
    balanced = np.bincount(BalancedSphericalKMeans(3).fit(points_ND).labels_, minlength=3)
    assert vanilla.max() > 34
    assert balanced.max() <= 34


def test_vanilla_keeps_the_centroid_of_an_empty_cluster():
    points_ND = np.eye(2, dtype=np.float32)[[0, 0, 1]]
    init = np.array([[1, 0], [0, 1], [-1, 0]], dtype=np.float32)
    model = SphericalKMeans(3, init=init).fit(points_ND)
    np.testing.assert_array_equal(model.cluster_centers_[2], init[2])


def test_kmeans_plus_plus_picks_distinct_points():
    points_ND = np.eye(6, dtype=np.float32)[[0, 0, 0, 0, 1, 2]]
    for seed in range(20):
        chosen = kmeans_plus_plus(points_ND, 3, seed)
        assert sorted(chosen.argmax(axis=1).tolist()) == [0, 1, 2]


class TestMatchCentroids:
    def test_undoes_a_permutation(self):
        points_ND, _ = build_points([1] * 6)
        permutation = np.array([3, 0, 5, 1, 4, 2])
        matched = match_centroids(points_ND, points_ND[permutation])
        np.testing.assert_array_equal(points_ND[permutation][matched], points_ND)

    def test_shapes_must_agree(self):
        with pytest.raises(ValueError, match="at most as many"):
            match_centroids(np.eye(3), np.eye(3)[:2])


class TestTransport:
    def test_prices_certify_the_optimum(self):
        rng = np.random.default_rng(0)
        cost_NK = rng.random((30, 4))
        labels_N, prices_K = assign_with_capacity(cost_NK, 8)
        chosen_N = (cost_NK + prices_K)[np.arange(30), labels_N]
        np.testing.assert_allclose(chosen_N, (cost_NK + prices_K).min(axis=1), atol=1e-9)
        assert (prices_K >= 0).all()
        assert (np.bincount(labels_N, minlength=4)[prices_K > 1e-9] == 8).all()

    def test_room_for_all_is_nearest(self):
        cost_NK = np.random.default_rng(0).random((9, 3))
        labels_N, prices_K = assign_with_capacity(cost_NK, 9)
        np.testing.assert_array_equal(labels_N, cost_NK.argmin(axis=1))
        assert not prices_K.any()

    def test_refuses(self):
        with pytest.raises(ValueError, match="5 points do not fit in 2 clusters of at most 2"):
            assign_with_capacity(np.zeros((5, 2)), 2)
        with pytest.raises(ValueError, match="finite"):
            assign_with_capacity(np.full((2, 2), np.nan), 1)
