"""From a capture to an artifact: IDF, layer mask, balanced clusters, and what follows from them.

Axes: N requests, L MoE layers, E experts, K clusters, D signature length.
"""

from __future__ import annotations

import logging
from typing import Literal, get_args

import numpy as np
import scipy
from numpy.typing import NDArray

from calibration.artifact import MAX_RESERVOIR, Artifact
from calibration.clustering import BalancedSphericalKMeans
from calibration.counts import Capture
from calibration.layers import greedy_layer_selection
from calibration.signature import (
    CountArray,
    Float32Array,
    IndexArray,
    SignatureTransform,
    compute_idf,
)

logger = logging.getLogger(__name__)

DOMAIN_COVERAGE = 0.5

LayerChoice = Literal["selected", "all"]
"""Layers of the signature: what greedy selection keeps, or all of them."""


def fit(
    capture: Capture,
    k: int,
    *,
    tau: float = 0.1,
    seed: int = 1,
    workload: str = "unnamed",
    layers: LayerChoice = "selected",
    show_progress: bool = True,
) -> Artifact:
    """Fit the routing artifact for one model and workload. Deterministic in its arguments.

    Args:
        capture: expert counts of at least max(2, k) requests.
        k: number of clusters: one for each decode replica.
        tau: band width to suggest to the router, cosine units, in [0, 1].
        seed: seed of the pair draw, of k-means++ and of the reservoir.
        workload: name of the traffic, for people.
        layers: layers of the signature; the greedy search runs, and is kept, either way.
        show_progress: draw progress bars on stderr.

    Raises:
        ValueError: an argument is out of range, the requests or their distinct signatures are
            fewer than k, or a signature is all zeros.
    """
    if k < 1 or seed < 0 or not 0 <= tau <= 1:
        raise ValueError(
            f"k must be >= 1, seed >= 0 and tau in [0, 1], got k={k}, seed={seed}, tau={tau}"
        )
    if layers not in get_args(LayerChoice):
        raise ValueError(f"layers must be one of {get_args(LayerChoice)}, got {layers!r}")
    if len(capture) < max(2, k):
        raise ValueError(
            f"k={k} clusters need at least {max(2, k)} requests, the capture has {len(capture)}: "
            "capture more or lower k"
        )
    counts_NLE = capture.prefill_counts_NLE
    search = greedy_layer_selection(
        counts_NLE, capture.decode_counts_NLE, seed=seed, show_progress=show_progress
    )
    mask = search.mask if layers == "selected" else np.arange(capture.num_layers)
    transform = SignatureTransform(compute_idf(counts_NLE), mask)
    signatures_ND = transform.batch(counts_NLE)
    _refuse_zero_signatures(signatures_ND, capture)
    _refuse_duplicates(signatures_ND, k)
    if not search.rho_curve.max() > 0:
        logger.warning(
            "rho is %.2f: the prompts' experts say nothing about decode here, so routing by them "
            "will not help",
            search.rho_curve.max(),
        )
    clusters = BalancedSphericalKMeans(k, random_state=seed)
    clusters.fit(signatures_ND, show_progress=show_progress)
    rows_R = _sample_rows(len(capture), seed)
    return Artifact(
        model_id=capture.model_id,
        fingerprint=capture.fingerprint,
        num_layers=capture.num_layers,
        num_experts=capture.num_experts,
        top_k=capture.top_k,
        workload=workload,
        prompts_sha256=capture.prompts_sha256,
        num_requests=len(capture),
        k=k,
        tau=float(tau),
        seed=seed,
        scores={
            "rho": float(search.rho_curve[len(mask) - 1]),
            "rho_all_layers": float(search.rho_curve[-1]),
            "mean_cosine_distance": clusters.inertia_ / len(capture),
            "kmeans_iterations": float(clusters.n_iter_),
        },
        versions={**capture.versions, "numpy": np.__version__, "scipy": scipy.__version__},
        idf_LE=transform.idf_LE,
        layer_mask=mask,
        layer_order=search.order,
        rho_curve_L=search.rho_curve,
        layer_rho_L=search.per_layer_rho,
        centroids_KD=clusters.cluster_centers_,
        assignments_N=clusters.labels_,
        domains_N=capture.domains_N,
        reservoir_RD=signatures_ND[rows_R],
        reservoir_rows_R=rows_R,
        cluster_activation_KLE=cluster_activation(
            capture.decode_counts_NLE, capture.decode_tokens_N, clusters.labels_, k
        ),
        domain_clusters=domain_clusters(capture.domains_N, clusters.labels_),
    )


def cluster_activation(
    decode_NLE: CountArray, decode_tokens_N: NDArray[np.int32], labels_N: IndexArray, k: int
) -> Float32Array:
    """How often a decoded token of each cluster chooses each expert.

    Counts and tokens are summed over the cluster's requests before they are divided, so a request
    weighs as many steps as it runs. A cluster without requests gets the figures of all requests.

    Returns:
        float32, shape (K, L, E); each row over E sums to top_k.
    """
    activation_KLE = np.empty((k, *decode_NLE.shape[1:]), dtype=np.float32)
    for cluster in range(k):
        is_member_N = labels_N == cluster
        if not is_member_N.any():
            is_member_N[:] = True
        counts_LE = decode_NLE[is_member_N].sum(axis=0, dtype=np.int64)
        activation_KLE[cluster] = counts_LE / decode_tokens_N[is_member_N].sum(dtype=np.int64)
    return activation_KLE


def domain_clusters(domains_N: NDArray[np.str_], labels_N: IndexArray) -> dict[str, list[int]]:
    """For each label the fewest clusters that hold at least half of its requests, ascending.

    Larger shares first, lower index on ties. Requests without a label are left out.
    """
    homes = {}
    for domain in np.unique(domains_N[domains_N != ""]).tolist():
        sizes_K = np.bincount(labels_N[domains_N == domain])
        largest_first = np.argsort(-sizes_K, kind="stable")
        covered = np.cumsum(sizes_K[largest_first])
        needed = int(np.searchsorted(covered, DOMAIN_COVERAGE * sizes_K.sum())) + 1
        homes[domain] = sorted(largest_first[:needed].tolist())
    return homes


def _refuse_zero_signatures(signatures_ND: Float32Array, capture: Capture) -> None:
    is_zero_N = ~signatures_ND.any(axis=1)
    if is_zero_N.any():
        raise ValueError(
            f"{is_zero_N.sum()} of {len(capture)} requests have an all-zero signature, first "
            f"{capture.ids_N.item(is_zero_N.argmax())!r}: all experts they use are used by every "
            "request; capture longer or more varied prompts, or leave these out"
        )


def _refuse_duplicates(signatures_ND: Float32Array, k: int) -> None:
    """Some repeats are traffic; fewer distinct signatures than clusters are no calibration."""
    num_distinct = len({signature_D.tobytes() for signature_D in signatures_ND.round(5)})
    if num_distinct < k:
        raise ValueError(
            f"k={k} clusters need at least {k} distinct signatures, the {len(signatures_ND)} "
            f"requests have {num_distinct}: capture more varied prompts or lower k"
        )


def _sample_rows(num_requests: int, seed: int) -> IndexArray:
    rng = np.random.default_rng(seed)
    size = min(num_requests, MAX_RESERVOIR)
    return np.sort(rng.choice(num_requests, size=size, replace=False)).astype(np.int64)
