from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata

from calibration.clustering import BalancedSphericalKMeans, match_centroids
from calibration.fit import domain_clusters
from calibration.layers import centred_ranks
from calibration.signature import SignatureTransform, compute_idf
from calibration.transport import assign_with_capacity

counts = arrays(
    np.uint16,
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 5)),
    elements=st.integers(0, 65535),
)


@given(counts)
def test_idf_range(counts_NLE):
    idf_LE = compute_idf(counts_NLE)
    num_requests = len(counts_NLE)
    assert (idf_LE >= 0).all()
    assert (idf_LE <= math.log(num_requests + 1) + 1e-6).all()
    assert (idf_LE[(counts_NLE > 0).all(axis=0)] == 0).all()


@given(counts)
def test_signature_has_norm_one_or_zero(counts_NLE):
    transform = SignatureTransform(compute_idf(counts_NLE), np.arange(counts_NLE.shape[1]))
    for signature_D in transform.batch(counts_NLE):
        assert (signature_D >= 0).all()
        norm = float(np.linalg.norm(signature_D))
        assert norm == 0.0 or abs(norm - 1.0) < 1e-5


@st.composite
def transports(draw):
    """Costs with many ties or none, a capacity that fits, and prices to start from."""
    num_points, num_clusters = draw(st.integers(1, 24)), draw(st.integers(1, 6))
    elements = draw(st.sampled_from([st.integers(0, 3).map(float), st.floats(-1, 1, width=32)]))
    cost_NK = draw(arrays(np.float64, (num_points, num_clusters), elements=elements))
    capacity = -(-num_points // num_clusters) + draw(st.integers(0, 2))
    prices = draw(st.none() | arrays(np.float64, num_clusters, elements=st.floats(0, 2, width=32)))
    return cost_NK, capacity, prices


@settings(max_examples=200)
@given(transports())
def test_assignment_is_an_optimum(transport):
    cost_NK, capacity, prices_K = transport
    labels_N, prices_K = assign_with_capacity(cost_NK, capacity, prices_K)
    rows = np.arange(len(cost_NK))
    sizes_K = np.bincount(labels_N, minlength=cost_NK.shape[1])
    assert sizes_K.max() <= capacity
    slots = np.repeat(np.arange(cost_NK.shape[1]), capacity)
    best = cost_NK[:, slots][linear_sum_assignment(cost_NK[:, slots])].sum()
    assert abs(cost_NK[rows, labels_N].sum() - best) < 1e-8
    assert (prices_K >= 0).all()
    assert (sizes_K[prices_K > 1e-9] == capacity).all()


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 5), st.integers(0, 99))
def test_clusters_are_balanced(num_points, num_clusters, num_groups, seed):
    num_clusters = min(num_clusters, num_points)
    rng = np.random.default_rng(seed)
    groups = rng.random((num_groups, 6)) + 0.01
    points_ND = groups[rng.integers(num_groups, size=num_points)]
    points_ND = points_ND + rng.choice([0.0, 0.1]) * rng.random(points_ND.shape)
    points_ND /= np.linalg.norm(points_ND, axis=1, keepdims=True)
    model = BalancedSphericalKMeans(num_clusters, random_state=seed).fit(points_ND)
    sizes_K = np.bincount(model.labels_, minlength=num_clusters)
    assert sizes_K.sum() == num_points
    assert sizes_K.max() <= math.ceil(num_points / num_clusters)
    np.testing.assert_allclose(np.linalg.norm(model.cluster_centers_, axis=1), 1.0, atol=1e-4)


@given(st.integers(1, 8), st.integers(0, 99))
def test_match_is_a_permutation(num_clusters, seed):
    rng = np.random.default_rng(seed)
    old_KD, new_KD = rng.random((2, num_clusters, 5))
    assert sorted(match_centroids(old_KD, new_KD).tolist()) == list(range(num_clusters))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), min_size=1))
def test_domain_clusters_cover_half_and_none_is_spare(pairs):
    domains_N = np.array([domain for domain, _ in pairs])
    labels_N = np.array([label for _, label in pairs])
    for domain, clusters in domain_clusters(domains_N, labels_N).items():
        members = labels_N[domains_N == domain]
        sizes = [int((members == cluster).sum()) for cluster in clusters]
        assert 2 * sum(sizes) >= len(members)
        assert 2 * (sum(sizes) - min(sizes)) < len(members)


ties = st.lists(st.integers(-3, 3).map(float), min_size=1)
spread_out = st.lists(st.floats(-1e3, 1e3), min_size=1)


@given(ties | spread_out)
def test_ranks_are_those_of_scipy(values):
    expected = rankdata(values) - (len(values) + 1) / 2
    np.testing.assert_array_equal(centred_ranks(np.array(values)), expected)
