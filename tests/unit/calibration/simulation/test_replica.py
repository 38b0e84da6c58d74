"""One decode replica: worked examples, and the fast way against exact unions of tokens."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from calibration.simulation.config import WorkloadSection
from calibration.simulation.replica import DecodeReplica
from calibration.simulation.routing import FittedRouter, fit_router
from calibration.simulation.simulator import Simulator
from calibration.simulation.workload import make_workload
from calibration.step_time import StepTimeLaw
from tests.builders import build_artifact

from .conftest import LAW, make_config

SECOND = StepTimeLaw(1.0, 0.0, 0.0)
TRACE = "data/traces/gptoss20b_requests_ids.npz"
TRACE_META = "data/traces/gptoss20b_requests_meta.jsonl"


def _replica(workload, law=SECOND, **options):
    settings = {"max_num_seqs": 64, "cache_slots": None, "now": 0.0, **options}
    return DecodeReplica("decode", workload, law, **settings)


def test_a_request_joins_at_the_next_step(workload):
    replica = _replica(workload)
    replica.submit(0, 0, 3, 0.0)
    replica.submit(1, 1, 2, 0.5)
    assert replica.advance(10.0) == [(0, 3.0), (1, 3.0)]
    assert replica.totals.steps == 3
    assert replica.totals.tokens == 5


def test_a_step_longer_with_each_request(workload):
    replica = _replica(workload, StepTimeLaw(1.0, 1.0, 0.0))
    replica.submit(0, 0, 2, 0.0)
    replica.submit(1, 1, 1, 1.0)
    # Alone until 2, then a step of two requests until 5.
    assert replica.advance(10.0) == [(0, 5.0), (1, 5.0)]


def test_advance_stops_at_the_time_given(workload):
    replica = _replica(workload)
    replica.submit(0, 0, 3, 0.0)
    assert replica.advance(2.9) == []
    assert replica.next_finish == pytest.approx(3.0)
    replica.submit(1, 1, 1, 2.9)
    assert replica.advance(4.0) == [(0, 3.0), (1, 4.0)]
    assert replica.num_requests == 0


def test_what_does_not_fit_waits_in_order(workload):
    replica = _replica(workload, max_num_seqs=1)
    for request, ready in ((2, 0.2), (0, 0.0), (1, 0.1)):
        replica.submit(request, request, 2, ready)
    assert replica.advance(10.0) == [(0, 2.0), (1, 4.0), (2, 6.0)]


def test_an_idle_replica_starts_when_the_kv_is_there(workload):
    replica = _replica(workload)
    replica.submit(0, 0, 1, 7.25)
    assert replica.advance(8.0) == []
    assert replica.advance(8.25) == [(0, 8.25)]


def test_distinct_experts_of_one_request_are_its_top_k(workload):
    replica = _replica(workload, LAW)
    replica.submit(0, 0, 2, 0.0)
    replica.advance(1.0)
    totals = replica.totals
    assert totals.distinct / totals.steps == pytest.approx(workload.capture.top_k, rel=0.02)


def test_rounding_does_not_pile_up(workload):
    """After thousands of joins and leaves the replica is as a new one."""
    old, new = _replica(workload, LAW), _replica(workload, LAW)
    rng = np.random.default_rng(0)
    at, request = 0.0, 0
    for row in rng.integers(len(workload), size=3000).tolist():
        old.submit(request, row, 40, at)
        at += 0.01
        request += 1
    old.submit(request, 0, 10**7, 0.0)  # keeps it from becoming empty
    old.advance(at + 600.0)
    new.submit(0, 0, 10**7, 0.0)
    new.advance(0.0)
    assert old.num_requests == 1
    assert old.distinct == pytest.approx(new.distinct, abs=0.02)


@cache
def _requests(source):
    section = {"source": "synthetic", "num_layers": 4, "num_requests": 120, "output_tokens": 128}
    if source == "deep":
        section["num_layers"] = 48  # of which the fast way takes every second
    elif source == "trace":
        section = {
            "source": "trace",
            "trace": TRACE,
            "trace_meta": TRACE_META,
            "output_tokens": 128,
        }
    workload = make_workload(WorkloadSection(**section))
    if source != "synthetic":  # rr asks for no scores; fitting many layers would take seconds
        artifact = build_artifact(4)
        return (
            section,
            workload,
            FittedRouter(artifact, artifact.centroids_KD[:1].repeat(len(workload), axis=0)),
        )
    return section, workload, fit_router(workload, 4, "count_idf", "balanced")


@pytest.mark.parametrize(
    ("source", "policy", "error"),
    [("trace", "rr", 0.015), ("deep", "rr", 0.015), ("synthetic", "soft", 0.03)],
)
def test_expectation_agrees_with_exact_unions(source, policy, error):
    """Stated error of the fast way; README.md has more cases.

    Round robin chooses alike in both; soft does not once an end comes a little sooner, so its two
    runs are two samples of a short run.
    """
    section, workload, router = _requests(source)
    config = make_config(workload=section, traffic={"rates": [60.0], "duration_s": 5.0})
    law = StepTimeLaw(1e-3, 1e-5, 2e-4)
    figures = []
    for fidelity in ("expected", "exact"):
        variant = config.model_copy(update={"fidelity": fidelity})
        figures.append(Simulator(variant, workload, router, law, policy, 60.0, 0).run().figures())
    fast, exact = figures
    for name in ("distinct", "token_distinct", "tpot_p50", "tpot_p99", "batch"):
        assert fast[name] == pytest.approx(exact[name], rel=error), name


def test_expected_loads_are_those_of_the_unlikely_experts(workload):
    law = replace(LAW, per_load=1e-3)
    all_slots = workload.num_experts
    loads = []
    for slots in (all_slots, 16, 4):
        replica = _replica(workload, law, cache_slots=slots)
        for request in range(8):
            replica.submit(request, request, 2, 0.0)
        replica.advance(5.0)
        loads.append(replica.totals.loads / replica.totals.steps)
    assert loads[0] == 0
    assert 0 < loads[1] < loads[2] < replica.totals.distinct / replica.totals.steps
    activation_LE = 1 - np.prod(1 - workload.activation_NLE[:8].astype(np.float64), axis=0)
    expected = np.sort(activation_LE, axis=1)[:, : all_slots - 16].sum(axis=1).mean()
    assert loads[1] == pytest.approx(expected, rel=1e-4)
