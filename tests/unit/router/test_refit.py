from __future__ import annotations

import numpy as np
import pytest

from router.refit import (
    RefitJob,
    RefitPlanner,
    RefitReason,
    RefitResult,
    RefitSettings,
    balanced_similarity,
    centroid_tag,
    run_refit,
    signature_space,
    spread,
)
from tests.builders import build_artifact, build_counts

ARTIFACT = build_artifact(4, num_experts=32)


def rows_of(domains, *, seed=0, taste_seed=0):
    """Signatures of requests of the given domains; domains 0 to 3 are those of ARTIFACT."""
    counts = build_counts(
        [*domains, 7], [40] * (len(domains) + 1), num_experts=32, seed=seed, taste_seed=taste_seed
    )
    return list(ARTIFACT.transform.batch(counts[:-1]))


def job(rows, owned, *, reason=RefitReason.POOL, centroids=ARTIFACT.centroids_KD, min_gain=0.01):
    ids = tuple(f"d{k}" for k in range(len(owned)))
    return RefitJob(reason, ids, np.array(owned), centroids, rows, 1, min_gain, "space")


class TestPoolChange:
    def test_replicas_keep_their_domain_and_new_ones_get_the_new_domains(self):
        rows = rows_of([n % 6 for n in range(120)])
        result = run_refit(job(rows, [0, 1, 2, 3, -1, -1]))
        homes = np.stack(rows) @ result.centroids_KD.T
        homes_of = {d: set(homes.argmax(axis=1)[d::6].tolist()) for d in range(6)}
        assert [homes_of[d] for d in range(4)] == [{0}, {1}, {2}, {3}]
        assert sorted(min(homes_of[d]) for d in (4, 5)) == [4, 5]
        assert result.is_accepted
        assert result.gain is None
        assert result.skew == pytest.approx(1.0)
        assert result.moved_share == pytest.approx(2 / 6)

    def test_rows_of_the_result_follow_the_replicas_not_the_centroids(self):
        rows = rows_of([n % 4 for n in range(80)])
        result = run_refit(job(rows, [2, 0, 3, 1]))
        cosines = np.einsum("kd,kd->k", result.centroids_KD, ARTIFACT.centroids_KD[[2, 0, 3, 1]])
        assert (cosines > 0.9).all()
        assert result.moved_share == 0.0

    def test_share_of_a_replica_that_left_goes_to_the_others_only(self):
        rows = rows_of([n % 4 for n in range(80)])
        result = run_refit(job(rows, [0, 1, 3]))
        assert result.centroids_KD.shape == (3, ARTIFACT.transform.length)
        np.testing.assert_allclose(np.linalg.norm(result.centroids_KD, axis=1), 1, atol=1e-5)
        homes = (np.stack(rows) @ result.centroids_KD.T).argmax(axis=1)
        for domain, replica in ((0, 0), (1, 1), (3, 2)):
            assert (homes[domain::4] == replica).mean() > 0.7

    def test_without_any_centroid(self):
        rows = rows_of([n % 4 for n in range(40)])
        result = run_refit(job(rows, [-1] * 4, centroids=ARTIFACT.centroids_KD[:0]))
        assert result.similarity > 0.8
        assert result.moved_share == 1.0

    def test_same_job_same_result(self):
        rows = rows_of([n % 6 for n in range(60)])
        first, second = (run_refit(job(rows, [0, 1, 2, 3, -1, -1])) for _ in range(2))
        np.testing.assert_array_equal(first.centroids_KD, second.centroids_KD)
        assert first.tags == second.tags

    def test_too_few_rows(self):
        with pytest.raises(ValueError, match="N >= n_clusters = 4"):
            run_refit(job(rows_of([0, 1, 2]), [0, 1, 2, 3]))


class TestDrift:
    def test_new_domains_are_worth_a_refit(self):
        rows = rows_of([n % 4 for n in range(160)], taste_seed=5)
        before = balanced_similarity(np.stack(rows), ARTIFACT.centroids_KD)
        result = run_refit(job(rows, [0, 1, 2, 3], reason=RefitReason.DRIFT))
        assert result.is_accepted
        assert result.gain > 0.1
        assert balanced_similarity(np.stack(rows), result.centroids_KD) > before + 0.1

    def test_known_traffic_is_not(self):
        domains = [n % 4 for n in range(160)]
        fitted = run_refit(job(rows_of(domains, seed=1), [0, 1, 2, 3])).centroids_KD
        drift = job(
            rows_of(domains, seed=2), [0, 1, 2, 3], reason=RefitReason.DRIFT, centroids=fitted
        )
        result = run_refit(drift)
        assert not result.is_accepted
        assert result.gain < 0.01
        assert result.moved_share == 0.0
        np.testing.assert_array_equal(result.centroids_KD, fitted)

    def test_gain_is_that_of_rows_it_was_not_fitted_on(self):
        """Noise can be fitted, but not foreseen."""
        rng = np.random.default_rng(0)
        rows_RD = rng.random((64, 32), dtype=np.float32)
        rows_RD /= np.linalg.norm(rows_RD, axis=1, keepdims=True)
        centroids = rows_RD.mean(axis=0) + 0.01 * rng.random((8, 32), dtype=np.float32)
        centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
        asked = job(list(rows_RD), list(range(8)), reason=RefitReason.DRIFT, centroids=centroids)
        result = run_refit(asked)
        seen = balanced_similarity(
            rows_RD, run_refit(job(list(rows_RD), [-1] * 8, centroids=centroids[:0])).centroids_KD
        )
        assert seen - balanced_similarity(rows_RD, centroids) > 0.01
        assert result.gain < 0.01
        assert not result.is_accepted


