"""When requests arrive and which ones they are.

Every process is one of unit rate, read through the inverse of the cumulated rate: equal gaps stay
equally likely wherever the rate stands, and a day's curve needs no thinning.

Axes: N arrivals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.simulation.config import MixPoint, TrafficSection

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.int64]


def arrival_times(
    traffic: TrafficSection, requests_per_s: float, rng: np.random.Generator
) -> FloatArray:
    """Times of all arrivals from 0 to the end of the measured time.

    Args:
        traffic: process, duration and curve.
        requests_per_s: rate where the curve's factor is 1.
        rng: source of the gaps.

    Returns:
        Seconds, ascending; float64 (N,). May be empty.
    """
    end = traffic.warm_up_s + traffic.duration_s
    times, factors = np.array([0.0, end]), np.ones(2)
    if traffic.curve:
        points = [(point.at_s, point.factor) for point in traffic.curve]
        times = np.unique([0.0, *(at for at, _ in points if at < end), end])
        at, factor = (list(column) for column in zip(*points, strict=True))
        factors = np.interp(times, at, factor)
    # Fine enough that the rate is nearly constant within a piece.
    fine = np.unique(np.concatenate([times, np.linspace(0, end, 2001)]))
    rates = requests_per_s * np.interp(fine, times, factors)
    expected = np.concatenate([[0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(fine))])
    total = expected[-1]
    units = _unit_arrivals(traffic, total, rng)
    arrivals: FloatArray = np.interp(units[units < total], expected, fine)
    return arrivals


def _unit_arrivals(traffic: TrafficSection, total: float, rng: np.random.Generator) -> FloatArray:
    """Arrivals of mean gap 1, beyond `total`."""
    if traffic.arrivals == "fixed":
        return np.arange(0.5, total + 1, dtype=np.float64)
    shape = 1.0 if traffic.arrivals == "poisson" else 1.0 / traffic.burstiness
    reached, parts = 0.0, []
    while reached < total:
        number = int((total - reached) * 1.1 + 10 * np.sqrt(total / shape) + 10)
        parts.append(reached + np.cumsum(rng.gamma(shape, 1 / shape, number)))
        reached = float(parts[-1][-1])
    return np.concatenate(parts)


def draw_requests(
    times_N: FloatArray,
    domains_M: NDArray[np.str_],
    mix: list[MixPoint],
    rng: np.random.Generator,
) -> IndexArray:
    """Which request of the pool each arrival is, with replacement.

    Args:
        times_N: arrival times, ascending.
        domains_M: label of each request of the pool.
        mix: course of the domain shares; empty draws uniformly from the pool.
        rng: source of the draws.

    Returns:
        int64 (N,).

    Raises:
        ValueError: the mix names a domain that the pool does not have.
    """
    if not mix:
        return rng.integers(len(domains_M), size=len(times_N))
    names, domain_M = np.unique(domains_M, return_inverse=True)
    known = names.tolist()
    if unknown := sorted({name for point in mix for name in point.weights} - set(known)):
        raise ValueError(
            f"traffic.mix names domain {unknown[0]!r}: the requests have {', '.join(known)}"
        )
    shares_PD = np.array([[point.weights.get(name, 0.0) for name in known] for point in mix])
    shares_PD /= shares_PD.sum(axis=1, keepdims=True)
    at_P = [point.at_s for point in mix]
    shares_ND = np.stack([np.interp(times_N, at_P, column) for column in shares_PD.T], axis=1)
    edges_ND = np.cumsum(shares_ND, axis=1)
    drawn_N1 = rng.random((len(times_N), 1)) * edges_ND[:, -1:]
    wanted_N = (edges_ND <= drawn_N1).sum(axis=1)
    by_domain = np.argsort(domain_M, kind="stable")
    sizes_D = np.bincount(domain_M, minlength=len(known))
    first_D: NDArray[Any] = np.concatenate([[0], np.cumsum(sizes_D)[:-1]])
    within_N = (rng.random(len(times_N)) * sizes_D[wanted_N]).astype(np.int64)
    chosen_N: IndexArray = by_domain[first_D[wanted_N] + within_N]
    return chosen_N


def output_lengths(number: int, mean: int, kind: str, rng: np.random.Generator) -> IndexArray:
    """Tokens of each answer, at least 2; int64 (N,)."""
    if kind == "fixed":
        return np.full(number, mean, dtype=np.int64)
    return 1 + rng.geometric(1 / (mean - 1), size=number)
