from __future__ import annotations

import math

import numpy as np
import pytest

from router.policy import Band, Live, Soft, locality_band, make_policy
from router.types import FallbackReason

NAN = math.nan
ALL = ["random", "rr", "jsq", "p2c", "domain", "band", "soft", "live"]


def scores(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def loads(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class TestLocalityBand:
    def test_keeps_what_is_within_tau_of_the_best(self):
        assert locality_band(scores(0.5, 0.75, 0.625, 0.875), 0.25).tolist() == [1, 2, 3]

    def test_tau_zero_keeps_the_maximum_and_exact_ties(self):
        assert locality_band(scores(0.5, 0.75, 0.75), 0.0).tolist() == [1, 2]

    def test_nan_is_never_in_the_band(self):
        assert locality_band(scores(NAN, 0.5, NAN), 1.0).tolist() == [1]

    @pytest.mark.parametrize(
        ("values", "tau", "message"),
        [((), 0.1, "empty"), ((NAN, NAN), 0.1, "only NaN"), ((0.5,), -0.1, "tau must be >= 0")],
    )
    def test_refuses(self, values, tau, message):
        with pytest.raises(ValueError, match=message):
            locality_band(scores(*values), tau)


class TestBand:
    def test_least_load_inside_the_band(self):
        decision = Band(0.1).choose(scores(0.9, 0.85, 0.3), loads(5, 2, 0), None)
        assert (decision.index, decision.band_size, decision.fallback) == (1, 2, None)

    def test_tie_goes_to_the_lowest_index(self):
        assert Band(0.1).choose(scores(0.85, 0.9, 0.9), loads(2, 2, 2), None).index == 0

    def test_a_one_member_band_stays_as_it_is(self):
        decision = Band(0.1).choose(scores(0.9, 0.5), loads(100, 0), None)
        assert (decision.index, decision.band_size) == (0, 1)

    def test_no_signature_falls_back_to_least_load(self):
        decision = Band().choose(None, loads(3, 1, 1), None)
        assert (decision.index, decision.fallback) == (1, FallbackReason.NO_SIGNATURE)

    def test_no_centroid_at_all_falls_back_to_least_load(self):
        decision = Band().choose(scores(NAN, NAN), loads(3, 1), None)
        assert (decision.index, decision.fallback) == (1, FallbackReason.NO_CENTROID)

    def test_replica_without_centroid_is_not_chosen_while_another_has_one(self):
        assert Band(1.0).choose(scores(NAN, 0.1), loads(0, 50), None).index == 1

    def test_only_allowed_replicas(self):
        policy = Band(0.1)
        values = scores(0.9, 0.2, 0.85, NAN)
        assert policy.choose(values, loads(0, 0, 9, 0), None, loads(1, 2, 3)).index == 2
        fallback = policy.choose(values, loads(0, 0, 9, 4), None, loads(3))
        assert (fallback.index, fallback.fallback) == (3, FallbackReason.NO_CENTROID)

    @pytest.mark.parametrize("tau", [-0.1, 1.3, NAN])
    def test_tau_range(self, tau):
        with pytest.raises(ValueError, match=r"tau must be in \[0, 1\], got"):
            Band(tau)


class TestSoft:
    def test_worked_example(self):
        # mean load 2: values 0.9 - 0.5 * (4 / 2 - 1) = 0.4 and 0.5 - 0.5 * (0 / 2 - 1) = 1.0
        assert Soft(0.5).choose(scores(0.9, 0.5), loads(4, 0), None).index == 1
        # mean load 5: 0.9 - 0.5 * 0.2 = 0.8 against 0.5 + 0.5 * 0.2 = 0.6
        assert Soft(0.5).choose(scores(0.9, 0.5), loads(6, 4), None).index == 0

    def test_load_is_taken_relative_to_at_least_one_request(self):
        assert Soft(0.5).choose(scores(0.9, 0.7), loads(1, 0), None).index == 1
        assert Soft(0.1).choose(scores(0.9, 0.7), loads(1, 0), None).index == 0

    def test_nothing_in_flight_is_pure_locality(self):
        assert Soft(0.5).choose(scores(0.2, 0.9, 0.5), loads(0, 0, 0), None).index == 1

    def test_ties_go_to_less_load_then_lowest_index(self):
        assert Soft(0.0).choose(scores(0.5, 0.5, 0.5), loads(3, 1, 1), None).index == 1

    def test_missing_centroid_counts_as_the_smallest_score(self):
        policy = Soft(0.5)
        assert policy.choose(scores(0.9, NAN, 0.1), loads(0, 0, 0), None).index == 0
        assert policy.choose(scores(0.9, NAN, 0.1), loads(9, 0, 3), None).index == 1

    def test_no_score(self):
        policy = Soft()
        assert policy.choose(None, loads(1, 0), None).fallback is FallbackReason.NO_SIGNATURE
        decision = policy.choose(scores(NAN, NAN), loads(1, 0), None)
        assert (decision.index, decision.fallback) == (1, FallbackReason.NO_CENTROID)

    def test_mean_is_over_the_allowed_replicas(self):
        # Among 1 and 2 the mean is 4: 0.9 - 0.5 * 1 = 0.4 against 0.3 + 0.5 = 0.8.
        decision = Soft(0.5).choose(scores(0.1, 0.9, 0.3), loads(90, 8, 0), None, loads(1, 2))
        assert decision.index == 2


class TestBaselines:
    def test_round_robin_takes_turns_and_skips(self):
        policy = make_policy("rr")
        assert [policy.choose(None, loads(0, 0, 0), None).index for _ in range(4)] == [0, 1, 2, 0]
        assert policy.choose(None, loads(0, 0, 0), None, loads(0, 2)).index == 2
        assert policy.choose(None, loads(0, 0, 0), None, loads(1, 2)).index == 1

    def test_round_robin_survives_a_shrinking_pool(self):
        policy = make_policy("rr")
        for _ in range(3):
            policy.choose(None, loads(0, 0, 0, 0), None)
        assert policy.choose(None, loads(0, 0), None).index == 1

    def test_jsq_draws_between_the_least_loaded(self):
        policy = make_policy("jsq")
        chosen = {policy.choose(None, loads(1, 0, 0, 2), None).index for _ in range(50)}
        assert chosen == {1, 2}

    def test_p2c_never_takes_the_most_loaded_and_reaches_the_others(self):
        policy = make_policy("p2c")
        chosen = {policy.choose(None, loads(1, 0, 0, 9), None).index for _ in range(100)}
        assert chosen == {0, 1, 2}

    def test_p2c_with_one_replica(self):
        assert make_policy("p2c").choose(None, loads(4), None).index == 0

    def test_random_reaches_all(self):
        policy = make_policy("random")
        assert {policy.choose(None, loads(9, 0, 0), None).index for _ in range(60)} == {0, 1, 2}

    def test_domain_stays_inside_its_replicas(self):
        policy = make_policy("domain", domain_replicas={"code": [2, 1, 99], "gone": [99]})
        pool = loads(0, 5, 4, 0)
        assert policy.choose(None, pool, "code").index == 2
        assert policy.choose(None, pool, "code", loads(0, 1, 3)).index == 1
        assert policy.choose(None, pool, "code", loads(0)).index == 0
        for label in ("unknown", "gone", None):
            assert policy.choose(None, pool, label).index in (0, 3)

    @pytest.mark.parametrize("name", ["random", "jsq", "p2c", "domain"])
    def test_same_seed_same_choices(self, name):
        first, second = (make_policy(name, seed=3) for _ in range(2))
        pool = loads(0, 0, 0, 0, 0)
        assert [first.choose(None, pool, None) for _ in range(30)] == [
            second.choose(None, pool, None) for _ in range(30)
        ]


class TestMakePolicy:
    @pytest.mark.parametrize("name", ALL)
    def test_names(self, name):
        policy = make_policy(name, tau=0.2, lambda_=1.0, seed=1, domain_replicas={"a": [0]})
        assert policy.name == name
        assert policy.needs_scores == (name in ("band", "soft", "live"))
        decision = policy.choose(scores(0.1, 0.5), loads(0, 3), "a", loads(1))
        assert decision.index == 1

    def test_unknown_name_lists_the_known_ones(self):
        with pytest.raises(ValueError, match="'lru': use one of random, rr, jsq, p2c, domain"):
            make_policy("lru", tau=0.1, lambda_=0.5, seed=1, domain_replicas={})


class TestLive:
    def test_load_weighs_more_where_little_runs(self):
        values = scores(0.9, 0.6)
        assert Soft(0.5).choose(values, loads(5, 3), None).index == 0
        assert Live(0.5).choose(values, loads(5, 3), None).index == 1
        assert Live(0.5).choose(values, loads(51, 49), None).index == 0

    def test_with_nothing_in_flight_only_likeness_counts(self):
        assert Live(0.5).choose(scores(0.2, 0.3), loads(0, 0), None).index == 1

    def test_load_bound_holds_however_like_the_batch_is(self):
        assert Live(0.0, 1.5).choose(scores(1.0, 0.5, 0.0), loads(14, 8, 5), None).index == 1
        assert Live(0.0, 1.5).choose(scores(1.0, 0.5, 0.0), loads(12, 8, 7), None).index == 0

    def test_bound_leaves_room_when_little_runs(self):
        assert Live(0.0, 1.0).choose(scores(1.0, 0.0), loads(1, 0), None).index == 0
        assert Live(0.0, 1.0).choose(scores(1.0, 0.0), loads(8, 0), None).index == 1

    def test_equal_loads_are_never_all_refused(self):
        for load in range(20):
            assert Live(0.0, 1.0).choose(scores(0.1, 0.9), loads(load, load), None).index == 1

    def test_bound_counts_allowed_replicas_only(self):
        allowed = np.array([0, 2])
        decision = Live(0.0, 1.5).choose(scores(1.0, 0.0, 0.5), loads(30, 0, 0), None, allowed)
        assert decision.index == 2

    def test_cached_experts_change_defaults_and_nothing_that_is_set(self):
        def made(**settings):
            policy = make_policy("live", caches_experts=True, **settings)
            return policy.lambda_, policy.max_load, policy.resident_weight

        plain = make_policy("live")
        assert (plain.lambda_, plain.max_load, plain.resident_weight) == (0.4, 1.5, 0.0)
        assert made() == (0.12, 2.0, 1.3)
        assert made(lambda_=0.7) == (0.7, 2.0, 1.3)
        assert made(max_load=1.2) == (0.12, 1.2, 1.3)
        assert made(resident_weight=0.0) == (0.2, 2.0, 0.0)  # nothing else holds load together
        assert made(resident_weight=0.5) == (0.12, 2.0, 0.5)

    @pytest.mark.parametrize("weight", [-0.1, NAN, float("inf")])
    def test_refuses_a_weight_of_caches_that_is_none(self, weight):
        with pytest.raises(ValueError, match="resident_weight must be >= 0"):
            Live(resident_weight=weight)

    @pytest.mark.parametrize("max_load", [0.9, -1.0, NAN])
    def test_refuses_a_bound_below_the_mean(self, max_load):
        with pytest.raises(ValueError, match="max_load must be >= 1"):
            Live(0.5, max_load)
