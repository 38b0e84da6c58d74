from __future__ import annotations

import json

import numpy as np
import pytest

from router import core as core_module
from router.core import RouteRequest, RoutingCore
from router.policy import Band, Live, Soft, make_policy
from router.types import FallbackReason, NoReplica
from tests.builders import build_artifact, build_domain_request

TOKENS = 40


def build_core(num_replicas: int = 4, policy=None, **options) -> RoutingCore:
    core = RoutingCore(policy or Band(0.1), build_artifact(4), seed=1, **options)
    core.set_replicas([f"d{k}" for k in range(num_replicas)])
    return core


def select(core, request_id="r", counts=None, tokens=TOKENS, domain=None, now=0.0, exclude=()):
    return core.select(request_id, counts, tokens, domain, now, exclude)


class TestSelect:
    @pytest.mark.parametrize("domain", range(4))
    def test_request_goes_home(self, domain):
        selection = select(build_core(), counts=build_domain_request(domain))
        assert selection.replica_id == f"d{domain}"
        assert selection.centroid == domain
        assert selection.policy == "band"
        assert selection.fallback is None
        assert 0.5 < selection.similarity <= 1.0
        assert selection.band_size >= 1

    def test_similarity_is_the_cosine_to_the_chosen_centroid(self):
        core = build_core()
        counts = build_domain_request(2)
        expected = core.artifact.centroids_KD[2] @ core.artifact.transform(counts)
        assert select(core, counts=counts).similarity == pytest.approx(float(expected), abs=1e-6)

    def test_choosing_reserves(self):
        core = build_core(policy=Band(1.0))
        for i in range(8):
            select(core, f"r{i}", build_domain_request(0))
        assert core.loads(0.0).tolist() == [2, 2, 2, 2]
        assert core.release("r0")
        assert not core.release("r0")
        assert core.loads(0.0).tolist() == [1, 2, 2, 2]
        assert core.counters["unknown_releases"] == 1

    def test_excluded_replicas_are_not_chosen(self):
        core = build_core()
        counts = build_domain_request(0)
        for i in range(3):
            selection = select(core, f"r{i}", counts, exclude={"d0", "d1"})
            assert selection.replica_id in ("d2", "d3")

    def test_retry_moves_the_reservation(self):
        core = build_core()
        counts = build_domain_request(0)
        assert select(core, counts=counts).replica_id == "d0"
        assert select(core, counts=counts, exclude=["d0"]).replica_id != "d0"
        assert core.loads(0.0).sum() == 1
        assert core.counters["reselected"] == 1
        assert core.release("r")
        assert core.loads(0.0).sum() == 0

    def test_no_replica(self):
        core = build_core(0)
        with pytest.raises(NoReplica, match="no decode replica is known"):
            select(core)
        core.set_replicas(["d0"])
        with pytest.raises(NoReplica, match="all 1 decode replicas are excluded"):
            select(core, exclude={"d0"})
        assert isinstance(NoReplica(), LookupError)
        assert len(core.ledger) == 0


