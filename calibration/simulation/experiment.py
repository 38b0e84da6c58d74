"""All runs of a simulation, and their summary: means, and paired ratios with intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.parallel import choose_jobs, run_parallel
from calibration.replay_report import LOAD_BALANCERS, interval
from calibration.simulation import published
from calibration.simulation.config import SimulationConfig, WorkloadSection
from calibration.simulation.laws import NamedLaw, make_law
from calibration.simulation.routing import FittedRouter, fit_router
from calibration.simulation.simulator import RunResult, Simulator
from calibration.simulation.workload import Workload, make_workload
from calibration.step_time import StepTimeLaw

SECONDS_A_REQUEST = {"expected": 8e-5, "exact": 1e-2}
"""Rough time of a run, by fidelity."""

RATIOS = ("tpot_p50", "tpot_p95", "tpot_p99", "ttft_p50", "distinct")


@dataclass(frozen=True, eq=False)
class Cell:
    """One policy at one rate in one variant.

    Attributes:
        values: swept fields of the variant.
        rate: requests per second.
        policy: name of the policy.
        runs: one a seed.
    """

    values: dict[str, Any]
    rate: float
    policy: str
    runs: list[RunResult]

    def figures(self) -> dict[str, list[float]]:
        """Each figure over seeds."""
        rows = [run.figures() for run in self.runs]
        return {name: [row[name] for row in rows] for name in rows[0]}


@dataclass(frozen=True, eq=False)
class Setting:
    """What a variant was run with.

    Attributes:
        values: swept fields.
        config: the configuration with them.
        workload: its requests.
        router: artifact and signatures.
        law: step time.
        cells: by rate, then policy.
    """

    values: dict[str, Any]
    config: SimulationConfig
    workload: Workload
    router: FittedRouter
    law: NamedLaw
    cells: dict[float, dict[str, Cell]]


@dataclass(frozen=True, eq=False)
class Outcome:
    """All runs of a configuration.

    Attributes:
        settings: one a variant.
        jobs: processes that shared the runs.
        wall_s: time from the first run's start to the last one's end, with that of starting
            processes.
    """

    settings: list[Setting]
    jobs: int
    wall_s: float


def num_runs(config: SimulationConfig) -> int:
    """Runs of all variants, rates, policies and seeds."""
    return sum(
        len(variant.traffic.rates) * len(variant.router.policies) * variant.seeds
        for _, variant in config.variants()
    )


def run_all(
    config: SimulationConfig,
    on_run: Callable[[str], object] = lambda text: None,
    jobs: int | None = 1,
) -> Outcome:
    """Run every variant, rate, policy and seed.

    Args:
        config: what to run.
        on_run: told what has just run.
        jobs: processes; None: as many as pay. Requests and routers are made here, once.
    """
    prepared = _prepare(config)
    calls = [
        (variant, workload, router, law.law, policy, rate, seed)
        for _, variant, workload, router, law in prepared
        for rate in variant.traffic.rates
        for policy in variant.router.policies
        for seed in range(variant.seeds)
    ]
    jobs = choose_jobs(jobs, len(calls), _expected_s(config))

    def on_done(number: int) -> None:
        *_, policy, rate, seed = calls[number]
        on_run(f"{rate:g}/s {policy} seed {seed}")

    started = time.perf_counter()
    runs = iter(run_parallel(_run, calls, jobs, on_done))
    wall_s = time.perf_counter() - started
    settings = []
    for values, variant, workload, router, law in prepared:
        cells = {
            rate: {
                policy: Cell(values, rate, policy, [next(runs) for _ in range(variant.seeds)])
                for policy in variant.router.policies
            }
            for rate in variant.traffic.rates
        }
        settings.append(Setting(values, variant, workload, router, law, cells))
    return Outcome(settings, jobs, wall_s)


def _prepare(
    config: SimulationConfig,
) -> list[tuple[dict[str, Any], SimulationConfig, Workload, FittedRouter, NamedLaw]]:
    """Each variant with its requests, router and law; what variants share is made once."""
    workloads: dict[WorkloadSection, Workload] = {}
    routers: dict[tuple[Any, ...], FittedRouter] = {}
    prepared = []
    for values, variant in config.variants():
        section = variant.workload
        workload = workloads.get(section)
        if workload is None:
            workload = workloads[section] = make_workload(section)
            workload.derive(exact=variant.fidelity == "exact")
        wanted = (variant.decode.replicas, variant.router.signature, variant.router.clustering)
        router = routers.get((section, *wanted))
        if router is None:
            router = routers[section, *wanted] = fit_router(workload, *wanted)
            router.derive()
        prepared.append((values, variant, workload, router, make_law(variant.step_time)))
    return prepared


def _run(
    config: SimulationConfig,
    workload: Workload,
    router: FittedRouter,
    law: StepTimeLaw,
    policy: str,
    rate: float,
    seed: int,
) -> RunResult:
    return Simulator(config, workload, router, law, policy, rate, seed).run()


def _expected_s(config: SimulationConfig) -> float:
    """Rough time of all runs, one after the other, seconds."""
    requests = sum(
        rate * (variant.traffic.warm_up_s + variant.traffic.duration_s)
        for _, variant in config.variants()
        for rate in variant.traffic.rates
        for _ in range(len(variant.router.policies) * variant.seeds)
    )
    return requests * SECONDS_A_REQUEST[config.fidelity]


def reference(setting: Setting) -> str:
    """The strongest load balancer: least mean TPOT P50 over rates and seeds; else the first."""
    policies = setting.config.router.policies
    balancers = [policy for policy in policies if policy in LOAD_BALANCERS]

    def mean_p50(policy: str) -> float:
        cells = (row[policy] for row in setting.cells.values())
        return float(np.mean([value for cell in cells for value in cell.figures()["tpot_p50"]]))

    return min(balancers, key=mean_p50) if balancers else policies[0]


def summary(config: SimulationConfig, outcome: Outcome) -> dict[str, Any]:
    """The report as one JSON object; NaN becomes None.

    Its `speed` says both how fast all runs were together (`speedup`, against the clock on the wall)
    and how fast each was by itself (`median`, `least`).
    """
    settings = outcome.settings
    runs = [
        run
        for setting in settings
        for row in setting.cells.values()
        for cell in row.values()
        for run in cell.runs
    ]
    virtual_s = sum(run.virtual_s for run in runs)
    speedups = [run.speedup for run in runs]
    return {
        "name": config.name,
        "seeds": config.seeds,
        "fidelity": config.fidelity,
        "variants": [_variant(setting) for setting in settings],
        "paper": _paper(config, settings),
        "speed": {
            "runs": len(runs),
            "virtual_s": round(virtual_s, 1),
            "jobs": outcome.jobs,
            "wall_s": round(outcome.wall_s, 2),
            "speedup": round(virtual_s / outcome.wall_s, 1),
            "median": round(float(np.median(speedups)), 1),
            "least": round(min(speedups), 1),
            "requests": sum(run.num_requests for run in runs),
            "tokens": sum(run.num_tokens for run in runs),
        },
    }


def _variant(setting: Setting) -> dict[str, Any]:
    best = reference(setting)
    law, artifact = setting.law, setting.router.artifact
    rates = []
    for rate, row in setting.cells.items():
        base = row[best].figures()
        policies: dict[str, dict[str, Any]] = {}
        for policy, cell in row.items():
            figures = cell.figures()
            policies[policy] = {
                **{name: _mean(values) for name, values in figures.items()},
                "ratio": {name: _ratio(figures[name], base[name]) for name in RATIOS},
            }
        rates.append({"rate": rate, "policies": policies})
    config = setting.config
    return {
        "values": setting.values,
        "pool": f"{config.prefill.replicas}P{config.decode.replicas}D",
        "source": setting.workload.source,
        "facts": {name: round(value, 4) for name, value in setting.workload.facts.items()},
        "rho": round(artifact.scores["rho"], 4),
        "layers_kept": len(artifact.layer_mask),
        "law_s": {name: getattr(law.law, name) for name in type(law.law).__slots__},
        "law": config.step_time.law,
        "law_origin": law.origin,
        "reference": best,
        "rates": rates,
    }


def _ratio(values: list[float], base: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(values, base, strict=True)]
    if any(math.isnan(ratio) for ratio in ratios):
        return {"mean": None, "ci": None}
    low, high = interval(ratios)
    bounds = None if math.isnan(low) else [round(low, 4), round(high, 4)]
    return {"mean": round(float(np.mean(ratios)), 4), "ci": bounds}


def _mean(values: list[float]) -> float | None:
    mean = float(np.mean(values))
    return None if math.isnan(mean) else round(mean, 3)


def _paper(config: SimulationConfig, settings: list[Setting]) -> dict[str, Any] | None:
    """Our figures beside the published ones; None where nothing was asked for."""
    if config.paper is None:
        return None
    key = (config.paper.workload, config.paper.model)
    study = config.paper.study
    rows = _rate_rows(key, settings) if study == "rates" else _swept_rows(study, key, settings)
    notes = ["scale", "shape", "ttft", "tail", "structure", "refit", "runs"]
    if config.workload.source == "trace":
        notes = ["trace", "tail", "refit", "runs"]
    elif key[0] == "lang":
        notes.insert(notes.index("structure") + 1, "languages")
    return {
        "study": study,
        "workload": key[0],
        "model": key[1],
        "rows": rows,
        "notes": [published.NOTES[name] for name in notes],
    }


def _rate_rows(key: tuple[str, str], settings: list[Setting]) -> list[dict[str, Any]]:
    """Each rate and policy: TPOT, and its change against round robin, theirs and ours."""
    theirs = published.TPOT_MS[key]
    rows = []
    for setting in settings:
        for rate, row in setting.cells.items():
            if rate not in published.RATES or "rr" not in row or not _is_measured(row):
                continue
            column = published.RATES.index(rate)
            base = row["rr"].figures()
            for policy, cell in row.items():
                figures = cell.figures()
                pair = theirs[policy][column] if policy in theirs else None
                base_pair = theirs["rr"][column]
                rows.append(
                    {
                        "case": f"{rate:g} req/s",
                        "policy": policy,
                        "paper_ms": None if pair is None else list(pair),
                        "ours_ms": [_mean(figures["tpot_p50"]), _mean(figures["tpot_p99"])],
                        "paper_change": None
                        if pair is None
                        else [_percent(a / b) for a, b in zip(pair, base_pair, strict=True)],
                        "ours_change": _changes(figures, base),
                        "ours_distinct": _changes(figures, base, ("distinct",))[0],
                        "paper_ttft_ms": published.TTFT_MS[key].get(policy, {}).get(rate),
                        "ours_ttft_ms": _mean(figures["ttft_p50"]),
                    }
                )
    return rows


def _swept_rows(study: str, key: tuple[str, str], settings: list[Setting]) -> list[dict[str, Any]]:
    """Each value of the swept field: change of the band against round robin."""
    field = published.SWEPT_FIELD[study]
    rows = []
    for setting in settings:
        value = setting.values.get(field)
        pair = published.SENSITIVITY[study].get(str(value), {}).get(key)
        for policy in setting.config.router.policies:
            cells = [row for row in setting.cells.values() if "rr" in row and _is_measured(row)]
            if policy in LOAD_BALANCERS or not cells:
                continue
            changes = [_changes(row[policy].figures(), row["rr"].figures()) for row in cells]
            distinct = [
                _changes(row[policy].figures(), row["rr"].figures(), ("distinct",))[0]
                for row in cells
            ]
            rows.append(
                {
                    "case": f"{field} = {value}",
                    "policy": policy,
                    "paper_ms": None,
                    "ours_ms": None,
                    "paper_change": list(pair) if pair and policy == "band" else None,
                    "ours_change": [
                        round(float(np.mean(c)), 1) for c in zip(*changes, strict=True)
                    ],
                    "ours_distinct": round(float(np.mean(distinct)), 1),
                }
            )
    return rows


def _is_measured(row: dict[str, Cell]) -> bool:
    """Whether every run of a rate has requests that ended."""
    return all(len(run.tpot_M) for cell in row.values() for run in cell.runs)


def _changes(
    figures: dict[str, list[float]],
    base: dict[str, list[float]],
    names: tuple[str, ...] = ("tpot_p50", "tpot_p99"),
) -> list[float]:
    """Mean over seeds of the change in percent, seed by seed."""
    return [
        _percent(float(np.mean([a / b for a, b in zip(figures[n], base[n], strict=True)])))
        for n in names
    ]


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 1)
