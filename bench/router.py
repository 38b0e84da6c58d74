"""`eldr bench router`: time of one routing decision, counts in, reservation out and back.

Axes: K decode replicas, L MoE layers, E experts, D signature length.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from bench.report import table
from calibration.artifact import Artifact
from router.core import RoutingCore
from router.policy import make_policy
from router.refit import RefitJob, RefitReason, run_refit
from router.types import CountArray, FloatArray

NUM_LAYERS, NUM_EXPERTS, TOP_K = 48, 128, 8
PROMPT_TOKENS = 300
LOAD_PER_REPLICA = 8
DECISIONS = {16: 3000, 64: 2000, 1024: 300}  # K: timed decisions
NUM_PROMPTS = 32
REFIT_REPLICAS = 16


def add_cli(subparsers: Any) -> None:
    """Register `router` among the sub-parsers of `eldr bench`."""
    parser = subparsers.add_parser("router", help="time of one routing decision")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--policy", default="band", help="routing policy (default band)")
    parser.add_argument(
        "--refit",
        action="store_true",
        help="decision time while centroids are fitted on another thread, against alone",
    )
    parser.add_argument(
        "--actor",
        action="store_true",
        help="decisions per second through the router actor, asked by processes of their own",
    )
    parser.add_argument(
        "--callers", type=int, default=2, help="with --actor: calling processes (default 2)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=32,
        help="with --actor: requests that each process has under way (default 32)",
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="with --actor: time measured (default 5)"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        nargs="+",
        default=[16, 1024],
        help="with --actor: decode replicas (default 16 1024)",
    )
    parser.set_defaults(func=_command)


def measure(policy: str = "band", decisions: dict[int, int] | None = None) -> dict[str, Any]:
    """Times of select + release with K x 8 requests in flight, all 48 layers kept.

    Linear algebra runs on one thread, as it should in the router: a matrix of 16 rows is not worth
    waking a second one.

    Returns:
        {"decision_us": {K: {"p50": microseconds, "p99": microseconds}}}, K as text.
    """
    with threadpool_limits(limits=1):
        return {
            "decision_us": {
                str(k): _decision_us(policy, k, repeats)
                for k, repeats in (decisions or DECISIONS).items()
            }
        }


def _command(args: argparse.Namespace) -> int:
    if args.actor:
        from bench import router_actor

        return router_actor.command(args)
    if args.refit:
        return _refit_command(args)
    report = measure(args.policy)
    if args.json:
        print(json.dumps(report))
        return 0
    print(f"policy {args.policy}, {NUM_LAYERS} layers x {NUM_EXPERTS} experts, select + release")
    print(f"{'replicas':>8}  {'p50 us':>9}  {'p99 us':>9}")
    for k, times in report["decision_us"].items():
        print(f"{k:>8}  {times['p50']:>9.1f}  {times['p99']:>9.1f}")
    return 0


def measure_refit(policy: str = "band", num_refits: int = 5) -> dict[str, Any]:
    """Decisions a millisecond apart at 16 replicas, alone and beside refits on 1,024 signatures.

    Returns:
        {"alone": {"p50": microseconds, "p99": ..., "max": ...}, "beside": the same,
        "refit_s": seconds of one refit, mean}.
    """
    rng = np.random.default_rng(1)
    k = REFIT_REPLICAS
    core = RoutingCore(make_policy(policy, seed=1), bench_artifact(k, rng), seed=1)
    core.set_replicas([f"decode-{i}" for i in range(k)])
    tastes = [bench_taste(rng) for _ in range(k)]
    prompts = [bench_counts(rng, taste_LE) for taste_LE in tastes for _ in range(64)]
    assert core.artifact is not None
    job = RefitJob(
        RefitReason.POOL,
        tuple(core.replica_ids),
        np.arange(k),
        core.centroids_CD,
        list(core.artifact.transform.batch(np.stack(prompts))),
        seed=1,
        min_gain=0.0,
        space="bench",
    )

    def decisions(is_done: Callable[[], bool]) -> dict[str, float]:
        times_s: list[float] = []
        while not is_done():
            counts_LE = prompts[len(times_s) % len(prompts)]
            started = time.perf_counter()
            core.select("request", counts_LE, PROMPT_TOKENS, None, started)
            core.release("request")
            times_s.append(time.perf_counter() - started)
            time.sleep(0.001)
        p50, p99, most = np.percentile(times_s, [50, 99, 100]) * 1e6
        return {"p50": round(p50, 1), "p99": round(p99, 1), "max": round(most, 1)}

    with threadpool_limits(limits=1), ThreadPoolExecutor(1) as thread:
        end = time.perf_counter() + 1.0
        alone = decisions(lambda: time.perf_counter() > end)
        started = time.perf_counter()
        refits = [thread.submit(run_refit, job) for _ in range(num_refits)]
        beside = decisions(refits[-1].done)
        refit_s = (time.perf_counter() - started) / num_refits
    return {"alone": alone, "beside": beside, "refit_s": round(refit_s, 3)}


def _refit_command(args: argparse.Namespace) -> int:
    report = measure_refit(args.policy)
    if args.json:
        print(json.dumps({"refit": report}))
        return 0
    print(f"policy {args.policy}, {REFIT_REPLICAS} replicas; one refit takes {report['refit_s']} s")
    rows = [["decisions", "p50 us", "p99 us", "max us"]]
    rows += [
        [name, *(f"{report[name][key]:.1f}" for key in ("p50", "p99", "max"))]
        for name in ("alone", "beside")
    ]
    print(table(rows))
    return 0


def _decision_us(policy: str, k: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    core = RoutingCore(make_policy(policy, seed=1), bench_artifact(k, rng), seed=1)
    core.set_replicas([f"decode-{i}" for i in range(k)])
    prompts = [bench_counts(rng) for _ in range(NUM_PROMPTS)]
    for i in range(k * LOAD_PER_REPLICA):
        core.ledger.reserve(f"standing-{i}", f"decode-{rng.integers(k)}", 0.0)
    times_s = []
    for i in range(repeats + repeats // 10):
        counts_LE = prompts[i % NUM_PROMPTS]
        started = time.perf_counter()
        core.select("request", counts_LE, PROMPT_TOKENS, None, float(i))
        core.release("request")
        times_s.append(time.perf_counter() - started)
    p50, p99 = np.percentile(times_s[repeats // 10 :], [50, 99]) * 1e6
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1)}


def bench_artifact(k: int, rng: np.random.Generator) -> Artifact:
    """Random centroids: the time does not depend on their values."""
    length = NUM_LAYERS * NUM_EXPERTS
    centroids_KD = rng.random((k, length), dtype=np.float32)
    centroids_KD /= np.linalg.norm(centroids_KD, axis=1, keepdims=True)
    return Artifact(
        model_id="bench",
        fingerprint="bench",
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        workload="bench",
        prompts_sha256="",
        num_requests=1,
        k=k,
        tau=0.1,
        seed=1,
        scores={},
        versions={},
        idf_LE=rng.random((NUM_LAYERS, NUM_EXPERTS), dtype=np.float32),
        layer_mask=np.arange(NUM_LAYERS),
        layer_order=np.arange(NUM_LAYERS),
        rho_curve_L=np.zeros(NUM_LAYERS),
        layer_rho_L=np.zeros(NUM_LAYERS),
        centroids_KD=centroids_KD,
        assignments_N=np.zeros(1, dtype=np.int64),
        domains_N=np.array([""]),
        reservoir_RD=np.empty((0, length), dtype=np.float32),
        reservoir_rows_R=np.empty(0, dtype=np.int64),
        cluster_activation_KLE=np.full(
            (k, NUM_LAYERS, NUM_EXPERTS), TOP_K / NUM_EXPERTS, dtype=np.float32
        ),
        domain_clusters={},
    )


def bench_taste(rng: np.random.Generator) -> FloatArray:
    """How likely a prompt's tokens choose each expert; float64 (L, E), rows sum to 1."""
    taste_LE = rng.gamma(0.3, size=(NUM_LAYERS, NUM_EXPERTS))
    return np.asarray(taste_LE / taste_LE.sum(axis=1, keepdims=True))


def bench_counts(rng: np.random.Generator, taste_LE: FloatArray | None = None) -> CountArray:
    """Counts of one prompt, uint16 (L, E); every layer sums to tokens * top_k."""
    taste_LE = bench_taste(rng) if taste_LE is None else taste_LE
    return rng.multinomial(PROMPT_TOKENS * TOP_K, taste_LE).astype(np.uint16)
