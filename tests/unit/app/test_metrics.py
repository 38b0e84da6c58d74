"""What reaches Ray's metrics: totals as increments, gauges again and again."""

from __future__ import annotations

from typing import Any

import pytest
from ray.util import metrics as ray_metrics

from app.metrics import REFRESH_S, IngressMetrics, PlacementMetrics, RouterMetrics

Calls = list[tuple[str, float, dict[str, str]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Each value that is recorded, with its metric and labels."""
    recorded: Calls = []

    def record(self: Any, value: float, tags: dict[str, str] | None = None) -> None:
        labels = {**self._default_tags, **(tags or {})}
        assert set(labels) <= set(self._tag_keys)
        recorded.append((self.info["name"], value, labels))

    monkeypatch.setattr(ray_metrics.Counter, "inc", record)
    monkeypatch.setattr(ray_metrics.Gauge, "set", record)
    return recorded


def test_router_exports_what_has_changed(calls: Calls) -> None:
    router = RouterMetrics("app")
    totals: dict[tuple[str, ...], float] = {
        ("selections", "live", "none"): 4,
        ("best_similarity",): 2.5,
        ("refits", "failed"): 0,
    }
    gauges = {("replicas", "decode"): 2.0, ("moved_share",): 0.1}
    router.export(totals, gauges)
    labels = {"application": "app", "policy": "live", "fallback": "none"}
    assert ("eldr_router_selections", 4, labels) in calls
    assert ("eldr_router_best_similarity_sum", 2.5, {"application": "app"}) in calls
    assert ("eldr_router_replicas", 2, {"application": "app", "role": "decode"}) in calls
    assert len(calls) == 4  # nothing of what is 0
    calls.clear()
    totals["selections", "live", "none"] = 5
    totals["best_similarity",] = 2.5 - 1e-12  # sums of floats may round down
    router.export(totals, gauges)
    assert [(name, value) for name, value, _ in calls] == [
        ("eldr_router_selections", 1),
        ("eldr_router_replicas", 2),  # gauges again: Ray forgets them otherwise
        ("eldr_router_moved_share", 0.1),
    ]


def test_router_exports_now_and_then(calls: Calls) -> None:
    router = RouterMetrics("app")
    assert router.is_due(100.0)
    assert not router.is_due(100.0 + REFRESH_S / 2)
    assert router.is_due(100.0 + REFRESH_S)


def test_ingress_without_requests_says_so(calls: Calls) -> None:
    ingress = IngressMetrics()
    ingress.active("chat", +1)
    calls.clear()
    ingress.refresh()
    assert [(value, labels["kind"]) for _, value, labels in calls] == [
        (1, "chat"),
        (0, "completion"),
    ]


def test_moves_count_once(calls: Calls) -> None:
    placement = PlacementMetrics()
    status = {"version": 3, "expected_balance": 1.2, "measured_balance": None, "num_moves": 7}
    placement.export(status)
    placement.export(status)
    assert [value for name, value, _ in calls if name == "eldr_placement_moves"] == [7]
    assert [value for name, value, _ in calls if name == "eldr_placement_version"] == [3, 3]
