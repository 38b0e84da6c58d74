"""Replay of recorded routing through expert caches, and the distance of each policy to the bound.

The requests of a trace are independent: each starts with empty caches and decodes alone. All of
them, and all their layers, are stepped together, since what one cache does does not depend on
another.

Axes: N requests, S steps (tokens of the longest request), L MoE layers, E experts, k experts a
token chooses, R = N * L caches ("rows", the layers of a request side by side), U experts of a
demand.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachemgr.bound import Bound, Demands, Variant, certify, minimum
from cachemgr.policies import Retention, RowCaches, check_capacity, make_retention
from cachemgr.types import BoolArray, FloatArray, IntArray, Ledger, Totals
from calibration.traces import RoutingTrace, expert_counts

Progress = Callable[[int], object]

BOUNDS: dict[str, Variant] = {"min": "forced", "min-bypass": "bypass", "min-shared": "shared"}
POLICIES = ("lru", "lfu", "lrfu", "static", "gate", "learned", *BOUNDS)


def layer_demands(trace: RoutingTrace) -> Demands:
    """Every layer of every request as a cache of its own; row n * L + l of the longest first."""
    ids_SNLk = _by_length(trace)
    num_steps, num_requests, num_layers, top_k = ids_SNLk.shape
    return Demands(ids_SNLk.reshape(num_steps, num_requests * num_layers, top_k), trace.num_experts)


def pool_demands(trace: RoutingTrace) -> Demands:
    """Every request as one cache that its layers share; the layers of a token are its steps."""
    ids_SNLk = _by_length(trace).astype(np.int32)
    _, num_requests, num_layers, top_k = ids_SNLk.shape
    first_L1 = (np.arange(num_layers, dtype=np.int32) * trace.num_experts)[:, None]
    ids_SNLk = np.where(ids_SNLk >= 0, ids_SNLk + first_L1, -1)
    ids_SRU = ids_SNLk.transpose(0, 2, 1, 3).reshape(-1, num_requests, top_k)
    return Demands(ids_SRU, num_layers * trace.num_experts)


def by_length(trace: RoutingTrace) -> IntArray:
    """Requests in the order of the rows: the longest first, then as recorded."""
    order: IntArray = np.argsort(-trace.num_tokens_N, kind="stable")
    return order


def _by_length(trace: RoutingTrace) -> NDArray[np.int16]:
    shape = (int(trace.num_tokens_N.max()), len(trace), trace.num_layers, trace.top_k)
    ids_SNLk = np.full(shape, -1, dtype=np.int16)
    for n, request in enumerate(by_length(trace)):
        tokens = trace.tokens(int(request))
        ids_SNLk[: len(tokens), n] = tokens
    return ids_SNLk


def run(
    demands: Demands,
    capacity: int,
    retention: Retention,
    *,
    budget: int = 0,
    weights_SRU: FloatArray | None = None,
    progress: Progress | None = None,
) -> Ledger:
    """Step every cache through its demands.

    Args:
        demands: what is executed.
        capacity: B.
        retention: scores of the same rows.
        budget: candidates of a pre-access refinement by the retention's score after the step
            before; 0 for none.
        weights_SRU: given to a retention that takes them with `observe_weights`.
        progress: called with a number of finished steps.

    Returns:
        Counts of each row.
    """
    num_rows = demands.ids_SRU.shape[1]
    caches = RowCaches(num_rows, demands.num_items, capacity, retention)
    # One more item takes the padding.
    demand_RM = np.zeros((num_rows, demands.num_items + 1), dtype=np.bool_)
    rows_R1 = np.arange(num_rows)[:, None]
    for s, active in enumerate(demands.active_S.tolist()):
        rows = slice(0, active)
        ids_RU = demands.ids_SRU[s, rows]
        demand_RM[rows] = False
        demand_RM[rows_R1[rows], ids_RU] = True
        if budget and s:
            caches.refine(rows, retention.scores(rows), budget)
        if weights_SRU is not None and isinstance(retention, GateLRFU):
            retention.weigh(rows, ids_RU, weights_SRU[s, rows])
        caches.access(rows, demand_RM[rows, :-1])
        if progress is not None:
            progress(1)
    return caches.ledger


class GateLRFU:
    """LRFU that adds the gate's weight of a use instead of 1.

    Args:
        num_rows: caches.
        num_experts: E.
        lambda_: in [0, 1], as of LRFU.
    """

    name = "gate"

    def __init__(self, num_rows: int, num_experts: int, lambda_: float = 0.03) -> None:
        if not 0 <= lambda_ <= 1:
            raise ValueError(f"lambda of gate must be in [0, 1], got {lambda_}")
        self._decay = 0.5**lambda_
        self._sum_RM = np.zeros((num_rows, num_experts + 1))

    def weigh(self, rows: slice, ids_RU: NDArray[Any], weights_RU: FloatArray) -> None:
        """Weights of the coming step's experts; call before the access."""
        self._sum_RM[rows] *= self._decay
        self._sum_RM[np.arange(len(ids_RU))[:, None] + (rows.start or 0), ids_RU] += weights_RU

    def observe(self, rows: slice, demand_RE: BoolArray) -> None:
        """See `Retention.observe`; `weigh` has done it."""

    def scores(self, rows: slice) -> FloatArray:
        """See `Retention.scores`."""
        return self._sum_RM[rows, :-1]

    def reset(self, rows: slice) -> None:
        """See `Retention.reset`."""
        self._sum_RM[rows] = 0