class TestFallback:
    def assert_least_loaded(self, core, reason, **request):
        select(core, "busy", build_domain_request(0))
        selection = select(core, "r", **request)
        assert selection.fallback is reason
        assert selection.similarity is None
        assert selection.replica_id == "d1"
        assert core.counters[f"fallback_{reason}"] == 1

    def test_no_counts(self):
        self.assert_least_loaded(build_core(), FallbackReason.NO_SIGNATURE)

    @pytest.mark.parametrize("tokens", [39, 41, 0])
    def test_tokens_that_do_not_add_up(self, tokens):
        counts = build_domain_request(0)
        self.assert_least_loaded(
            build_core(), FallbackReason.BAD_SIGNATURE, counts=counts, tokens=tokens
        )

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda c: c[:3],
            lambda c: c[:, :8],
            lambda c: c.astype(np.float32),
            lambda c: c.ravel(),
            lambda c: c.astype(np.int32) + np.array([[-1000, 1000] + [0] * 14], dtype=np.int32),
        ],
        ids=["layers", "experts", "float", "flat", "negative"],
    )
    def test_bad_counts(self, spoil):
        counts = spoil(build_domain_request(0))
        self.assert_least_loaded(build_core(), FallbackReason.BAD_SIGNATURE, counts=counts)

    def test_one_layer_out_of_step_without_a_token_count(self):
        counts = build_domain_request(0)
        assert select(build_core(), counts=counts, tokens=None).fallback is None
        counts[2, 3] += 2
        selection = select(build_core(), counts=counts, tokens=None)
        assert selection.fallback is FallbackReason.BAD_SIGNATURE

    def test_empty_prompt_is_a_zero_signature(self):
        counts = np.zeros((4, 16), dtype=np.uint16)
        self.assert_least_loaded(
            build_core(), FallbackReason.ZERO_SIGNATURE, counts=counts, tokens=0
        )

    def test_no_artifact(self):
        core = RoutingCore(Band(), None, seed=1)
        core.set_replicas(["d0", "d1"])
        selection = select(core, counts=build_domain_request(0))
        assert selection.fallback is FallbackReason.NO_ARTIFACT
        assert (selection.replica_id, selection.centroid) == ("d0", None)

    def test_policies_without_scores_do_not_fall_back(self):
        core = RoutingCore(make_policy("jsq"), None, seed=1)
        core.set_replicas(["d0", "d1"])
        selection = select(core)
        assert (selection.policy, selection.fallback) == ("jsq", None)

    def test_no_centroid_among_the_allowed(self):
        core = build_core(5)
        selection = select(core, counts=build_domain_request(0), exclude={"d0", "d1", "d2", "d3"})
        assert selection.fallback is FallbackReason.NO_CENTROID
        assert (selection.replica_id, selection.centroid) == ("d4", None)
        assert selection.similarity is None


class TestReplicas:
    def test_new_replica_takes_the_centroid_of_the_lost_one(self):
        core = build_core(4)
        core.set_replicas(["d0", "d2", "d3", "new"])
        assert core.assignment == {"d0": 0, "d2": 2, "d3": 3, "new": 1}

    def test_order_does_not_move_centroids(self):
        core = build_core(3)
        core.set_replicas(["d2", "d0", "d1"])
        assert core.assignment == {"d2": 2, "d0": 0, "d1": 1}
        assert select(core, counts=build_domain_request(2)).replica_id == "d2"

    def test_replica_without_centroid_waits_for_one(self):
        core = build_core(5)
        assert core.assignment["d4"] is None
        core.set_replicas(["new", "d1", "d2", "d3", "d4"])
        assert (core.assignment["d4"], core.assignment["new"]) == (0, None)

    def test_fewer_replicas_than_centroids(self):
        core = build_core(2)
        assert core.assignment == {"d0": 0, "d1": 1}
        assert select(core, counts=build_domain_request(3)).fallback is None

    def test_new_replicas_get_the_free_centroid_they_remember(self):
        core = build_core(2)
        core.set_replicas(["d0", "d1", "d2", "d3"], {"d2": 3, "d3": 0})
        assert core.assignment == {"d0": 0, "d1": 1, "d2": 3, "d3": 2}

    def test_removal_drops_reservations(self):
        core = build_core(2)
        selection = select(core, counts=build_domain_request(0))
        assert core.set_replicas(["d1"]) == [selection.request_id]
        assert not core.release("r")
        assert core.loads(0.0).tolist() == [0]

    def test_repeated_id_is_refused(self):
        core = build_core(2)
        with pytest.raises(ValueError, match="must be distinct"):
            core.set_replicas(["d0", "d0"])
        assert core.replica_ids == ["d0", "d1"]

    def test_set_artifact_keeps_homes(self):
        core = build_core(3)
        core.set_replicas(["d1", "d2"])
        core.set_artifact(build_artifact(4))
        assert core.assignment == {"d1": 1, "d2": 2}
        core.set_artifact(build_artifact(2))
        assert core.assignment == {"d1": 1, "d2": 0}
        core.set_artifact(None)
        assert core.assignment == {"d1": None, "d2": None}


