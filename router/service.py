"""The router as a service: replicas that come and go by heartbeat, requests that are placed.

Plain Python with a given clock; `router/actor.py` makes a Ray actor of it. One event loop or
thread; no method awaits, so that choosing and reserving are one step.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calibration.artifact import Artifact
from calibration.signature import Float32Array
from router.core import NO_CENTROID, RouteRequest, RoutingCore
from router.policy import make_policy
from router.refit import (
    ROWS_PER_REPLICA,
    RefitJob,
    RefitPlanner,
    RefitReason,
    RefitResult,
    RefitSettings,
    centroid_tag,
    signature_space,
    spread,
)
from router.types import CountArray, NoReplica, Selection

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 5.0
HEARTBEAT_S = 1.0
MIN_HEARTBEAT_S = 0.2
HEARTBEATS_PER_S = 64.0
_EXPIRE_EVERY_S = 5.0
_RESTORE_EVERY_S = 0.1
_LOOK_EVERY_S = 0.5
_NORM_TOLERANCE = 1e-3
DECISION_SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1)
"""Upper ends of the buckets of decision times; longer ones have a bucket of their own."""


WireRequest = tuple[str, bytes | None, int | None, str | None, Collection[str]]


def heartbeat_s(num_replicas: int, tells_residents: bool) -> float:
    """Seconds from one heartbeat of a decode replica to the next.

    Those that say what an expert cache holds come sooner: it changes from step to step, and what
    the router knows of it is as old. HEARTBEATS_PER_S of the pool together, but of each one in
    HEARTBEAT_S to MIN_HEARTBEAT_S.
    """
    if not tells_residents:
        return HEARTBEAT_S
    return min(max(num_replicas / HEARTBEATS_PER_S, MIN_HEARTBEAT_S), HEARTBEAT_S)


@dataclass(slots=True)
class _Member:
    role: str
    url: str
    last_seen: float
    suspected: bool = False


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What the service needs of the configuration; plain values, so that it can be compared."""

    policy: str
    tau: float
    lambda_: float | None
    seed: int
    artifact: str | None
    reservoir_size: int
    reservation_ttl_s: float
    ramp_s: float = 0.0
    refit: RefitSettings = field(default_factory=lambda: RefitSettings(when="never"))
    max_load: float | None = None
    resident_weight: float | None = None
    caches_experts: bool = False


@dataclass(slots=True)
class _Tally:
    """What decisions add up to since the start; plain numbers, for the hot path."""

    num_by_time: list[int] = field(default_factory=lambda: [0] * (len(DECISION_SECONDS) + 1))
    num_selected: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    num_alike: int = 0
    similarity: float = 0.0
    num_banded: int = 0
    band_size: int = 0


