"""The clairvoyant assignment, against exhaustive search on small snapshots."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from calibration.clairvoyant import (
    even_assignment,
    local_search,
    snapshot,
    total_distinct,
)
from calibration.replay import Workload, expert_bits
from tests.unit.calibration.test_replay import two_groups


def random_bits(num_requests: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (num_requests * 3, 2)  # 3 steps, 2 layers, top-2 of 12 experts
    ids = np.stack([rng.permutation(12)[:2] for _ in range(np.prod(shape))]).reshape(*shape, 2)
    return expert_bits(ids.astype(np.uint8), 12).reshape(num_requests, 3, 2, 1)


def brute_total(bits: np.ndarray, replica_N: np.ndarray, num_replicas: int) -> int:
    total = 0
    for k in range(num_replicas):
        members = bits[replica_N == k]
        for t in range(bits.shape[1]):
            for layer in range(bits.shape[2]):
                union = 0
                for member in members[:, t, layer, 0]:
                    union |= int(member)
                total += union.bit_count()
    return total


@pytest.mark.parametrize("seed", range(5))
def test_total_is_the_sum_of_unions(seed: int) -> None:
    bits = random_bits(7, seed)
    replica_N = np.random.default_rng(seed).integers(0, 3, 7)
    assert total_distinct(bits, replica_N, 3) == brute_total(bits, replica_N, 3)


@pytest.mark.parametrize("seed", range(10))
def test_search_keeps_loads_and_comes_near_the_optimum(seed: int) -> None:
    bits = random_bits(6, seed)
    start = even_assignment(6, 2, np.random.default_rng(seed))
    found = local_search(bits, start, 2)
    assert np.bincount(found).tolist() == [3, 3]
    cost = total_distinct(bits, found, 2)
    assert cost <= total_distinct(bits, start, 2)
    best = min(
        total_distinct(bits, np.array(order), 2) for order in set(permutations([0, 0, 0, 1, 1, 1]))
    )
    assert best <= cost <= 1.1 * best


def test_no_swap_of_two_helps_afterwards() -> None:
    bits = random_bits(9, 1)
    found = local_search(bits, even_assignment(9, 3, np.random.default_rng(1)), 3)
    cost = total_distinct(bits, found, 3)
    for i in range(9):
        for j in range(i):
            swapped = found.copy()
            swapped[i], swapped[j] = found[j], found[i]
            assert total_distinct(bits, swapped, 3) >= cost


def test_groups_of_one_and_empty_groups() -> None:
    bits = random_bits(2, 0)
    found = local_search(bits, np.array([0, 2]), 3)
    assert sorted(found.tolist()) == [0, 2]


def test_snapshot_serves_every_request_before_one_comes_again() -> None:
    workload = Workload.split(two_groups(), 4, 0)
    requests_N, bits = snapshot(workload, 20, 30, np.random.default_rng(0))
    assert sorted(requests_N.tolist()) == workload.served.tolist()
    assert bits.shape == (20, 30, 3, 1)


def test_it_separates_groups_that_share_nothing() -> None:
    workload = Workload.split(two_groups(), 4, 0)
    requests_N, bits = snapshot(workload, 12, 16, np.random.default_rng(0))
    found = local_search(bits, even_assignment(12, 2, np.random.default_rng(1)), 2)
    domains = np.array([workload.trace.domains[r] for r in requests_N])
    counts = [np.unique(domains[found == k], return_counts=True)[1].max() for k in range(2)]
    assert sum(counts) >= 11
