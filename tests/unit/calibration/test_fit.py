from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from calibration.artifact import Artifact
from calibration.fit import cluster_activation, domain_clusters, fit
from router.core import RoutingCore
from router.policy import Band
from tests.builders import build_capture


@pytest.fixture(scope="module")
def capture():
    return build_capture(40)


@pytest.fixture(scope="module")
def artifact(capture):
    return fit(capture, 4, workload="tasks", show_progress=False)


def test_domains_become_clusters(capture, artifact):
    sizes = np.bincount(artifact.assignments_N, minlength=4)
    assert sizes.tolist() == [10, 10, 10, 10]
    homes = artifact.domain_clusters
    assert sorted(homes) == ["code", "legal", "math", "medical"]
    assert sorted(cluster for home in homes.values() for cluster in home) == [0, 1, 2, 3]


def test_describes_itself(capture, artifact):
    assert artifact.workload == "tasks"
    assert artifact.prompts_sha256 == capture.prompts_sha256
    assert (artifact.num_requests, artifact.k, artifact.seed) == (40, 4, 1)
    assert 0 < artifact.scores["rho_all_layers"] <= artifact.scores["rho"] <= 1
    assert {"vllm", "numpy", "scipy"} <= set(artifact.versions)


def test_activation_sums_to_top_k(artifact):
    np.testing.assert_allclose(artifact.cluster_activation_KLE.sum(axis=2), 2.0, rtol=1e-5)


def test_reservoir_holds_signatures_of_the_capture(capture, artifact):
    row = artifact.reservoir_rows_R[3]
    np.testing.assert_array_equal(
        artifact.reservoir_RD[3], artifact.transform(capture.prefill_counts_NLE[row])
    )
    assert artifact.reservoir_domains_R[3] == capture.domains_N[row]
    assert artifact.reservoir_clusters_R[3] == artifact.assignments_N[row]


def test_deterministic(capture, artifact, tmp_path):
    artifact.save(tmp_path / "a")
    fit(capture, 4, workload="tasks", show_progress=False).save(tmp_path / "b")
    assert (tmp_path / "a" / "arrays.npz").read_bytes() == (
        tmp_path / "b" / "arrays.npz"
    ).read_bytes()


def test_router_sends_requests_of_a_domain_home(capture, artifact, tmp_path):
    artifact.save(tmp_path / "a")
    core = RoutingCore(Band(0.1), Artifact.load(tmp_path / "a"), seed=1)
    core.set_replicas([f"d{k}" for k in range(4)])
    fresh = build_capture(40)
    for n in range(40):
        selection = core.select(
            f"r{n}", fresh.prefill_counts_NLE[n], int(fresh.prompt_tokens_N[n]), None, 0.0
        )
        assert selection.centroid in artifact.domain_clusters[str(fresh.domains_N[n])]


@pytest.mark.parametrize(
    ("k", "tau", "message"),
    [
        (41, 0.1, "k=41 clusters need at least 41 requests, the capture has 40"),
        (0, 0.1, "k must be >= 1"),
        (4, 1.5, "tau in"),
        (4, float("nan"), "tau in .* tau=nan"),
    ],
)
def test_refuses(capture, k, tau, message):
    with pytest.raises(ValueError, match=message):
        fit(capture, k, tau=tau, show_progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seed": -1}, "seed >= 0 .* seed=-1"), ({"layers": "greedy"}, "layers must be one of")],
)
def test_refuses_options(capture, options, message):
    with pytest.raises(ValueError, match=message):
        fit(capture, 4, show_progress=False, **options)


def rows_of(capture, rows):
    return dataclasses.replace(
        capture, **{name: getattr(capture, name)[np.array(rows)] for name in capture._ARRAYS}
    )


def test_duplicates_are_refused_if_clusters_would_be_the_same(capture):
    repeated = rows_of(capture, [0, 1, 2, 0, 1, 2, 0, 1])
    with pytest.raises(ValueError, match="4 distinct signatures, the 8 requests have 3: capture"):
        fit(repeated, 4, show_progress=False)
    assert fit(repeated, 3, show_progress=False).k == 3


def test_warns_if_prompts_say_nothing(capture, caplog):
    constant = dataclasses.replace(
        capture,
        decode_counts_NLE=np.ones_like(capture.decode_counts_NLE),
        decode_tokens_N=np.full(len(capture), 8, dtype=np.int32),
    )
    fit(constant, 2, show_progress=False)
    assert "rho is 0.00: the prompts' experts say nothing about decode" in caplog.text


def test_zero_signatures_are_named(capture):
    same = rows_of(capture, [0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="5 of 5 requests have an all-zero signature, first 'requ"):
        fit(same, 2, show_progress=False)


def test_cluster_activation_weighs_by_tokens():
    decode_NLE = np.array([[[2, 0]], [[2, 4]], [[1, 1]]], dtype=np.uint16)
    activation = cluster_activation(
        decode_NLE, np.array([2, 6, 2], dtype=np.int32), np.array([0, 0, 1]), 3
    )
    np.testing.assert_allclose(activation[:, 0], [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])


def test_domain_clusters_cover_half():
    labels_N = np.array([0, 0, 1, 2, 2, 2, 1, 3])
    domains_N = np.array(["a", "a", "a", "a", "b", "b", "b", ""])
    # a: clusters 0 (2 of 4) suffices; b: 2 (2 of 3).
    assert domain_clusters(domains_N, labels_N) == {"a": [0], "b": [2]}
    spread = domain_clusters(np.array(["c"] * 5), np.array([4, 3, 2, 1, 0]))
    assert spread == {"c": [0, 1, 2]}
