"""Whatever happens to the pool, every simulated request ends once or counts as failed."""

from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.simulation.config import POLICIES, SimulationConfig
from calibration.simulation.replica import DecodeReplica
from calibration.simulation.routing import fit_router
from calibration.simulation.simulator import Simulator
from calibration.simulation.workload import make_workload
from calibration.step_time import StepTimeLaw

WORKLOAD = {
    "source": "synthetic",
    "num_requests": 60,
    "num_layers": 2,
    "num_experts": 16,
    "top_k": 2,
    "output_tokens": 20,
    "output_lengths": "geometric",
}
SECONDS = 6.0

times = st.floats(0.0, SECONDS + 1)
failures = st.lists(
    st.fixed_dictionaries(
        {
            "at_s": times,
            "replica": st.integers(0, 5),
            "restart_after_s": st.none() | st.floats(0.1, 3.0),
        }
    ),
    max_size=4,
)
schedules = st.lists(
    st.tuples(times, st.integers(1, 6)), max_size=3, unique_by=lambda point: point[0]
)


@cache
def _parts():
    config = SimulationConfig.model_validate(
        {"name": "x", "workload": WORKLOAD, "traffic": {"rates": [1.0]}}
    )
    workload = make_workload(config.workload)
    return workload, fit_router(workload, 3, "count_idf", "balanced")


@settings(max_examples=30, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    failures=failures,
    schedule=schedules,
    refit=st.booleans(),
    retries=st.integers(0, 2),
    arrivals=st.sampled_from(["poisson", "fixed", "bursty"]),
    seed=st.integers(0, 99),
)
def test_requests_are_conserved(policy, failures, schedule, refit, retries, arrivals, seed):
    points = [{"at_s": at, "replicas": size} for at, size in sorted(schedule)]
    config = SimulationConfig.model_validate(
        {
            "name": "property",
            "workload": WORKLOAD,
            "traffic": {
                "rates": [30.0],
                "duration_s": SECONDS,
                "warm_up_s": 0.0,
                "arrivals": arrivals,
            },
            "prefill": {"replicas": 2},
            "decode": {"replicas": 3, "max_num_seqs": 8},
            "router": {"refit": refit, "ramp_s": 1.0},
            "autoscaling": {"schedule": points, "start_delay_s": 0.5} if points else None,
            "failures": failures,
            "retry": {"max_retries": retries, "delay_s": 0.2},
        }
    )
    workload, router = _parts()
    law = StepTimeLaw(2e-3, 1e-3, 1e-3)
    result = Simulator(config, workload, router, law, policy, 30.0, seed).run()
    assert len(result.tpot_M) + result.num_failed == result.num_requests
    assert (result.ttft_M > 0).all()
    assert (result.tpot_M > 0).all()
    assert (result.e2e_M >= result.ttft_M).all()
    if not failures:
        assert result.num_failed == result.num_retries == 0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 30)), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(0, 99),
)
def test_looking_more_often_changes_nothing(requests, max_num_seqs, seed):
    """Ends of requests do not depend on when a replica is advanced."""
    workload, _ = _parts()
    law = StepTimeLaw(0.05, 0.01, 0.0)
    ends = []
    for looks in ([1e9], np.sort(np.random.default_rng(seed).uniform(0, 30, 40)).tolist()):
        replica = DecodeReplica(
            "decode", workload, law, max_num_seqs=max_num_seqs, cache_slots=None, now=0.0
        )
        for number, (ready, steps) in enumerate(requests):
            replica.submit(number, number % len(workload), steps, ready)
        ended = []
        for until in (*looks, 1e9):
            ended += replica.advance(until)
        ends.append(dict(ended))
    assert ends[0].keys() == ends[1].keys() == set(range(len(requests)))
    for number, at in ends[0].items():
        np.testing.assert_allclose(ends[1][number], at, rtol=1e-9)