def test_spread_by_hand():
    centroids = np.eye(4, dtype=np.float32)
    rows = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0.6, 0.8, 0, 0], [0, 0, 1, 0]], np.float32)
    similarity, skew = spread(rows, centroids)
    assert similarity == pytest.approx((1 + 1 + 0.8 + 1) / 4)
    assert skew == pytest.approx(2.0)


def test_balanced_similarity_by_hand():
    centroids = np.eye(2, dtype=np.float32)
    rows = np.array([[1, 0], [0.8, 0.6]], np.float32)
    # The second row is nearer to the first centroid, but there is room for one only.
    assert balanced_similarity(rows, centroids) == pytest.approx((1 + 0.6) / 2)


def test_tags_tell_vectors_and_spaces_apart():
    space = signature_space(ARTIFACT.idf_LE, ARTIFACT.layer_mask)
    other = signature_space(ARTIFACT.idf_LE, ARTIFACT.layer_mask[:2])
    first, second = ARTIFACT.centroids_KD[:2]
    tags = {centroid_tag(s, v) for s in (space, other) for v in (first, second)}
    assert len(tags) == 4
    assert centroid_tag(space, first.copy()) == centroid_tag(space, first)
    assert centroid_tag(space, first).startswith(f"{space}-")


def planner(**changes) -> RefitPlanner:
    made = RefitPlanner(RefitSettings(**({"when": "online"} | changes)), now=0.0)
    made.set_level(0.8, 1.2)
    return made


def finished(planner, now, *, similarity=0.8, accepted=True):
    done = job([], [0], reason=RefitReason.DRIFT)
    planner.finished(
        now,
        RefitResult(done, accepted, ARTIFACT.centroids_KD, (), similarity, 1.2, 0.1, 0.0),
    )


class TestPlanner:
    def test_pool_must_settle_first(self):
        plan = planner(when="pool", settle_s=5.0)
        plan.pool_changed(10.0)
        assert plan.due(14.9, is_paired=False) is None
        plan.pool_changed(14.0)
        assert plan.due(18.9, is_paired=False) is None
        assert plan.due(19.0, is_paired=False) is RefitReason.POOL
        assert plan.due(19.0, is_paired=True) is None

    def test_never(self):
        assert planner(when="never").due(1000.0, is_paired=False) is None

    def test_a_failure_is_tried_again_after_a_while(self):
        plan = planner(interval_s=10.0)
        plan.failed(100.0)
        assert plan.due(109.9, is_paired=False) is None
        assert plan.due(110.0, is_paired=False) is RefitReason.POOL

    @pytest.mark.parametrize(
        ("similarity", "skew", "drifted"),
        [(0.76, 1.7, False), (0.74, 1.2, True), (0.8, 1.9, True)],
    )
    def test_what_counts_as_drift(self, similarity, skew, drifted):
        assert planner().check(10.0, similarity, skew) == drifted

    def test_an_attempt_sets_the_level_so_that_it_does_not_ask_again(self):
        for accepted in (True, False):
            plan = planner()
            assert plan.check(10.0, 0.7, 1.2)
            finished(plan, 11.0, similarity=0.7, accepted=accepted)
            assert not plan.check(20.0, 0.7, 1.2)
            assert not plan.check(30.0, 0.66, 1.2)
            assert plan.check(40.0, 0.64, 1.2)

    def test_level_follows_upwards(self):
        plan = planner()
        assert not plan.check(10.0, 0.9, 1.2)
        assert plan.check(20.0, 0.84, 1.2)

    def test_without_a_level_the_first_look_sets_it(self):
        plan = RefitPlanner(RefitSettings(when="online"), now=0.0)
        assert not plan.check(10.0, 0.5, 3.0)
        assert plan.check(20.0, 0.44, 3.0)

    def test_enough_time_and_traffic_before_a_look(self):
        plan = planner(interval_s=10.0)
        assert not plan.is_check_due(9.0, 1000, 4)
        assert not plan.is_check_due(10.0, 31, 4)
        assert plan.is_check_due(10.0, 32, 4)
        assert not planner(when="pool").is_check_due(10.0, 1000, 4)

    def test_one_more_attempt_when_the_window_has_only_new_traffic(self):
        plan = planner(window_s=30.0)
        finished(plan, 100.0)
        assert plan.due(129.9, is_paired=True) is None
        assert plan.due(130.0, is_paired=True) is RefitReason.DRIFT
        assert plan.due(130.0, is_paired=True) is None
        finished(plan, 131.0, accepted=False)
        assert plan.due(1000.0, is_paired=True) is None
