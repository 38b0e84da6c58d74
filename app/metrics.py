"""Metrics of our own. Ray exports them as `ray_<name>`, counters with `_total`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram
from ray.util import metrics as ray_metrics

_SECONDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60]
_TPOT_SECONDS = [0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1]


class IngressMetrics:
    """What one ingress replica measures; made inside the replica."""

    def __init__(self) -> None:
        self._requests = Counter(
            "eldr_requests", "Requests ended, by kind and HTTP status.", tag_keys=("kind", "status")
        )
        self._active = Gauge("eldr_active_requests", "Requests under way.", tag_keys=("kind",))
        self._ttft = Histogram(
            "eldr_ttft_seconds",
            "Request in to first byte of the answer out.",
            boundaries=_SECONDS,
            tag_keys=("policy",),
        )
        self._tpot = Histogram(
            "eldr_tpot_seconds",
            "(E2E - TTFT) / (output tokens - 1) of a streamed request.",
            boundaries=_TPOT_SECONDS,
            tag_keys=("policy",),
        )
        self._fallbacks = Counter(
            "eldr_routing_fallbacks",
            "Requests not routed by signature, by reason.",
            tag_keys=("reason",),
        )
        self._num_active: dict[str, int] = {}

    def active(self, kind: str, change: int) -> None:
        self._num_active[kind] = self._num_active.get(kind, 0) + change
        self._active.set(self._num_active[kind], {"kind": kind})

    def finished(self, kind: str, status: int) -> None:
        self._requests.inc(1, {"kind": kind, "status": str(status)})

    def streamed(self, policy: str, ttft_s: float, rest_s: float, num_events: int) -> None:
        """One answer that went through: its events are its tokens (one each in a stream)."""
        self._ttft.observe(ttft_s, {"policy": policy})
        if num_events > 1:
            self._tpot.observe(rest_s / (num_events - 1), {"policy": policy})

    def fell_back(self, reason: str) -> None:
        self._fallbacks.inc(1, {"reason": reason})


class CacheMetrics:
    """How a decode replica's expert cache fits what it serves; made inside the replica.

    What the cache counts step by step is in vLLM's own metrics (`vllm:eldr_cache_*`).
    """

    def __init__(self) -> None:
        self._overlap = Gauge(
            "eldr_cache_home_overlap",
            "Share of the uses expected of the replica's cluster that fall on resident experts.",
        )

    def overlap(self, share: float) -> None:
        self._overlap.set(share)


class PlacementMetrics:
    """Where a decode replica's experts are, as its node's manager says; made inside the replica."""

    def __init__(self) -> None:
        self._version = Gauge("eldr_placement_version", "Version of the placement plan.")
        self._balance = Gauge(
            "eldr_placement_rank_balance",
            "Active experts on the fullest EP rank over the mean of ranks, by what was counted.",
            tag_keys=("kind",),
        )
        self._moves = Counter("eldr_placement_moves", "Experts moved to another EP rank.")
        self._exported = 0

    def export(self, status: Mapping[str, Any]) -> None:
        """Take what `Planner.status` says."""
        self._version.set(status["version"])
        for kind in ("expected", "measured"):
            if (balance := status[f"{kind}_balance"]) is not None:
                self._balance.set(balance, {"kind": kind})
        if (more := status["num_moves"] - self._exported) > 0:
            self._moves.inc(more)
        self._exported = status["num_moves"]  # a manager that is new counts from 0


class RouterMetrics:
    """What the router actor measures; made inside the actor, which is no Serve replica."""

    def __init__(self) -> None:
        self._refits = ray_metrics.Counter(
            "eldr_router_refits", "Refits of the centroids ended, by outcome.", ("outcome",)
        )
        self._moved_share = ray_metrics.Gauge(
            "eldr_router_moved_share",
            "Share of recent requests whose nearest replica the last refit changed.",
        )
        self._exported: dict[str, int] = {}

    def refits(self, num_by_outcome: Mapping[str, int], moved_share: float | None) -> None:
        """Export totals since the start of the router; what has not changed costs nothing."""
        for outcome, total in num_by_outcome.items():
            if (more := total - self._exported.get(outcome, 0)) > 0:
                self._refits.inc(more, {"outcome": outcome})
                self._exported[outcome] = total
                if moved_share is not None:
                    self._moved_share.set(moved_share)
