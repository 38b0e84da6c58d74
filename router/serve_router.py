"""Request routers that Serve runs in each calling process: thin, private state, no decisions."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from router.prefix import PrefixRing


class PinnedRequestRouter(RequestRouter):
    """Sends a call to the replica that its first argument names.

    The decision was made by the router actor. A replica that Serve no longer lists (it drains)
    cannot be pinned: the call then goes to any other, which answers that it is not meant.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        wanted = pending_request.args[0] if pending_request and pending_request.args else None
        pinned = [r for r in candidate_replicas if r.replica_id.unique_id == wanted]
        return [pinned or candidate_replicas]


class PrefixAffineRequestRouter(RequestRouter):
    """Prefill side: same beginning of the prompt, same replica, unless it is overloaded.

    Source: ELDR's artifact, prefix-hash router with bounded load (all policies alike).
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._ring: PrefixRing | None = None
        self._ring_ids: tuple[str, ...] = ()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        key = pending_request.args[0] if pending_request and pending_request.args else None
        if len(candidate_replicas) < 2 or not isinstance(key, bytes):
            return [candidate_replicas]
        by_id = {r.replica_id.unique_id: r for r in candidate_replicas}
        ids = tuple(sorted(by_id))
        if self._ring is None or ids != self._ring_ids:
            self._ring, self._ring_ids = PrefixRing(ids), ids
        cache = self.replica_queue_len_cache
        loads = {i: cache.get(r.replica_id) or 0 for i, r in by_id.items()}
        chosen = self._ring.pick(key, loads)
        rest = [r for i, r in by_id.items() if i != chosen]
        return [[by_id[chosen]], rest]
