from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.artifact import Artifact
from deployments.replica import CacheReporter, home_overlap, of_all_ranks, overlap_artifact

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def artifact():
    return Artifact.load(ROOT / "models" / "demo" / "calibration")


def bits(resident_LE):
    return np.packbits(resident_LE, axis=1).tobytes()


def test_share_of_expected_uses(artifact):
    shape = (artifact.num_layers, artifact.num_experts)
    rng = np.random.default_rng(3)
    for cluster in range(artifact.k):
        rate_LE = artifact.cluster_activation_KLE[cluster]
        resident_LE = rng.random(shape) < 0.4
        share = home_overlap(artifact, cluster, None, bits(resident_LE))
        assert share == pytest.approx(rate_LE[resident_LE].sum() / rate_LE.sum())
    assert home_overlap(artifact, None, None, bits(np.ones(shape, np.bool_))) == 1
    assert home_overlap(artifact, 0, None, bits(np.zeros(shape, np.bool_))) == 0


def test_a_refitted_home_counts_as_the_nearest_cluster(artifact):
    rate_LE = artifact.cluster_activation_KLE[1]
    best_LE = rate_LE > np.median(rate_LE, axis=1, keepdims=True)
    home = artifact.centroids_KD[1].astype("<f4").tobytes()
    assert home_overlap(artifact, 0, home, bits(best_LE)) == home_overlap(
        artifact, 1, None, bits(best_LE)
    )
    assert home_overlap(artifact, 1, None, bits(best_LE)) > 0.6


def test_ranks_add_up(artifact):
    first_LE = np.zeros((artifact.num_layers, artifact.num_experts), np.bool_)
    first_LE[:, ::2] = True
    shares = [home_overlap(artifact, 0, None, bits(part)) for part in (first_LE, ~first_LE)]
    both = home_overlap(artifact, 0, None, of_all_ranks([bits(first_LE), bits(~first_LE)]))
    assert both == pytest.approx(sum(shares)) == pytest.approx(1)


def test_a_metric_that_cannot_be_had_stops_nothing(artifact, tmp_path):
    assert overlap_artifact(None) is None
    assert overlap_artifact(str(tmp_path / "elsewhere")) is None
    shares, homes = [], [(0, None), (0, b"\0" * 8)]
    reporter = CacheReporter(
        "app", "a", None, None, artifact=artifact, home=lambda: homes[0], export=shares.append
    )
    resident = bits(np.ones((artifact.num_layers, artifact.num_experts), np.bool_))
    reporter.export_overlap(resident)
    homes.pop(0)  # a router with another artifact
    reporter.export_overlap(resident)
    reporter.export_overlap(resident)
    assert shares == [1]
