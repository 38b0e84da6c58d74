"""The generator: published facts, probabilities, tokens and counts."""

import numpy as np
import pytest

from calibration.simulation.synthetic import (
    STRUCTURES,
    draw_counts,
    draw_tokens,
    expected_distinct,
    inclusion_probabilities,
    make_requests,
    structure_facts,
)

QWEN = {"num_experts": 128, "top_k": 8}


@pytest.mark.parametrize(
    ("structure", "most", "least"), [("tasks", -0.21, -0.17), ("languages", -0.10, -0.03)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_published_facts_hold(structure, most, least, seed):
    requests = make_requests(STRUCTURES[structure], 400, num_layers=6, seed=seed, **QWEN)
    facts = structure_facts(requests.prefill_NLE, requests.decode_NLE, requests.domains_N)
    assert most <= facts["same_domain_change"] <= least
    assert facts["prefill_decode_pearson"] == pytest.approx(0.90, abs=0.03)


def test_the_same_seed_makes_the_same_requests():
    first, again = (
        make_requests(STRUCTURES["tasks"], 20, num_layers=2, seed=3, **QWEN) for _ in range(2)
    )
    np.testing.assert_array_equal(first.decode_NLE, again.decode_NLE)
    np.testing.assert_array_equal(first.domains_N, again.domains_N)


def test_inclusion_probabilities_are_those_of_gumbel_top_k():
    rng = np.random.default_rng(0)
    taste_NLE = rng.normal(size=(1, 1, 32)).astype(np.float32) * 1.5
    p_E = inclusion_probabilities(taste_NLE, 4)[0, 0]
    assert p_E.sum() == pytest.approx(4, abs=0.01)
    keys = taste_NLE[0] + rng.gumbel(size=(40_000, 32))
    chosen = np.argpartition(-keys, 3, axis=1)[:, :4]
    measured_E = np.bincount(chosen.ravel(), minlength=32) / 40_000
    np.testing.assert_allclose(p_E, measured_E, atol=0.03)


def test_tokens_have_the_probabilities_and_distinct_experts():
    rng = np.random.default_rng(0)
    p_LE = inclusion_probabilities(rng.normal(size=(1, 3, 32)).astype(np.float32), 4)[0]
    ids_TLk = draw_tokens(p_LE, 20_000, 4, rng)
    assert (np.diff(np.sort(ids_TLk, axis=2), axis=2) > 0).all()
    measured_E = np.bincount(ids_TLk[:, 1].ravel(), minlength=32) / 20_000
    np.testing.assert_allclose(measured_E, p_LE[1], atol=0.015)


def test_counts_are_conserved():
    rng = np.random.default_rng(0)
    p_NLE = inclusion_probabilities(rng.normal(size=(5, 3, 32)).astype(np.float32), 4)
    counts_NLE = draw_counts(p_NLE, np.array([1, 7, 50, 300, 1000]), 4, rng)
    assert (counts_NLE.sum(axis=2) == 4 * np.array([1, 7, 50, 300, 1000])[:, None]).all()


def test_expected_distinct_of_equal_experts():
    uniform_BLE = np.full((3, 2, 8), 0.5, dtype=np.float32)
    assert expected_distinct(uniform_BLE) == pytest.approx(8 * (1 - 0.125))
