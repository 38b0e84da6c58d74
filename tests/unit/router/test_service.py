"""The router service with a clock of our own: replicas come and go, the router restarts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from router.service import HEARTBEAT_TIMEOUT_S, RouterService, RouterSettings
from tests.builders import build_artifact


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def settings(
    policy: str = "jsq", artifact: str | None = None, ttl_s: float = 100
) -> RouterSettings:
    return RouterSettings(policy, 0.1, 0.5, 0, artifact, 16, ttl_s)


def service(clock: Clock, *replicas: str, **kwargs: object) -> RouterService:
    made = RouterService(settings(**kwargs), clock)  # type: ignore[arg-type]
    for replica in replicas:
        made.heartbeat("decode", replica, f"http://{replica}", 0, None)
    return made


def select(router: RouterService, request_id: str, **kwargs: object) -> dict[str, object]:
    return router.select(request_id, None, None, None, **kwargs)  # type: ignore[arg-type]


def test_no_replica_is_an_answer_not_a_crash(clock: Clock) -> None:
    assert "no decode replica" in str(select(service(clock), "r")["error"])


def test_selection_reserves_and_carries_url_and_map(clock: Clock) -> None:
    router = service(clock, "a", "b")
    first = select(router, "r1")
    second = select(router, "r2", known_version=first["version"])
    assert {first["replica_id"], second["replica_id"]} == {"a", "b"}
    assert first["url"] == f"http://{first['replica_id']}"
    assert "view" in first
    assert "view" not in second


def test_young_router_says_that_it_may_not_know_all(clock: Clock) -> None:
    router = service(clock, "a")
    assert not router.view()["is_complete"]
    clock.now += HEARTBEAT_TIMEOUT_S
    assert router.view()["is_complete"]


def test_silent_replica_is_forgotten(clock: Clock) -> None:
    router = service(clock, "a", "b")
    clock.now = HEARTBEAT_TIMEOUT_S + 1
    router.heartbeat("decode", "b", "http://b", 0, None)
    assert list(router.replicas()["decode"]) == ["b"]
    assert {select(router, f"r{i}")["replica_id"] for i in range(4)} == {"b"}


def test_suspect_returns_with_its_next_heartbeat(clock: Clock) -> None:
    router = service(clock, "a", "b")
    router.suspect("a")
    assert {select(router, f"r{i}")["replica_id"] for i in range(3)} == {"b"}
    router.heartbeat("decode", "a", "http://a", 0, None)
    assert select(router, "r9")["replica_id"] == "a"


def test_draining_replica_gets_nothing_new(clock: Clock) -> None:
    router = service(clock, "a", "b")
    router.deregister("b")
    router.deregister("b")
    assert select(router, "r")["replica_id"] == "a"


def test_releases_travel_with_the_next_selection(clock: Clock) -> None:
    router = service(clock, "a")
    select(router, "r1")
    select(router, "r2", released=["r1", "unknown"])
    assert router.stats()["loads"] == {"a": 1}
    router.release(["r2"])
    assert router.stats()["loads"] == {"a": 0}


def test_prefill_replicas_are_known_but_not_chosen(clock: Clock) -> None:
    router = service(clock, "a")
    router.heartbeat("prefill", "p", "http://p", 0, None)
    assert router.replicas()["prefill"] == {"p": "http://p"}
    assert select(router, "r")["replica_id"] == "a"


def test_unreleased_reservation_expires(clock: Clock) -> None:
    router = service(clock, "a", ttl_s=10)
    select(router, "r")
    assert router.stats()["loads"] == {"a": 1}
    for _ in range(12):
        clock.now += 1
        router.heartbeat("decode", "a", "http://a", 0, None)
    assert router.stats()["loads"] == {"a": 0}


def test_restarted_router_gives_the_same_centroids_in_any_order(
    clock: Clock, tmp_path: Path
) -> None:
    build_artifact(k=3).save(tmp_path / "artifact")
    path = str(tmp_path / "artifact")
    old = service(clock, "a", "b", "c", policy="band", artifact=path)
    given = {r: old.heartbeat("decode", r, f"http://{r}", 0, None)["centroid"] for r in "abc"}
    assert sorted(given.values()) == [0, 1, 2]
    new = RouterService(settings("band", path), clock)
    again = {r: new.heartbeat("decode", r, f"http://{r}", 0, given[r])["centroid"] for r in "cab"}
    assert again == given


def test_wrong_counts_fall_back(clock: Clock, tmp_path: Path) -> None:
    artifact = build_artifact(k=2)
    artifact.save(tmp_path / "artifact")
    router = service(clock, "a", "b", policy="band", artifact=str(tmp_path / "artifact"))
    right = np.zeros((artifact.num_layers, artifact.num_experts), dtype="<u2")
    right[:, 0] = 5 * artifact.top_k
    for counts, tokens in ((b"xyz", 5), (b"xy", 5), (b"", 5), (right.tobytes(), 6)):
        answer = router.select("r", counts, tokens, None)
        assert answer["fallback"] == "bad_signature"
    assert router.select("r", None, None, None)["fallback"] == "no_signature"


def test_configure_changes_policy_and_keeps_replicas(clock: Clock) -> None:
    router = service(clock, "a", "b")
    assert router.configure(settings("rr"))
    assert not router.configure(settings("rr"))
    assert {select(router, f"r{i}")["replica_id"] for i in range(2)} == {"a", "b"}
    with pytest.raises((OSError, ValueError)):
        router.configure(settings("band", "/no/such/artifact"))
    assert router.core.policy.name == "rr"