@dataclass(frozen=True)
class Outcome:
    """What one policy needed.

    Attributes:
        totals: sums over requests and layers.
        num_tokens: T.
        loads_L: D + P of each layer; None for a pool of all layers.
    """

    totals: Totals
    num_tokens: int
    loads_L: IntArray | None

    def figures(self, expert_bytes: float | None = None) -> dict[str, float]:
        """Metrics of the report; bytes only when the size of an expert is given."""
        totals, tokens = self.totals, self.num_tokens
        figures = {
            "hit": totals.hit,
            "adj_hit": totals.adj_hit,
            "demand_per_token": totals.demand / tokens,
            "proactive_per_token": totals.proactive / tokens,
            "loads_per_token": totals.loads_per_token(tokens),
        }
        if expert_bytes is not None:
            figures["load_mb_per_token"] = totals.bytes_per_token(tokens, expert_bytes) / 1e6
        return figures


def replay(
    trace: RoutingTrace,
    policies: Sequence[str],
    capacity: int,
    *,
    lambda_: float = 0.03,
    budget: int = 0,
    weights_TLk: FloatArray | None = None,
    learned: Callable[[int], Retention] | None = None,
    prove: bool = False,
    progress: Callable[[str, int], Progress] | None = None,
) -> dict[str, Outcome]:
    """Replay policies over a trace, batch 1, each request from empty caches.

    Args:
        trace: requests.
        policies: names from `POLICIES`.
        capacity: B, slots of a layer; `min-shared` has L x B slots for all layers together.
        lambda_: of `lrfu` and `gate`.
        budget: pre-access refinement by each policy's own score; the bounds need none.
        weights_TLk: router weights of each token's experts, for `gate`; (T, L, k).
        learned: makes the retention of `learned` for a number of requests.
        prove: certify the bounds; takes about ten times as long as finding them.
        progress: given a policy and its number of steps, returns a function to call with steps.

    Raises:
        ValueError: unknown policy, capacity out of range, or a policy without its input.
    """
    check_capacity(capacity, trace.num_experts, trace.top_k, budget)
    for name in policies:
        if name not in POLICIES:
            raise ValueError(f"unknown cache policy {name!r}: choose from {', '.join(POLICIES)}")
    if "gate" in policies and weights_TLk is None:
        raise ValueError("policy gate needs the router weights of the trace: give --probs")
    if "learned" in policies and learned is None:
        raise ValueError("policy learned needs a score: give --score (see `eldr cache train`)")
    demands = layer_demands(trace)
    num_tokens, num_steps = len(trace.ids_TLk), len(demands.ids_SRU)
    outcomes = {}
    for name in policies:
        if name in BOUNDS:
            outcomes[name] = _bound(trace, demands, capacity, BOUNDS[name], prove, progress)
            continue
        num_rows = demands.ids_SRU.shape[1]
        weights_SRU = None
        retention: Retention
        if name == "learned":
            assert learned is not None
            retention = learned(len(trace))
        elif name == "gate":
            assert weights_TLk is not None
            retention = GateLRFU(num_rows, trace.num_experts, lambda_)
            weights_SRU = _rows_of(trace, weights_TLk)
        else:
            retention = make_retention(
                name,
                num_rows,
                trace.num_experts,
                lambda_=lambda_,
                hotness_RE=_counts_of_others(trace) if name == "static" else None,
            )
        ledger = run(
            demands,
            capacity,
            retention,
            budget=budget,
            weights_SRU=weights_SRU,
            progress=progress(name, num_steps) if progress is not None else None,
        )
        loads_R = ledger.demand + ledger.proactive
        loads_L = loads_R.reshape(len(trace), trace.num_layers).sum(axis=0)
        outcomes[name] = Outcome(ledger.totals(), num_tokens, loads_L)
    return outcomes


