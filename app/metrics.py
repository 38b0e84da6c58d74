"""Metrics of our own. Ray exports them as `ray_<name>`, counters with `_total`.

`dashboards/README.md` has the table of all of them. Ray forgets a gauge that has not been set for
two of its report intervals, 20 s. So what must not vanish is set again every `REFRESH_S`, and what
speaks of a replica ends with the replica, which sets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram
from ray.util import metrics as ray_metrics

REFRESH_S = 5.0
KINDS = ("chat", "completion")
_SECONDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60]
_PHASE_SECONDS = [0.001, 0.002, *_SECONDS]
_E2E_SECONDS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600]
_TPOT_SECONDS = [0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1]


Series = tuple[str, ...]
"""Key of one of the router's metrics, and the values of its labels."""


class IngressMetrics:
    """What one ingress replica measures; made inside the replica."""

    def __init__(self) -> None:
        self._requests = Counter(
            "eldr_requests", "Requests ended, by kind and HTTP status.", tag_keys=("kind", "status")
        )
        self._active = Gauge("eldr_active_requests", "Requests under way.", tag_keys=("kind",))
        self._ttft = Histogram(
            "eldr_ttft_seconds",
            "Request in to first byte of a streamed answer out.",
            boundaries=_SECONDS,
            tag_keys=("policy",),
        )
        self._tpot = Histogram(
            "eldr_tpot_seconds",
            "(E2E - TTFT) / (output tokens - 1) of a streamed request.",
            boundaries=_TPOT_SECONDS,
            tag_keys=("policy",),
        )
        self._e2e = Histogram(
            "eldr_e2e_seconds",
            "Request in to last byte of the answer out.",
            boundaries=_E2E_SECONDS,
            tag_keys=("kind",),
        )
        self._phase = Histogram(
            "eldr_phase_seconds",
            "Time of one phase of a request, by attempt.",
            boundaries=_PHASE_SECONDS,
            tag_keys=("phase",),
        )
        self._retries = Counter(
            "eldr_retries", "Attempts that failed, by the phase it failed in.", tag_keys=("phase",)
        )
        self._fallbacks = Counter(
            "eldr_routing_fallbacks",
            "Requests not routed by signature, by reason.",
            tag_keys=("reason",),
        )
        self._num_active = dict.fromkeys(KINDS, 0)

    def refresh(self) -> None:
        """Set the gauges again, so that Ray does not forget them."""
        for kind, number in self._num_active.items():
            self._active.set(number, {"kind": kind})

    def active(self, kind: str, change: int) -> None:
        self._num_active[kind] += change
        self._active.set(self._num_active[kind], {"kind": kind})

    def finished(self, kind: str, status: int) -> None:
        self._requests.inc(1, {"kind": kind, "status": str(status)})

    def phase(self, phase: str, seconds: float) -> None:
        self._phase.observe(seconds, {"phase": phase})

    def retried(self, phase: str) -> None:
        self._retries.inc(1, {"phase": phase})

    def answered(self, kind: str, e2e_s: float) -> None:
        self._e2e.observe(e2e_s, {"kind": kind})

    def streamed(self, policy: str, ttft_s: float, rest_s: float, num_events: int) -> None:
        """One streamed answer that went through: its events are its tokens, one each."""
        self._ttft.observe(ttft_s, {"policy": policy})
        if num_events > 1:
            self._tpot.observe(rest_s / (num_events - 1), {"policy": policy})

    def fell_back(self, reason: str) -> None:
        self._fallbacks.inc(1, {"reason": reason})


class ReplicaMetrics:
    """What a prefill or decode replica holds; made inside the replica."""

    def __init__(self, role: str) -> None:
        self._requests = Gauge(
            "eldr_replica_requests", "Requests that the replica holds.", tag_keys=("role",)
        )
        self._role = role

    def holds(self, num_requests: int) -> None:
        self._requests.set(num_requests, {"role": self._role})


