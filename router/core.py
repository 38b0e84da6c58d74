"""The routing core: signature checks, scores, policy, reservation. No clock, no I/O, no Ray.

Axes: B requests of a batch, L MoE layers, E experts, K decode replicas, C centroids, D signature
length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg.blas import saxpy, sscal

from calibration.artifact import Artifact
from calibration.signature import Float32Array
from router.ledger import LoadLedger
from router.policy import Policy
from router.reservoir import SignatureReservoir
from router.types import (
    BoolArray,
    CountArray,
    FallbackReason,
    IntArray,
    NoReplica,
    Selection,
)

NO_CENTROID = -1
SMALL_POOL = 2**18
"""Numbers in the centroids of a pool below which a core's cache holds them, so that a product with
each signature of a batch by itself costs less than one with all of them."""
EXACT_IN_FLOAT32 = 2**24
"""Whole numbers below are exact in float32, and so are sums of them that stay below."""
BATCH_PRIOR = 8.0
"""Requests that a replica's centroid counts for in the mean signature of what runs there; with
fewer, homes of a nearly idle pool wander with every request."""


class RouteRequest(NamedTuple):
    """One request of `RoutingCore.select_many`; fields as the arguments of `select`."""

    request_id: str
    counts_LE: CountArray | None
    prompt_tokens: int | None
    domain: str | None = None
    exclude: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests lay among the centroids in a stretch of time.

    Attributes:
        num_requests: requests that were compared with centroids.
        similarity: mean cosine to the nearest centroid; 0 without requests.
        skew: share of requests at the most frequent nearest centroid, times C; 1 is even.
    """

    num_requests: int
    similarity: float
    skew: float


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
        window_s: seconds that a signature is kept for a refit.
        ramp_s: seconds in which a replica that joins a working pool comes to its full share; 0
            gives it at once.
    """

    def __init__(
        self,
        policy: Policy,
        artifact: Artifact | None,
        seed: int = 1,
        *,
        max_report_age_s: float = 5.0,
        reservoir_size: int = 1024,
        window_s: float = math.inf,
        ramp_s: float = 0.0,
    ) -> None:
        self.policy = policy
        self.ledger = LoadLedger()
        self.max_report_age_s = max_report_age_s
        self._counters: Counter[str] = Counter()
        self._best_similarity_sum = 0.0
        self._reservoir = SignatureReservoir(reservoir_size, seed, window_s)
        self._ramp_s = ramp_s
        self._ids: list[str] = []
        self._index: dict[str, int] = {}
        self._centroid_K: IntArray = np.empty(0, dtype=np.int64)
        self._foreign_K: IntArray = np.empty(0, dtype=np.int64)
        self._reported_at_K = np.empty(0)
        self._last_foreign_at = -math.inf
        self._joined_at_K = np.empty(0)
        self._last_joined_at = -math.inf
        # Mean signature of what runs on each replica, for policies that follow the batch; NaN for
        # a replica without one, so that scores come out as NaN.
        self._running_KD: Float32Array = np.empty((0, 0), dtype=np.float32)
        self._has_running_K = np.empty(0, dtype=np.bool_)
        # The row in them of each replica, None for a new one; empty if the pool has not changed.
        self._moved_K: list[int | None] = []
        # Experts that each replica's cache holds, as 0 and 1, (L * E,); (K, L * E) is laid out of
        # them when it is asked for.
        self._resident: dict[str, Float32Array] = {}
        self._resident_KN: Float32Array | None = None
        self._is_empty_K = np.empty(0, dtype=np.bool_)
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
    def centroids_CD(self) -> Float32Array:
        """Unit centroids in use, of the artifact or a refit; not to be changed."""
        return self._centroids_CD

    @property
    def assignment(self) -> dict[str, int | None]:
        """Centroid of each replica; None for one that takes overflow only."""
        return {
            replica_id: None if centroid == NO_CENTROID else centroid
            for replica_id, centroid in zip(self._ids, self._centroid_K.tolist(), strict=True)
        }

    def centroid_of(self, replica_id: str) -> int | None:
        """Centroid of one replica; None for one without, or one that is not in the pool."""
        k = self._index.get(replica_id)
        centroid = NO_CENTROID if k is None else int(self._centroid_K[k])
        return None if centroid == NO_CENTROID else centroid

    @property
    def is_paired(self) -> bool:
        """Whether every replica has a centroid and every centroid a replica."""
        num_centroids = len(self._centroids_CD)
        return len(self._ids) == num_centroids and NO_CENTROID not in self._centroid_K

    def set_replicas(
        self,
        replica_ids: Sequence[str],
        remembered: Mapping[str, int] | None = None,
        joined_at: float | None = None,
    ) -> list[str]:
        """Change the pool: known replicas keep their centroid, others take what is free.

        Free centroids are handed out lowest first: to known replicas that wait for one, then to
        new ones in the order given. Replicas beyond the number of centroids get none.

        Args:
            replica_ids: the new pool, in order.
            remembered: centroids that new replicas say they had, as after a restart of the router;
                one that is taken is ignored.
            joined_at: seconds; new replicas ramp up from then on. None: they do not, as after a
                short absence.

        Returns:
            Requests whose reservations went with a removed replica.

        Raises:
            ValueError: a replica is named twice; nothing has changed.
        """
        if len(set(replica_ids)) != len(replica_ids):
            raise ValueError(f"replica ids must be distinct, got {list(replica_ids)}")
        dropped = self.ledger.set_replicas(replica_ids)
        self._counters["dropped_reservations"] += len(dropped)
        assignment = self.assignment
        taken = {assignment[i] for i in replica_ids if i in assignment}
        for replica_id, centroid in (remembered or {}).items():
            if replica_id not in assignment and centroid not in taken:
                assignment[replica_id] = centroid
                taken.add(centroid)
        if joined_at is not None and not self._index.keys() >= set(replica_ids):
            self._last_joined_at = joined_at
        self._lay_out(replica_ids, assignment, joined_at)
        return dropped

    def set_artifact(self, artifact: Artifact | None) -> None:
        """Swap the artifact; centroid k of the new one takes the place of centroid k of the old.

        The reservoir starts again: signatures of another IDF or mask are not comparable.
        """
        self._artifact = artifact
        self._reservoir.clear()
        self._resident, self._resident_KN = {}, None
        self._running()  # of the old length, before it is forgotten
        self._has_running_K[:] = False
        centroids_CD = artifact.centroids_KD if artifact else np.empty((0, 0), np.float32)
        self.set_centroids(centroids_CD, self.assignment)

    def set_centroids(
        self, centroids_CD: Float32Array, assignment: Mapping[str, int | None]
    ) -> None:
        """Swap the centroids, as after a refit; loads, reservations and reservoir stay.

        So do mean signatures of running batches: they have followed the traffic already.

        Args:
            centroids_CD: unit vectors in the signature space of the artifact; float32, shape
                (C, D); not to be changed afterwards.
            assignment: centroid of each replica; free ones go to replicas without one.
        """
        self._running()  # replicas that have joined start from the centroids until now
        self._centroids_CD = centroids_CD
        self._scores_C = np.full(len(centroids_CD) + 1, np.nan, dtype=np.float32)  # [-1] stays NaN
        self.mark()
        self._lay_out(self._ids, assignment)

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
        self._give_up(request_id)
        allowed = self._allowed(exclude)
        signature_D, scores_K, reason = None, None, None
        if self.policy.needs_scores:
            signature_D, reason = self._signature(counts_LE, prompt_tokens, now)
            if signature_D is not None:
                scores_K = self._scores(signature_D)
        loads_K = self._ramped(self.loads(now), now)
        held_K = None
        if scores_K is not None and counts_LE is not None and self._uses_residents:
            held_K = self._held(counts_LE[None])[0]
        selection = self._place(request_id, scores_K, reason, loads_K, domain, allowed, now, held_K)
        if signature_D is not None and self.policy.follows_batch:
            self._follow(self._index[selection.replica_id], signature_D)
        return selection

    def select_many(
        self, requests: Sequence[RouteRequest], now: float
    ) -> list[Selection | NoReplica]:
        """Choose and reserve for a batch, one after the other, in order.

        Each choice sees the reservations of those before it. In a large pool scores are computed
        for all of them at once: the time goes into reading the centroids, which a batch reads once.
        They may differ from those of `select` in the last bit.

        Args:
            requests: distinct requests.
            now: seconds, as for `select`.

        Returns:
            What `select` returns or raises, for each request.
        """
        if len(self._ids) * self._centroids_CD.shape[1] <= SMALL_POOL:
            return [self._select_or_refuse(request, now) for request in requests]
        allowed: list[IntArray | NoReplica | None] = []
        signatures: dict[int, Float32Array] = {}  # by position in the batch
        reasons: dict[int, FallbackReason | None] = {}
        for b, request in enumerate(requests):
            try:
                allowed.append(self._allowed(request.exclude))
            except NoReplica as err:
                allowed.append(err)
                continue
            if self.policy.needs_scores:
                signature_D, reasons[b] = self._signature(
                    request.counts_LE, request.prompt_tokens, now
                )
                if signature_D is not None:
                    signatures[b] = signature_D
        scores_BK, cosines_BB, rows = self._batch_scores(signatures)
        held_BK = None
        if rows and self._uses_residents:
            held_BK = self._held(
                np.stack([c for b in rows if (c := requests[b].counts_LE) is not None])
            )
        loads_K = self._ramped(self.loads(now), now)
        answers: list[Selection | NoReplica] = []
        for b, (request, choice) in enumerate(zip(requests, allowed, strict=True)):
            if self._give_up(request.request_id):
                loads_K = self._ramped(self.loads(now), now)
            if isinstance(choice, NoReplica):
                answers.append(choice)
                continue
            selection = self._place(
                request.request_id,
                scores_BK[rows[b]] if b in rows else None,
                reasons.get(b),
                loads_K,
                request.domain,
                choice,
                now,
                held_BK[rows[b]] if held_BK is not None and b in rows else None,
            )
            k = self._index[selection.replica_id]
            if b in rows and self.policy.follows_batch:
                # What runs on k is another mix now: those that follow must see it.
                rate = self._follow(k, signatures[b])
                row = rows[b]
                later = cosines_BB[row, row + 1 :]
                if rate < 1.0:
                    before = scores_BK[row + 1 :, k]
                    later = before + np.float32(rate) * (later - before)
                scores_BK[row + 1 :, k] = later
            loads_K[k] += 1
            answers.append(selection)
        return answers

    def _select_or_refuse(self, request: RouteRequest, now: float) -> Selection | NoReplica:
        request_id, counts_LE, prompt_tokens, domain, exclude = request
        try:
            return self.select(request_id, counts_LE, prompt_tokens, domain, now, exclude)
        except NoReplica as err:
            return err

    def _give_up(self, request_id: str) -> bool:
        """End the reservation that a retried request still holds; whether it held one."""
        if request_id not in self.ledger:
            return False
        self._counters["reselected"] += 1
        return self.ledger.release(request_id)

    def _place(
        self,
        request_id: str,
        scores_K: Float32Array | None,
        reason: FallbackReason | None,
        loads_K: IntArray,
        domain: str | None,
        allowed: IntArray | None,
        now: float,
        held_K: Float32Array | None = None,
    ) -> Selection:
        """Let the policy choose, and reserve."""
        values_K = scores_K
        if scores_K is not None and held_K is not None:
            values_K = scores_K + np.float32(self.policy.resident_weight) * held_K
        decision = self.policy.choose(values_K, loads_K, domain, allowed)
        self.ledger.reserve(request_id, self._ids[decision.index], now)
        fallback = reason or decision.fallback
        self._counters["selected"] += 1
        if fallback is not None:
            self._counters[f"fallback_{fallback}"] += 1
        centroid = int(self._centroid_K[decision.index])
        similarity = None if scores_K is None else float(scores_K[decision.index])
        if similarity is not None and math.isnan(similarity):
            similarity = None
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
        if self._foreign_K[k]:
            self._last_foreign_at = now
        return True

    def report_resident(self, replica_id: str, resident_LE: BoolArray) -> bool:
        """Take which experts a replica's cache holds; they count where the policy says so.

        Args:
            replica_id: a replica.
            resident_LE: bool (L, E).

        Returns:
            False for a replica that is not in the pool.

        Raises:
            ValueError: another shape than the artifact's model has.
        """
        if replica_id not in self._index:
            return False
        artifact = self._artifact
        shape = None if artifact is None else (artifact.num_layers, artifact.num_experts)
        if resident_LE.shape != shape:
            raise ValueError(
                f"resident experts of {replica_id!r} must have shape {shape}, got "
                f"{resident_LE.shape}: it runs another model than the artifact's"
            )
        resident_N = resident_LE.ravel().astype(np.float32)
        self._resident[replica_id] = resident_N
        if self._resident_KN is not None:
            k = self._index[replica_id]
            self._resident_KN[k], self._is_empty_K[k] = resident_N, not resident_LE.any()
        return True

    @property
    def _uses_residents(self) -> bool:
        return bool(self.policy.resident_weight and self._resident)

    def _held(self, counts_BLE: CountArray) -> Float32Array:
        """Share of each prompt's choices that fall on experts a replica holds; (B, K).

        A replica whose cache is not known, or empty as in one that has just started, counts as the
        mean of the others: it is to fill up, and not to be left out for being empty.
        """
        if self._resident_KN is None:
            none_N = np.zeros(counts_BLE[0].size, dtype=np.float32)
            self._resident = {i: r for i, r in self._resident.items() if i in self._index}
            self._resident_KN = np.stack([self._resident.get(i, none_N) for i in self._ids])
            self._is_empty_K = self._resident_KN.max(axis=1) == 0
        counts_BN = counts_BLE.reshape(len(counts_BLE), -1).astype(np.float32)
        counts_BN /= counts_BN.sum(axis=1, keepdims=True)
        held_BK: Float32Array = counts_BN @ self._resident_KN.T
        is_empty_K = self._is_empty_K
        if is_empty_K.any() and not is_empty_K.all():
            held_BK[:, is_empty_K] = held_BK[:, ~is_empty_K].mean(axis=1, keepdims=True)
        return held_BK

    def loads(self, now: float) -> IntArray:
        """Effective load: own reservations, and recent requests of others; int64, shape (K,).

        Others' are what an engine reported beyond our own reservations at that moment: a report is
        up to a heartbeat old, and taken as it is it would count our own finished requests.
        """
        if now - self._last_foreign_at > self.max_report_age_s:
            return self.ledger.loads()
        is_recent_K = now - self._reported_at_K <= self.max_report_age_s
        return self.ledger.loads() + self._foreign_K * is_recent_K

    def _ramped(self, loads_K: IntArray, now: float) -> IntArray:
        """Loads as policies see them: a replica that has just joined counts as if it held more.

        The others' mean is added to its load, and less and less of it until `ramp_s` is over. So a
        policy that evens out loads fills it in a straight line, and its emptiness does not draw
        every request at once to an engine with cold caches. An offset and not a floor: below a
        floor it would stay the emptiest, whatever it gets.
        """
        if now - self._last_joined_at >= self._ramp_s:
            return loads_K
        left_K = 1.0 - np.minimum((now - self._joined_at_K) / self._ramp_s, 1.0)
        is_settled_K = left_K <= 0.0
        if not is_settled_K.any():
            return loads_K  # the whole pool is new: nobody to compare with
        offset_K: IntArray = np.rint(left_K * loads_K[is_settled_K].mean()).astype(np.int64)
        return loads_K + offset_K

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

    def reservoir(self, now: float) -> list[Float32Array]:
        """Uniform sample of the window's signatures, float32 (D,) each; not copies."""
        return self._reservoir.rows(now)

    def traffic(self) -> Traffic:
        """How near and how evenly requests were to their centroids since the last `mark`."""
        num_scored = int(self._since_mark_C.sum())
        most = int(self._since_mark_C.max(initial=0))
        return Traffic(
            num_scored,
            self._similarity_since_mark / max(num_scored, 1),
            most * len(self._since_mark_C) / max(num_scored, 1),
        )

    def mark(self) -> None:
        """Let `traffic` start again; so does a change of centroids."""
        self._since_mark_C = np.zeros(len(self._centroids_CD), dtype=np.int64)
        self._similarity_since_mark = 0.0

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
        ledger.set_replicas(list(assignment))
        self.ledger = ledger
        self._lay_out(list(assignment), assignment)

    def _lay_out(
        self,
        ids: Sequence[str],
        assignment: Mapping[str, int | None],
        joined_at: float | None = None,
    ) -> None:
        """Rebuild the arrays over K for a pool; reported loads of known replicas stay."""
        kept_K = [self._index.get(replica_id) for replica_id in ids]
        foreign, reported_at = self._foreign_K, self._reported_at_K
        self._foreign_K = np.array([0 if k is None else foreign[k] for k in kept_K], np.int64)
        self._reported_at_K = np.array([-np.inf if k is None else reported_at[k] for k in kept_K])
        new_since = -math.inf if joined_at is None else joined_at
        joined = self._joined_at_K
        self._joined_at_K = np.array([new_since if k is None else joined[k] for k in kept_K])
        self._centroid_K = assign_centroids(ids, assignment, len(self._scores_C) - 1)
        if self.policy.follows_batch:
            moved_K = self._moved_K
            self._moved_K = (
                [None if k is None else moved_K[k] for k in kept_K] if moved_K else kept_K
            )
        self._ids = list(ids)
        self._index = {replica_id: k for k, replica_id in enumerate(ids)}
        self._resident_KN = None

    def _running(self) -> Float32Array:
        """Mean signature of what runs on each replica, (K, D), in the pool's order.

        Laid out when it is asked for and not when the pool changes: a thousand replicas register
        one after the other, and to copy all the vectors for each would take longer than they wait
        before they are forgotten.
        """
        if self._moved_K:
            self._lay_out_running(self._moved_K, self._centroids_CD)
            self._moved_K = []
        return self._running_KD

    def _lay_out_running(self, kept_K: Sequence[int | None], centroids_CD: Float32Array) -> None:
        """Rebuild the mean signatures: kept replicas keep theirs, others get their centroid."""
        running_KD, had_K = self._running_KD, self._has_running_K
        num_dims = centroids_CD.shape[1]
        kept = np.array([-1 if k is None else k for k in kept_K], dtype=np.int64)
        is_kept_K = kept >= 0
        is_kept_K[is_kept_K] = had_K[kept[is_kept_K]]
        is_new_K = ~is_kept_K & (self._centroid_K != NO_CENTROID)
        self._running_KD = np.empty((len(kept_K), num_dims), dtype=np.float32)
        if is_kept_K.any():  # else the old ones may be of another length
            np.take(running_KD, kept, axis=0, out=self._running_KD, mode="clip")
        self._running_KD[~is_kept_K] = np.nan
        self._running_KD[is_new_K] = centroids_CD[self._centroid_K[is_new_K]]
        self._has_running_K = is_kept_K | is_new_K

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

    def _signature(
        self, counts_LE: CountArray | None, prompt_tokens: int | None, now: float
    ) -> tuple[Float32Array | None, FallbackReason | None]:
        """Signature of a request that can be compared with centroids; or why there is none."""
        artifact = self._artifact
        if artifact is None:
            return None, FallbackReason.NO_ARTIFACT
        if counts_LE is None:
            return None, FallbackReason.NO_SIGNATURE
        exact_LE = conserved(counts_LE, prompt_tokens, artifact)
        if exact_LE is None:
            return None, FallbackReason.BAD_SIGNATURE
        signature_D = artifact.transform(exact_LE)
        if signature_D.max() == 0:
            return None, FallbackReason.ZERO_SIGNATURE
        self._reservoir.offer(signature_D, now)
        if not len(self._centroids_CD):
            return None, FallbackReason.NO_CENTROID
        return signature_D, None

    def _scores(self, signature_D: Float32Array) -> Float32Array:
        """Similarity to each replica's centroid or batch, shape (K,); NaN where there is none."""
        if self.policy.follows_batch:
            scores_K: Float32Array = self._running() @ signature_D
            self._note_running(scores_K)
            return scores_K
        scores_C = np.dot(self._centroids_CD, signature_D, out=self._scores_C[:-1])
        self._note_scores(scores_C)
        scores_K = self._scores_C[self._centroid_K]
        return scores_K

    def _batch_scores(
        self, signatures: Mapping[int, Float32Array]
    ) -> tuple[Float32Array, Float32Array, dict[int, int]]:
        """What `_scores` gives for each signature, shape (B, K), and the row of each key.

        Between them, for policies that follow the batch, the cosines of the signatures, (B, B).
        """
        rows = {key: row for row, key in enumerate(signatures)}
        none = np.empty((0, 0), dtype=np.float32)
        if not signatures:
            return none, none, rows
        signatures_BD = np.stack(list(signatures.values()))
        if self.policy.follows_batch:
            scores_BK: Float32Array = signatures_BD @ self._running().T
            for scores_K in scores_BK:
                self._note_running(scores_K)
            return scores_BK, signatures_BD @ signatures_BD.T, rows
        scores_BC = np.full((len(signatures), len(self._scores_C)), np.nan, dtype=np.float32)
        np.matmul(signatures_BD, self._centroids_CD.T, out=scores_BC[:, :-1])
        for scores_C in scores_BC[:, :-1]:
            self._note_scores(scores_C)
        return scores_BC[:, self._centroid_K], none, rows

    def _follow(self, k: int, signature_D: Float32Array) -> float:
        """Count a request that was just reserved on replica k into the mean of what runs there.

        Returns its share of the mean, in (0, 1].

        A request that ends takes the mean with it, not its own signature: the mean stays, and only
        its weight, the load, falls. So nothing is kept per request, and an idle replica remembers
        what it served last.
        """
        running_D = self._running_KD[k]
        if not self._has_running_K[k]:
            running_D[:] = signature_D
            self._has_running_K[k] = True
            return 1.0
        rate = 1.0 / (BATCH_PRIOR + self.ledger.load(self._ids[k]))
        sscal(1.0 - rate, running_D)  # in place, a quarter of the time of three array operations
        saxpy(signature_D, running_D, a=rate)
        return rate

    def _note_running(self, scores_K: Float32Array) -> None:
        """Note which replica's batch a request is nearest to, as if it were its centroid."""
        nearest = int(scores_K.argmax())  # the first NaN, if there is one
        best = float(scores_K[nearest])
        if best != best:
            if np.isnan(scores_K).all():
                return  # no replica has anything to compare with
            nearest = int(np.nanargmax(scores_K))
            best = float(scores_K[nearest])
        self._counters["scored"] += 1
        self._best_similarity_sum += best
        centroid = int(self._centroid_K[nearest])
        if centroid != NO_CENTROID:
            self._since_mark_C[centroid] += 1
            self._similarity_since_mark += best

    def _note_scores(self, scores_C: Float32Array) -> None:
        nearest = int(scores_C.argmax())
        best = float(scores_C[nearest])
        self._counters["scored"] += 1
        self._best_similarity_sum += best
        self._since_mark_C[nearest] += 1
        self._similarity_since_mark += best


def conserved(
    counts_LE: CountArray, prompt_tokens: int | None, artifact: Artifact
) -> Float32Array | None:
    """The counts as float32 if every layer accounts for every prompt token, else None.

    That is, sum over E = prompt_tokens * top_k. Counts of another shape, of a type other than
    integer, or below zero are not conserved. With prompt_tokens None, the layers must agree on a
    sum that is a multiple of top_k.
    """
    if counts_LE.dtype.kind not in "ui":
        return None
    if counts_LE.shape != (artifact.num_layers, artifact.num_experts):
        return None
    if counts_LE.dtype.kind == "i" and counts_LE.min() < 0:
        return None
    as_float_LE: Float32Array = counts_LE.astype(np.float32)
    sums: list[float] = (as_float_LE @ np.ones(artifact.num_experts, np.float32)).tolist()
    expected = sums[0] if prompt_tokens is None else prompt_tokens * artifact.top_k
    if expected >= EXACT_IN_FLOAT32:
        sums = np.add.reduce(counts_LE, axis=1, dtype=np.int64).tolist()
        expected = sums[0] if prompt_tokens is None else expected
    is_conserved = expected % artifact.top_k == 0 and sums.count(expected) == len(sums)
    return as_float_LE if is_conserved else None


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
