"""In-flight requests per replica: reserved at selection, released exactly once.

Reserving when a replica is chosen, and not when the request reaches it, keeps requests that are
chosen at the same moment from all going to the same idle replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from router.types import IntArray


class LoadLedger:
    """Owns the reservations of one router; used from one thread or event loop.

    Every operation on one request is O(1). A load falls only when a reservation of that replica is
    taken out, so it cannot become negative.

    Axes: K replicas.
    """

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._loads_K: IntArray = np.empty(0, dtype=np.int64)
        self._reservations: dict[str, tuple[str, float]] = {}  # oldest first
        self.num_unknown_releases = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reservations

    def __len__(self) -> int:
        """Number of live reservations."""
        return len(self._reservations)

    @property
    def replica_ids(self) -> list[str]:
        """Known replicas, in the order given to `set_replicas`."""
        return list(self._index)

    def set_replicas(self, replica_ids: Sequence[str]) -> list[str]:
        """Change the replicas; those that stay keep their reservations.

        Args:
            replica_ids: the new replicas, distinct, in order.

        Returns:
            Requests whose reservations went with a removed replica.
        """
        held = dict(zip(self._index, self._loads_K.tolist(), strict=True))
        loads = [held.get(i, 0) for i in replica_ids]
        removed = self._index.keys() - set(replica_ids)
        self._index = {replica_id: k for k, replica_id in enumerate(replica_ids)}
        self._loads_K = np.array(loads, dtype=np.int64)
        if not removed:
            return []
        dropped = sorted(i for i, (holder, _) in self._reservations.items() if holder in removed)
        for request_id in dropped:
            del self._reservations[request_id]
        return dropped

    def reserve(self, request_id: str, replica_id: str, now: float) -> None:
        """Count a request as in flight at a replica.

        Args:
            request_id: key for `release`.
            replica_id: a known replica.
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
        self._loads_K[self._position(replica_id)] += 1
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
        self._loads_K[self._index[reservation[0]]] -= 1
        return True

    def load(self, replica_id: str) -> int:
        """Requests in flight at a replica; ValueError if it is unknown."""
        return int(self._loads_K[self._position(replica_id)])

    def loads(self) -> IntArray:
        """Requests in flight at each replica, in order; a copy, int64, shape (K,)."""
        return self._loads_K.copy()

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
        held = Counter(replica_id for replica_id, _ in self._reservations.values())
        for replica_id in {**self._index, **held}:
            load = self.load(replica_id) if replica_id in self._index else 0
            if load != held[replica_id]:
                raise RuntimeError(
                    f"ledger disagrees on replica {replica_id!r}: load {load}, "
                    f"reservations {held[replica_id]}, all reservations {len(self._reservations)}"
                )

    def snapshot(self) -> dict[str, Any]:
        """Plain dict for `restore`; JSON-able, oldest reservation first."""
        return {
            "replicas": self.replica_ids,
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
            fresh.set_replicas(snapshot["replicas"])
            for request_id, replica_id, reserved_at in snapshot["reservations"]:
                fresh.reserve(request_id, replica_id, float(reserved_at))
            fresh.num_unknown_releases = int(snapshot["num_unknown_releases"])
        except (KeyError, TypeError, ValueError) as err:
            raise ValueError(f"ledger snapshot is malformed: {err!r}") from err
        self.__dict__.update(fresh.__dict__)

    def _position(self, replica_id: str) -> int:
        try:
            return self._index[replica_id]
        except KeyError:
            known = ", ".join(self._index) or "none"
            raise ValueError(
                f"unknown replica {replica_id!r} (known: {known}): give it to set_replicas first"
            ) from None
