"""Replays in which the pool or the traffic changes while requests are routed.

The whole router service runs on the replay's clock: heartbeats every second, refits as they fall
due. A refit's result is in force at once; the live router computes it in a fraction of a second.

Axes: N requests, K decode replicas, D signature length.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.report import table
from calibration.artifact import Artifact
from calibration.replay import Arrivals, BoolArray, Replay, Workload, replica_name
from calibration.replay_report import interval
from calibration.signature import IndexArray
from calibration.step_time import StepTimeLaw
from calibration.traces import RoutingTrace
from router.core import RoutingCore
from router.refit import RefitResult, RefitSettings, run_refit
from router.service import RouterService, RouterSettings

HEARTBEAT_S = 1.0
SETTLED_SHARE = 0.25
"""Part of the requests after the change, from the end, that counts as settled."""
RECOVERED = 0.9
FIRST = 32


@dataclass(frozen=True)
class Settings:
    """What is replayed. Times in seconds.

    Attributes:
        policy: rule under test; JSQ is the reference.
        num_replicas: K at the start.
        new_replicas: K after the change, for a change of the pool.
        concurrency: requests in flight, closed loop.
        prefix_tokens: tokens that stand in for the prompt.
        seeds: seeds of split, fit and order.
        num_before: requests after warm-up and before the change.
        num_after: requests after the change.
        law: time of a decode step.
        refit: when to refit; the variants set `when`.
        ramp_s: ramp of new replicas.
        bin_size: requests in one figure of the course after the change.
    """

    policy: str = "soft"
    num_replicas: int = 8
    new_replicas: int = 8
    concurrency: int = 128
    prefix_tokens: int = 64
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    num_before: int = 512
    num_after: int = 2048
    law: StepTimeLaw = field(default_factory=lambda: StepTimeLaw(0.01, 0.0001, 0.0009))
    refit: RefitSettings = field(default_factory=RefitSettings)
    ramp_s: float = 2.0
    bin_size: int = 128

    @property
    def change_at(self) -> int:
        """Number of the first request after the change."""
        return 2 * self.concurrency + self.num_before


@dataclass(frozen=True, eq=False)
class Course:
    """One run.

    Attributes:
        distinct: distinct experts per layer, mean over the tokens decoded while each bin of
            requests arrived; first bin at the change.
        tpot_N: seconds a token, of each request after the change.
        joined: most of the FIRST requests after the change that went to one new replica.
        moved_share: served requests whose nearest replica is another one after the refits.
        results: refits, taken or not.
    """

    distinct: list[float]
    tpot_N: np.ndarray[Any, np.dtype[np.float64]]
    joined: int
    moved_share: float
    results: list[RefitResult]


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class _LiveRouter:
    """The service, its replicas' heartbeats, and what is measured; scenario and observer."""

    def __init__(
        self, settings: Settings, router: RouterService, clock: _Clock, workload: Workload
    ) -> None:
        self._settings, self.router, self._clock = settings, router, clock
        artifact = router.core.artifact
        assert artifact is not None
        self._served_ND = artifact.transform.batch(workload.counts_NLE[workload.served])
        self._names = [replica_name(k) for k in range(settings.num_replicas)]
        self._next_beat = 0.0
        num_bins = settings.num_after // settings.bin_size
        self._tokens = np.zeros(num_bins)
        self._experts = np.zeros(num_bins)
        self._bin = -1
        self._homes_before: IndexArray | None = None
        self.results: list[RefitResult] = []
        self.beat()

    def beat(self) -> None:
        """Heartbeats of the pool; a replica without a change of load reports it as ours."""
        for name in self._names:
            load = self.router.core.ledger.load(name) if self._knows(name) else 0
            self.router.heartbeat("decode", name, "", load, None)
        if (job := self.router.next_refit()) is not None:
            self.results.append(run_refit(job))
            self.router.finish_refit(job, self.results[-1])
        self._next_beat = self._clock.now + HEARTBEAT_S

    def __call__(self, number: int, now: float, core: RoutingCore) -> None:
        """Before each arrival: see `calibration.replay.Scenario`."""
        self._clock.now = now
        self._bin = (number - self._settings.change_at) // self._settings.bin_size
        if number == self._settings.change_at:
            self._homes_before = self.homes()
            self._change_pool()
        if now >= self._next_beat:
            self.beat()

    def on_step(self, replica: int, union_LE: BoolArray, num_requests: int) -> float:
        """See `calibration.replay.Observer`; an observer of this kind loads nothing."""
        if 0 <= self._bin < len(self._tokens):
            self._tokens[self._bin] += num_requests
            self._experts[self._bin] += num_requests * union_LE.sum() / len(union_LE)
        return 0.0

    def homes(self) -> IndexArray:
        """Nearest replica of each served request; int64 (N,)."""
        core = self.router.core
        owned = {c: k for k, c in enumerate(core.assignment.values()) if c is not None}
        rows = sorted(owned)
        nearest_N = (self._served_ND @ core.centroids_CD[rows].T).argmax(axis=1)
        return np.array([owned[rows[c]] for c in nearest_N], dtype=np.int64)

    def course(self, tpot_N: np.ndarray[Any, np.dtype[np.float64]], joined: int) -> Course:
        assert self._homes_before is not None
        moved_share = float((self.homes() != self._homes_before).mean())
        distinct = (self._experts / self._tokens).tolist()
        return Course(distinct, tpot_N, joined, moved_share, self.results)

    def _change_pool(self) -> None:
        before, after = self._settings.num_replicas, self._settings.new_replicas
        for k in range(after, before):
            self.router.deregister(replica_name(k))
        self._names = [replica_name(k) for k in range(after)]
        self.beat()

    def _knows(self, name: str) -> bool:
        return name in self.router.core.ledger.replica_ids


