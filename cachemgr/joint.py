"""Routing times caching: the expert loads of decode replicas under each routing policy.

Axes: L MoE layers, E experts, S steps, K replicas, R = K * L caches, U experts of a demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cachemgr.bound import Demands, minimum
from cachemgr.learned import ScoreTable
from cachemgr.policies import Retention, RowCaches, check_capacity, make_retention
from cachemgr.replay import run
from cachemgr.types import BoolArray
from calibration.artifact import Artifact
from calibration.parallel import choose_jobs, run_parallel
from calibration.replay import Workload
from calibration.replay_report import Settings, expected_s, fit_seeds, run_one
from calibration.traces import RoutingTrace
from router.policy import make_policy

POLICIES = ("lru", "lfu", "lrfu", "learned", "min")


class ReplicaCaches:
    """Expert caches of all decode replicas of a replay: its observer, which prices every step.

    Args:
        num_layers: L.
        num_experts: E.
        capacity: B, slots of a layer.
        make: makes the retention of a replica, with L rows.
    """

    def __init__(
        self, num_layers: int, num_experts: int, capacity: int, make: Callable[[], Retention]
    ) -> None:
        check_capacity(capacity, num_experts, top_k=1)
        self._shape = (num_layers, num_experts, capacity)
        self._make = make
        self.caches: dict[int, RowCaches] = {}
        """Caches of each replica, by its number."""
        self.num_tokens = 0
        """Tokens decoded by all replicas."""

    def on_step(self, replica: int, union_LE: BoolArray, num_requests: int) -> float:
        """Loads of a step whose batch activates `union_LE`; mean over layers."""
        caches = self.caches.get(replica)
        if caches is None:
            caches = self.caches[replica] = RowCaches(*self._shape, self._make())
        self.num_tokens += num_requests
        return float(caches.access(slice(0, self._shape[0]), union_LE).mean())

    def resident(self, replica: int) -> BoolArray:
        """What the cache of a replica that has run a step holds; bool (L, E), not to be changed."""
        return self.caches[replica].resident_RE

    @property
    def loads_per_token(self) -> float:
        """Experts loaded, all layers and replicas, over tokens."""
        loads = sum(caches.ledger.totals().loads for caches in self.caches.values())
        return loads / self.num_tokens if self.num_tokens else float("nan")


class UnionRecorder:
    """Keeps what each step of each replica activates, to replay caches of any kind afterwards.

    Args:
        caches: see the same steps, for routing that asks what replicas hold; None: it does not.
    """

    def __init__(self, caches: ReplicaCaches | None = None) -> None:
        self._caches = caches
        self._steps: dict[int, list[NDArray[np.uint8]]] = {}
        self._num_experts = 0
        self.num_tokens = 0

    def on_step(self, replica: int, union_LE: BoolArray, num_requests: int) -> float:
        """Takes a step; what it loads costs no time."""
        if self._caches is not None:
            self._caches.on_step(replica, union_LE, num_requests)
        self._steps.setdefault(replica, []).append(np.packbits(union_LE, axis=1))
        self._num_experts = union_LE.shape[1]
        self.num_tokens += num_requests
        return 0.0

    def demands(self) -> Demands:
        """Every layer of every replica as a cache of its own, the replica with most steps first."""
        replicas = sorted(self._steps.values(), key=len, reverse=True)
        parts = []
        for steps in replicas:
            unions_SLE = np.unpackbits(np.stack(steps), axis=2, count=self._num_experts)
            parts.append(_as_ids(unions_SLE.astype(np.bool_)))
        num_steps, width = len(parts[0]), max(part.shape[2] for part in parts)
        num_layers = parts[0].shape[1]
        ids_SKLU = np.full((num_steps, len(parts), num_layers, width), -1, dtype=np.int16)
        for k, part in enumerate(parts):
            ids_SKLU[: len(part), k, :, : part.shape[2]] = part
        return Demands(ids_SKLU.reshape(num_steps, -1, width), self._num_experts)


def batch_demands(trace: RoutingTrace, batch: int, seed: int) -> Demands:
    """What a busy replica executes: requests one after the other in `batch` lanes, in any order.

    Args:
        trace: requests.
        batch: lanes, each with one token a step.
        seed: of the order of requests.

    Raises:
        ValueError: fewer tokens than lanes.
    """
    order = np.random.default_rng(seed).permutation(len(trace))
    tokens_TLk = np.concatenate([trace.tokens(int(request)) for request in order])
    num_steps = len(tokens_TLk) // batch
    if not num_steps:
        raise ValueError(
            f"a batch of {batch} needs as many tokens, the trace has {len(tokens_TLk)}"
        )
    unions_SLE = np.zeros((num_steps, trace.num_layers, trace.num_experts), dtype=np.bool_)
    for lane in range(batch):
        ids_SLk = tokens_TLk[lane * num_steps : (lane + 1) * num_steps]
        np.put_along_axis(unions_SLE, ids_SLk.astype(np.int64), True, axis=2)
    return Demands(_as_ids(unions_SLE), trace.num_experts)


def _as_ids(unions_SLE: BoolArray) -> NDArray[np.int16]:
    """Ids of each union, ascending and padded with -1."""
    sizes_SL = np.count_nonzero(unions_SLE, axis=2)
    ids_SLU = np.full((*sizes_SL.shape, int(sizes_SL.max())), -1, dtype=np.int16)
    filled = np.arange(ids_SLU.shape[2]) < sizes_SL[:, :, None]
    ids_SLU[filled] = unions_SLE.nonzero()[2]
    return ids_SLU


@dataclass(frozen=True)
class Cell:
    """Loads of one routing policy, cache policy and capacity.

    Attributes:
        loads_per_token: experts loaded, all layers, over tokens; one value a seed.
        passes: executions of a layer over steps, over 1 where unions exceed the capacity; the
            least possible for `min`.
        pressure: mean union over capacity.
    """

    loads_per_token: list[float]
    passes: list[float]
    pressure: list[float]

    def extend(self, other: Cell) -> None:
        """Append the values of other seeds."""
        self.loads_per_token.extend(other.loads_per_token)
        self.passes.extend(other.passes)
        self.pressure.extend(other.pressure)


Matrix = dict[str, dict[str, dict[int, Cell]]]
"""Cache policy to routing policy to capacity."""


def joint(
    trace: RoutingTrace,
    settings: Settings,
    capacities: Sequence[int],
    policies: Sequence[str] = ("lrfu",),
    lambda_: float = 0.03,
    table: ScoreTable | None = None,
    tell: Callable[[str], object] = lambda text: None,
    jobs: int | None = 1,
) -> Matrix:
    """Route requests by every routing policy, and replay caches on what the replicas execute.

    Caches start cold, and every step counts. Routing that asks what replicas hold is replayed once
    a capacity, with LRFU caches of that size, whatever is replayed on its steps afterwards.

    Args:
        trace: recorded requests.
        settings: of the replay; its policies are the routing policies.
        capacities: slots of a layer on each replica.
        policies: cache policies, of `POLICIES`; `min` is the `union` bound.
        lambda_: of lrfu.
        table: of learned.
        tell: told after each run of `num_runs`.
        jobs: processes; None: as many as pay.

    Raises:
        ValueError: unknown cache policy, learned without its score, or capacity out of range.
    """
    for name in policies:
        if name not in POLICIES:
            raise ValueError(
                f"unknown cache policy {name!r} of batches: choose from {', '.join(POLICIES)}"
            )
    for capacity in capacities:
        check_capacity(capacity, trace.num_experts, trace.top_k)
    matrix: Matrix = {
        name: {
            routing: {capacity: Cell([], [], []) for capacity in capacities}
            for routing in settings.policies
        }
        for name in policies
    }

    runs = num_runs(settings, capacities)
    jobs = choose_jobs(jobs, runs, expected_s(settings, runs))
    calls = [
        (workload, artifact, settings, routing, seed, group, policies, lambda_, table)
        for seed, workload, artifact in fit_seeds(trace, settings, jobs)
        for routing in settings.policies
        for group in _groups(settings, routing, capacities)
    ]

    def on_done(number: int) -> None:
        _, _, _, routing, seed, group, *_ = calls[number]
        tell(f"seed {seed}, {routing}, {', '.join(map(str, group))} slots")

    for call, row in zip(calls, run_parallel(_row, calls, jobs, on_done), strict=True):
        for name, cells in row.items():
            for capacity, cell in cells.items():
                matrix[name][call[3]][capacity].extend(cell)
    return matrix


def _row(
    workload: Workload,
    artifact: Artifact,
    settings: Settings,
    routing: str,
    seed: int,
    group: Sequence[int],
    policies: Sequence[str],
    lambda_: float,
    table: ScoreTable | None,
) -> dict[str, dict[int, Cell]]:
    """One replay of a routing policy, and caches of a group of capacities on its steps."""
    trace = workload.trace
    caches = None
    if asks_residents(settings, routing):
        lrfu = partial(make_retention, "lrfu", trace.num_layers, trace.num_experts, lambda_=lambda_)
        caches = ReplicaCaches(trace.num_layers, trace.num_experts, group[0], lrfu)
    recorder = UnionRecorder(caches)
    residents = None if caches is None else caches.resident
    run_one(workload, artifact, settings, routing, seed, recorder, residents)
    demands = recorder.demands()
    row = {name: {capacity: Cell([], [], []) for capacity in group} for name in policies}
    for name, cells in row.items():
        for capacity, cell in cells.items():
            fill(cell, demands, recorder.num_tokens, name, capacity, lambda_, table)
    return row


def asks_residents(settings: Settings, routing: str) -> bool:
    """Whether a routing policy asks what replicas hold."""
    policy = make_policy(
        routing,
        resident_weight=settings.resident_weight,
        caches_experts=settings.caches_experts,
    )
    return policy.resident_weight > 0


def num_runs(settings: Settings, capacities: Sequence[int]) -> int:
    """Runs of `joint`; each serves a group of capacities, with all cache policies."""
    groups = sum(len(_groups(settings, routing, capacities)) for routing in settings.policies)
    return len(settings.seeds) * groups


def _groups(settings: Settings, routing: str, capacities: Sequence[int]) -> list[list[int]]:
    """Capacities that one replay of a routing policy serves."""
    if asks_residents(settings, routing):
        return [[capacity] for capacity in capacities]
    return [list(capacities)]


def fill(
    cell: Cell,
    demands: Demands,
    num_tokens: int,
    name: str,
    capacity: int,
    lambda_: float,
    table: ScoreTable | None,
) -> None:
    """Replay a cache policy, or `min`, over what batches execute, and add its figures to a cell."""
    sizes_SR = demands.sizes_SR
    num_steps = np.count_nonzero(sizes_SR)
    if name == "min":
        loads = int(minimum(demands, capacity, "union", prove=False).loads_R.sum())
        passes = int((-(-sizes_SR // capacity)).sum())
    else:
        retention = make_retention(
            name, sizes_SR.shape[1], demands.num_items, lambda_=lambda_, table=table
        )
        totals = run(demands, capacity, retention).totals()
        loads, passes = totals.loads, totals.passes
    cell.loads_per_token.append(loads / num_tokens)
    cell.passes.append(passes / num_steps)
    cell.pressure.append(float(sizes_SR.sum() / num_steps / capacity))


PRICED = ("loads_per_token", "distinct", "tpot_p50", "tpot_p99", "tokens_per_time")

Priced = dict[str, dict[int, dict[str, list[float]]]]
"""Routing policy to capacity to figures of `PRICED`, one value a seed."""


def priced(
    trace: RoutingTrace,
    settings: Settings,
    capacities: Sequence[int],
    policy: str = "lrfu",
    lambda_: float = 0.03,
    table: ScoreTable | None = None,
    tell: Callable[[str], object] = lambda text: None,
    jobs: int | None = 1,
) -> Priced:
    """Replay routing and caches together: a step takes the time of its loads too.

    So a policy that saves loads has faster replicas, and what it costs in full batches shows as
    well. One run a cell.

    Args:
        trace: recorded requests.
        settings: of the replay; `law.per_load` prices a load.
        capacities: slots of a layer on each replica.
        policy: cache policy; `min` is none, as it needs to know what comes.
        lambda_: of lrfu.
        table: of learned.
        tell: told after each run.
        jobs: processes; None: as many as pay.

    Raises:
        ValueError: unknown cache policy, learned without its score, or capacity out of range.
    """
    for capacity in capacities:
        check_capacity(capacity, trace.num_experts, trace.top_k)

    retention = partial(
        make_retention, policy, trace.num_layers, trace.num_experts, lambda_=lambda_, table=table
    )
    retention()  # raises before the work begins
    num_runs = len(settings.seeds) * len(settings.policies) * len(capacities)
    jobs = choose_jobs(jobs, num_runs, expected_s(settings, num_runs))
    calls = [
        (workload, artifact, settings, routing, seed, capacity, retention)
        for seed, workload, artifact in fit_seeds(trace, settings, jobs)
        for routing in settings.policies
        for capacity in capacities
    ]

    def on_done(number: int) -> None:
        _, _, _, routing, seed, capacity, _ = calls[number]
        tell(f"seed {seed}, {routing}, {policy} {capacity}")

    figures: Priced = {
        routing: {capacity: {name: [] for name in PRICED} for capacity in capacities}
        for routing in settings.policies
    }
    results = run_parallel(_priced_figures, calls, jobs, on_done)
    for (_, _, _, routing, _, capacity, _), values in zip(calls, results, strict=True):
        for name in PRICED:
            figures[routing][capacity][name].append(values[name])
    return figures


def _priced_figures(
    workload: Workload,
    artifact: Artifact,
    settings: Settings,
    routing: str,
    seed: int,
    capacity: int,
    retention: Callable[[], Retention],
) -> dict[str, float]:
    trace = workload.trace
    caches = ReplicaCaches(trace.num_layers, trace.num_experts, capacity, retention)
    result = run_one(workload, artifact, settings, routing, seed, caches, caches.resident)
    values = result.figures()
    values["loads_per_token"] *= trace.num_layers  # was a mean over layers
    return values


def priced_rows(figures: Priced, capacity: int, reference: str) -> list[list[str]]:
    """Table of a capacity: figures under the reference, changes in % of the others."""
    lines = [[f"{capacity} slots", *PRICED]]
    for routing, by_capacity in figures.items():
        line = [routing]
        for name in PRICED:
            values = np.array(by_capacity[capacity][name])
            if routing == reference:
                line.append(f"{values.mean():.2f}")
            else:
                line.append(_change(values, figures[reference][capacity][name]))
        lines.append(line)
    return lines


def rows(matrix: Matrix, name: str, reference: str) -> list[list[str]]:
    """Table of a cache policy: loads per token under the reference, changes in % of the others."""
    by_routing = matrix[name]
    capacities = list(by_routing[reference])
    lines = [[f"{name}, slots", *(str(capacity) for capacity in capacities)]]
    for routing, cells in by_routing.items():
        line = [routing if routing != reference else f"{routing} (loads/token)"]
        for capacity in capacities:
            values = np.array(cells[capacity].loads_per_token)
            if routing == reference:
                line.append(f"{values.mean():.2f}")
                continue
            line.append(_change(values, by_routing[reference][capacity].loads_per_token))
        lines.append(line)
    passes = [np.mean(by_routing[reference][capacity].passes) for capacity in capacities]
    lines.append([f"passes/step ({reference})", *(f"{value:.2f}" for value in passes)])
    return lines


def _change(values: NDArray[np.float64], reference: Sequence[float]) -> str:
    """Mean change in % against the reference, seed by seed, and its range."""
    change = 100 * (values / reference - 1)
    spread = f" ({change.min():+.1f}..{change.max():+.1f})" if len(change) > 1 else ""
    return f"{change.mean():+.1f} %{spread}"
