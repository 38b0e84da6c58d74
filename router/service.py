"""The router as a service: replicas that come and go by heartbeat, requests that are placed.

Plain Python with a given clock; `router/actor.py` makes a Ray actor of it. One event loop or
thread; no method awaits, so that choosing and reserving are one step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calibration.artifact import Artifact
from router.core import RoutingCore
from router.policy import make_policy
from router.types import CountArray, NoReplica

HEARTBEAT_TIMEOUT_S = 5.0
_EXPIRE_EVERY_S = 5.0


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
    lambda_: float
    seed: int
    artifact: str | None
    reservoir_size: int
    reservation_ttl_s: float


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

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._build()

    def configure(self, settings: RouterSettings) -> bool:
        """Take other settings; known replicas stay. Returns whether anything changed.

        Raises:
            ValueError: the artifact cannot be loaded; the old settings stay in force.
        """
        if settings == self.settings:
            return False
        old = self.settings
        self.settings = settings
        try:
            self._build()
        except Exception:
            self.settings = old
            raise
        self._pool_changed({})
        return True

    # ---- replicas

    def heartbeat(
        self, role: str, replica_id: str, url: str, load: int, centroid: int | None
    ) -> dict[str, Any]:
        """A replica says that it is alive.

        Args:
            role: "prefill" or "decode".
            replica_id: unique id of the replica.
            url: base URL of its HTTP server.
            load: requests it holds now.
            centroid: the centroid this router gave it before, if any.

        Returns:
            {"centroid": its centroid or None}.
        """
        now = self.clock()
        member = self._members.get(replica_id)
        is_new = member is None or member.suspected
        if member is None:
            self._members[replica_id] = _Member(role, url, now)
        else:
            member.last_seen, member.suspected, member.url = now, False, url
        if role != "decode":
            return {"centroid": None}
        if is_new:
            self._pool_changed({} if centroid is None else {replica_id: centroid})
        self.core.report_load(replica_id, load, now)
        self.tick(now)
        return {"centroid": self.core.assignment.get(replica_id)}

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
            selection = self.core.select(
                request_id, self._counts(counts), prompt_tokens, domain, now, exclude
            )
        except NoReplica as err:
            return {"error": str(err)}
        answer: dict[str, Any] = {
            "replica_id": selection.replica_id,
            "url": self._members[selection.replica_id].url,
            "policy": selection.policy,
            "similarity": selection.similarity,
            "band_size": selection.band_size,
            "fallback": str(selection.fallback) if selection.fallback else None,
            "version": self.version,
        }
        if known_version != self.version:
            answer["view"] = self.view()
        return answer

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
            "counters": self.core.counters,
            "mean_best_similarity": self.core.mean_best_similarity,
            "replicas": self.replicas(),
        }

    # ---- inside

    def _build(self) -> None:
        settings = self.settings
        artifact = Artifact.load(settings.artifact) if settings.artifact else None
        self.core = RoutingCore(
            self._policy(artifact, {}),
            artifact,
            settings.seed,
            reservoir_size=settings.reservoir_size,
        )

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
            seed=self.settings.seed,
            domain_replicas={d: ks for d, ks in domain_replicas.items() if ks},
        )

    def _pool_changed(self, remembered: dict[str, int]) -> None:
        ids = sorted(self.replicas()["decode"])
        self.core.set_replicas(ids, remembered)
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
