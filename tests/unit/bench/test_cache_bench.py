"""Figures of the cache bench, from times and counts made by hand."""

from __future__ import annotations

import pytest

from bench.cache import ALIKE, POLICIES, UNLIKE, loads_report, overhead_report, policy_us


def test_overhead_is_taken_round_by_round() -> None:
    times = {
        1: {"on": [0.011, 0.022, 0.012], "off": [0.010, 0.020, 0.010]},
        16: {"on": [0.03, 0.03], "off": [0.03, 0.02]},
    }
    report = overhead_report(times)
    assert report["hit_overhead"]["1"] == {
        "median": 1.1,
        "lo": 1.1,
        "hi": 1.2,
        "on_ms": 12.0,
        "off_ms": 10.0,
    }
    assert report["hit_overhead_ratio"] == report["hit_overhead"]["16"]["median"] == 1.25


def test_loads_are_medians_of_runs() -> None:
    runs = [
        {"loads_per_token": loads, "hit_rate": 0.9, "distinct_per_step": 10.0}
        for loads in (3.0, 1.0, 2.0)
    ]
    report = loads_report({"jsq/lru": runs})
    assert report["loads_per_token"] == {"jsq/lru": 2.0}
    assert report["loads_spread"]["jsq/lru"] == {"median": 2.0, "lo": 1.0, "hi": 3.0}
    assert report["hit_rate"] == {"jsq/lru": 0.9}
    with pytest.raises(ValueError, match="no rounds"):
        loads_report({"jsq/lru": []})


def test_decisions_are_timed_for_every_policy() -> None:
    fit, split = (policy_us(seed=0, spread=spread, steps=8) for spread in (ALIKE, UNLIKE))
    assert set(fit) == set(split) == set(POLICIES)
    assert all(0 < fit[policy] < split[policy] for policy in POLICIES)
