"""Cache policies on the recorded GPT-OSS-20B requests: the figures published in cachemgr/README."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachemgr.replay import replay
from calibration.traces import load_trace

IDS = Path(__file__).parents[2] / "data/traces/gptoss20b_requests_ids.npz"

# Hit rates in % of every second request, from an implementation written apart from this one.
HITS = {
    8: {"lru": 64.4, "lfu": 67.7, "lrfu": 68.4, "min": 76.4},
    12: {"lru": 79.4, "lfu": 82.1, "lrfu": 82.8, "min": 88.3},
    16: {"lru": 88.8, "lfu": 90.2, "lrfu": 90.7, "min": 93.8},
}


@pytest.fixture(scope="module")
def trace():
    """A sixth of those requests, for the test's time: up to a point of noise."""
    trace = load_trace(IDS)
    return trace.subset(range(0, len(trace), 12))


@pytest.mark.parametrize("capacity", HITS)
def test_hit_rates_of_real_traces(trace, capacity):
    outcomes = replay(trace, list(HITS[capacity]), capacity, lambda_=0.03)
    hits = {name: 100 * outcome.totals.hit for name, outcome in outcomes.items()}
    assert hits == pytest.approx(HITS[capacity], abs=1.0)
    assert hits["lru"] < hits["lfu"] < hits["lrfu"] < hits["min"]
