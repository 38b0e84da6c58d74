"""An artifact for people: a table on stdout and pictures in a folder.

Axes: R points shown, L MoE layers, K clusters, D signature length.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibration.artifact import Artifact
from calibration.counts import Capture
from calibration.signature import Float32Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_DOMAIN = "(no label)"


def show(
    artifact: Artifact, capture: Capture | None = None, out_dir: Path | None = None
) -> list[Path]:
    """Print what the artifact holds; draw it if a folder is given.

    Args:
        artifact: what to show; it is enough by itself.
        capture: requests to draw instead of the artifact's reservoir, such as those of another day.
        out_dir: folder for projection.png, clusters.png and layers.png; made if missing.

    Returns:
        The pictures written.

    Raises:
        ValueError: the capture is of another model.
    """
    if capture is not None:
        artifact.verify_model(
            capture.fingerprint,
            capture.model_id,
            capture.num_layers,
            capture.num_experts,
            capture.top_k,
        )
    print(describe(artifact))
    if out_dir is None:
        return []
    points_RD, domains_R = artifact.reservoir_RD, artifact.reservoir_domains_R
    if capture is not None:
        points_RD = artifact.transform.batch(capture.prefill_counts_NLE)
        domains_R = capture.domains_N
    out_dir.mkdir(parents=True, exist_ok=True)
    figures = {
        "projection.png": draw_projection(artifact, points_RD, domains_R),
        "clusters.png": draw_clusters(artifact),
        "layers.png": draw_layers(artifact),
    }
    for name, figure in figures.items():
        figure.savefig(out_dir / name, dpi=120)
    return [out_dir / name for name in figures]


def describe(artifact: Artifact) -> str:
    """Text of several aligned lines: model, fit, layers, clusters with their domain mix."""
    kept, layers = len(artifact.layer_mask), artifact.num_layers
    head = {
        "model": f"{artifact.model_id}, fingerprint {artifact.fingerprint}",
        "shape": f"{layers} MoE layers, {artifact.num_experts} experts, top-{artifact.top_k}",
        "workload": f"{artifact.workload}, N = {artifact.num_requests} requests",
        "fit": f"K = {artifact.k}, tau = {artifact.tau:g}, seed = {artifact.seed}",
        "layers kept": f"{kept} of {layers}: {' '.join(map(str, artifact.layer_mask))}",
        **{name: f"{value:.4g}" for name, value in artifact.scores.items()},
        "versions": ", ".join(f"{name} {v}" for name, v in sorted(artifact.versions.items())),
    }
    homes = {
        f"domain {domain}": f"clusters {' '.join(map(str, clusters))}"
        for domain, clusters in artifact.domain_clusters.items()
    }
    sizes_K = np.bincount(artifact.assignments_N, minlength=artifact.k)
    rows: list[tuple[str, ...]] = [("cluster", "requests", "share", "domains")]
    for cluster, size in enumerate(sizes_K.tolist()):
        mix = _domain_mix(artifact.domains_N[artifact.assignments_N == cluster])
        rows.append((str(cluster), str(size), f"{size / artifact.num_requests:.1%}", mix))
    return "\n".join([*_pairs(head), "", *_table(rows), "", *_pairs(homes)]).rstrip()


def project(
    points_RD: Float32Array, centroids_KD: Float32Array
) -> tuple[Float32Array, Float32Array]:
    """Points and centroids on the two main axes of the points; float32, shapes (R, 2), (K, 2)."""
    if len(points_RD) < 2:
        points_RD = np.concatenate([points_RD, centroids_KD])
    mean_D = points_RD.mean(axis=0)
    axes = np.linalg.svd(points_RD - mean_D, full_matrices=False)[2][:2]
    return (points_RD - mean_D) @ axes.T, (centroids_KD - mean_D) @ axes.T


def draw_projection(
    artifact: Artifact, points_RD: Float32Array, domains_R: NDArray[np.str_]
) -> Figure:
    """Signatures coloured by domain, and the centroids with their numbers."""
    figure = _figure()
    axes = figure.subplots()
    scatter_domains(axes, points_RD, domains_R, artifact.centroids_KD)
    axes.set_title(f"Signatures, {artifact.model_id}, {artifact.workload}")
    axes.legend(fontsize="small")
    return figure


def scatter_domains(
    axes: Axes,
    points_RD: Float32Array,
    domains_R: NDArray[np.str_],
    centroids_KD: Float32Array,
) -> None:
    """Draw points by domain and numbered centroids on the main axes of the points."""
    points, centroids = project(points_RD, centroids_KD)
    for domain in np.unique(domains_R).tolist():
        rows = np.flatnonzero(domains_R == domain)
        axes.scatter(points[rows, 0], points[rows, 1], s=12, alpha=0.6, label=domain or NO_DOMAIN)
    axes.scatter(centroids[:, 0], centroids[:, 1], s=90, marker="X", c="black", label="centroid")
    for cluster, (x, y) in enumerate(centroids):
        axes.annotate(str(cluster), (x, y), xytext=(5, 5), textcoords="offset points")
    axes.set_xlabel("first principal component")
    axes.set_ylabel("second principal component")


def draw_clusters(artifact: Artifact) -> Figure:
    """Requests per cluster, stacked by domain, with the capacity as a line."""
    figure = _figure()
    axes = figure.subplots()
    whole_numbers(axes)
    bottom_K = np.zeros(artifact.k)
    for domain in np.unique(artifact.domains_N).tolist():
        members = artifact.assignments_N[artifact.domains_N == domain]
        height_K = np.bincount(members, minlength=artifact.k)
        axes.bar(np.arange(artifact.k), height_K, bottom=bottom_K, label=domain or NO_DOMAIN)
        bottom_K += height_K
    capacity = -(-artifact.num_requests // artifact.k)
    axes.axhline(capacity, color="black", linestyle="--", label=f"capacity {capacity}")
    axes.set_xlabel("cluster")
    axes.set_ylabel("requests")
    axes.set_title("Cluster sizes")
    axes.legend(fontsize="small")
    return figure


def draw_layers(artifact: Artifact) -> Figure:
    """rho of each layer alone, and of the greedy selection as it grew."""
    figure = _figure()
    alone, greedy = figure.subplots(2, 1)
    whole_numbers(alone)
    whole_numbers(greedy)
    layers = np.arange(artifact.num_layers)
    is_kept = np.isin(layers, artifact.layer_mask)
    alone.bar(layers, artifact.layer_rho_L, color=np.where(is_kept, "tab:blue", "lightgrey"))
    alone.set_xlabel("MoE layer (blue: kept)")
    alone.set_ylabel("rho alone")
    rounds = layers + 1
    kept = len(artifact.layer_mask)
    greedy.plot(rounds, artifact.rho_curve_L, marker=".")
    greedy.axvline(kept, color="black", linestyle="--", label=f"{kept} layers kept")
    greedy.set_xlabel("layers taken")
    greedy.set_ylabel("rho")
    greedy.legend(fontsize="small")
    return figure


def _figure() -> Figure:
    """A figure that draws to files only, whatever backend the process has."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def whole_numbers(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _domain_mix(domains: NDArray[np.str_], most: int = 4) -> str:
    counts = Counter(domains.tolist()).most_common()
    shown = [f"{name or NO_DOMAIN} {n / len(domains):.0%}" for name, n in counts[:most]]
    return ", ".join(shown + (["..."] if len(counts) > most else [])) or "-"


def _pairs(entries: dict[str, str]) -> list[str]:
    width = max(map(len, entries), default=0)
    return [f"{name:<{width}}  {value}" for name, value in entries.items()]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns right-aligned, the last one left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*(cell.rjust(w) for cell, w in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    ]
