"""In-flight requests per replica: reserved at selection, released exactly once.

Reserving when a replica is chosen, and not when the request reaches it, keeps requests that are
chosen at the same moment from all going to the same idle replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from router.types import IntArray


class LoadLedger:
    """Owns the reservations of one router; used from one thread or event loop.

    Every operation on one request is O(1). A load is the size of the replica's own set of
    requests, so it cannot become negative.
    """

    def __init__(self) -> None:
        self._requests: dict[str, set[str]] = {}
        self._reservations: dict[str, tuple[str, float]] = {}  # oldest first
        self.num_unknown_releases = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reservations

    def __len__(self) -> int:
        """Number of live reservations."""
        return len(self._reservations)

    @property
    def replica_ids(self) -> list[str]:
        """Known replicas, in the order they were added."""
        return list(self._requests)

    def add_replica(self, replica_id: str) -> None:
        """Start counting for a replica; nothing changes if it is known."""
        self._requests.setdefault(replica_id, set())

    def remove_replica(self, replica_id: str) -> list[str]:
        """Forget a replica and its reservations; returns the requests that lost theirs."""
        dropped = sorted(self._requests.pop(replica_id, ()))
        for request_id in dropped:
            del self._reservations[request_id]
        return dropped

    def reserve(self, request_id: str, replica_id: str, now: float) -> None:
        """Count a request as in flight at a replica.

        Args:
            request_id: key for `release`.
            replica_id: a replica that was added.
            now: time of the reservation, seconds; must not run backwards between calls.

        Raises:
            ValueError: the replica is unknown, or the request already holds a reservation.
        """
        if request_id in self._reservations:
            holder = self._reservations[request_id][0]
            raise ValueError(
                f"request {request_id!r} already holds a reservation on {holder!r}: release it "
                "before reserving again"
            )
        self._known(replica_id).add(request_id)
        self._reservations[request_id] = (replica_id, now)

    def release(self, request_id: str) -> bool:
        """End a reservation.

        Returns:
            True the first time. False, and counted in `num_unknown_releases`, if there is no such
            reservation: released before, expired, gone with its replica, or never made.
        """
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            self.num_unknown_releases += 1
            return False
        self._requests[reservation[0]].remove(request_id)
        return True

    def load(self, replica_id: str) -> int:
        """Requests in flight at a replica; ValueError if it is unknown."""
        return len(self._known(replica_id))

    def loads(self, replica_ids: Sequence[str]) -> IntArray:
        """Requests in flight at each of the replicas; int64, in their order."""
        requests = self._requests
        return np.fromiter(
            (len(requests[replica_id]) for replica_id in replica_ids), np.int64, len(replica_ids)
        )

    def expire(self, now: float, max_age_s: float) -> list[str]:
        """End reservations older than `max_age_s` seconds; returns their requests, oldest first.

        A net for requests whose release was lost with the process that owed it. Later releases of
        expired requests return False.
        """
        expired = []
        for request_id, (_, reserved_at) in self._reservations.items():
            if now - reserved_at <= max_age_s:
                break
            expired.append(request_id)
        for request_id in expired:
            self.release(request_id)
        return expired

    def check_integrity(self) -> None:
        """Compare the two views of the ledger.

        Raises:
            RuntimeError: they disagree; the message holds both numbers.
        """
        held: dict[str, int] = dict.fromkeys(self._requests, 0)
        for replica_id, _ in self._reservations.values():
            held[replica_id] = held.get(replica_id, 0) + 1
        for replica_id, reservations in held.items():
            load = len(self._requests.get(replica_id, ()))
            if load != reservations:
                raise RuntimeError(
                    f"ledger disagrees on replica {replica_id!r}: load {load}, "
                    f"reservations {reservations}, all reservations {len(self._reservations)}"
                )

    def snapshot(self) -> dict[str, Any]:
        """Plain dict for `restore`; JSON-able, oldest reservation first."""
        return {
            "replicas": list(self._requests),
            "reservations": [
                [request_id, replica_id, reserved_at]
                for request_id, (replica_id, reserved_at) in self._reservations.items()
            ],
            "num_unknown_releases": self.num_unknown_releases,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Replace all state by that of a snapshot.

        Raises:
            ValueError: the snapshot is malformed; the ledger is unchanged.
        """
        fresh = LoadLedger()
        try:
            for replica_id in snapshot["replicas"]:
                fresh.add_replica(replica_id)
            for request_id, replica_id, reserved_at in snapshot["reservations"]:
                fresh.reserve(request_id, replica_id, float(reserved_at))
            fresh.num_unknown_releases = int(snapshot["num_unknown_releases"])
        except (KeyError, TypeError, ValueError) as err:
            raise ValueError(f"ledger snapshot is malformed: {err!r}") from err
        self.__dict__.update(fresh.__dict__)

    def _known(self, replica_id: str) -> set[str]:
        try:
            return self._requests[replica_id]
        except KeyError:
            known = ", ".join(self._requests) or "none"
            raise ValueError(
                f"unknown replica {replica_id!r} (known: {known}): call add_replica first"
            ) from None
