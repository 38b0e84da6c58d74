"""Scores, limits and counts of the cache policies, on cases small enough to do by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cachemgr.policies import (
    LFU,
    LRFU,
    LRU,
    ExpertCache,
    Given,
    Static,
    check_capacity,
    make_retention,
)


def demand(*experts: int, num_experts: int = 5) -> np.ndarray:
    return np.isin(np.arange(num_experts), experts)


def run(retention, steps, capacity: int = 3, top_k: int = 1) -> ExpertCache:
    cache = ExpertCache(1, 5, capacity, top_k, retention)
    for experts in steps:
        cache.access(0, demand(*experts))
    return cache


def residents(cache: ExpertCache) -> set[int]:
    return set(np.flatnonzero(cache.resident_LE[0]).tolist())


STEPS = ([0], [0], [0], [1], [2], [3])


def test_lru_evicts_the_oldest_use():
    assert residents(run(LRU(1, 5), STEPS)) == {1, 2, 3}


def test_lfu_evicts_the_fewest_uses_and_the_lower_id_of_equals():
    assert residents(run(LFU(1, 5), STEPS)) == {0, 2, 3}


def test_lrfu_is_between():
    assert residents(run(LRFU(1, 5, lambda_=1.0), STEPS)) == {1, 2, 3}
    assert residents(run(LRFU(1, 5, lambda_=0.0), STEPS)) == {0, 2, 3}
    lrfu = LRFU(1, 5, lambda_=0.5)
    lrfu.observe(slice(0, 1), demand(4)[None])
    lrfu.observe(slice(0, 1), demand(4)[None])
    assert lrfu.scores(slice(0, 1))[0].tolist() == [0, 0, 0, 0, pytest.approx(1 + 0.5**0.5)]


def test_history_counts_uses_of_experts_that_left():
    cache = run(LFU(1, 5), ([0], [0], [1], [1], [1], [2], [2], [2], [3], [3], [3], [3]))
    assert residents(cache) == {1, 2, 3}
    cache.access(0, demand(0))  # its third use ties with 1 and 2
    assert residents(cache) == {0, 2, 3}


def test_static_keeps_the_hot_set():
    hot = np.array([[5.0, 1.0, 4.0, 0.0, 3.0]])
    assert residents(run(Static(hot), ([0], [2], [4], [1], [3]))) == {0, 2, 3}
    with pytest.raises(ValueError, match="finite"):
        Static(np.array([[math.nan]]))
    with pytest.raises(ValueError, match=r"shape \(1, 5\), got None"):
        make_retention("static", 1, 5)


def test_given_needs_scores():
    cache = ExpertCache(1, 5, 1, 1, Given())
    cache.access(0, demand(0), np.zeros(5))
    with pytest.raises(ValueError, match="give `scores`"):
        cache.access(0, demand(1))


def test_executed_experts_stay_whatever_their_score():
    cache = ExpertCache(1, 5, 2, 2, Given())
    cache.access(0, demand(0, 1), np.arange(5.0))
    plan = cache.access(0, demand(1, 2), np.array([9.0, 0, 0, 0, 0]))
    assert residents(cache) == {1, 2}
    ((load,),) = (one.loads for one in plan.passes)
    assert (load.expert, load.evicted) == (2, 0)


def test_ledger_and_metrics():
    cache = ExpertCache(1, 5, 2, 2, Given(), budget=2)
    flat = np.zeros(5)
    cache.access(0, demand(0, 1), flat)  # two demand misses
    loads = cache.refine(0, np.array([0.0, 0.0, 3.0, 2.0, 0.0]))  # 2 and 3 displace 0 and 1
    assert [(load.expert, load.evicted) for load in loads] == [(2, 0), (3, 1)]
    cache.access(0, demand(2, 4), flat)  # one hit, one miss
    cache.access(0, demand(0, 1, 2), flat)  # beyond the capacity: three passes, as 4 stays
    totals = cache.ledger.totals()
    assert (totals.accesses, totals.demand, totals.proactive) == (7, 5, 2)
    assert (totals.steps, totals.passes, totals.overflows) == (3, 5, 1)
    assert totals.evictions == totals.loads - 2
    assert totals.hit == pytest.approx(1 - 5 / 7)
    assert totals.adj_hit == pytest.approx((7 - 5) / (7 + 2))
    assert totals.loads_per_token(2) == 3.5
    assert totals.bytes_per_token(2, 10.0) == 35
    assert totals.pressure(2) == pytest.approx(7 / 6)


def test_no_access_has_no_ratio():
    totals = ExpertCache(1, 5, 2, 1, Given()).ledger.totals()
    assert math.isnan(totals.hit)
    assert math.isnan(totals.adj_hit)
    assert math.isnan(totals.loads_per_token(0))


def test_refinement_stops_at_the_first_candidate_that_loses():
    cache = ExpertCache(1, 5, 2, 2, Given())
    cache.access(0, demand(0, 1), np.zeros(5))
    scores = np.array([0.4, 0.2, 0.3, 0.25, 0.0])
    loads = cache.refine(0, scores, 2)  # top two: 0 is resident, 2 displaces 1
    assert [(load.expert, load.evicted) for load in loads] == [(2, 1)]
    assert cache.refine(0, scores, 2) == ()


def test_reset_empties_and_forgets():
    cache = run(LFU(1, 5), ([0], [1], [2]))
    cache.reset()
    assert residents(cache) == set()
    assert (cache.slot_LE == -1).all()
    assert cache.retention.scores(slice(0, 1)).sum() == 0
    assert cache.access(0, demand(3)).num_loads == 1
    assert cache.ledger.totals().demand == 4


@pytest.mark.parametrize(
    ("capacity", "budget", "message"),
    [
        (3, 0, "capacity 3 is below top-k 4"),
        (33, 0, "capacity 33 exceeds the 32 experts"),
        (8, 9, r"budget 9 must be in \[0, 8\]"),
        (8, -1, r"budget -1 must be in \[0, 8\]"),
    ],
)
def test_limits(capacity, budget, message):
    with pytest.raises(ValueError, match=message):
        check_capacity(capacity, 32, 4, budget)
    with pytest.raises(ValueError, match=message):
        ExpertCache(1, 32, capacity, 4, LRU(1, 32), budget=budget)


@pytest.mark.parametrize("lambda_", [-0.1, 1.5, math.nan])
def test_lambda_has_a_range(lambda_):
    with pytest.raises(ValueError, match="lambda of LRFU must be in"):
        LRFU(1, 5, lambda_)