def _bound(
    trace: RoutingTrace,
    demands: Demands,
    capacity: int,
    variant: Variant,
    prove: bool,
    progress: Callable[[str, int], Progress] | None,
) -> Outcome:
    if variant == "shared":
        demands, capacity = pool_demands(trace), capacity * trace.num_layers
    name = next(key for key, value in BOUNDS.items() if value == variant)
    tell = progress(name, len(demands.ids_SRU)) if progress is not None else None
    bound = minimum(demands, capacity, variant, prove=prove, progress=tell)
    if prove:
        certify(demands, capacity, variant, bound)
    loads_L = None
    if variant != "shared":
        loads_L = bound.loads_R.reshape(len(trace), trace.num_layers).sum(axis=0)
    return Outcome(_totals(demands, bound), len(trace.ids_TLk), loads_L)


def _totals(demands: Demands, bound: Bound) -> Totals:
    steps = int(demands.active_S.sum())
    return Totals(
        accesses=int(bound.accesses_R.sum()),
        demand=int(bound.loads_R.sum()),
        proactive=0,
        evictions=0,
        steps=steps,
        passes=steps,
        overflows=0,
    )


def _counts_of_others(trace: RoutingTrace) -> FloatArray:
    """Uses of each expert in all other requests: hotness for `static` without looking ahead."""
    own_NLE = np.stack(
        [expert_counts(trace.tokens(int(r)), trace.num_experts) for r in by_length(trace)]
    )
    others_RE: FloatArray = (own_NLE.sum(axis=0) - own_NLE).reshape(-1, trace.num_experts)
    return others_RE


def _rows_of(trace: RoutingTrace, values_TLk: FloatArray) -> FloatArray:
    """Values of tokens in the layout of `layer_demands`; 0 where a row has ended."""
    num_steps, num_requests = int(trace.num_tokens_N.max()), len(trace)
    values = np.zeros((num_steps, num_requests, *values_TLk.shape[1:]), dtype=np.float32)
    for n, request in enumerate(by_length(trace)):
        start, stop = trace.offsets[request], trace.offsets[request + 1]
        values[: stop - start, n] = values_TLk[start:stop]
    return values.reshape(num_steps, num_requests * trace.num_layers, -1)


def load_gate_weights(
    path: str | Path, trace: RoutingTrace
) -> tuple[RoutingTrace, NDArray[np.float32]]:
    """Router weights of a trace, and the requests that have them.

    Args:
        path: .npz with `probs_u8` (weight x 255, [layer, rank, token]), `offsets`, and `trace`,
            the number of each request in the trace.
        trace: the requests with their experts, in the same order of rank.

    Returns:
        The requests of `trace` that have weights, and the weights; float32 (T, L, k).

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such an archive, or it belongs to another trace.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no router weights at {path}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not an .npz archive")
    names = ("probs_u8", "offsets", "trace")
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise ValueError(f"{path}: needs {', '.join(names)}; {', '.join(missing)} missing")
            probs_LkT, offsets, requests = (archive[name] for name in names)
    except (zipfile.BadZipFile, EOFError, OSError, TypeError) as err:
        raise ValueError(f"{path}: not a readable .npz archive: {err}") from err
    if requests.ndim != 1 or requests.dtype.kind not in "ui" or not len(requests):
        raise ValueError(f"{path}: `trace` must be a row of request numbers")
    if int(requests.max()) >= len(trace):
        raise ValueError(
            f"{path}: names request {requests.max()}, the trace has {len(trace)}: is it the right "
            f"pair of files?"
        )
    part = trace.subset(requests)
    expected = (trace.num_layers, trace.top_k, len(part.ids_TLk))
    if probs_LkT.shape != expected or not np.array_equal(offsets, part.offsets):
        raise ValueError(
            f"{path}: weights of shape {probs_LkT.shape} for requests that need {expected}: is it "
            f"the right pair of files?"
        )
    return part, (probs_LkT.transpose(2, 0, 1) / np.float32(255)).astype(np.float32)
