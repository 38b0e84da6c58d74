from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from calibration.layers import cosine_distances, draw_pairs, greedy_layer_selection
from calibration.signature import SignatureTransform, compute_idf
from tests.builders import build_capture


@pytest.fixture(scope="module")
def capture():
    return build_capture(60, num_layers=5)


@pytest.fixture(scope="module")
def selection(capture):
    return greedy_layer_selection(
        capture.prefill_counts_NLE, capture.decode_counts_NLE, num_pairs=2000
    )


def rho(capture, layers):
    """Spearman's rho of a layer set, computed the long way."""
    counts_NLE, decode_NLE = capture.prefill_counts_NLE, capture.decode_counts_NLE
    i_M, j_M = draw_pairs(len(counts_NLE), 2000, 1)
    mask = np.sort(np.array(layers))
    signatures_ND = SignatureTransform(compute_idf(counts_NLE), mask).batch(counts_NLE)
    profiles = decode_NLE.reshape(len(decode_NLE), -1).astype(np.float64)
    profiles /= np.linalg.norm(profiles, axis=1, keepdims=True)
    return spearmanr(
        1 - (signatures_ND[i_M] * signatures_ND[j_M]).sum(axis=1),
        1 - (profiles[i_M] * profiles[j_M]).sum(axis=1),
    ).statistic


def test_rounds_are_spearman_of_the_layers_so_far(capture, selection):
    for taken in range(1, 6):
        expected = rho(capture, selection.order[:taken])
        assert selection.rho_curve[taken - 1] == pytest.approx(expected, abs=1e-4)


def test_single_layers(capture, selection):
    for layer in range(5):
        assert selection.per_layer_rho[layer] == pytest.approx(rho(capture, [layer]), abs=1e-4)
    assert selection.order[0] == selection.per_layer_rho.argmax()


def test_each_round_takes_the_best_layer(capture, selection):
    taken = selection.order[:2].tolist()
    others = set(range(5)).difference(taken)
    best = max(others, key=lambda layer: rho(capture, [*taken, layer]))
    assert selection.order[2] == best


def test_all_rounds_then_cut_at_the_peak(selection):
    assert sorted(selection.order.tolist()) == list(range(5))
    kept = selection.rho_curve.argmax() + 1
    assert selection.mask.tolist() == sorted(selection.order[:kept].tolist())


def test_repeatable(capture, selection):
    again = greedy_layer_selection(
        capture.prefill_counts_NLE, capture.decode_counts_NLE, num_pairs=2000
    )
    np.testing.assert_array_equal(again.order, selection.order)
    np.testing.assert_array_equal(again.rho_curve, selection.rho_curve)


def test_layer_without_information_scores_zero(capture):
    counts_NLE = capture.prefill_counts_NLE.copy()
    counts_NLE[:, 2] = 1
    selection = greedy_layer_selection(counts_NLE, capture.decode_counts_NLE, num_pairs=500)
    assert selection.per_layer_rho[2] == 0.0
    assert selection.order[0] != 2


def test_pairs_have_two_different_requests():
    i_M, j_M = draw_pairs(5, 1000, seed=1)
    assert (i_M != j_M).all()
    assert 700 < len(i_M) < 900
    with pytest.raises(ValueError, match="no pair of two requests"):
        draw_pairs(1, 10, seed=1)


def test_zero_norm_is_clipped():
    distance = cosine_distances(np.zeros(1), np.array([0.0, 4.0]), np.array([0]), np.array([1]))
    assert distance.tolist() == [1.0]


def test_shapes_are_checked(capture):
    with pytest.raises(ValueError, match="one shape"):
        greedy_layer_selection(capture.prefill_counts_NLE, capture.decode_counts_NLE[:, :2])
    with pytest.raises(ValueError, match="N >= 2"):
        greedy_layer_selection(capture.prefill_counts_NLE[:1], capture.decode_counts_NLE[:1])


def test_nan_is_named(capture):
    values_NLE = capture.prefill_counts_NLE.astype(np.float32)
    values_NLE[7, 2, 5] = np.nan
    weights_LE = np.ones(values_NLE.shape[1:])
    with pytest.raises(ValueError, match="got nan for request 7, layer 2, expert 5"):
        greedy_layer_selection(values_NLE, capture.decode_counts_NLE, weights_LE=weights_LE)
