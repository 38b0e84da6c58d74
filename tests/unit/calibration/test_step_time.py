"""Step-time law: validation, and its fit by non-negative least squares."""

import numpy as np
import pytest

from calibration.step_time import StepTimeLaw, fit_step_time


def _steps(law, number=200, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 33, number)
    distinct = rng.uniform(8, 100, number)
    loads = rng.uniform(0, 10, number)
    times = np.array([law(*step) for step in zip(batch, distinct, loads, strict=True)])
    return batch, distinct, loads, times * (1 + noise * rng.standard_normal(number))


def test_recovers_a_law_in_seconds():
    law = StepTimeLaw(5e-3, 1e-5, 2e-4, 3e-4)
    fitted, r_squared = fit_step_time(*_steps(law))
    assert r_squared == pytest.approx(1)
    for name in StepTimeLaw.__slots__:
        assert getattr(fitted, name) == pytest.approx(getattr(law, name), rel=1e-6)


def test_noise_lowers_r_squared_and_leaves_the_law_near():
    law = StepTimeLaw(5e-3, 1e-5, 2e-4, 0)
    fitted, r_squared = fit_step_time(*_steps(law, 2000, noise=0.1))
    assert 0.8 < r_squared < 0.95
    assert fitted.per_distinct == pytest.approx(law.per_distinct, rel=0.05)


def test_no_coefficient_is_negative():
    batch = np.array([1, 2, 3, 4])
    fitted, r_squared = fit_step_time(batch, 10 * batch, np.zeros(4), [4.0, 3.0, 2.0, 1.0])
    assert (fitted.per_request, fitted.per_distinct) == (0, 0)
    assert fitted.base == pytest.approx(2.5)
    assert r_squared == pytest.approx(0)


def test_a_term_that_does_not_vary_gets_nothing():
    fitted, _ = fit_step_time([8, 8, 8], [10, 20, 30], [0, 0, 0], [2.0, 3.0, 4.0])
    assert (fitted.per_request, fitted.per_load) == (0, 0)
    assert (fitted.base, fitted.per_distinct) == (pytest.approx(1), pytest.approx(0.1))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, 2], [1], [0, 0], [1, 1]), "one value a step"),
        (([1], [1], [0], [1]), "at least 2 steps"),
        (([1, 2], [1, np.nan], [0, 0], [1, 1]), "distinct must be finite"),
        (([1, 2], [1, 2], [0, 0], [1, 0]), "times must be > 0"),
    ],
)
def test_refuses_bad_measurements(columns, message):
    with pytest.raises(ValueError, match=message):
        fit_step_time(*columns)
