"""Replays of several policies and seeds, set beside the strongest load balancer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import scipy.stats

from calibration.artifact import Artifact
from calibration.clairvoyant import clairvoyant_ratio
from calibration.clustering import BalancedSphericalKMeans
from calibration.fit import LayerChoice
from calibration.parallel import choose_jobs, run_parallel
from calibration.replay import (
    Arrivals,
    BoolArray,
    Observer,
    Replay,
    ReplayResult,
    Workload,
    independent_draws,
    shuffles,
)
from calibration.signature import IndexArray
from calibration.step_time import StepTimeLaw
from calibration.traces import RoutingTrace
from router.core import RoutingCore
from router.policy import make_policy

LOAD_BALANCERS = ("random", "rr", "jsq", "p2c")
CONFIDENCE = 0.95
SECONDS_A_REQUEST = 1e-3
"""Rough time to replay a request of a recorded trace."""
RATIOS = ("distinct", "tpot_p50", "tpot_p95", "tpot_p99", "tpot_mean", "max_batch", "load_skew")

Figures = dict[str, dict[str, list[float]]]
"""Policy to figure to its value for each seed."""


@dataclass(frozen=True)
class Settings:
    """What a comparison replays.

    Attributes:
        policies: names as in the configuration.
        num_replicas: K.
        arrivals: closed or open loop.
        prefix_tokens: tokens that stand in for the prompt; None: the trace knows its prompts.
        min_tokens: shortest request to take; None: twice the prefix.
        seeds: seeds of split, fit, order and policy.
        num_requests: measured requests of a run.
        num_warmup: requests before those.
        law: time of a decode step.
        tau: band width of `band`.
        lambda_: load weight of `soft` and `live`; None: what each has by itself.
        max_load: load bound of `live`; None: its own.
        resident_weight: what resident experts add in `live`; None: its own.
        caches_experts: whether replicas load experts on demand; `live` has other defaults then.
        layers: layers of the signature.
        draw: "shuffle" serves every request once before any comes again; "independent" draws them
            with replacement, so that copies of one run at the same time.
        start: "spread" starts from a steady state; "together" with all at their first token.
    """

    policies: Sequence[str]
    num_replicas: int = 8
    arrivals: Arrivals = field(default_factory=Arrivals)
    prefix_tokens: int | None = 64
    min_tokens: int | None = None
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    num_requests: int = 1280
    num_warmup: int = 256
    law: StepTimeLaw = field(default_factory=StepTimeLaw)
    tau: float = 0.1
    lambda_: float | None = None
    max_load: float | None = None
    resident_weight: float | None = None
    caches_experts: bool = False
    layers: LayerChoice = "all"
    draw: Literal["shuffle", "independent"] = "shuffle"
    start: Literal["spread", "together"] = "spread"


def run(
    trace: RoutingTrace,
    settings: Settings,
    on_run: Callable[[str, int], object] = lambda policy, seed: None,
    jobs: int | None = 1,
) -> Figures:
    """Replay every policy with every seed.

    Args:
        trace: recorded requests.
        settings: what to replay.
        on_run: told policy and seed after each run.
        jobs: processes; None: as many as pay.
    """
    num_runs = len(settings.seeds) * len(settings.policies)
    jobs = choose_jobs(jobs, num_runs, expected_s(settings, num_runs))
    calls = [
        (workload, artifact, settings, policy, seed)
        for seed, workload, artifact in fit_seeds(trace, settings, jobs)
        for policy in settings.policies
    ]
    rows = run_parallel(_run_figures, calls, jobs, lambda number: on_run(*calls[number][-2:]))
    figures: Figures = {policy: {} for policy in settings.policies}
    for (*_, policy, _), row in zip(calls, rows, strict=True):
        for name, value in row.items():
            figures[policy].setdefault(name, []).append(value)
    return figures


def _run_figures(
    workload: Workload, artifact: Artifact, settings: Settings, policy: str, seed: int
) -> dict[str, float]:
    """Computed where the run was: a copy of its arrays has another layout, and sums other bits."""
    return run_one(workload, artifact, settings, policy, seed).figures()


def fit_seeds(
    trace: RoutingTrace, settings: Settings, jobs: int
) -> list[tuple[int, Workload, Artifact]]:
    """Each seed with its halves of the requests, and the artifact of the first half."""
    seeds = settings.seeds
    split = Workload.split(trace, settings.prefix_tokens, seeds[0], settings.min_tokens)
    workloads = [split.halved_by(seed) for seed in seeds]
    calls = [
        (workload, settings.num_replicas, seed, settings.layers)
        for seed, workload in zip(seeds, workloads, strict=True)
    ]
    artifacts = run_parallel(Workload.fit, calls, min(jobs, len(seeds)))
    return list(zip(seeds, workloads, artifacts, strict=True))


def expected_s(settings: Settings, num_runs: int) -> float:
    """Rough time of some runs, one after the other, seconds."""
    requests = settings.num_warmup + settings.num_requests + settings.arrivals.concurrency
    return num_runs * requests * SECONDS_A_REQUEST


def run_one(
    workload: Workload,
    artifact: Artifact,
    settings: Settings,
    policy: str,
    seed: int,
    observer: Observer | None = None,
    residents: Callable[[int], BoolArray] | None = None,
) -> ReplayResult:
    """One replay; replica k has centroid k."""
    made = make_policy(
        policy,
        tau=settings.tau,
        lambda_=settings.lambda_,
        max_load=settings.max_load,
        resident_weight=settings.resident_weight,
        caches_experts=settings.caches_experts,
        seed=seed,
        domain_replicas=artifact.domain_clusters,
    )
    total = settings.num_requests + settings.num_warmup + 65 * settings.arrivals.concurrency
    draw = shuffles if settings.draw == "shuffle" else independent_draws
    return Replay(
        workload,
        RoutingCore(made, artifact, seed),
        num_replicas=settings.num_replicas,
        arrivals=settings.arrivals,
        law=settings.law,
        num_requests=settings.num_requests,
        num_warmup=settings.num_warmup,
        seed=seed,
        observer=observer,
        residents=residents,
        order=draw(workload.served, total, seed),
        together=settings.start == "together",
    ).run()


def open_rate(trace: RoutingTrace, settings: Settings) -> float:
    """Arrival rate at which JSQ would hold about `concurrency` requests in flight.

    By Little's law that is the rate at which a closed loop of that size gets requests done.
    """
    closed = replace(settings, arrivals=replace(settings.arrivals, kind="closed"))
    seed = settings.seeds[0]
    workload = Workload.split(trace, settings.prefix_tokens, seed, settings.min_tokens)
    artifact = workload.fit(settings.num_replicas, seed, "all")
    result = run_one(workload, artifact, closed, "jsq", seed)
    return len(result.tpot_M) / result.duration


def clairvoyant(
    trace: RoutingTrace, settings: Settings, seeds: Iterable[int]
) -> dict[str, dict[str, Any]]:
    """Distinct experts of clairvoyant over blind assignments with even loads, mean and interval.

    The search starts from balanced clusters of what the requests really decode.
    """
    ratios = []
    for seed in seeds:
        workload = Workload.split(trace, settings.prefix_tokens, seed, settings.min_tokens)

        def start(
            requests_N: IndexArray, workload: Workload = workload, seed: int = seed
        ) -> IndexArray:
            profiles_NLE = workload.decode_counts(requests_N).astype(np.float32)
            profiles_ND = profiles_NLE.reshape(len(requests_N), -1)
            profiles_ND /= np.linalg.norm(profiles_ND, axis=1, keepdims=True)
            clusters = BalancedSphericalKMeans(settings.num_replicas, random_state=seed)
            return clusters.fit(profiles_ND, show_progress=False).labels_

        ratios.append(
            clairvoyant_ratio(
                workload, start, settings.num_replicas, settings.arrivals.concurrency, seed
            )
        )
    mean = round(float(np.mean(ratios)), 4)
    return {"distinct": {"mean": mean, "ci": _rounded(interval(ratios))}}


def reference(figures: Figures) -> str:
    """The strongest load balancer: the lowest mean TPOT P50; else the first policy."""
    balancers = [policy for policy in figures if policy in LOAD_BALANCERS]
    if not balancers:
        return next(iter(figures))
    return min(balancers, key=lambda policy: float(np.mean(figures[policy]["tpot_p50"])))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean by Student's t; NaN for a single value."""
    if len(values) < 2:
        return float("nan"), float("nan")
    spread = float(scipy.stats.sem(values))
    half = spread * float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    mean = float(np.mean(values))
    return mean - half, mean + half


