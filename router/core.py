"""The routing core: signature checks, scores, policy, reservation. No clock, no I/O, no Ray.

Axes: L MoE layers, E experts, K decode replicas, C centroids, D signature length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from calibration.artifact import Artifact
from calibration.signature import Float32Array
from router.ledger import LoadLedger
from router.policy import Policy
from router.reservoir import SignatureReservoir
from router.types import CountArray, FallbackReason, IntArray, NoReplica, Selection

NO_CENTROID = -1


class RoutingCore:
    """Owns the replica pool, the replica -> centroid map and the load ledger of one router.

    Used from one thread or event loop. `select` chooses and reserves in one call, so nothing can
    come between the two.

    Args:
        policy: chooses the replica.
        artifact: signature transform and centroids; None routes by load alone.
        seed: seed of the signature reservoir.
        max_report_age_s: age beyond which an engine-reported load is ignored, seconds.
        reservoir_size: most signatures kept for a refit.
    """

    def __init__(
        self,
        policy: Policy,
        artifact: Artifact | None,
        seed: int = 1,
        *,
        max_report_age_s: float = 5.0,
        reservoir_size: int = 1024,
    ) -> None:
        self.policy = policy
        self.ledger = LoadLedger()
        self.max_report_age_s = max_report_age_s
        self._counters: Counter[str] = Counter()
        self._best_similarity_sum = 0.0
        self._reservoir = SignatureReservoir(reservoir_size, seed)
        self._ids: list[str] = []
        self._index: dict[str, int] = {}
        self._centroid_K: IntArray = np.empty(0, dtype=np.int64)
        self._foreign_K: IntArray = np.empty(0, dtype=np.int64)
        self._reported_at_K = np.empty(0)
        self.set_artifact(artifact)

    # ---- pool and artifact

    @property
    def replica_ids(self) -> list[str]:
        """Replicas of the pool, in the order given to `set_replicas`."""
        return list(self._ids)

    @property
    def artifact(self) -> Artifact | None:
        """The artifact in use."""
        return self._artifact

    @property
    def assignment(self) -> dict[str, int | None]:
        """Centroid of each replica; None for one that takes overflow only."""
        return {
            replica_id: None if centroid == NO_CENTROID else centroid
            for replica_id, centroid in zip(self._ids, self._centroid_K.tolist(), strict=True)
        }

    def set_replicas(
        self, replica_ids: Sequence[str], remembered: Mapping[str, int] | None = None
    ) -> list[str]:
        """Change the pool: known replicas keep their centroid, others take what is free.

        Free centroids are handed out lowest first: to known replicas that wait for one, then to
        new ones in the order given. Replicas beyond the number of centroids get none.

        Args:
            replica_ids: the new pool, in order.
            remembered: centroids that new replicas say they had, as after a restart of the router;
                one that is taken is ignored.

        Returns:
            Requests whose reservations went with a removed replica.

        Raises:
            ValueError: a replica is named twice; nothing has changed.
        """
        if len(set(replica_ids)) != len(replica_ids):
            raise ValueError(f"replica ids must be distinct, got {list(replica_ids)}")
        dropped: list[str] = []
        for gone in set(self._ids).difference(replica_ids):
            dropped += self.ledger.remove_replica(gone)
        for replica_id in replica_ids:
            self.ledger.add_replica(replica_id)
        self._counters["dropped_reservations"] += len(dropped)
        assignment = self.assignment
        taken = {assignment[i] for i in replica_ids if i in assignment}
        for replica_id, centroid in (remembered or {}).items():
            if replica_id not in assignment and centroid not in taken:
                assignment[replica_id] = centroid
                taken.add(centroid)
        self._lay_out(replica_ids, assignment)
        return dropped

    def set_artifact(self, artifact: Artifact | None) -> None:
        """Swap the artifact; centroid k of the new one takes the place of centroid k of the old.

        The reservoir starts again: signatures of another IDF or mask are not comparable.
        """
        self._artifact = artifact
        num_centroids = artifact.k if artifact else 0
        self._scores_C = np.full(num_centroids + 1, np.nan, dtype=np.float32)  # [-1] stays NaN
        self._reservoir.clear()
        self._lay_out(self._ids, self.assignment)

    # ---- requests

    def select(
        self,
        request_id: str,
        counts_LE: CountArray | None,
        prompt_tokens: int | None,
        domain: str | None,
        now: float,
        exclude: Collection[str] = (),
    ) -> Selection:
        """Choose a decode replica and reserve a slot on it.

        A request that already holds a reservation (a retry) gives it up first.

        Args:
            request_id: key for `release`.
            counts_LE: prompt tokens per MoE layer and expert; integers, shape (L, E); None if the
                prefill side sent none.
            prompt_tokens: prompt length the counts must account for; None checks only that all
                layers agree on one.
            domain: label for the domain oracle.
            now: seconds, same clock as in `report_load`; must not run backwards.
            exclude: replicas not to choose, such as those that failed this request.

        Returns:
            The selection. A signature that is missing or wrong never raises: the request goes to
            the least loaded replica and `fallback` says why.

        Raises:
            NoReplica: there is no replica, or all are excluded; nothing is reserved.
        """
        if request_id in self.ledger:
            self.ledger.release(request_id)
            self._counters["reselected"] += 1
        allowed = self._allowed(exclude)
        scores_K, reason = None, None
        if self.policy.needs_scores:
            scores_K, reason = self._scores(counts_LE, prompt_tokens)
        decision = self.policy.choose(scores_K, self.loads(now), domain, allowed)
        self.ledger.reserve(request_id, self._ids[decision.index], now)
        fallback = reason or decision.fallback
        self._counters["selected"] += 1
        if fallback is not None:
            self._counters[f"fallback_{fallback}"] += 1
        centroid = int(self._centroid_K[decision.index])
        similarity = None
        if scores_K is not None and centroid != NO_CENTROID:
            similarity = float(scores_K[decision.index])
        return Selection(
            request_id=request_id,
            replica_id=self._ids[decision.index],
            policy=self.policy.name,
            similarity=similarity,
            band_size=decision.band_size,
            centroid=None if centroid == NO_CENTROID else centroid,
            fallback=fallback,
        )

    def release(self, request_id: str) -> bool:
        """End a reservation; False if it was released before, expired, or never made."""
        return self.ledger.release(request_id)

    def expire(self, now: float, max_age_s: float) -> list[str]:
        """End reservations older than `max_age_s` seconds; returns their requests."""
        expired = self.ledger.expire(now, max_age_s)
        self._counters["expired"] += len(expired)
        return expired

    # ---- load

    def report_load(self, replica_id: str, num_requests: int, now: float) -> bool:
        """Take an engine's own count of running and waiting requests.

        Returns:
            False for a replica that is not in the pool: a late report of a removed one.

        Raises:
            ValueError: num_requests is negative.
        """
        if num_requests < 0:
            raise ValueError(f"num_requests must be >= 0, got {num_requests} for {replica_id!r}")
        k = self._index.get(replica_id)
        if k is None:
            return False
        self._foreign_K[k] = max(0, num_requests - self.ledger.load(replica_id))
        self._reported_at_K[k] = now
        return True

    def loads(self, now: float) -> IntArray:
        """Effective load: own reservations, and recent requests of others; int64, shape (K,).

        Others' are what an engine reported beyond our own reservations at that moment: a report is
        up to a heartbeat old, and taken as it is it would count our own finished requests.
        """
        is_recent_K = now - self._reported_at_K <= self.max_report_age_s
        return self.ledger.loads(self._ids) + self._foreign_K * is_recent_K

    # ---- state

    @property
    def counters(self) -> dict[str, int]:
        """Events since the start: selected, reselected, scored, expired, fallback_<reason>, ..."""
        return {**self._counters, "unknown_releases": self.ledger.num_unknown_releases}

    @property
    def mean_best_similarity(self) -> float | None:
        """Mean over scored requests of the best cosine to any centroid; None before the first."""
        num_scored = self._counters["scored"]
        return self._best_similarity_sum / num_scored if num_scored else None

    def reservoir(self) -> Float32Array:
        """Uniform sample of the signatures since `clear_reservoir`; float32, shape (R, D)."""
        return self._reservoir.signatures()

    def clear_reservoir(self) -> None:
        """Start a new sample, so that a refit sees recent traffic only."""
        self._reservoir.clear()

    def snapshot(self) -> dict[str, Any]:
        """Assignment and reservations as a JSON-able dict for `restore`."""
        return {"assignment": self.assignment, "ledger": self.ledger.snapshot()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Replace pool, assignment and reservations by those of a snapshot.

        Centroids the current artifact does not have are dropped and the free ones handed out.

        Raises:
            ValueError: the snapshot is malformed or contradicts itself; nothing has changed.
        """
        ledger = LoadLedger()
        try:
            assignment = {
                str(replica_id): None if centroid is None else int(centroid)
                for replica_id, centroid in snapshot["assignment"].items()
            }
            ledger.restore(snapshot["ledger"])
        except (KeyError, TypeError, AttributeError, ValueError) as err:
            raise ValueError(f"router snapshot is malformed: {err!r}") from err
        if set(ledger.replica_ids) != set(assignment):
            raise ValueError(
                f"router snapshot disagrees on replicas: assignment has {sorted(assignment)}, "
                f"ledger has {sorted(ledger.replica_ids)}"
            )
        self.ledger = ledger
        self._lay_out(list(assignment), assignment)

    def _lay_out(self, ids: Sequence[str], assignment: Mapping[str, int | None]) -> None:
        """Rebuild the arrays over K for a pool; reported loads of known replicas stay."""
        kept_K = [self._index.get(replica_id) for replica_id in ids]
        foreign, reported_at = self._foreign_K, self._reported_at_K
        self._foreign_K = np.array([0 if k is None else foreign[k] for k in kept_K], np.int64)
        self._reported_at_K = np.array([-np.inf if k is None else reported_at[k] for k in kept_K])
        self._centroid_K = assign_centroids(ids, assignment, len(self._scores_C) - 1)
        self._ids = list(ids)
        self._index = {replica_id: k for k, replica_id in enumerate(ids)}

    def _allowed(self, exclude: Collection[str]) -> IntArray | None:
        """Indices that may be chosen; None for all; NoReplica if there are none."""
        if not self._ids:
            raise NoReplica("no decode replica is known: wait for one to register")
        if not exclude:
            return None
        allowed = [k for k, replica_id in enumerate(self._ids) if replica_id not in exclude]
        if not allowed:
            raise NoReplica(f"all {len(self._ids)} decode replicas are excluded for this request")
        return np.array(allowed, dtype=np.int64)

    def _scores(
        self, counts_LE: CountArray | None, prompt_tokens: int | None
    ) -> tuple[Float32Array | None, FallbackReason | None]:
        """Cosine to each replica's centroid, shape (K,), NaN without one; or why there is none."""
        artifact = self._artifact
        if artifact is None:
            return None, FallbackReason.NO_ARTIFACT
        if counts_LE is None:
            return None, FallbackReason.NO_SIGNATURE
        if not is_conserved(counts_LE, prompt_tokens, artifact):
            return None, FallbackReason.BAD_SIGNATURE
        signature_D = artifact.transform(counts_LE)
        if signature_D.max() == 0:
            return None, FallbackReason.ZERO_SIGNATURE
        self._reservoir.offer(signature_D)
        scores_C = np.dot(artifact.centroids_KD, signature_D, out=self._scores_C[:-1])
        self._counters["scored"] += 1
        self._best_similarity_sum += float(scores_C.max())
        scores_K: Float32Array = self._scores_C[self._centroid_K]
        return scores_K, None


