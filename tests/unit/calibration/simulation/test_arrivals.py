"""Arrival processes, the course of rate and mix, answer lengths, and the scaler."""

import numpy as np
import pytest

from calibration.simulation.arrivals import arrival_times, draw_requests, output_lengths
from calibration.simulation.config import AutoscalingSection, MixPoint, TrafficSection
from calibration.simulation.scaling import LoadScaler

from .conftest import make_config


def _times(rate=100.0, seed=0, **fields):
    traffic = TrafficSection(rates=[rate], duration_s=200.0, warm_up_s=0.0, **fields)
    return arrival_times(traffic, rate, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("kind", "squared_cv"), [("fixed", 0.0), ("poisson", 1.0), ("bursty", 4.0)]
)
def test_rate_and_variance_of_gaps(kind, squared_cv):
    times = _times(arrivals=kind)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert (gaps >= 0).all()
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(squared_cv, rel=0.15, abs=0.01)


def test_the_curve_shapes_the_rate():
    curve = [{"at_s": 0.0, "factor": 0.0}, {"at_s": 100.0, "factor": 2.0}]
    times = _times(arrivals="fixed", curve=curve)
    assert len(times) == pytest.approx(100 * 100 + 200 * 100, rel=0.01)  # ramp, then held
    assert (times < 50).sum() == pytest.approx(100 * 25, rel=0.03)


def test_the_mix_drifts():
    domains = np.array(["a"] * 10 + ["b"] * 90)
    mix = [
        MixPoint(at_s=0.0, weights={"a": 1.0}),
        MixPoint(at_s=100.0, weights={"a": 1.0, "b": 1.0}),
    ]
    times = np.linspace(0, 100, 20_000)
    is_b = domains[draw_requests(times, domains, mix, np.random.default_rng(0))] == "b"
    assert not is_b[:5].any()
    assert is_b[9_000:11_000].mean() == pytest.approx(0.25, abs=0.03)
    assert is_b[-1000:].mean() == pytest.approx(0.5, abs=0.05)


def test_a_mix_of_unknown_domains_is_refused():
    mix = [MixPoint(at_s=0.0, weights={"cooking": 1.0})]
    with pytest.raises(ValueError, match="'cooking': the requests have a, b"):
        draw_requests(np.zeros(3), np.array(["a", "b"]), mix, np.random.default_rng(0))


def test_answer_lengths():
    rng = np.random.default_rng(0)
    assert set(output_lengths(10, 512, "fixed", rng)) == {512}
    lengths = output_lengths(50_000, 64, "geometric", rng)
    assert lengths.min() == 2
    assert lengths.mean() == pytest.approx(64, rel=0.02)


def test_the_scaler_goes_up_at_once_and_down_after_a_while():
    scaler = LoadScaler(AutoscalingSection(target_load=10.0, max_replicas=6, down_delay_s=100.0))
    assert scaler.wanted(35, 2, 0.0) == 4
    assert scaler.wanted(1000, 4, 10.0) == 6
    assert scaler.wanted(5, 6, 20.0) == 6
    assert scaler.wanted(15, 6, 60.0) == 6
    assert scaler.wanted(5, 6, 119.0) == 6
    assert scaler.wanted(5, 6, 120.0) == 2  # the most that was needed meanwhile
    assert scaler.wanted(5, 2, 130.0) == 2


def test_a_higher_load_ends_the_wait():
    scaler = LoadScaler(AutoscalingSection(target_load=10.0, down_delay_s=100.0))
    assert scaler.wanted(5, 4, 0.0) == 4
    assert scaler.wanted(40, 4, 90.0) == 4
    assert scaler.wanted(5, 4, 110.0) == 4
    assert scaler.wanted(5, 4, 210.0) == 1


def test_policies_default_to_all_that_the_application_knows():
    assert {"random", "rr", "jsq", "p2c", "domain", "band", "soft"} <= set(
        make_config().router.policies
    )