@dataclass(slots=True)
class RouterService:
    """Owns the routing core and the set of live replicas.

    Args:
        settings: policy and artifact.
        clock: monotonic seconds.
    """

    settings: RouterSettings
    clock: Callable[[], float]
    core: RoutingCore = field(init=False)
    version: int = field(init=False, default=0)
    _members: dict[str, _Member] = field(init=False, default_factory=dict)
    _next_expiry: float = field(init=False, default=0.0)
    _started: float = field(init=False)
    _space: str = field(init=False)
    _planner: RefitPlanner = field(init=False)
    _refit_counters: Counter[str] = field(init=False, default_factory=Counter)
    _next_look: float = field(init=False, default=0.0)
    _refitting: RefitJob | None = field(init=False, default=None)
    _moved_share: float | None = field(init=False, default=None)
    _tags: tuple[str, ...] = field(init=False, default=())
    _restored: dict[str, Float32Array] = field(init=False, default_factory=dict)
    _awaited: set[str] = field(init=False, default_factory=set)
    _restore_at: float | None = field(init=False, default=None)
    _misfits: set[str] = field(init=False, default_factory=set)
    _tally: _Tally = field(init=False, default_factory=_Tally)
    _earlier: Counter[str] = field(init=False, default_factory=Counter)
    _earlier_similarity: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._build()

    def configure(self, settings: RouterSettings) -> bool:
        """Take other settings; known replicas stay. Returns whether anything changed.

        Refitted centroids stay too while refits are on and the signature space is the same.

        Raises:
            ValueError: the artifact cannot be loaded; the old settings stay in force.
        """
        if settings == self.settings:
            return False
        old, old_core, old_space = self.settings, self.core, self._space
        self.settings = settings
        try:
            self._build()
        except Exception:
            self.settings = old
            raise
        self._earlier, self._earlier_similarity = self._counted(old_core)
        self._pool_changed({})
        if self._tags and self._takes_refits() and self._space == old_space:
            self.core.set_centroids(old_core.centroids_CD, old_core.assignment)
        else:
            self._tags, self._restored, self._awaited = (), {}, set()
        return True

    # ---- replicas

    def heartbeat(
        self,
        role: str,
        replica_id: str,
        url: str,
        load: int,
        centroid: int | None,
        home_tag: str | None = None,
        resident: bytes | None = None,
    ) -> dict[str, Any]:
        """A replica says that it is alive.

        A refitted centroid is kept by its replica: the answer carries the vector when it is
        another than the replica has, and a restarted router asks for it (`restore_home`).

        Args:
            role: "prefill" or "decode".
            replica_id: unique id of the replica.
            url: base URL of its HTTP server.
            load: requests it holds now.
            centroid: the centroid this router gave it before, if any.
            home_tag: name of the refitted centroid vector the replica keeps, if any.
            resident: experts that its cache holds, as bits, each layer from a byte of its own; None
                without a cache.

        Returns:
            {"centroid": its centroid or None, "interval_s": seconds to the next heartbeat}; for
            refitted centroids also {"home_tag": name, "home": vector as bytes if it is new};
            {"send_home": True} asks for `restore_home`.
        """
        now = self.clock()
        member = self._members.get(replica_id)
        is_new = member is None or member.suspected
        if member is None:
            self._members[replica_id] = _Member(role, url, now)
        else:
            member.last_seen, member.suspected, member.url = now, False, url
        if role != "decode":
            return {"centroid": None, "interval_s": HEARTBEAT_S}
        if is_new:
            remembered = self._remembered(replica_id, centroid, home_tag)
            self._pool_changed(remembered, joined_at=now if member is None else None)
        self.core.report_load(replica_id, load, now)
        counts = resident is not None and self._take_resident(replica_id, resident)
        self.tick(now)
        interval_s = heartbeat_s(len(self.core.replica_ids), counts)
        return {**self._home_of(replica_id, home_tag), "interval_s": interval_s}

    def _take_resident(self, replica_id: str, resident: bytes) -> bool:
        """Tell the core what a cache holds; whether it counts."""
        artifact = self.core.artifact
        if artifact is None or not self.core.policy.resident_weight:
            return False
        try:
            resident_LE = artifact.unpack_experts(resident)
        except ValueError as err:
            if replica_id not in self._misfits:
                self._misfits.add(replica_id)
                logger.warning("%s: its cache does not count: %s", replica_id, err)
            return False
        return self.core.report_resident(replica_id, resident_LE)

    def restore_home(self, replica_id: str, home: bytes) -> bool:
        """A replica gives back the centroid it kept over a restart of the router.

        Args:
            replica_id: a replica that was asked to, by `send_home`.
            home: little-endian float32 unit vector in the artifact's signature space.

        Returns:
            Whether it is taken; False also if it was not asked for (any more).
        """
        if replica_id not in self._awaited or self.core.artifact is None:
            return False
        self._awaited.discard(replica_id)
        length = self.core.artifact.transform.length
        vector_D: Float32Array = np.frombuffer(home[: len(home) // 4 * 4], dtype="<f4")
        is_unit = abs(float(np.linalg.norm(vector_D)) - 1.0) <= _NORM_TOLERANCE  # False for NaN
        if len(home) != 4 * length or not is_unit:
            self._refit_counters["refused_homes"] += 1
            logger.warning("%s gave back a centroid that is none: it waits for a refit", replica_id)
            return False
        self._restored[replica_id] = vector_D
        if self._restore_at is None:
            self._restore_at = self.clock() + _RESTORE_EVERY_S
        return True

    def deregister(self, replica_id: str) -> None:
        """A replica drains: nothing new goes there; its streams keep their reservations' end."""
        if self._members.pop(replica_id, None) is not None:
            self._pool_changed({})

    def suspect(self, replica_id: str) -> None:
        """A caller could not reach a replica: leave it out until its next heartbeat."""
        member = self._members.get(replica_id)
        if member is not None and not member.suspected:
            member.suspected = True
            self._pool_changed({})

    def tick(self, now: float | None = None) -> None:
        """Forget replicas that went silent and reservations that nobody released."""
        now = self.clock() if now is None else now
        if self._restore_at is not None and now >= self._restore_at:
            self._restore_homes()
        if now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRE_EVERY_S / 5
        silent = [i for i, m in self._members.items() if now - m.last_seen > HEARTBEAT_TIMEOUT_S]
        for replica_id in silent:
            del self._members[replica_id]
        if silent:
            self._pool_changed({})
        self.core.expire(now, self.settings.reservation_ttl_s)

    def replicas(self) -> dict[str, dict[str, str]]:
        """Live replicas by role: {"prefill": {id: url}, "decode": {id: url}}."""
        answer: dict[str, dict[str, str]] = {"prefill": {}, "decode": {}}
        for replica_id, member in self._members.items():
            if not member.suspected:
                answer[member.role][replica_id] = member.url
        return answer

    def view(self) -> dict[str, Any]:
        """What callers keep: version, live replicas, and whether every replica can be known yet.

        A router that has just started has not heard from all of them.
        """
        is_complete = self.clock() - self._started >= HEARTBEAT_TIMEOUT_S
        return {"version": self.version, "replicas": self.replicas(), "is_complete": is_complete}

    # ---- requests

    def select(
        self,
        request_id: str,
        counts: bytes | None,
        prompt_tokens: int | None,
        domain: str | None,
        exclude: Collection[str] = (),
        known_version: int = -1,
        released: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Choose and reserve a decode replica.

        Args:
            request_id: key of the reservation.
            counts: expert counts as they travel (little-endian uint16, L x E), or None.
            prompt_tokens: tokens the counts must account for.
            domain: label for the domain oracle.
            exclude: replicas that failed this request.
            known_version: the caller's version of the replica map.
            released: reservations that have ended, carried along.

        Returns:
            The selection as a dict with the replica's url and the map's version; the map itself
            when the caller's version is old; {"error": text} when there is no replica.
        """
        now = self.clock()
        self.tick(now)
        self.release(released)
        try:
            answer = self._answer(
                self.core.select(
                    request_id, self._counts(counts), prompt_tokens, domain, now, exclude
                )
            )
        except NoReplica as err:
            return {"error": str(err)}
        self._tally.num_by_time[bisect_left(DECISION_SECONDS, self.clock() - now)] += 1
        if known_version != self.version:
            answer["view"] = self.view()
        return answer

    def select_many(
        self,
        requests: Sequence[WireRequest],
        known_version: int = -1,
        released: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Choose and reserve for a batch of distinct requests, in order.

        Args:
            requests: (request_id, counts, prompt_tokens, domain, exclude) each, as for `select`.
            known_version: the caller's version of the replica map.
            released: reservations that have ended, carried along.

        Returns:
            {"answers": what `select` returns for each, without a map; "view": the map, when the
            caller's version is old}.
        """
        now = self.clock()
        self.tick(now)
        self.release(released)
        selections = self.core.select_many(
            [
                RouteRequest(request_id, self._counts(counts), prompt_tokens, domain, exclude)
                for request_id, counts, prompt_tokens, domain, exclude in requests
            ],
            now,
        )
        answer: dict[str, Any] = {
            "answers": [
                self._answer(item) if isinstance(item, Selection) else {"error": str(item)}
                for item in selections
            ]
        }
        if requests:
            each = (self.clock() - now) / len(requests)
            self._tally.num_by_time[bisect_left(DECISION_SECONDS, each)] += len(requests)
        if known_version != self.version:
            answer["view"] = self.view()
        return answer

    def _answer(self, selection: Selection) -> dict[str, Any]:
        tally = self._tally
        tally.num_selected[selection.policy, selection.fallback] += 1
        if selection.similarity is not None:
            tally.num_alike += 1
            tally.similarity += selection.similarity
        if selection.band_size is not None:
            tally.num_banded += 1
            tally.band_size += selection.band_size
        return {
            "replica_id": selection.replica_id,
            "url": self._members[selection.replica_id].url,
            "policy": selection.policy,
            "similarity": selection.similarity,
            "band_size": selection.band_size,
            "fallback": str(selection.fallback) if selection.fallback else None,
            "version": self.version,
        }

    def release(self, request_ids: Sequence[str]) -> None:
        """End reservations; those that are not known (any more) are counted by the core."""
        for request_id in request_ids:
            self.core.release(request_id)

    def stats(self) -> dict[str, Any]:
        """Loads, centroids, counters and settings, for operators and tests."""
        loads = self.core.loads(self.clock()).tolist()
        return {
            "policy": self.core.policy.name,
            "version": self.version,
            "loads": dict(zip(self.core.replica_ids, loads, strict=True)),
            "assignment": self.core.assignment,
            "counters": {**self.core.counters, **self._refit_counters},
            "moved_share": self._moved_share,
            "mean_best_similarity": self.core.mean_best_similarity,
            "replicas": self.replicas(),
        }

    # ---- metrics

    def totals(self) -> dict[tuple[str, ...], float]:
        """What has been counted since the start, by key and labels of `RouterMetrics`."""
        tally = self._tally
        counters, best_similarity = self._counted(self.core)
        totals: dict[tuple[str, ...], float] = {
            ("selections", policy, fallback or "none"): number
            for (policy, fallback), number in tally.num_selected.items()
        }
        num_until = 0
        for end, number in zip((*DECISION_SECONDS, "+Inf"), tally.num_by_time, strict=True):
            num_until += number
            totals["decision", str(end)] = num_until
        totals |= {
            ("scored",): counters["scored"],
            ("best_similarity",): best_similarity,
            ("placed",): tally.num_alike,
            ("similarity",): tally.similarity,
            ("banded",): tally.num_banded,
            ("band_size",): tally.band_size,
        }
        for event in ("expired", "dropped_reservations", "reselected", "unknown_releases"):
            totals["events", event] = counters[event]
        for outcome, number in self.num_refits.items():
            totals["refits", outcome] = number
        return totals

    def gauges(self) -> dict[tuple[str, ...], float]:
        """How things are now, by key and labels of `RouterMetrics`."""
        loads_K = self.core.loads(self.clock())
        gauges: dict[tuple[str, ...], float] = {
            ("replicas", role): len(urls) for role, urls in self.replicas().items()
        }
        gauges["load", "max"] = int(loads_K.max(initial=0))
        gauges["load", "mean"] = float(loads_K.mean()) if len(loads_K) else 0.0
        if self._moved_share is not None:
            gauges["moved_share",] = self._moved_share
        return gauges

    def _counted(self, core: RoutingCore) -> tuple[Counter[str], float]:
        """Counters and sum of best similarities of a core and those before it."""
        own = core.counters
        best = (core.mean_best_similarity or 0.0) * own.get("scored", 0)
        return self._earlier + Counter(own), self._earlier_similarity + best

    # ---- refits

    @property
    def num_refits(self) -> dict[str, int]:
        """Refits ended since the start, by outcome."""
        outcomes = {
            "taken": "refits",
            "rejected": "rejected_refits",
            "failed": "failed_refits",
            "overtaken": "overtaken_refits",
        }
        return {outcome: self._refit_counters[name] for outcome, name in outcomes.items()}

    def next_refit(self) -> RefitJob | None:
        """A refit that is due, for the caller to run off the request path; one at a time.

        Every job must end in `finish_refit`.
        """
        now = self.clock()
        if self._refitting is not None or now < self._next_look or not self._takes_refits():
            return None
        self._next_look = now + _LOOK_EVERY_S
        ids = self.core.replica_ids
        reason = self._reason(now, len(ids)) if ids else None
        if reason is None:
            return None
        rows = self.core.reservoir(now)
        if len(rows) < ROWS_PER_REPLICA * len(ids):
            assert self.core.artifact is not None
            rows = [*self.core.artifact.reservoir_RD, *rows]
        if len(rows) < len(ids):
            self._planner.failed(now)
            self._refit_counters["failed_refits"] += 1
            logger.warning(
                "no refit: %d replicas but %d signatures, from traffic and artifact together",
                len(ids),
                len(rows),
            )
            return None
        owned = [NO_CENTROID if c is None else c for c in self.core.assignment.values()]
        self._refitting = RefitJob(
            reason=reason,
            replica_ids=tuple(ids),
            owned_K=np.array(owned, dtype=np.int64),
            centroids_CD=self.core.centroids_CD,
            rows=rows,
            seed=self.settings.seed,
            min_gain=self.settings.refit.min_gain,
            space=self._space,
        )
        return self._refitting

    def finish_refit(self, job: RefitJob, result: RefitResult | None) -> None:
        """Take the result of a job, in one step; None says that it failed and changes nothing.

        A result for a pool or centroids that are no longer in use is dropped.
        """
        now = self.clock()
        self._refitting = None
        is_current = (
            tuple(self.core.replica_ids) == job.replica_ids
            and self.core.centroids_CD is job.centroids_CD
        )
        if result is None or not is_current:
            self._refit_counters["failed_refits" if result is None else "overtaken_refits"] += 1
            if result is None:
                self._planner.failed(now)
            return
        self._planner.finished(now, result)
        if not result.is_accepted:
            self._refit_counters["rejected_refits"] += 1
            logger.info("refit for %s rejected: gain %.4f", job.reason, result.gain)
            return
        self._refit_counters["refits"] += 1
        self._moved_share = result.moved_share
        self._tags, self._restored, self._awaited = result.tags, {}, set()
        homes = {replica_id: k for k, replica_id in enumerate(job.replica_ids)}
        self.core.set_centroids(result.centroids_KD, homes)
        logger.info(
            "refit for %s: %d centroids, %.0f %% of requests have a new home",
            job.reason,
            len(homes),
            100 * result.moved_share,
        )

    def _reason(self, now: float, num_replicas: int) -> RefitReason | None:
        is_paired = self.core.is_paired
        reason = self._planner.due(now, is_paired)
        if reason is not None or not is_paired:
            return reason
        if self.core.policy.follows_batch:
            return None  # homes follow the traffic by themselves
        traffic = self.core.traffic()
        if not self._planner.is_check_due(now, traffic.num_requests, num_replicas):
            return None
        self.core.mark()
        if self._planner.check(now, traffic.similarity, traffic.skew):
            return RefitReason.DRIFT
        return None

    def _takes_refits(self) -> bool:
        return (
            self.settings.refit.when != "never"
            and self.core.artifact is not None
            and self.core.policy.needs_scores
        )

    def _remembered(
        self, replica_id: str, centroid: int | None, home_tag: str | None
    ) -> dict[str, int]:
        """Centroid that a replica new to the pool had before, if it is still in use here."""
        if home_tag is None:
            return {} if centroid is None or self._tags else {replica_id: centroid}
        if home_tag in self._tags:
            return {replica_id: self._tags.index(home_tag)}
        has_own_fit = bool(self._tags) and not self._restored
        if not has_own_fit and self._takes_refits() and home_tag.startswith(f"{self._space}-"):
            # This router has restarted. Nobody may take a centroid of the artifact as a home
            # meanwhile: it would be left again in a moment, with all that was sent there.
            if not self._tags and len(self.core.centroids_CD):
                self.core.set_centroids(self.core.centroids_CD[:0], {})
            self._awaited.add(replica_id)
        return {}

    def _home_of(self, replica_id: str, home_tag: str | None) -> dict[str, Any]:
        centroid = self.core.centroid_of(replica_id)
        answer: dict[str, Any] = {"centroid": centroid}
        if replica_id in self._awaited:
            return {**answer, "send_home": True}
        if self._tags and centroid is not None:
            answer["home_tag"] = self._tags[centroid]
            if answer["home_tag"] != home_tag:
                answer["home"] = self.core.centroids_CD[centroid].astype("<f4").tobytes()
        return answer

    def _restore_homes(self) -> None:
        """Make the centroids that replicas gave back the ones in use."""
        self._restore_at = None
        homes = {i: self._restored[i] for i in self.core.replica_ids if i in self._restored}
        if not homes:
            return
        self.core.set_centroids(
            np.stack(list(homes.values())), {replica_id: k for k, replica_id in enumerate(homes)}
        )
        self._tags = tuple(centroid_tag(self._space, home_D) for home_D in homes.values())
        self._refit_counters["restored_homes"] = len(homes)

    # ---- inside

    def _build(self) -> None:
        settings = self.settings
        artifact = Artifact.load(settings.artifact) if settings.artifact else None
        self.core = RoutingCore(
            self._policy(artifact, {}),
            artifact,
            settings.seed,
            reservoir_size=settings.reservoir_size,
            window_s=settings.refit.window_s,
            ramp_s=settings.ramp_s,
        )
        self._planner = RefitPlanner(settings.refit, self.clock())
        self._space = ""
        if artifact is not None:
            self._space = signature_space(artifact.idf_LE, artifact.layer_mask)
            if settings.refit.when == "online" and len(artifact.reservoir_RD):
                self._planner.set_level(*spread(artifact.reservoir_RD, artifact.centroids_KD))

    def _policy(self, artifact: Artifact | None, assignment: dict[str, int | None]) -> Any:
        """The policy; the domain oracle needs to know which replica has which cluster."""
        by_centroid = {c: k for k, c in enumerate(assignment.values()) if c is not None}
        clusters = artifact.domain_clusters if artifact is not None else {}
        domain_replicas = {
            domain: [by_centroid[c] for c in ids if c in by_centroid]
            for domain, ids in clusters.items()
        }
        return make_policy(
            self.settings.policy,
            tau=self.settings.tau,
            lambda_=self.settings.lambda_,
            max_load=self.settings.max_load,
            resident_weight=self.settings.resident_weight,
            caches_experts=self.settings.caches_experts,
            seed=self.settings.seed,
            domain_replicas={d: ks for d, ks in domain_replicas.items() if ks},
        )

    def _pool_changed(self, remembered: dict[str, int], joined_at: float | None = None) -> None:
        ids = sorted(self.replicas()["decode"])
        self._awaited.intersection_update(ids)
        self._planner.pool_changed(self.clock())
        self.core.set_replicas(ids, remembered, joined_at)
        if self.core.policy.name == "domain":
            self.core.policy = self._policy(self.core.artifact, self.core.assignment)
        self.version += 1

    def _counts(self, counts: bytes | None) -> CountArray | None:
        artifact = self.core.artifact
        if counts is None or artifact is None:
            return None
        flat: CountArray = np.frombuffer(counts[: len(counts) // 2 * 2], dtype="<u2")
        if len(counts) % 2 or flat.size != artifact.num_layers * artifact.num_experts:
            return flat  # wrong shape: the core counts it as a bad signature
        return flat.reshape(artifact.num_layers, artifact.num_experts)
