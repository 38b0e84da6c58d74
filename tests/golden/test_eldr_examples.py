"""Examples worked by hand, and equality with the paper's own procedure."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from calibration.clustering import BalancedSphericalKMeans, kmeans_plus_plus
from calibration.layers import greedy_layer_selection
from calibration.signature import SignatureTransform, compute_idf
from calibration.transport import assign_with_capacity
from router.policy import Band


def test_idf():
    # One layer, four experts, three requests: used by all, two, one and none of them.
    counts_NLE = np.array([[[4, 1, 0, 0]], [[2, 0, 3, 0]], [[1, 9, 0, 0]]], dtype=np.uint16)
    expected = [math.log(4 / 4), math.log(4 / 3), math.log(4 / 2), math.log(4 / 1)]
    np.testing.assert_allclose(compute_idf(counts_NLE), [expected], rtol=1e-6)


def test_signature():
    idf_LE = np.array([[1.0, 2.0], [5.0, 5.0], [0.0, 4.0]], dtype=np.float32)
    transform = SignatureTransform(idf_LE, np.array([0, 2]))
    # Layer 1 is masked. Weighted: (3, 2 * 0), (0 * 7, 4 * 1); norm 5.
    signature_D = transform(np.array([[3, 0], [9, 9], [7, 1]], dtype=np.uint16))
    np.testing.assert_allclose(signature_D, [0.6, 0.0, 0.0, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    ("tau", "chosen", "band_size"),
    [(0.0, 1, 1), (0.1, 0, 2), (0.3, 2, 3), (1.0, 3, 4)],
)
def test_band(tau, chosen, band_size):
    scores_K = np.array([0.78, 0.85, 0.60, 0.10], dtype=np.float32)
    loads_K = np.array([4, 9, 3, 1])
    decision = Band(tau).choose(scores_K, loads_K, None)
    assert (decision.index, decision.band_size) == (chosen, band_size)


def test_capacity_moves_the_cheapest_point():
    # All prefer cluster 0, which holds two: point 2 loses least by leaving (0.1).
    cost_NK = np.array([[0.0, 0.9], [0.1, 0.7], [0.2, 0.3]])
    labels_N, prices_K = assign_with_capacity(cost_NK, 2)
    assert labels_N.tolist() == [0, 0, 1]
    assert prices_K[1] == 0.0
    assert 0.1 <= prices_K[0] <= 0.6


def test_capacity_moves_along_a_chain():
    # Cluster 0 is over by one, only cluster 2 has room, and no point of 0 is near it: the optimum
    # passes one point from 0 to 1 and one from 1 to 2.
    cost_NK = np.array(
        [[0.0, 0.1, 2.0], [0.0, 2.0, 2.0], [2.0, 0.0, 0.1], [2.0, 0.0, 2.0], [0, 2, 2]]
    )
    labels_N, _ = assign_with_capacity(cost_NK, 2)
    assert labels_N.tolist() == [1, 0, 2, 1, 0]


def lsa_labels(cost_NK, capacity):
    """The paper's assignment: every cluster column replicated `capacity` times."""
    slots = np.repeat(np.arange(cost_NK.shape[1]), capacity)
    return slots[linear_sum_assignment(cost_NK[:, slots])[1]]


@pytest.mark.parametrize("seed", range(12))
def test_assignment_costs_what_the_lsa_costs(seed):
    rng = np.random.default_rng(seed)
    num_points, num_clusters = int(rng.integers(20, 120)), int(rng.integers(2, 12))
    cost_NK = rng.random((num_points, num_clusters)) ** 2
    cost_NK[:, 0] -= 0.5 * rng.random()  # a favourite
    capacity = -(-num_points // num_clusters)
    labels_N, _ = assign_with_capacity(cost_NK, capacity, rng.random(num_clusters))
    rows = np.arange(num_points)
    expected = cost_NK[rows, lsa_labels(cost_NK, capacity)].sum()
    assert np.bincount(labels_N).max() <= capacity
    assert cost_NK[rows, labels_N].sum() == pytest.approx(expected, abs=1e-9)


def test_clustering_is_the_papers_procedure():
    rng = np.random.default_rng(3)
    points_ND = np.abs(rng.normal(size=(90, 10))).astype(np.float32)
    points_ND /= np.linalg.norm(points_ND, axis=1, keepdims=True)
    centers_KD = kmeans_plus_plus(points_ND, 7, 1)
    for _ in range(50):
        labels_N = lsa_labels(1.0 - points_ND @ centers_KD.T, 13)
        moved_KD = np.stack([points_ND[labels_N == k].mean(axis=0) for k in range(7)])
        moved_KD /= np.linalg.norm(moved_KD, axis=1, keepdims=True)
        is_done = np.allclose(moved_KD, centers_KD)
        centers_KD = moved_KD
        if is_done:
            break
    model = BalancedSphericalKMeans(7, random_state=1).fit(points_ND)
    np.testing.assert_array_equal(model.labels_, labels_N)
    np.testing.assert_allclose(model.cluster_centers_, centers_KD, atol=1e-5)


def test_greedy_selection():
    # Decode: requests 0 and 1 are close, 2 is far from both: ranks of pairs 01, 02, 12 are
    # 1, 2.5, 2.5. Layer 1 says the same, so rho = 1; layer 0 has 0 and 2 close (2.5, 1, 2.5),
    # so rho = -0.5 if every pair is drawn equally often.
    near_01 = [[4, 0, 0], [2, 2, 0], [0, 0, 4]]
    near_02 = [[4, 0, 0], [0, 0, 4], [2, 2, 0]]
    counts_NLE = np.stack([near_02, near_01], axis=1).astype(np.uint16)
    decode_NLE = np.stack([near_01, near_01], axis=1).astype(np.uint16)
    selection = greedy_layer_selection(counts_NLE, decode_NLE)
    assert selection.order.tolist() == [1, 0]
    assert selection.mask.tolist() == [1]
    assert selection.rho_curve[0] == pytest.approx(1.0)
    np.testing.assert_allclose(selection.per_layer_rho, [-0.5, 1.0], atol=0.03)