def run_course(
    workload: Workload,
    artifact: Artifact,
    settings: Settings,
    seed: int,
    *,
    policy: str,
    when: str,
    order: IndexArray | None = None,
) -> Course:
    """One replay with a change; replica k starts with centroid k of the artifact."""
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        artifact.save(Path(folder) / "artifact")
        router = RouterService(
            RouterSettings(
                policy,
                0.1,
                0.5,
                seed,
                str(Path(folder) / "artifact"),
                1024,
                1e9,
                settings.ramp_s,
                replace(settings.refit, when=when),  # type: ignore[arg-type]
            ),
            clock,
        )
    live = _LiveRouter(settings, router, clock, workload)
    num_first = settings.change_at - settings.concurrency
    replay = Replay(
        workload,
        router.core,
        num_replicas=settings.num_replicas,
        arrivals=Arrivals("closed", settings.concurrency),
        law=settings.law,
        num_requests=settings.num_after,
        num_warmup=num_first,
        seed=seed,
        observer=live,
        scenario=live,
        order=order,
    )
    result = replay.run()
    first = result.replica_M[:FIRST]
    is_new = first >= settings.num_replicas  # replicas are numbered as they first appear
    joined = int(np.bincount(first[is_new]).max()) if is_new.any() else 0
    return live.course(result.tpot_M, joined)