class TestReportedLoad:
    def test_own_reservations_and_recent_requests_of_others(self):
        core = build_core(2, max_report_age_s=5.0)
        select(core, counts=build_domain_request(0))
        assert core.report_load("d0", 3, now=10.0)
        assert core.report_load("d1", 7, now=10.0)
        assert core.loads(15.0).tolist() == [3, 7]
        assert core.loads(15.1).tolist() == [1, 0]

    def test_finished_request_does_not_live_on_in_a_report(self):
        core = build_core(1)
        select(core, "r")
        core.report_load("d0", 1, now=0.0)
        core.release("r")
        assert core.loads(0.5).tolist() == [0]

    def test_reports_stay_when_the_pool_changes(self):
        core = build_core(2)
        core.report_load("d1", 7, now=0.0)
        core.set_replicas(["d1", "d2"])
        assert core.loads(0.0).tolist() == [7, 0]

    def test_report_of_a_gone_replica_is_ignored(self):
        assert not build_core(1).report_load("gone", 3, now=0.0)

    def test_negative_report_is_refused(self):
        with pytest.raises(ValueError, match="must be >= 0, got -1"):
            build_core(1).report_load("d0", -1, now=0.0)

    def test_least_load_uses_reports(self):
        core = build_core(2)
        core.report_load("d0", 7, now=0.0)
        assert select(core).replica_id == "d1"


class TestState:
    def test_snapshot_survives_json(self):
        core = build_core(5)
        for i in range(30):
            select(core, f"r{i}", build_domain_request(i % 4))
        core.set_replicas(["d1", "d2", "d3", "d4"])
        snapshot = json.loads(json.dumps(core.snapshot()))
        copy = RoutingCore(Band(0.1), build_artifact(4), seed=1)
        copy.restore(snapshot)
        assert copy.snapshot() == core.snapshot()
        assert copy.assignment == core.assignment
        assert copy.loads(0.0).tolist() == core.loads(0.0).tolist()
        assert copy.release("r1")

    def test_restore_with_fewer_centroids(self):
        copy = RoutingCore(Band(0.1), build_artifact(2), seed=1)
        copy.restore(build_core(4).snapshot())
        assert copy.assignment == {"d0": 0, "d1": 1, "d2": None, "d3": None}

    @pytest.mark.parametrize("spoil", ["ledger", "assignment"])
    def test_malformed_snapshot_changes_nothing(self, spoil):
        core = build_core(2)
        snapshot = core.snapshot()
        del snapshot[spoil]
        with pytest.raises(ValueError, match="router snapshot"):
            core.restore(snapshot)
        assert core.replica_ids == ["d0", "d1"]

    def test_snapshot_that_disagrees_on_replicas(self):
        snapshot = build_core(2).snapshot()
        snapshot["assignment"]["d9"] = 3
        with pytest.raises(ValueError, match="disagrees on replicas"):
            build_core(2).restore(snapshot)

    def test_reservoir_is_bounded_and_repeatable(self):
        first, second = (build_core(reservoir_size=8) for _ in range(2))
        for core in (first, second):
            for i in range(30):
                select(core, f"r{i}", build_domain_request(i % 4, seed=i))
                core.release(f"r{i}")
        rows_RD = np.stack(first.reservoir(0.0))
        assert rows_RD.shape == (8, 64)
        np.testing.assert_array_equal(rows_RD, np.stack(second.reservoir(0.0)))
        np.testing.assert_allclose(np.linalg.norm(rows_RD, axis=1), 1.0, atol=1e-6)

    def test_drift_figure(self):
        core = build_core()
        assert core.mean_best_similarity is None
        select(core, counts=build_domain_request(1))
        assert 0.5 < core.mean_best_similarity <= 1.0

    def test_expire(self):
        core = build_core(policy=Soft())
        select(core, "old", now=0.0)
        select(core, "new", now=90.0)
        assert core.expire(now=100.0, max_age_s=60.0) == ["old"]
        assert core.counters["expired"] == 1


