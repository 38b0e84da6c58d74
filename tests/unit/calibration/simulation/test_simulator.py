"""The event loop: conservation, determinism, queueing laws, failures, scaling."""

import numpy as np
import pytest

from calibration.simulation.config import POLICIES
from calibration.step_time import StepTimeLaw

CONSTANT = StepTimeLaw(10e-3, 0.0, 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once(simulate, policy):
    result = simulate(policy)
    assert len(result.tpot_M) == result.num_requests > 100
    assert result.num_failed == result.num_retries == 0
    assert result.num_tokens == 39 * result.num_requests
    assert (result.ttft_M > 0.04).all()
    assert (result.e2e_M > result.ttft_M).all()


def test_warm_up_is_not_measured(simulate):
    result = simulate(traffic={"warm_up_s": 5.0, "duration_s": 5.0})
    assert result.arrived_M.min() >= 5.0
    assert 0 < len(result.tpot_M) < result.num_requests


@pytest.mark.parametrize("policy", ["random", "soft"])
def test_a_seed_fixes_the_run(simulate, policy):
    first, again, other = simulate(policy), simulate(policy), simulate(policy, seed=1)
    np.testing.assert_array_equal(first.tpot_M, again.tpot_M)
    np.testing.assert_array_equal(first.ttft_M, again.ttft_M)
    assert first.figures()["tpot_p50"] != other.figures()["tpot_p50"]


def test_policies_see_the_same_arrivals(simulate):
    np.testing.assert_array_equal(simulate("rr").arrived_M, simulate("soft").arrived_M)


@pytest.mark.parametrize("policy", ["domain", "band", "soft"])
def test_locality_lowers_distinct_experts_and_tpot(simulate, policy):
    rate = {"rates": [60.0]}
    theirs, ours = simulate("jsq", traffic=rate).figures(), simulate(policy, traffic=rate).figures()
    assert ours["token_distinct"] < 0.93 * theirs["token_distinct"]
    assert ours["tpot_p50"] < theirs["tpot_p50"]
    assert ours["skew"] > theirs["skew"]


def test_an_idle_replica_decodes_at_the_law(simulate):
    """One request at a time: TPOT is the step time plus the transfer, shared by its tokens."""
    result = simulate(law=CONSTANT, traffic={"rates": [0.5], "duration_s": 60.0})
    alone = result.tpot_M.min()
    assert alone == pytest.approx(10e-3 + 2e-3 / 39, rel=0.01)


def test_a_single_server_queues_as_pollaczek_and_khinchine_say(simulate):
    """One replica, one request at a time, geometric lengths: M/G/1 (nearly M/M/1)."""
    mean_steps, step_s, rate = 9.0, 10e-3, 5.0
    result = simulate(
        law=CONSTANT,
        workload={"output_tokens": 10, "output_lengths": "geometric"},
        traffic={"rates": [rate], "duration_s": 3000.0, "warm_up_s": 100.0},
        decode={"replicas": 1, "max_num_seqs": 1},
        transfer={"base_ms": 0.0, "per_token_ms": 0.0},
    )
    chance = 1 / mean_steps
    second_moment = step_s**2 * (2 - chance) / chance**2
    service = mean_steps * step_s
    wait = rate * second_moment / (2 * (1 - rate * service))
    measured = (result.e2e_M - result.ttft_M).mean()
    assert measured == pytest.approx(service + wait, rel=0.06)


def test_littles_law_holds(simulate):
    result = simulate(traffic={"rates": [40.0], "duration_s": 60.0})
    late = [sample.in_flight for sample in result.samples if sample.at_s > 5]
    in_decode = (result.e2e_M - result.ttft_M).mean()
    assert np.mean(late) == pytest.approx(40.0 * in_decode, rel=0.06)


def test_a_full_batch_makes_requests_wait(simulate):
    free = simulate(law=CONSTANT, traffic={"rates": [40.0]})
    full = simulate(law=CONSTANT, traffic={"rates": [40.0]}, decode={"max_num_seqs": 3})
    assert full.figures()["batch"] <= 3
    assert full.figures()["tpot_p50"] > 1.2 * free.figures()["tpot_p50"]


def test_cached_prefixes_shorten_the_first_token(simulate):
    """2000 tokens, 100 ms, are computed once a replica where prefixes repeat, else always."""
    fixed = {"replicas": 2, "prefix_tokens": 2000}
    repeat = simulate(prefill={**fixed, "num_prefixes": 2}).figures()["ttft_p50"]
    differ = simulate(prefill={**fixed, "num_prefixes": 10**6}).figures()["ttft_p50"]
    assert repeat < 100
    assert differ > repeat + 100


def test_requests_of_a_dead_replica_start_over(simulate):
    failures = [{"at_s": 5.0, "replica": 1, "restart_after_s": 2.0}]
    result = simulate("soft", traffic={"rates": [60.0]}, failures=failures, router={"refit": True})
    assert result.num_retries > 0
    assert result.num_failed == 0
    assert len(result.tpot_M) == result.num_requests
    sizes = {sample.replicas for sample in result.samples}
    assert sizes == {3, 4}
    assert result.num_refits == 2
    assert result.counters["dropped_reservations"] == result.num_retries
    assert result.e2e_M.max() > 1.0 + np.median(result.e2e_M)  # the delay, and all tokens again


def test_without_retries_they_fail(simulate):
    failures = [{"at_s": 5.0, "replica": 1}]
    result = simulate(failures=failures, retry={"max_retries": 0}, traffic={"rates": [60.0]})
    assert result.num_failed == result.counters["dropped_reservations"] > 0
    assert result.num_retries == 0
    assert len(result.tpot_M) + result.num_failed == result.num_requests


def test_with_no_replica_left_all_later_requests_fail(simulate):
    failures = [{"at_s": 5.0, "replica": 0}]
    result = simulate("band", decode={"replicas": 1}, failures=failures, router={"refit": True})
    assert result.arrived_M.max() < 5.0
    assert len(result.tpot_M) + result.num_failed == result.num_requests


def test_the_pool_follows_a_schedule(simulate):
    scaling = {
        "schedule": [{"at_s": 2.0, "replicas": 6}, {"at_s": 6.0, "replicas": 2}],
        "start_delay_s": 1.0,
    }
    result = simulate("soft", autoscaling=scaling, traffic={"rates": [60.0]})
    size = {round(sample.at_s, 2): sample.replicas for sample in result.samples}
    assert [size[at] for at in (1.0, 2.5, 3.5, 6.5)] == [4, 4, 6, 2]
    assert result.num_failed == result.num_retries == 0  # drained replicas end what they have


def test_the_pool_follows_the_load(simulate):
    scaling = {
        "target_load": 5.0,
        "max_replicas": 20,
        "interval_s": 0.5,
        "start_delay_s": 0.5,
        "down_delay_s": 1.0,
    }
    curve = [
        {"at_s": 0.0, "factor": 1.0},
        {"at_s": 10.0, "factor": 1.0},
        {"at_s": 11.0, "factor": 0.02},
    ]
    traffic = {"rates": [80.0], "duration_s": 20.0, "curve": curve}
    result = simulate(autoscaling=scaling, traffic=traffic, decode={"replicas": 2})
    sizes = [sample.replicas for sample in result.samples]
    assert sizes[0] == 2
    assert max(sizes) > 5
    assert sizes[-1] < 4
    loads = [s.in_flight / s.replicas for s in result.samples if 5 < s.at_s < 10]
    assert np.mean(loads) < 6.5
    assert result.figures()["replicas"] == pytest.approx(np.mean(sizes), rel=0.1)


def test_drift_is_answered_by_refits(simulate):
    """One domain alone keeps to its few replicas, until the others get centroids in it."""
    mix = [{"at_s": 0.0, "weights": {"code": 1.0}}]
    traffic = {"rates": [60.0], "duration_s": 30.0, "mix": mix}
    still = simulate("band", traffic=traffic)
    refitted = simulate("band", traffic=traffic, router={"refit_every_s": 4.0})
    assert still.num_refits == 0
    assert refitted.num_refits >= 1
    assert refitted.samples[-1].skew < 0.75 * still.samples[-1].skew
    assert refitted.figures()["tpot_p50"] < still.figures()["tpot_p50"]


def test_cached_experts_are_loaded_at_a_price(simulate):
    law = StepTimeLaw(2e-3, 1e-4, 1e-3, 5e-3)
    held = {"replicas": 4, "cache_slots": 12}
    section = {"per_load_ms": 5.0}
    all_held = simulate(law=law).figures()
    some = simulate("jsq", law=law, decode=held, step_time=section).figures()
    near = simulate("soft", law=law, decode=held, step_time=section).figures()
    assert all_held["loads"] == 0 < near["loads"] < some["loads"]
    assert some["tpot_p50"] > all_held["tpot_p50"]