class CacheMetrics:
    """How a decode replica's expert cache fits what it serves; made inside the replica.

    What the cache counts step by step is in vLLM's own metrics (`vllm:eldr_cache_*`).
    """

    def __init__(self) -> None:
        self._overlap = Gauge(
            "eldr_cache_home_overlap",
            "Share of the uses expected of the replica's cluster that fall on resident experts.",
        )
        self._slots = Gauge("eldr_cache_slots", "Experts of a layer that fit into the cache (B).")
        self._budget = Gauge(
            "eldr_cache_budget", "Experts of a layer that may be loaded ahead a step (R)."
        )

    def overlap(self, share: float) -> None:
        self._overlap.set(share)

    def size(self, slots: int, budget: int) -> None:
        self._slots.set(slots)
        self._budget.set(budget)


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
    """What the router actor measures; made inside the actor, which is no Serve replica.

    A call to Ray's metrics takes a third of a decision. So the service adds up in plain Python, and
    what has changed since is exported here now and then.

    Args:
        app_name: application of the router, as Serve labels its replicas.
    """

    def __init__(self, app_name: str) -> None:
        self._counters = {
            key: ray_metrics.Counter(name, text, ("application", *labels))
            for key, (name, text, *labels) in _ROUTER_COUNTERS.items()
        }
        self._gauges = {
            key: ray_metrics.Gauge(name, text, ("application", *labels))
            for key, (name, text, *labels) in _ROUTER_GAUGES.items()
        }
        for metric in (*self._counters.values(), *self._gauges.values()):
            metric.set_default_tags({"application": app_name})
        self._exported: dict[Series, float] = {}
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it is time to export; if so, the next time is put off by `REFRESH_S`."""
        if now < self._next:
            return False
        self._next = now + REFRESH_S
        return True

    def export(self, totals: Mapping[Series, float], gauges: Mapping[Series, float]) -> None:
        """Take what `RouterService.totals` and `gauges` say; totals never fall."""
        for series, total in totals.items():
            if (more := total - self._exported.get(series, 0)) > 0:
                key, *values = series
                labels = zip(_ROUTER_COUNTERS[key][2:], values, strict=True)
                self._counters[key].inc(more, dict(labels))
                self._exported[series] = total
        for (key, *values), value in gauges.items():
            labels = zip(_ROUTER_GAUGES[key][2:], values, strict=True)
            self._gauges[key].set(value, dict(labels))


_ROUTER_COUNTERS: dict[str, tuple[str, ...]] = {
    # key: name, help, labels
    "selections": (
        "eldr_router_selections",
        "Decode replicas chosen, by policy and why it went by load alone (none: it did not).",
        "policy",
        "fallback",
    ),
    # A histogram by hand: Ray's takes one call for each value. Cumulative, as Prometheus wants it.
    "decision": (
        "eldr_router_decision_seconds_bucket",
        "Decisions that took at most `le` seconds, inside the router.",
        "le",
    ),
    "scored": ("eldr_router_scored", "Requests compared with replicas."),
    "best_similarity": (
        "eldr_router_best_similarity_sum",
        "Sum over scored requests of the cosine to the most alike replica.",
    ),
    "placed": ("eldr_router_placed_alike", "Requests whose replica had a cosine to them."),
    "similarity": (
        "eldr_router_similarity_sum",
        "Sum over them of the cosine to the replica that was chosen.",
    ),
    "banded": ("eldr_router_banded", "Requests placed by policy band."),
    "band_size": (
        "eldr_router_band_size_sum",
        "Sum over them of the replicas in the locality band.",
    ),
    "events": (
        "eldr_router_reservation_events",
        "Reservations that did not end by their one release, by what happened.",
        "event",
    ),
    "refits": ("eldr_router_refits", "Refits of the centroids ended, by outcome.", "outcome"),
}
_ROUTER_GAUGES: dict[str, tuple[str, ...]] = {
    "replicas": ("eldr_router_replicas", "Replicas that the router may choose.", "role"),
    "load": (
        "eldr_router_load",
        "Requests under way at decode replicas, as the router counts them: max and mean.",
        "stat",
    ),
    "moved_share": (
        "eldr_router_moved_share",
        "Share of recent requests whose nearest replica the last refit changed.",
    ),
}