class TestFollowingTheBatch:
    def live_core(self, num_replicas: int = 4) -> RoutingCore:
        return build_core(num_replicas, Live(0.02, 8.0))

    def test_an_idle_replica_is_its_centroid(self):
        core, soft = self.live_core(), build_core(policy=Soft(0.5))
        for domain in range(4):
            counts = build_domain_request(domain)
            ours, theirs = select(core, f"r{domain}", counts), select(soft, "r", counts)
            soft.release("r")
            core.release(f"r{domain}")
            assert ours.replica_id == theirs.replica_id

    def test_home_moves_with_what_runs_there(self):
        core = self.live_core()
        for i in range(30):  # all others are refused: domain 1 settles on d0
            select(core, f"r{i}", build_domain_request(1), exclude=["d1", "d2", "d3"])
        for i in range(30):
            select(core, f"s{i}", build_domain_request(0), exclude=["d0", "d2", "d3"])
        assert select(core, "t", build_domain_request(1)).replica_id == "d0"
        assert select(core, "u", build_domain_request(0)).replica_id == "d1"

    def test_similarity_is_the_mean_cosine_to_centroid_and_running_requests(self):
        core = self.live_core()
        transform, centroid = core.artifact.transform, core.artifact.centroids_KD[0]
        first, second = (build_domain_request(0), build_domain_request(1))
        others = ["d1", "d2", "d3"]
        select(core, "a", first, exclude=others)
        select(core, "b", second, exclude=others)
        third = transform(build_domain_request(0))
        terms = [centroid @ third] * 8 + [transform(first) @ third, transform(second) @ third]
        answer = select(core, "c", build_domain_request(0), exclude=others)
        assert answer.similarity == pytest.approx(float(np.mean(terms)), abs=1e-5)

    def test_a_replica_without_centroid_takes_part_once_it_has_served(self):
        core = self.live_core(5)
        assert core.assignment["d4"] is None
        first = select(core, "a", build_domain_request(2), exclude=["d0", "d1", "d2", "d3"])
        assert first.similarity is None
        core.release("a")
        again = select(core, "b", build_domain_request(2), exclude=["d0", "d1", "d3"])
        assert again.similarity is not None

    def test_a_batch_of_a_large_pool_is_placed_as_if_one_by_one(self, monkeypatch):
        monkeypatch.setattr(core_module, "SMALL_POOL", 0)
        one, many = self.live_core(), self.live_core()
        requests = [RouteRequest(f"r{i}", build_domain_request(i % 3), TOKENS) for i in range(24)]
        singles = [
            one.select(r.request_id, r.counts_LE, r.prompt_tokens, None, 0.0) for r in requests
        ]
        answers = many.select_many(requests, 0.0)
        for single, answer in zip(singles, answers, strict=True):
            assert answer.replica_id == single.replica_id
            assert answer.similarity == pytest.approx(single.similarity, abs=1e-5)

    def test_batches_are_kept_when_the_pool_changes(self):
        core = self.live_core()
        for i in range(30):
            select(core, f"r{i}", build_domain_request(1), exclude=["d1", "d2", "d3"])
        core.set_replicas(["d0", "d2", "d3"])
        assert select(core, "t", build_domain_request(1)).replica_id == "d0"

    def test_a_replica_that_left_and_came_back_between_two_selections_starts_afresh(self):
        core, fresh = self.live_core(), self.live_core()
        counts = build_domain_request(2)
        for i in range(30):
            select(core, f"r{i}", build_domain_request(3), exclude=["d1", "d2", "d3"])
            select(core, f"s{i}", counts, exclude=["d0", "d2", "d3"])
        core.set_replicas(["d1"])
        core.set_replicas(["d1", "d0"])
        expected = select(fresh, "t", counts, exclude=["d1", "d2", "d3"]).similarity
        assert select(core, "t", counts, exclude=["d1"]).similarity == pytest.approx(expected)
        assert select(core, "u", counts, exclude=["d0"]).similarity > expected + 0.3

    def test_a_replica_that_joined_before_a_refit_starts_from_the_centroid_of_before(self):
        core, fresh = self.live_core(), self.live_core()
        counts = build_domain_request(2)
        core.set_centroids(np.roll(core.centroids_CD, 1, axis=0), core.assignment)
        for one in (core, fresh):
            assert select(one, "t", counts).replica_id == "d2"

    def test_another_artifact_starts_afresh(self):
        core = self.live_core()
        for i in range(30):
            select(core, f"r{i}", build_domain_request(1), exclude=["d1", "d2", "d3"])
        for i in range(30):
            core.release(f"r{i}")
        core.set_artifact(build_artifact(4))
        assert select(core, "t", build_domain_request(1)).replica_id == "d1"


