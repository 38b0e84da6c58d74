"""Prefill side: prefix-affine choice with bounded load, the same for every decode policy.

Source: ELDR (arXiv 2607.00466) prefill router; bounded loads as in consistent hashing with bounded
loads (Mirrokni et al., 2018).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence

from router.types import NoReplica

PREFIX_BYTES = 1024
VIRTUAL_NODES = 160
MAX_LOAD_RATIO = 1.25


class PrefixRing:
    """Consistent-hash ring over prefill replicas. Immutable: make a new one when the pool changes.

    Args:
        replica_ids: the prefill replicas, distinct; may be empty.

    Raises:
        ValueError: a replica is named twice.
    """

    def __init__(self, replica_ids: Sequence[str]) -> None:
        if len(set(replica_ids)) != len(replica_ids):
            raise ValueError(f"replica ids must be distinct, got {list(replica_ids)}")
        self.replica_ids = list(replica_ids)
        ring = sorted(
            (hash64(f"{replica_id}#{node}".encode()), replica_id)
            for replica_id in replica_ids
            for node in range(VIRTUAL_NODES)
        )
        self._points = [point for point, _ in ring]
        self._owners = [owner for _, owner in ring]

    def pick(self, key: bytes, loads: Mapping[str, int], exclude: Collection[str] = ()) -> str:
        """Choose a prefill replica.

        Args:
            key: the prompt; only its first 1024 bytes count.
            loads: in-flight prefill requests, for at least every replica of the ring.
            exclude: replicas not to choose, such as those that failed this request.

        Returns:
            The key's home on the ring if its load is at most 1.25 x the mean load, the mean taken
            with the incoming request; else the least loaded replica, first in order on ties.

        Raises:
            NoReplica: the ring is empty, or all of it is excluded.
            ValueError: a replica has no entry in `loads`.
        """
        candidates = self.replica_ids
        if exclude:
            candidates = [replica for replica in candidates if replica not in exclude]
        if not candidates:
            raise NoReplica(
                f"no prefill replica may be chosen: {len(self.replica_ids)} known, all excluded"
                if self.replica_ids
                else "no prefill replica is known: wait for one to register"
            )
        try:
            total = sum(map(loads.__getitem__, candidates))
        except KeyError:
            missing = [replica for replica in candidates if replica not in loads]
            raise ValueError(f"loads must name every prefill replica, missing {missing}") from None
        home = self._home(key, exclude)
        mean = (total + 1) / len(candidates)
        if loads[home] <= MAX_LOAD_RATIO * mean:
            return home
        return min(candidates, key=loads.__getitem__)

    def _home(self, key: bytes, exclude: Collection[str]) -> str:
        """First owner at or after the key's point that is not excluded; one must exist."""
        owners = self._owners
        i = bisect_left(self._points, hash64(key[:PREFIX_BYTES])) % len(owners)
        while owners[i] in exclude:
            i = (i + 1) % len(owners)
        return owners[i]


def hash64(data: bytes) -> int:
    """64-bit BLAKE2b of the bytes; the same on every machine and run."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
