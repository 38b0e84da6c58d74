"""The pooled core chooses as the live core; fitted routers; the domain baseline."""

import numpy as np
import pytest

from calibration.simulation.config import POLICIES, SIGNATURES
from calibration.simulation.routing import PooledCore, domain_homes, fit_router
from router.core import RoutingCore
from router.policy import make_policy
from router.types import NoReplica

from .conftest import make_config


def _ids(number):
    return [f"decode-{k:04d}" for k in range(number)]


@pytest.mark.parametrize("policy", POLICIES)
def test_chooses_as_the_live_core(workload, router, policy):
    """Same choices, loads and counters over a stream of arrivals, ends, joins and leaves."""
    settings = make_config(router={"ramp_s": 3.0}).router
    pooled = PooledCore(settings, policy, router, seed=5)
    pooled.change_pool(_ids(4), None)
    live = RoutingCore(
        make_policy(policy, seed=5, domain_replicas=router.artifact.domain_clusters),
        router.artifact,
        5,
        ramp_s=3.0,
    )
    live.set_replicas(_ids(4))
    rng = np.random.default_rng(0)
    running = []
    for number in range(400):
        now = number * 0.05
        if number in (150, 250):
            pool = _ids(5) if number == 150 else _ids(5)[1:]
            pooled.change_pool(pool, now)
            live.set_replicas(pool, joined_at=now)
            if policy == "domain":
                live.policy = pooled.policy
        row = int(rng.integers(len(workload)))
        ours = pooled.select_row(str(number), row, workload.domains_N[row], now)
        if policy == "domain" and number >= 150:
            continue  # one policy object, whose draws only one core may take
        theirs = live.select(
            str(number),
            workload.counts_NLE[row],
            int(workload.prompt_tokens_N[row]),
            workload.domains_N[row],
            now,
        )
        assert (ours.replica_id, ours.band_size, ours.fallback) == (
            theirs.replica_id,
            theirs.band_size,
            theirs.fallback,
        )
        running.append(str(number))
        if len(running) > 40:
            done = running.pop(int(rng.integers(len(running))))
            assert pooled.release(done) == live.release(done)
        np.testing.assert_array_equal(pooled.loads(now), live.loads(now))


def test_an_empty_pool_refuses(router):
    core = PooledCore(make_config().router, "soft", router, seed=0)
    core.change_pool([], None)
    with pytest.raises(NoReplica):
        core.select_row("0", 0, "code", 0.0)


def test_a_refit_gives_every_replica_a_centroid(workload, router):
    core = PooledCore(make_config(router={"refit": True}).router, "band", router, seed=0)
    core.change_pool(_ids(4), None)
    for number in range(300):
        core.select_row(str(number), number % len(workload), "", 0.0)
    core.change_pool(_ids(7), 1.0)
    assert core.num_refits == 1
    assert sorted(core.assignment.values()) == list(range(7))


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("clustering", ["balanced", "vanilla"])
def test_every_signature_and_clustering_makes_an_artifact(workload, signature, clustering):
    fitted = fit_router(workload, 4, signature, clustering)
    sizes = np.bincount(fitted.artifact.assignments_N, minlength=4)
    if clustering == "balanced":
        assert sizes.max() <= -(-fitted.artifact.num_requests // 4)
    assert fitted.signatures_ND.shape == (len(workload), fitted.artifact.centroids_KD.shape[1])
    np.testing.assert_allclose(np.linalg.norm(fitted.signatures_ND, axis=1), 1, atol=1e-5)


def test_every_cluster_has_a_domain_and_every_domain_a_cluster(workload, router):
    homes = domain_homes(router.artifact)
    assert set(homes) == set(workload.domains_N.tolist())
    assert sorted(k for clusters in homes.values() for k in clusters) == [0, 1, 2, 3]
