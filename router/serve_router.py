"""The request router that Serve runs in each calling process: it decides nothing."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


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