def summary(figures: Figures, settings: Settings, against: str | None = None) -> dict[str, Any]:
    """Means, and paired ratios to a reference with their intervals, as JSON would have them.

    Args:
        figures: what `run` gave.
        settings: what it was given.
        against: policy to compare with; None: the strongest load balancer.

    Raises:
        ValueError: `against` was not replayed.
    """
    best = reference(figures) if against is None else against
    if best not in figures:
        raise ValueError(f"reference {best!r} is none of the policies {', '.join(figures)}")
    policies: dict[str, Any] = {}
    for policy, rows in figures.items():
        row: dict[str, Any] = {name: round(float(np.mean(v)), 4) for name, v in rows.items()}
        row["distinct_ci"] = _rounded(interval(rows["distinct"]))
        row["ratio"] = {}
        for name in RATIOS:
            ratios = [a / b for a, b in zip(rows[name], figures[best][name], strict=True)]
            row["ratio"][name] = {
                "mean": round(float(np.mean(ratios)), 4),
                "ci": _rounded(interval(ratios)),
            }
        policies[policy] = row
    return {
        "policies": policies,
        "reference": best,
        "replicas": settings.num_replicas,
        "arrivals": settings.arrivals.kind,
        "concurrency": settings.arrivals.concurrency,
        "rate": settings.arrivals.rate,
        "prefix_tokens": settings.prefix_tokens,
        "seeds": list(settings.seeds),
        "requests": settings.num_requests,
        "confidence": CONFIDENCE,
    }


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Table of a summary: absolute for the reference, change in percent for the others."""
    names = ("distinct", "tpot_p50", "tpot_p95", "tpot_p99")
    best = report["reference"]
    lines = [["policy", *(_TITLES[name] for name in names), "max batch", "skew", "band"]]
    for policy, row in report["policies"].items():
        cells = []
        for name in names:
            if policy == best:
                cells.append(f"{row[name]:.3f}")
            else:
                ratio = row["ratio"][name]
                cells.append(change(ratio["mean"], ratio["ci"]))
        band = f"{row['band_size']:.1f}" if "band_size" in row else "-"
        label = f"{policy} (reference)" if policy == best else policy
        lines.append([label, *cells, f"{row['max_batch']:.1f}", f"{row['load_skew']:.2f}", band])
    return lines


_TITLES = {
    "distinct": "distinct/layer/step",
    "tpot_p50": "TPOT P50",
    "tpot_p95": "TPOT P95",
    "tpot_p99": "TPOT P99",
}


def change(mean: float, ci: list[float] | None) -> str:
    """A ratio as a change in percent, with its interval."""
    text = f"{100 * (mean - 1):+.1f} %"
    if ci is None:
        return text
    return f"{text} [{100 * (ci[0] - 1):+.1f}, {100 * (ci[1] - 1):+.1f}]"


def _rounded(bounds: tuple[float, float]) -> list[float] | None:
    return None if np.isnan(bounds[0]) else [round(bound, 4) for bound in bounds]
