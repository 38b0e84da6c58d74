"""The bound against exhaustive search over every schedule, and its proof against tampering."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.bound import Demands, certify, minimum
from cachemgr.policies import RowCaches, make_retention

seeds = st.integers(0, 2**32 - 1)


def random_demands(rng, num_items: int, sizes: list[int]) -> list[list[int]]:
    """Demands that tend to repeat, so that keeping pays."""
    weights = rng.gamma(0.7, size=num_items) + 1e-3
    return [
        sorted(rng.choice(num_items, size=u, replace=False, p=weights / weights.sum()).tolist())
        for u in sizes
    ]


def as_demands(rows: list[list[list[int]]], num_items: int) -> Demands:
    """Rows of demands as one padded array."""
    rows = sorted(rows, key=len, reverse=True)
    width = max(len(demand) for row in rows for demand in row)
    ids_SRU = np.full((len(rows[0]), len(rows), width), -1, dtype=np.int16)
    for r, row in enumerate(rows):
        for s, demand in enumerate(row):
            ids_SRU[s, r, : len(demand)] = demand
    return Demands(ids_SRU, num_items)


def exhaustive(demands: list[list[int]], num_items: int, capacity: int, variant: str) -> int:
    """Fewest loads over all contents before and after each step; anything may be prefetched."""
    contents = [c for c in range(1 << num_items) if c.bit_count() <= capacity]
    cost = {0: 0}
    for demand in demands:
        need = sum(1 << e for e in demand)
        in_passes = len(demand) > capacity
        ready: dict[int, int] = {}
        for had, paid in cost.items():
            for content in contents:
                total = paid + (content & ~had).bit_count()
                if total < ready.get(content, 1 << 30):
                    ready[content] = total
        cost = {}
        for content, paid in ready.items():
            total = paid + (need & ~content).bit_count()
            for after in contents:
                if after & ~(content | need):
                    continue
                if variant == "forced" and need & ~after:
                    continue
                if variant == "union":
                    if in_passes and (after & ~need).bit_count() > capacity - 1:
                        continue
                    if not in_passes and need & ~after:
                        continue
                if total < cost.get(after, 1 << 30):
                    cost[after] = total
    return min(cost.values())


@pytest.mark.parametrize("variant", ["forced", "bypass", "union"])
def test_bound_is_the_optimum(variant):
    strict = 0
    for seed in range(220):
        rng = np.random.default_rng((seed, len(variant)))
        num_items = int(rng.integers(3, 6))
        capacity = int(rng.integers(1, num_items))
        most = min(num_items, capacity) if variant == "forced" else num_items
        rows = [
            random_demands(rng, num_items, rng.integers(1, most + 1, rng.integers(2, 8)).tolist())
            for _ in range(2)
        ]
        rows.sort(key=len, reverse=True)
        demands = as_demands(rows, num_items)
        bound = minimum(demands, capacity, variant)
        best = [exhaustive(row, num_items, capacity, variant) for row in rows]
        assert bound.loads_R.tolist() == best
        assert certify(demands, capacity, variant, bound).tolist() == best
        distinct = [len({e for demand in row for e in demand}) for row in rows]
        strict += sum(loads > few for loads, few in zip(best, distinct, strict=True))
    assert strict > 40  # most instances must make the cache work


def test_shared_pool_bound_is_the_optimum():
    """Two layers of three experts share slots: layers are steps, (layer, expert) the items."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        num_tokens, capacity = int(rng.integers(2, 5)), int(rng.integers(2, 5))
        layers = [random_demands(rng, 3, [int(k) for k in rng.integers(1, 3, num_tokens)])
                  for _ in range(2)]  # fmt: skip
        row = [
            [3 * layer + e for e in layers[layer][t]]
            for t, layer in product(range(num_tokens), range(2))
        ]
        demands = as_demands([row], 6)
        bound = minimum(demands, capacity, "shared")
        assert bound.loads_R.tolist() == [exhaustive(row, 6, capacity, "forced")]
        certify(demands, capacity, "shared", bound)