class TestConservation:
    """Counts are checked in float32 where that is exact, and in integers above."""

    @pytest.mark.parametrize("tokens", [2**23 - 1, 2**23, 2**23 + 1])
    def test_one_choice_too_many_is_seen_at_any_length(self, tokens):
        artifact = build_artifact(4)
        counts = np.zeros((artifact.num_layers, artifact.num_experts), dtype=np.uint32)
        counts[:, 0], counts[:, 1] = tokens * artifact.top_k - 3, 3
        assert core_module.conserved(counts, tokens, artifact) is not None
        assert core_module.conserved(counts, None, artifact) is not None
        counts[-1, 1] += 1
        assert core_module.conserved(counts, tokens, artifact) is None
        assert core_module.conserved(counts, None, artifact) is None


class TestResidentExperts:
    """What caches hold counts beside the cosine, for a policy that says so."""

    def core(self, weight: float = 10.0, num_replicas: int = 3) -> RoutingCore:
        return build_core(num_replicas, Live(0.1, 2.0, resident_weight=weight))

    def held(self, counts_LE) -> np.ndarray:
        return np.asarray(counts_LE) > 0

    def test_the_cache_that_holds_the_prompts_experts_wins(self):
        counts = build_domain_request(0)
        for weight, chosen in ((10.0, "d2"), (0.0, "d0")):
            core = self.core(weight)
            for replica in ("d0", "d1"):
                assert core.report_resident(replica, ~self.held(counts))
            assert core.report_resident("d2", self.held(counts))
            selection = select(core, counts=counts)
            assert selection.replica_id == chosen
            cosine = core.artifact.centroids_KD[int(chosen[1])] @ core.artifact.transform(counts)
            assert selection.similarity == pytest.approx(float(cosine), abs=1e-6)

    def test_it_counts_in_proportion_to_the_choices(self):
        core, counts = self.core(), build_domain_request(1)
        half = self.held(counts)
        half[::2] = False  # layers have equal weight
        core.report_resident("d0", half)
        core.report_resident("d1", self.held(counts))
        core.report_resident("d2", np.ones_like(half))
        held_K = core._held(counts[None])[0]
        share = half[1::2].shape[0] / len(half)
        assert held_K.tolist() == pytest.approx([share, 1.0, 1.0])

    def test_an_empty_or_unknown_cache_counts_as_the_mean(self):
        core, counts = self.core(num_replicas=4), build_domain_request(0)
        core.report_resident("d0", self.held(counts))
        core.report_resident("d1", ~self.held(counts))
        core.report_resident("d2", np.zeros_like(self.held(counts)))
        assert core._held(counts[None])[0].tolist() == pytest.approx([1.0, 0.0, 0.5, 0.5])
        core.report_resident("d2", self.held(counts))
        assert core._held(counts[None])[0].tolist() == pytest.approx([1.0, 0.0, 1.0, 2 / 3])

    def test_batches_of_a_large_pool_choose_as_single_requests_do(self, monkeypatch):
        monkeypatch.setattr(core_module, "SMALL_POOL", 0)
        requests = [RouteRequest(f"r{i}", build_domain_request(i % 4), TOKENS) for i in range(12)]
        alone, many = self.core(1.0), self.core(1.0)
        for core in (alone, many):
            for k in range(3):
                core.report_resident(f"d{k}", self.held(build_domain_request((k + 1) % 4)))
        expected = [
            select(alone, r.request_id, r.counts_LE, r.prompt_tokens).replica_id for r in requests
        ]
        assert [s.replica_id for s in many.select_many(requests, 0.0)] == expected

    def test_caches_follow_their_replicas(self):
        core, counts = self.core(), build_domain_request(0)
        core.report_resident("d2", self.held(counts))
        core.report_resident("d0", ~self.held(counts))
        core.set_replicas(["d2", "d3", "d0"])
        assert core._held(counts[None])[0].tolist() == pytest.approx([1.0, 0.5, 0.0])
        assert not core.report_resident("d1", self.held(counts))  # it has left
        core.set_artifact(core.artifact)
        assert select(core, counts=counts).fallback is None

    def test_another_shape_is_refused(self):
        core = self.core()
        with pytest.raises(
            ValueError, match=r"resident experts of 'd0' must have shape .*got \(2, 3\)"
        ):
            core.report_resident("d0", np.zeros((2, 3), np.bool_))
