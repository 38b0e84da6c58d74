"""Active experts on the fullest EP rank, by placement, on recorded traces of real models.

    python -m bench.placement [--migration] [--json]

Half of a trace's requests, drawn by seed, are clustered by signature as ELDR does; each cluster
stands for one decode replica and gets placements fitted to its tokens. Steps of `--batch` tokens
are then drawn from the other half's requests, sent to their nearest cluster, and counted exactly.

Axes: M steps, b tokens of a step, T tokens, L MoE layers, E logical experts, P physical experts
(slots), R ranks, k experts a token chooses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.report import Spread, table
from cachemgr.activity import (
    Dispatch,
    active_probability,
    expected_max_active,
    independent_activity,
    token_activity,
)
from cachemgr.eplb import eplb, linear, round_robin
from cachemgr.migration import MigrationCost, relabel, replan
from cachemgr.placement import place
from cachemgr.placement_plan import IntArray, copies, num_moves, slot_ranks
from cachemgr.planner import MOVE_PRICE
from calibration.clustering import BalancedSphericalKMeans
from calibration.signature import SignatureTransform, compute_idf
from calibration.traces import IdArray, RoutingTrace, expert_counts, load_trace

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
KNUTH = 2654435769  # vLLM's hash of a token's place in the batch, which chooses among copies
FLOOR = "floor"
HORIZONS_STEPS = (300, 3000, 30_000)


def load_model(name: str, folder: Path = TRACES) -> RoutingTrace:
    """The recorded trace of `gptoss` or `deepseek`. Raises KeyError for another name."""
    files = {
        "gptoss": ("gptoss20b_requests_ids.npz", "gptoss20b_requests_meta.jsonl"),
        "deepseek": ("deepseek_v2_lite_esft_requests.npz", None),
    }
    ids, meta = files[name]
    return load_trace(folder / ids, None if meta is None else folder / meta)


def draw_steps(
    trace: RoutingTrace, batch: int, num_steps: int, rng: np.random.Generator
) -> IdArray:
    """Choices of `num_steps` batches of tokens drawn uniformly; (M, b, L, k)."""
    return trace.ids_TLk[rng.integers(len(trace.ids_TLk), size=(num_steps, batch))]


def active_per_rank(
    ids_MbLk: IdArray, placement_LP: IntArray, num_ranks: int, dispatch: Dispatch = "split"
) -> NDArray[np.int64]:
    """Active experts of each step, layer and rank, counted.

    Args:
        ids_MbLk: choices of each step's tokens; unsigned integers.
        placement_LP: expert of each slot.
        num_ranks: R.
        dispatch: "split" chooses the copy by the token's place in the batch, as vLLM does;
            "single" gives an expert to the rank with the fewest active experts so far, experts
            without a choice first.

    Returns:
        int64 (M, L, R).
    """
    num_steps, batch, num_layers, _ = ids_MbLk.shape
    num_slots = placement_LP.shape[1]
    num_experts = int(placement_LP.max()) + 1
    rank_P = slot_ranks(num_slots, num_ranks)
    copies_LE = copies(placement_LP, num_experts)
    token_hash_b = (np.arange(batch, dtype=np.int64) * KNUTH) & 0xFFFFFFFF
    counts_MLR = np.zeros((num_steps, num_layers, num_ranks), dtype=np.int64)
    steps = np.arange(num_steps)
    for layer in range(num_layers):
        ids_Mbk = ids_MbLk[:, :, layer].astype(np.int64)
        slots_of = [np.flatnonzero(placement_LP[layer] == e) for e in range(num_experts)]
        if dispatch == "split":
            slot_EC = np.array([np.resize(slots, num_slots) for slots in slots_of])
            copy_Mbk = token_hash_b[:, None] % copies_LE[layer][ids_Mbk]
            active_MP = np.zeros((num_steps, num_slots), dtype=bool)
            active_MP[steps[:, None, None], slot_EC[ids_Mbk, copy_Mbk]] = True
            counts_MLR[:, layer] = active_MP.reshape(num_steps, num_ranks, -1).sum(axis=2)
            continue
        active_ME = np.zeros((num_steps, num_experts), dtype=bool)
        active_ME[steps[:, None, None], ids_Mbk] = True
        for expert in np.argsort(copies_LE[layer], kind="stable"):
            ranks = rank_P[slots_of[expert]]
            chosen_M = ranks[counts_MLR[:, layer][:, ranks].argmin(axis=1)]
            counts_MLR[steps, layer, chosen_M] += active_ME[:, expert]
    return counts_MLR


def measure(
    trace: RoutingTrace,
    num_ranks: int,
    *,
    seed: int,
    batch: int = 16,
    num_clusters: int = 4,
    num_steps: int = 1000,
    num_spare: int = 0,
    dispatch: Dispatch = "split",
) -> dict[str, float]:
    """Active experts on the fullest rank, mean over steps, layers and clusters, by placement.

    Returns:
        Name to mean. `floor` is the mean of ceil(active / R), which no placement without copies
        can be under; `estimate, X` is `expected_max_active` of X from the joint activity of the
        tokens that the steps are drawn from.
    """
    rng = np.random.default_rng(seed)
    results: dict[str, list[float]] = {}
    for fitted, held_out, everything in _replicas(trace, num_clusters, seed):
        steps_MbLk = draw_steps(held_out, batch, num_steps, rng)
        true_LEE = token_activity(held_out.ids_TLk, trace.num_experts, batch)
        placements = _placements(
            fitted, everything, true_LEE, num_ranks, batch, num_spare, dispatch
        )
        for name, placement_LP in placements.items():
            active_MLR = active_per_rank(steps_MbLk, placement_LP, num_ranks, dispatch)
            results.setdefault(name, []).append(float(active_MLR.max(axis=2).mean()))
            if name in ("linear", "ours"):
                estimate_L = expected_max_active(true_LEE, placement_LP, num_ranks, dispatch)
                results.setdefault(f"estimate, {name}", []).append(float(estimate_L.mean()))
            if name == "linear" and not num_spare:
                floor = np.ceil(active_MLR.sum(axis=2) / num_ranks).mean()
                results.setdefault(FLOOR, []).append(float(floor))
    return {name: mean(values) for name, values in results.items()}


def measure_migration(
    trace: RoutingTrace,
    num_ranks: int,
    *,
    seed: int,
    batch: int = 16,
    num_clusters: int = 4,
    num_steps: int = 1000,
) -> dict[str, tuple[float, float]]:
    """Moves, and active experts on the fullest rank of held-out steps, by way of planning anew.

    Twice: from the linear placement, and from one fitted to half of the cluster's requests when the
    other half is seen, where nothing has changed but the sample. A move costs `MOVE_PRICE`.

    Returns:
        Name to (experts moved per layer, mean active experts).
    """
    rng = np.random.default_rng(seed)
    results: dict[str, list[tuple[float, float]]] = {}
    for fitted, held_out, _ in _replicas(trace, num_clusters, seed):
        steps_MbLk = draw_steps(held_out, batch, num_steps, rng)
        halves = np.split(rng.permutation(len(fitted)), [len(fitted) // 2])
        earlier, later = (fitted.subset(half) for half in halves)
        joint_LEE = token_activity(later.ids_TLk, trace.num_experts, batch)
        fresh_LP = place(joint_LEE, num_ranks)
        by_tokens_LP = eplb(
            expert_counts(later.ids_TLk, trace.num_experts), trace.num_experts, num_ranks
        )
        starts = {
            "from linear": linear(trace.num_layers, trace.num_experts, num_ranks),
            "same traffic": place(
                token_activity(earlier.ids_TLk, trace.num_experts, batch), num_ranks
            ),
        }
        for start, old_LP in starts.items():
            ways = {
                "stay": old_LP,
                "EPLB": by_tokens_LP,
                "fresh": fresh_LP,
                "fresh, relabelled": relabel(old_LP, fresh_LP, num_ranks),
            }
            for steps in HORIZONS_STEPS:
                cost = MigrationCost(1.0, MOVE_PRICE, steps)
                outcome = replan(old_LP, joint_LEE, num_ranks, cost)
                ways[f"replan, {steps} steps"] = outcome.physical_to_logical_LP
            for way, placement_LP in ways.items():
                active_MLR = active_per_rank(steps_MbLk, placement_LP, num_ranks)
                moves = float(num_moves(old_LP, placement_LP, num_ranks).mean())
                fullest = float(active_MLR.max(axis=2).mean())
                results.setdefault(f"{start}: {way}", []).append((moves, fullest))
    return {
        name: (mean(moves for moves, _ in values), mean(fullest for _, fullest in values))
        for name, values in results.items()
    }


def _replicas(
    trace: RoutingTrace, num_clusters: int, seed: int
) -> Iterator[tuple[RoutingTrace, RoutingTrace, RoutingTrace]]:
    """Per cluster: its requests of one half, those of the other half, and all of the first half."""
    counts_NLE = np.stack(
        [expert_counts(trace.tokens(r), trace.num_experts) for r in range(len(trace))]
    )
    order_N = np.random.default_rng(seed).permutation(len(trace))
    first, second = np.split(order_N, [len(trace) // 2])
    layers = np.arange(trace.num_layers)
    transform = SignatureTransform(compute_idf(counts_NLE[first]), layers)
    kmeans = BalancedSphericalKMeans(num_clusters, random_state=seed)
    kmeans.fit(transform.batch(counts_NLE[first]))
    nearest = kmeans.predict(transform.batch(counts_NLE[second]))
    everything = trace.subset(first)
    for cluster in range(num_clusters):
        if (nearest == cluster).any():
            fitted = trace.subset(first[kmeans.labels_ == cluster])
            yield fitted, trace.subset(second[nearest == cluster]), everything


def _placements(
    fitted: RoutingTrace,
    everything: RoutingTrace,
    true_LEE: NDArray[np.float64],
    num_ranks: int,
    batch: int,
    num_spare: int,
    dispatch: Dispatch,
) -> dict[str, IntArray]:
    num_layers, num_experts = fitted.num_layers, fitted.num_experts
    num_slots = num_experts + num_spare
    load_LE = expert_counts(fitted.ids_TLk, num_experts)
    active_LE = active_probability(load_LE / len(fitted.ids_TLk), batch)

    def ours(joint_LEE: NDArray[np.float64]) -> IntArray:
        return place(joint_LEE, num_ranks, num_slots, dispatch=dispatch)

    placements = {
        "linear": linear(num_layers, num_experts, num_ranks, num_slots),
        "EPLB": eplb(load_LE, num_slots, num_ranks),
        "ours, means only": ours(independent_activity(active_LE)),
        "ours": ours(token_activity(fitted.ids_TLk, num_experts, batch)),
        "ours, all traffic": ours(token_activity(everything.ids_TLk, num_experts, batch)),
        "ours, oracle": ours(true_LEE),
    }
    if not num_spare:
        placements["round robin"] = round_robin(num_layers, num_experts, num_ranks)
    return placements


def main() -> None:
    """Print the tables of README.md."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.placement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the traces")
    parser.add_argument("--models", nargs="+", default=["gptoss", "deepseek"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0..N-1 (default 5)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--spare", type=int, default=0, help="slots beyond the experts")
    parser.add_argument("--dispatch", choices=["split", "single"], default="split")
    parser.add_argument("--migration", action="store_true", help="count moves instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    cells = [(model, ranks) for model in args.models for ranks in args.ranks]
    report: dict[str, list[dict[str, Any]]] = {}
    progress = tqdm(total=len(cells) * args.seeds, unit="fit")
    for model, ranks in cells:
        trace = load_model(model, args.traces)
        rounds: list[dict[str, Any]] = []
        for seed in range(args.seeds):
            if args.migration:
                rounds.append(measure_migration(trace, ranks, seed=seed, batch=args.batch))
            else:
                rounds.append(
                    measure(
                        trace,
                        ranks,
                        seed=seed,
                        batch=args.batch,
                        num_spare=args.spare,
                        dispatch=args.dispatch,
                    )
                )
            progress.update()
        report[f"{model}, {ranks} ranks"] = rounds
    progress.close()
    if args.json:
        print(json.dumps(report))
        return
    show = _migration_table if args.migration else _table
    print("\n\n".join(show(cell, rounds) for cell, rounds in report.items()))


def _table(cell: str, rounds: Sequence[dict[str, float]]) -> str:
    rows = [(cell, "active, fullest rank", "against linear %")]
    for name in rounds[0]:
        change = Spread.of([100 * (each[name] / each["linear"] - 1) for each in rounds])
        rows.append((name, Spread.of([each[name] for each in rounds]).text(3), change.text(2)))
    return table(rows)


def _migration_table(cell: str, rounds: Sequence[dict[str, tuple[float, float]]]) -> str:
    rows = [(cell, "moves per layer", "active, fullest rank")]
    for name in rounds[0]:
        moves, fullest = (Spread.of([each[name][i] for each in rounds]) for i in (0, 1))
        rows.append((name, moves.text(1), fullest.text(3)))
    return table(rows)


if __name__ == "__main__":
    main()
