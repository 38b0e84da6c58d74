"""Retention, refinement and slots: the array code against plain loops that follow the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.policies import (
    ExpertCache,
    Given,
    RowCaches,
    make_retention,
    refine,
    retain,
)

seeds = st.integers(0, 2**32 - 1)


def random_case(seed: int, levels: int = 6):
    """A cache of random contents, a demand of any size, and scores with ties."""
    rng = np.random.default_rng(seed)
    num_experts = int(rng.integers(2, 12))
    capacity = int(rng.integers(1, num_experts + 1))
    resident = np.zeros(num_experts, dtype=bool)
    resident[rng.permutation(num_experts)[: rng.integers(0, capacity + 1)]] = True
    demand = np.zeros(num_experts, dtype=bool)
    demand[rng.permutation(num_experts)[: rng.integers(1, num_experts + 1)]] = True
    return rng, num_experts, capacity, resident, demand, rng.integers(0, levels, num_experts) / 2


def u_b(resident: set[int], demand: set[int], score: list[float], capacity: int) -> set[int]:
    """Algorithm 1 as written: one missing expert at a time."""
    cache = set(resident)
    for expert in sorted(demand - resident):
        if len(cache) == capacity:
            cache.remove(min(cache - demand, key=lambda e: (score[e], e)))
        cache.add(expert)
    return cache


def algorithm_2(cache: set[int], score: list[float], capacity: int, budget: int) -> set[int]:
    """Pre-access refinement as written: one candidate at a time."""
    cache = set(cache)
    for candidate in sorted(range(len(score)), key=lambda e: (-score[e], e))[:budget]:
        if candidate in cache:
            continue
        if len(cache) < capacity:
            cache.add(candidate)
            continue
        victim = min(cache, key=lambda e: (score[e], e))
        if score[candidate] > score[victim]:
            cache.remove(victim)
            cache.add(candidate)
    return cache


def as_set(row) -> set[int]:
    return set(np.flatnonzero(row).tolist())


@given(seeds)
@settings(max_examples=300, deadline=None)
def test_retention_is_algorithm_1(seed):
    _, _, capacity, resident, demand, scores = random_case(seed)
    contents, passes = retain(resident[None], demand[None], scores[None], capacity)
    after, passes = contents[0], int(passes[0])
    assert after.sum() <= capacity
    if demand.sum() <= capacity:
        assert as_set(after) == u_b(as_set(resident), as_set(demand), scores.tolist(), capacity)
        assert passes == 1
    else:
        least = -(-int(demand.sum()) // capacity)
        assert least <= passes <= least + 1
        assert after.sum() == capacity
        assert not (after & ~resident & ~demand).any()
        # Of the residents the best stay, and of the loaded experts the best.
        for group in (resident, demand & ~resident):
            if (after & group).any() and (group & ~after).any():
                assert scores[after & group].min() >= scores[group & ~after].max()


@given(seeds)
@settings(max_examples=300, deadline=None)
def test_refinement_is_algorithm_2(seed):
    rng, _, capacity, resident, _, scores = random_case(seed)
    budget = int(rng.integers(0, capacity + 1))
    after = refine(resident[None], scores[None], capacity, budget)[0]
    assert as_set(after) == algorithm_2(as_set(resident), scores.tolist(), capacity, budget)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_rows_do_not_mix(seed):
    rng = np.random.default_rng(seed)
    rows, experts, capacity = 7, 9, int(rng.integers(1, 10))
    resident = np.zeros((rows, experts), dtype=bool)
    for row in resident:
        row[rng.permutation(experts)[: rng.integers(0, capacity + 1)]] = True
    demand = rng.random((rows, experts)) < rng.random((rows, 1))
    scores = rng.integers(0, 4, (rows, experts)).astype(float)
    together = retain(resident, demand, scores, capacity)
    refined = refine(resident, scores, capacity, capacity // 2)
    for r in range(rows):
        one = slice(r, r + 1)
        alone = retain(resident[one], demand[one], scores[one], capacity)
        assert (alone[0] == together[0][one]).all()
        assert alone[1] == together[1][r]
        assert (refine(resident[one], scores[one], capacity, capacity // 2) == refined[one]).all()


@given(seeds, st.sampled_from(["lru", "lfu", "lrfu", "static", "given"]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_slots_follow_the_plan(seed, name, refines):
    """A plan, carried out literally, has every expert in its slot when its pass runs."""
    rng = np.random.default_rng(seed)
    layers, experts = 2, int(rng.integers(3, 12))
    capacity = int(rng.integers(1, experts + 1))
    retention = make_retention(
        name, layers, experts, hotness_RE=rng.random((layers, experts)), lambda_=0.2
    )
    cache = ExpertCache(layers, experts, capacity, 1, retention, budget=capacity)
    rows = RowCaches(
        layers,
        experts,
        capacity,
        make_retention(name, layers, experts, hotness_RE=rng.random((layers, experts))),
    )
    slots = np.full((layers, capacity), -1)
    loads_made = 0
    for _ in range(12):
        for layer in range(layers):
            scores = rng.integers(0, 5, experts).astype(float)
            if refines:
                for load in cache.refine(layer, scores):
                    assert slots[layer, load.slot] == load.evicted
                    slots[layer, load.slot] = load.expert
                    loads_made += 1
            demand = rng.random(experts) < rng.random()
            demand[rng.integers(experts)] = True
            held = set(slots[layer].tolist()) - {-1}
            plan = cache.access(layer, demand, scores if name == "given" else None)
            assert plan.num_loads == len(as_set(demand) - held)
            least = -(-int(demand.sum()) // capacity)
            assert least <= len(plan.passes) <= least + (least > 1)
            done: set[int] = set()
            for one in plan.passes:
                for load in one.loads:
                    assert slots[layer, load.slot] == load.evicted
                    slots[layer, load.slot] = load.expert
                    loads_made += 1
                experts_run = as_set(demand) if one.experts is None else set(one.experts)
                assert experts_run <= set(slots[layer].tolist())
                assert not experts_run & done
                done |= experts_run
            assert done == as_set(demand)
            assert set(slots[layer].tolist()) - {-1} == as_set(cache.resident_LE[layer])
            assert (cache.expert_LB[layer] == slots[layer]).all()
            for expert in range(experts):
                slot = cache.slot_LE[layer, expert]
                assert (slot >= 0) == bool(cache.resident_LE[layer, expert])
                assert slot < 0 or slots[layer, slot] == expert
    totals = cache.ledger.totals()
    assert totals.loads == loads_made
    assert totals.evictions == loads_made - (slots >= 0).sum()
    assert rows.ledger.totals().loads == 0


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_one_layer_at_a_time_is_all_layers_at_once(seed):
    rng = np.random.default_rng(seed)
    layers, experts, capacity = 3, 10, int(rng.integers(2, 9))
    name = ["lru", "lfu", "lrfu"][int(rng.integers(3))]
    one = ExpertCache(layers, experts, capacity, 1, make_retention(name, layers, experts))
    rows = RowCaches(layers, experts, capacity, make_retention(name, layers, experts))
    for _ in range(15):
        demand = rng.random((layers, experts)) < 0.4
        loads = rows.access(slice(0, layers), demand)
        for layer in range(layers):
            assert one.access(layer, demand[layer]).num_loads == loads[layer]
    assert (one.resident_LE == rows.resident_RE).all()
    assert one.ledger.totals() == rows.ledger.totals()


def test_only_executed_experts_enter():
    cache = ExpertCache(1, 6, 3, 2, Given())
    everything_wanted = np.array([9.0, 9.0, 1.0, 2.0, 3.0, 9.0])
    for chosen in ([2, 3], [3, 4], [2, 4]):
        demand = np.isin(np.arange(6), chosen)
        cache.access(0, demand, everything_wanted)
    assert as_set(cache.resident_LE[0]) == {2, 3, 4}
    assert cache.ledger.totals().proactive == 0


def test_passes_keep_the_best_and_load_in_ascending_order():
    resident = np.array([1, 0, 0, 0, 1, 0], dtype=bool)
    demand = np.array([1, 1, 1, 1, 0, 1], dtype=bool)
    scores = np.array([5.0, 4.0, 1.0, 2.0, 9.0, 3.0])
    cache = ExpertCache(1, 6, 3, 1, Given())
    cache.access(0, resident, scores)
    plan = cache.access(0, demand, scores)
    # 4 and 0 are among the best three, but keeping both would take four passes. 4 stays; 0, which
    # is there, runs first; the missing experts follow by ascending score.
    assert [one.experts for one in plan.passes] == [(0, 2), (3, 5), (1,)]
    assert [load.evicted for one in plan.passes for load in one.loads] == [-1, 0, 2, 3]
    assert as_set(cache.resident_LE[0]) == {1, 4, 5}


def test_a_random_policy_is_refused_by_name():
    with pytest.raises(ValueError, match=r"unknown cache policy 'arc'.*lru"):
        make_retention("arc", 1, 4)