@given(seeds)
@settings(max_examples=80, deadline=None)
def test_no_policy_is_below_and_clairvoyant_retention_attains(seed):
    rng = np.random.default_rng(seed)
    num_items, steps, k = int(rng.integers(4, 12)), 30, 2
    capacity = int(rng.integers(k, num_items + 1))
    row = random_demands(rng, num_items, [k] * steps)
    demands = as_demands([row], num_items)
    bound = minimum(demands, capacity, "forced")
    certify(demands, capacity, "forced", bound)
    caches = {
        name: RowCaches(1, num_items, capacity, make_retention(name, 1, num_items))
        for name in ("lru", "lfu", "lrfu", "given")
    }
    random = RowCaches(1, num_items, capacity, make_retention("given", 1, num_items))
    for s in range(steps):
        demand = np.isin(np.arange(num_items), row[s])[None]
        later = [
            next((t for t in range(s + 1, steps) if e in row[t]), 10**6) for e in range(num_items)
        ]
        for name, cache in caches.items():
            scores = -np.array([later], dtype=float) if name == "given" else None
            cache.access(slice(0, 1), demand, scores)
        random.refine(slice(0, 1), rng.random((1, num_items)), int(rng.integers(capacity + 1)))
        random.access(slice(0, 1), demand, rng.random((1, num_items)))
    for cache in (*caches.values(), random):
        assert cache.ledger.totals().loads >= bound.loads_R[0]
    assert caches["given"].ledger.totals().loads == bound.loads_R[0]
    assert minimum(demands, capacity, "bypass").loads_R[0] <= bound.loads_R[0]


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_batches_beyond_the_capacity_are_not_below(seed):
    rng = np.random.default_rng(seed)
    num_items, steps = 9, 25
    capacity = int(rng.integers(1, 7))
    row = random_demands(rng, num_items, rng.integers(1, num_items + 1, steps).tolist())
    bound = minimum(as_demands([row], num_items), capacity, "union")
    for name in ("lru", "lrfu"):
        cache = RowCaches(1, num_items, capacity, make_retention(name, 1, num_items))
        for demand in row:
            cache.access(slice(0, 1), np.isin(np.arange(num_items), demand)[None])
        assert cache.ledger.totals().loads >= bound.loads_R[0]
        least = [-(-len(demand) // capacity) for demand in row]
        most = sum(passes + (passes > 1) for passes in least)
        assert sum(least) <= cache.ledger.passes[0] <= most


def small_proof():
    row = [[0, 1], [2, 3], [0, 1], [2, 0], [1, 3], [0, 2], [1, 3], [0, 1]]
    demands = as_demands([row], 4)
    return demands, minimum(demands, 3, "forced")


def test_a_wrong_claim_is_refused():
    demands, bound = small_proof()
    assert certify(demands, 3, "forced", bound).tolist() == bound.loads_R.tolist()
    fewer = dataclasses.replace(bound, loads_R=bound.loads_R - 1)
    with pytest.raises(ValueError, match=r"row 0: the schedule has \d+ loads, the bound says"):
        certify(demands, 3, "forced", fewer)


def test_a_worse_schedule_is_refused():
    demands, bound = small_proof()
    kept = bound.kept_SRU.copy()
    kept[tuple(np.argwhere(kept)[0])] = False
    worse = dataclasses.replace(bound, kept_SRU=kept, loads_R=bound.loads_R + 1)
    with pytest.raises(ValueError, match="the prices prove"):
        certify(demands, 3, "forced", worse)


def test_a_schedule_that_does_not_fit_is_refused():
    demands, bound = small_proof()
    everything = np.zeros_like(bound.kept_SRU)
    seen: set[int] = set()
    for s, ids in enumerate(demands.ids_SRU[:, 0]):
        for u, item in enumerate(ids.tolist()):
            everything[s, 0, u] = item in seen
            seen.add(item)
    greedy = dataclasses.replace(bound, kept_SRU=everything, loads_R=np.array([4]))
    with pytest.raises(ValueError, match=r"keeps \d items where \d fit"):
        certify(demands, 3, "forced", greedy)
    first = np.ones_like(bound.kept_SRU)
    with pytest.raises(ValueError, match="before its first use"):
        certify(demands, 3, "forced", dataclasses.replace(bound, kept_SRU=first))


def test_false_prices_are_refused():
    demands, bound = small_proof()
    assert bound.prices_PR is not None
    for change in (1, -1):
        prices = bound.prices_PR + change
        with pytest.raises(ValueError, match=r"prices (prove|must not be negative)"):
            certify(demands, 3, "forced", dataclasses.replace(bound, prices_PR=prices))
    with pytest.raises(ValueError, match="has no prices"):
        certify(demands, 3, "forced", minimum(demands, 3, prove=False))


def test_a_demand_beyond_the_capacity_needs_the_union_bound():
    demands = as_demands([[[0, 1, 2], [1]]], 3)
    with pytest.raises(ValueError, match=r"demands 3 experts, more than the capacity 2.*union"):
        minimum(demands, 2, "forced")
    with pytest.raises(ValueError, match="unknown bound 'belady'"):
        minimum(demands, 2, "belady")
