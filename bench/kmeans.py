"""`eldr bench kmeans`: time, memory and objective of the calibration fit.

Axes: N requests, L MoE layers, E experts, G domains, K clusters, D signature length.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from bench.report import Spread, table
from calibration.clustering import BalancedSphericalKMeans, SphericalKMeans
from calibration.layers import greedy_layer_selection
from calibration.signature import Float32Array, SignatureTransform, compute_idf

NUM_EXPERTS = 128
TOP_K = 8
PROMPT_TOKENS = (60, 600)
NUM_DOMAINS = 12
ZIPF = 0.8
"""Domain g gets a share of requests in proportion to 1 / (g + 1) ** ZIPF: balance must cost."""
SMALL = {"num_requests": 1000, "num_layers": 48, "k": 16}
LARGE = {"num_requests": 10_000, "num_layers": 12, "k": 64}


class SlotAssignmentKMeans(SphericalKMeans):
    """The paper's form: each cluster column ceil(N / K) times, one linear assignment."""

    def _assign(self, cost_NK: NDArray[Any], state: Any) -> tuple[NDArray[np.int64], Any]:
        slots = np.repeat(np.arange(self.n_clusters), -(-len(cost_NK) // self.n_clusters))
        _, chosen_N = linear_sum_assignment(cost_NK[:, slots])
        return slots[chosen_N], None


def add_cli(subparsers: Any) -> None:
    """Register `kmeans` among the sub-parsers of `eldr bench`."""
    parser = subparsers.add_parser("kmeans", help="time and objective of the calibration fit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=3, help="data sets drawn (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first data set (default 0)")
    parser.set_defaults(func=_command)


def draw_counts(
    num_requests: int, num_layers: int, seed: int, num_draws: int = 1
) -> list[NDArray[np.uint16]]:
    """Expert counts of made-up requests that fall into domains of unequal size.

    A domain likes some experts of each layer (gamma of shape 0.15, so few and strongly). A request
    gets up to half of its taste from another domain, strays from that (Dirichlet of concentration
    60), and draws its tokens' choices.

    Returns:
        `num_draws` counts of the same requests, such as prefill and decode; uint16 (N, L, E).
    """
    rng = np.random.default_rng(seed)
    taste_GLE = rng.gamma(0.15, size=(NUM_DOMAINS, num_layers, NUM_EXPERTS)) + 1e-3
    taste_GLE /= taste_GLE.sum(axis=2, keepdims=True)
    share_G = 1.0 / np.arange(1, NUM_DOMAINS + 1) ** ZIPF
    pairs_N2 = rng.choice(NUM_DOMAINS, size=(num_requests, 2), p=share_G / share_G.sum())
    draws = [
        np.empty((num_requests, num_layers, NUM_EXPERTS), dtype=np.uint16) for _ in range(num_draws)
    ]
    for n, (domain, other) in enumerate(pairs_N2):
        blend = rng.uniform(0, 0.5)
        mixed_LE = (1 - blend) * taste_GLE[domain] + blend * taste_GLE[other]
        own_LE = rng.standard_gamma(60 * mixed_LE) + 1e-9
        own_LE /= own_LE.sum(axis=1, keepdims=True)
        for counts_NLE in draws:
            counts_NLE[n] = rng.multinomial(rng.integers(*PROMPT_TOKENS) * TOP_K, own_LE)
    return draws


def draw_signatures(num_requests: int, num_layers: int, seed: int) -> Float32Array:
    """Unit signatures (counts x IDF of all layers) of made-up requests; float32 (N, D)."""
    (counts_NLE,) = draw_counts(num_requests, num_layers, seed)
    transform = SignatureTransform(compute_idf(counts_NLE), np.arange(num_layers))
    return transform.batch(counts_NLE)


def measure(rounds: int = 3, seed: int = 0, *, show_progress: bool = True) -> dict[str, Any]:
    """Time the fits on `rounds` data sets each; linear algebra on one thread.

    Returns:
        Medians of seconds (`n1000_k16_s`, `n10000_k64_s`, `layer_selection_s`, `slots_s`), the
        largest ratio of objectives to the slot form of the same start (`objective_ratio`), the
        process's largest memory (`peak_rss_mib`), and `spread` with least and greatest by name.

    Raises:
        ValueError: rounds is below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    values: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        values.setdefault(name, []).append(value)

    with (
        threadpool_limits(limits=1),
        tqdm(total=4 * rounds, desc="kmeans", unit="fit", disable=not show_progress) as bar,
    ):
        for data_seed in range(seed, seed + rounds):
            points_ND = draw_signatures(LARGE["num_requests"], LARGE["num_layers"], data_seed)
            seconds, large = _timed(lambda p: BalancedSphericalKMeans(LARGE["k"]).fit(p), points_ND)
            note("n10000_k64_s", seconds)
            note("n10000_k64_iterations", large.n_iter_)
            bar.update()
        peak_rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for data_seed in range(seed, seed + rounds):
            points_ND = draw_signatures(SMALL["num_requests"], SMALL["num_layers"], data_seed)
            note("zero_share", float((points_ND == 0).mean()))
            seconds, ours = _timed(lambda p: BalancedSphericalKMeans(SMALL["k"]).fit(p), points_ND)
            note("n1000_k16_s", seconds)
            note("n1000_k16_iterations", ours.n_iter_)
            bar.update()
            seconds, slots = _timed(lambda p: SlotAssignmentKMeans(SMALL["k"]).fit(p), points_ND)
            note("slots_s", seconds)
            note("objective_ratio", ours.inertia_ / slots.inertia_)
            bar.update()
            pair = draw_counts(SMALL["num_requests"], SMALL["num_layers"], data_seed, 2)
            seconds, _ = _timed(lambda p: greedy_layer_selection(*p), pair)
            note("layer_selection_s", seconds)
            bar.update()
    spread = {name: Spread.of(found) for name, found in values.items()}
    return {
        **{name: round(found.median, 4) for name, found in spread.items()},
        "objective_ratio": round(spread["objective_ratio"].hi, 6),
        "peak_rss_mib": round(peak_rss_mib),
        "rounds": rounds,
        "seed": seed,
        "spread": {name: found.as_dict(6) for name, found in spread.items()},
    }


def _timed(work: Callable[[Any], Any], given: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work(given)
    return time.perf_counter() - started, result


def _command(args: argparse.Namespace) -> int:
    report = measure(args.rounds, args.seed)
    if args.json:
        print(json.dumps(report))
        return 0
    length = SMALL["num_layers"] * NUM_EXPERTS
    labels = {
        "n1000_k16_s": f"balanced k-means, N = 1,000, K = 16, D = {length:,}, s",
        "slots_s": "the same as linear assignment of slots, s",
        "objective_ratio": "objective, ours / slots (worst)",
        "n10000_k64_s": "balanced k-means, N = 10,000, K = 64, D = 1,536, s",
        "layer_selection_s": "layer selection, L = 48, E = 128, N = 1,000, 30,000 pairs, s",
    }
    rows: list[tuple[str, ...]] = [("", "median", "range")]
    for name, label in labels.items():
        lo, hi = report["spread"][name]["lo"], report["spread"][name]["hi"]
        digits = 6 if name == "objective_ratio" else 2
        rows.append((label, f"{report[name]:.{digits}f}", f"{lo:.{digits}f} to {hi:.{digits}f}"))
    print(table(rows))
    print(f"\npeak memory {report['peak_rss_mib']} MiB; made-up requests, {args.rounds} data sets")
    return 0
