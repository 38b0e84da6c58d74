from __future__ import annotations

import numpy as np
import pytest

from router.reservoir import SignatureReservoir


def vector(value: float) -> np.ndarray:
    return np.array([value], dtype=np.float32)


def test_window_forgets_what_is_older():
    reservoir = SignatureReservoir(800, seed=1, window_s=8.0)
    for second in range(20):
        reservoir.offer(vector(second), float(second))
    assert [row.item() for row in reservoir.rows(19.0)] == list(range(12, 20))
    assert len(reservoir.rows(19.0 + 8.0)) == 0


def test_burst_does_not_push_out_what_came_before():
    reservoir = SignatureReservoir(80, seed=1, window_s=8.0)
    for i in range(70):
        reservoir.offer(vector(0), i / 10)
    for _ in range(10_000):
        reservoir.offer(vector(1), 7.5)
    values = np.array([row.item() for row in reservoir.rows(7.9)])
    assert len(values) <= 80
    assert (values == 0).sum() == 70
    assert (values == 1).sum() == 10


def test_rows_of_a_part_are_a_uniform_sample():
    means = []
    for seed in range(40):
        reservoir = SignatureReservoir(64, seed, window_s=100.0)
        for i in range(1000):
            reservoir.offer(vector(i), 1.0)
        means.append(reservoir.signatures(1.0).mean())
    # One row: mean 499.5, deviation 289; of 40 x 8 rows: 16.
    assert abs(np.mean(means) - 499.5) < 5 * 16


def test_equal_seeds_keep_equal_rows():
    first, second = (SignatureReservoir(16, seed=3, window_s=5.0) for _ in range(2))
    for i in range(500):
        first.offer(vector(i), i / 50)
        second.offer(vector(i), i / 50)
    np.testing.assert_array_equal(first.signatures(10.0), second.signatures(10.0))


@pytest.mark.parametrize(("size", "window_s"), [(0, 1.0), (4, 0.0), (4, -1.0), (4, float("nan"))])
def test_values_out_of_range(size, window_s):
    with pytest.raises(ValueError, match="must be >"):
        SignatureReservoir(size, 1, window_s)