def pool_change(
    trace: RoutingTrace, settings: Settings, on_run: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """From `num_replicas` to `new_replicas` decode replicas, at once.

    Variants: `jsq`; `no refit`, where new replicas take overflow; `refit` and `refit, no ramp`;
    and `fitted before`, whose artifact has the new K: what a refit could reach at best.
    """
    courses: dict[str, list[Course]] = {}
    for seed in settings.seeds:
        workload = Workload.split(trace, settings.prefix_tokens, seed)
        artifact = workload.fit(settings.num_replicas, seed)
        later = workload.fit(settings.new_replicas, seed)
        same = replace(settings, num_replicas=settings.new_replicas)
        no_ramp = replace(settings, ramp_s=0.0)
        runs = (
            ("jsq", artifact, settings, "jsq", "never"),
            ("no refit", artifact, settings, settings.policy, "never"),
            ("refit, no ramp", artifact, no_ramp, settings.policy, "pool"),
            ("refit", artifact, settings, settings.policy, "pool"),
            ("fitted before", later, same, settings.policy, "never"),
        )
        for name, fitted, given, policy, when in runs:
            course = run_course(workload, fitted, given, seed, policy=policy, when=when)
            courses.setdefault(name, []).append(course)
            on_run()
    return _summary(courses, settings)


def drift(
    trace: RoutingTrace, settings: Settings, on_run: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Half of the domains until the change, the other half after it.

    The artifact is fitted on requests of the first half of the domains only. Variants: `jsq`;
    `static` and `online` centroids; and `fitted before`, fitted on requests of the domains that
    come: what a refit could reach at best, its IDF too.
    """
    courses: dict[str, list[Course]] = {}
    for seed in settings.seeds:
        workload = Workload.split(trace, settings.prefix_tokens, seed)
        early, late = _split_domains(workload, seed)
        order = _shifted_order(workload, early, settings, seed)
        known = _calibrated_on(workload, early)
        foreseen = _calibrated_on(workload, late)
        artifact = known.fit(settings.num_replicas, seed)
        best = foreseen.fit(settings.num_replicas, seed)
        runs = (
            ("jsq", artifact, "jsq", "never"),
            ("static", artifact, settings.policy, "never"),
            ("online", artifact, settings.policy, "online"),
            ("fitted before", best, settings.policy, "never"),
        )
        for name, fitted, policy, when in runs:
            course = run_course(
                workload, fitted, settings, seed, policy=policy, when=when, order=order
            )
            courses.setdefault(name, []).append(course)
            on_run()
    return _summary(courses, settings)


def command(args: argparse.Namespace, trace: RoutingTrace, policy: str) -> int:
    """`eldr replay --scenario`: runs it and prints the report."""
    if args.scenario == "pool-change" and args.new_replicas is None:
        raise ValueError("--scenario pool-change needs --new-replicas")
    settings = Settings(
        policy=policy,
        num_replicas=args.replicas,
        new_replicas=args.new_replicas or args.replicas,
        concurrency=args.concurrency,
        prefix_tokens=args.prefix_tokens,
        seeds=range(args.seeds),
        num_before=2 * args.concurrency,
        num_after=16 * args.concurrency if args.requests is None else args.requests,
    )
    run, num_variants = (pool_change, 5) if args.scenario == "pool-change" else (drift, 4)
    with tqdm(total=num_variants * args.seeds, desc=args.scenario, unit="run") as bar:
        report = run(trace, settings, bar.update)
    if args.json:
        print(json.dumps(report))
        return 0
    replicas = f"{settings.num_replicas} to {settings.new_replicas} replicas"
    print(
        f"{args.scenario}, {policy}, {replicas}, {settings.concurrency} requests in flight, "
        f"{args.seeds} seeds; changes against jsq with 95 % intervals, or median (ends)"
    )
    print(table(list(rows(report))))
    return 0


def rows(report: dict[str, Any]) -> Iterator[list[str]]:
    """The report as a table; changes are against JSQ in the same run."""
    yield [
        "variant",
        "distinct, all",
        "distinct, settled",
        "recovered after",
        "TPOT P50",
        "TPOT P99",
        f"of {FIRST} to one new",
        "moved homes",
        "refits taken / not",
    ]
    for name, row in report["variants"].items():
        yield [
            name,
            *(
                row[key]["text"]
                for key in ("distinct", "settled", "recovered", "p50", "p99", "joined", "moved")
            ),
            f"{row['taken']:.1f} / {row['rejected']:.1f}",
        ]


def _summary(by_variant: dict[str, list[Course]], settings: Settings) -> dict[str, Any]:
    variants: dict[str, Any] = {}
    reference = by_variant["jsq"]
    best = [
        _settled_gain(c, r) for c, r in zip(by_variant["fitted before"], reference, strict=True)
    ]
    for name, courses in by_variant.items():
        pairs = list(zip(courses, reference, strict=True))
        gains = [[a / b - 1 for a, b in zip(c.distinct, r.distinct, strict=True)] for c, r in pairs]
        recovered = [
            recovered_after(gain, aim, settings.bin_size)
            for gain, aim in zip(gains, best, strict=True)
        ]
        variants[name] = {
            "distinct": _percent([float(np.mean(gain)) for gain in gains]),
            "settled": _percent([_settled_gain(c, r) for c, r in pairs]),
            "recovered": _requests(recovered),
            "p50": _percent([_ratio(c, r, 50) for c, r in pairs]),
            "p99": _percent([_ratio(c, r, 99) for c, r in pairs]),
            "joined": _number([float(c.joined) for c in courses]),
            "moved": _percent([c.moved_share for c in courses], sign=""),
            "taken": float(np.mean([sum(r.is_accepted for r in c.results) for c in courses])),
            "rejected": float(
                np.mean([sum(not r.is_accepted for r in c.results) for c in courses])
            ),
            "course": np.mean(gains, axis=0).round(4).tolist(),
        }
    return {"bin_size": settings.bin_size, "variants": variants}


def _settled_gain(course: Course, reference: Course) -> float:
    last = max(1, int(SETTLED_SHARE * len(course.distinct)))
    return float(np.mean(course.distinct[-last:]) / np.mean(reference.distinct[-last:]) - 1)


def _ratio(course: Course, reference: Course, percentile: int) -> float:
    ours, theirs = (np.percentile(c.tpot_N, percentile) for c in (course, reference))
    return float(ours / theirs - 1)


def recovered_after(gains: Sequence[float], aim: float, bin_size: int) -> float:
    """Requests until a bin has RECOVERED of the gain of `fitted before`; infinite if never."""
    for i, gain in enumerate(gains):
        if gain <= RECOVERED * aim:
            return float(i * bin_size)
    return float("inf")


def _percent(values: list[float], sign: str = "+") -> dict[str, Any]:
    low, high = interval(values)
    text = f"{100 * np.mean(values):{sign}.1f} %"
    if low < high:  # several seeds, and not the reference
        text += f" ({100 * low:{sign}.1f}..{100 * high:{sign}.1f})"
    return {"values": [round(value, 4) for value in values], "text": text}


def _number(values: list[float]) -> dict[str, Any]:
    text = f"{np.mean(values):.1f} ({min(values):.0f}..{max(values):.0f})"
    return {"values": values, "text": text}


def _requests(values: list[float]) -> dict[str, Any]:
    """The median run and both ends; None for runs that did not get there."""
    ends = (float(np.median(values)), min(values), max(values))
    middle, low, high = ("never" if value == np.inf else f"{value:.0f}" for value in ends)
    known = [None if value == np.inf else value for value in values]
    return {"values": known, "text": middle if low == high else f"{middle} ({low}..{high})"}


def _split_domains(workload: Workload, seed: int) -> tuple[set[str], set[str]]:
    """Two sets of domains, drawn so that their requests are about as many."""
    labels, sizes = np.unique(
        [workload.trace.domains[int(r)] for r in workload.served], return_counts=True
    )
    if len(labels) < 2:
        raise ValueError(f"drift needs requests of at least two domains, the trace has {labels}")
    order = np.random.default_rng([seed, 3]).permutation(len(labels))
    early: set[str] = set()
    num_early = 0
    for i in order[:-1]:
        if num_early and num_early + sizes[i] / 2 > sizes.sum() / 2:
            break
        early.add(str(labels[i]))
        num_early += int(sizes[i])
    return early, {str(label) for label in labels} - early


def _of_domains(workload: Workload, requests: IndexArray, domains: set[str]) -> IndexArray:
    kept = [r for r in requests if workload.trace.domains[int(r)] in domains]
    return np.array(kept, dtype=np.int64)


def _calibrated_on(workload: Workload, domains: set[str]) -> Workload:
    calibration = _of_domains(workload, workload.calibration, domains)
    return replace(workload, calibration=calibration)


def _shifted_order(
    workload: Workload, early: set[str], settings: Settings, seed: int
) -> IndexArray:
    """Served requests of the early domains up to the change, then of the others, in shuffles."""
    rng = np.random.default_rng([seed, 1])
    first = _of_domains(workload, workload.served, early)
    rest = np.setdiff1d(workload.served, first)
    total = settings.change_at + settings.num_after + 64 * settings.concurrency

    def repeated(requests: IndexArray, number: int) -> list[IndexArray]:
        rounds = [rng.permutation(requests) for _ in range(-(-number // len(requests)))]
        return [np.concatenate(rounds)[:number]]

    return np.concatenate(
        repeated(first, settings.change_at) + repeated(rest, total - settings.change_at),
        dtype=np.int64,
    )