def is_conserved(counts_LE: CountArray, prompt_tokens: int | None, artifact: Artifact) -> bool:
    """Whether every layer accounts for every prompt token: sum over E = prompt_tokens * top_k.

    Counts of another shape, of a type other than integer, or below zero are not conserved. With
    prompt_tokens None, the layers must agree on a sum that is a multiple of top_k.
    """
    if counts_LE.dtype.kind not in "ui":
        return False
    if counts_LE.shape != (artifact.num_layers, artifact.num_experts):
        return False
    if counts_LE.dtype.kind == "i" and counts_LE.min() < 0:
        return False
    sums_L = np.add.reduce(counts_LE, axis=1, dtype=np.int64)
    if prompt_tokens is None:
        return bool((sums_L == sums_L[0]).all() and sums_L[0] % artifact.top_k == 0)
    return bool((sums_L == prompt_tokens * artifact.top_k).all())


def assign_centroids(
    replica_ids: Sequence[str], assignment: Mapping[str, int | None], num_centroids: int
) -> IntArray:
    """Centroid of each replica; int64, shape (K,), NO_CENTROID where none is left.

    Replicas keep the centroid `assignment` gives them if it exists. Free centroids go, lowest
    first, to replicas `assignment` knows without one, then to those it does not know.
    """
    held = {}
    for replica_id in replica_ids:
        centroid = assignment.get(replica_id)
        if centroid is not None and 0 <= centroid < num_centroids:
            held[replica_id] = centroid
    free = iter(sorted(set(range(num_centroids)).difference(held.values())))
    waiting = [replica_id for replica_id in replica_ids if replica_id not in held]
    for replica_id in sorted(waiting, key=lambda replica_id: replica_id not in assignment):
        held[replica_id] = next(free, NO_CENTROID)
    return np.array([held[replica_id] for replica_id in replica_ids], dtype=np.int64)
