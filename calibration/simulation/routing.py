"""The live router's core for requests that are drawn again and again from one pool.

Axes: N requests of the pool, K decode replicas, C centroids, L MoE layers, E experts, D signature
length, R rows of a refit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from calibration.artifact import Artifact
from calibration.clustering import BalancedSphericalKMeans, SphericalKMeans
from calibration.fit import cluster_activation, fit
from calibration.signature import Float32Array
from calibration.simulation.config import RouterSection
from calibration.simulation.workload import Workload
from calibration.transforms import (
    Binary,
    Count,
    CountIdf,
    ExpertUse,
    SignatureEstimator,
    SqrtCount,
)
from router.core import NO_CENTROID, RoutingCore
from router.policy import Policy, make_policy
from router.refit import RefitJob, RefitReason, run_refit
from router.types import Selection

RECENT_REQUESTS = 1024
FIT_SEED = 1

_ESTIMATORS: dict[str, type[SignatureEstimator]] = {
    "count_idf": CountIdf,
    "count": Count,
    "sqrt_count": SqrtCount,
    "binary": Binary,
    "oracle": Count,
}


@dataclass(frozen=True, eq=False)
class FittedRouter:
    """What routing knows of a workload.

    Attributes:
        artifact: IDF, mask and centroids, fitted on the calibration requests.
        signatures_ND: signature of each served request; float32 (N, D).
        compact: served signatures, centroids and calibration signatures in coordinates of the space
            that they span: the same norms and cosines with fewer numbers.
    """

    artifact: Artifact
    signatures_ND: Float32Array

    @cached_property
    def compact(self) -> tuple[Float32Array, Float32Array, Float32Array]:
        parts = (self.signatures_ND, self.artifact.centroids_KD, self.artifact.reservoir_RD)
        rows_MD = np.concatenate(parts)
        if len(rows_MD) < rows_MD.shape[1]:
            basis_DM, _ = np.linalg.qr(rows_MD.T)
            rows_MD = rows_MD @ basis_DM
        first, second = len(parts[0]), len(parts[0]) + len(parts[1])
        return rows_MD[:first], rows_MD[first:second], rows_MD[second:]

    @cached_property
    def cosines_NN(self) -> Float32Array:
        """Between the served requests; float32 (N, N)."""
        signatures_ND = self.compact[0]
        return signatures_ND @ signatures_ND.T

    def derive(self) -> None:
        """Compute what all runs need before it is handed to other processes."""
        _ = self.cosines_NN


def fit_router(workload: Workload, k: int, signature: str, clustering: str) -> FittedRouter:
    """Fit the artifact, and take the signatures of the served requests once.

    `count_idf` with balanced clusters is `calibration.fit.fit` as it is. Other signatures replace
    its transform and clusters; all select their layers greedily.

    Args:
        workload: calibration and served requests.
        k: centroids, one a decode replica.
        signature: one of `config.SIGNATURES`.
        clustering: "balanced" or "vanilla".
    """
    artifact = fit(workload.capture, k, seed=FIT_SEED, show_progress=False)
    artifact = replace(artifact, domain_clusters=domain_homes(artifact))
    if (signature, clustering) == ("count_idf", "balanced"):
        return FittedRouter(artifact, artifact.transform.batch(workload.counts_NLE))
    fitted_use = ExpertUse.from_capture(workload.capture)
    served_use = ExpertUse(
        workload.counts_NLE,
        workload.counts_NLE,
        workload.prompt_tokens_N,
        workload.domains_N,
    )
    if signature == "oracle":
        fitted_use = replace(fitted_use, prefill_counts_NLE=fitted_use.decode_counts_NLE)
        profile_NLE = np.rint(workload.activation_NLE * 1e4).astype(np.int64)
        served_use = replace(served_use, prefill_counts_NLE=profile_NLE)
    estimator = _ESTIMATORS[signature](layers="greedy", random_state=FIT_SEED).fit(fitted_use)
    artifact = _refitted(artifact, estimator, fitted_use, clustering)
    return FittedRouter(artifact, estimator.transform(served_use))


def domain_homes(artifact: Artifact) -> dict[str, list[int]]:
    """Each cluster to the domain it holds most of, and at least one cluster to each domain.

    The paper's baseline gives every decoder to some domain. The artifact's own map names the fewest
    clusters with half of a domain's requests, which would leave replicas idle.
    """
    names, domain_N = np.unique(artifact.domains_N, return_inverse=True)
    sizes_DK = np.zeros((len(names), artifact.k), dtype=np.int64)
    np.add.at(sizes_DK, (domain_N, artifact.assignments_N), 1)
    owner_K = sizes_DK.argmax(axis=0)
    for domain in np.argsort(sizes_DK.sum(axis=1)):
        if not (owner_K == domain).any():
            is_spare_K = np.bincount(owner_K, minlength=len(names))[owner_K] > 1
            if is_spare_K.any():
                owner_K[np.where(is_spare_K, sizes_DK[domain], -1).argmax()] = domain
    homes = {str(name): np.flatnonzero(owner_K == d).tolist() for d, name in enumerate(names)}
    return {name: clusters for name, clusters in homes.items() if name and clusters}


def _refitted(
    artifact: Artifact, estimator: SignatureEstimator, use: ExpertUse, clustering: str
) -> Artifact:
    """The artifact with another signature or clustering."""
    points_ND = estimator.transform(use)
    kind = BalancedSphericalKMeans if clustering == "balanced" else SphericalKMeans
    clusters = kind(artifact.k, random_state=artifact.seed).fit(points_ND)
    transform = estimator.signature_
    refitted = replace(
        artifact,
        idf_LE=transform.idf_LE,
        layer_mask=transform.layer_mask,
        centroids_KD=clusters.cluster_centers_,
        assignments_N=clusters.labels_,
        reservoir_RD=points_ND[artifact.reservoir_rows_R],
        cluster_activation_KLE=cluster_activation(
            use.decode_counts_NLE,
            use.decode_tokens_N.astype(np.int32),
            clusters.labels_,
            artifact.k,
        ),
        domain_clusters={},
    )
    return replace(refitted, domain_clusters=domain_homes(refitted))


class PooledCore(RoutingCore):
    """`RoutingCore` that looks up what does not change from one draw of a request to the next.

    That is its signature, and its scores where they are with fixed centroids. All else is the base
    class's; a test holds that it chooses as the base class does, for every policy. Nothing is
    offered to the reservoir: refits take recent requests.

    Args:
        settings: policy parameters.
        policy: name of the policy.
        router: artifact and signatures.
        seed: seed of the policy's draws.
    """

    def __init__(
        self, settings: RouterSection, policy: str, router: FittedRouter, seed: int
    ) -> None:
        self._settings, self._policy_name, self._seed = settings, policy, seed
        # In a worker they are memory maps, whose rows would be maps too, and slow.
        self._signatures_ND, centroids_KD, self._reservoir_RD = map(np.asarray, router.compact)
        self._cosines_NN: Float32Array = np.asarray(router.cosines_NN)
        self._scores_NK: Float32Array | None = None
        self._recent: deque[int] = deque(maxlen=RECENT_REQUESTS)
        self.num_refits = 0
        super().__init__(self._make_policy({}), router.artifact, seed, ramp_s=settings.ramp_s)
        self.set_centroids(centroids_KD, {})

    def select_row(self, request_id: str, row: int, domain: str, now: float) -> Selection:
        """`select` for request `row` of the pool."""
        policy, scores_K = self.policy, None
        if policy.needs_scores:
            self._recent.append(row)
        self._allowed(())  # raises NoReplica where the base class does
        if policy.needs_scores:
            scores_K = self._running()[:, row] if policy.follows_batch else self._looked_up[row]
        loads_K = self._ramped(self.loads(now), now)
        selection = self._place(request_id, scores_K, None, loads_K, domain, None, now)
        if policy.follows_batch:
            self._follow(self._index[selection.replica_id], self._cosines_NN[row])
        return selection

    def change_pool(self, replica_ids: Sequence[str], now: float | None) -> list[str]:
        """`set_replicas`, and what the router service does with it.

        Args:
            replica_ids: the new pool.
            now: seconds; None for the first pool, whose replicas do not ramp up.

        Returns:
            Requests whose reservations went with a removed replica.
        """
        dropped = self.set_replicas(replica_ids, joined_at=now)
        if now is not None and self._settings.refit and replica_ids:
            self.refit(RefitReason.POOL)
        elif self.policy.name == "domain":
            self.policy = self._make_policy(self.assignment)
        return dropped

    def refit(self, reason: RefitReason) -> None:
        """Fit the centroids on recent requests, or on calibration ones while those are few."""
        if not self.policy.needs_scores:
            return
        rows: list[Float32Array] = [self._signatures_ND[row] for row in self._recent]
        if len(rows) < RECENT_REQUESTS // 4:
            rows += list(self._reservoir_RD)
        ids = self.replica_ids
        owned = [NO_CENTROID if (c := self.assignment[i]) is None else c for i in ids]
        result = run_refit(
            RefitJob(
                reason=reason,
                replica_ids=tuple(ids),
                owned_K=np.array(owned, dtype=np.int64),
                centroids_CD=self.centroids_CD,
                rows=rows,
                seed=self._seed,
                min_gain=0.01,
                space="simulation",
            )
        )
        if result.is_accepted:
            self.num_refits += 1
            self.set_centroids(result.centroids_KD, {i: k for k, i in enumerate(ids)})

    def _lay_out_running(self, kept_K: Sequence[int | None], centroids_CD: Float32Array) -> None:
        """Cosines with each request of the pool stand for a vector: their mean needs no product."""
        super()._lay_out_running(kept_K, centroids_CD @ self._signatures_ND.T)

    @property
    def _looked_up(self) -> Float32Array:
        """Score of each request with each replica's centroid, NaN without one; (N, K)."""
        if self._scores_NK is None:
            scores_NC = self._signatures_ND @ self.centroids_CD.T
            none_N1 = np.full((len(scores_NC), 1), np.nan, dtype=np.float32)
            scores_NC = np.concatenate([scores_NC, none_N1], axis=1)
            self._scores_NK = scores_NC[:, self._centroid_K]
        return self._scores_NK

    def _lay_out(self, *args: Any, **kwargs: Any) -> None:
        self._scores_NK = None
        super()._lay_out(*args, **kwargs)

    def _make_policy(self, assignment: Mapping[str, int | None]) -> Policy:
        """As the router service makes it: the domain oracle learns which replica has a cluster."""
        settings = self._settings
        by_centroid = {c: k for k, c in enumerate(assignment.values()) if c is not None}
        clusters = self.artifact.domain_clusters if assignment and self.artifact else {}
        replicas = {
            domain: [by_centroid[c] for c in ids if c in by_centroid]
            for domain, ids in clusters.items()
        }
        return make_policy(
            self._policy_name,
            tau=settings.tau,
            lambda_=settings.lambda_,
            max_load=settings.max_load,
            seed=self._seed,
            domain_replicas={domain: ks for domain, ks in replicas.items() if ks},
        )
