"""The manager: targets that survive restarts, refusals, and a control loop that does not swing."""

from __future__ import annotations

from typing import Any

import pytest

from cachemgr.manager import CacheManager, Controller, ControlSettings, Targets


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def stats(**changes: Any) -> dict[str, Any]:
    counts = ("steps", "tokens", "accesses", "hits", "demand_loads", "proactive_loads")
    sums = dict.fromkeys((*counts, "streamed_loads", "load_bytes", "evictions"), 1)
    return {
        **sums,
        "slots": 32,
        "budget": 8,
        "policy": "spatio",
        "score_file": None,
        "num_experts": 64,
        "top_k": 4,
        "copy_s": 0.0,
        "memory_free": 10,
        "memory_total": 100,
        **changes,
    }


def targets(**changes: Any) -> Targets:
    return Targets(
        **{"version": 0, "slots": 30, "max_slots": 30, "budget": 8, "policy": "spatio", **changes},
        score_file=None,
    )


def test_first_report_gives_the_targets_and_changes_nothing() -> None:
    manager = CacheManager(None, Clock())
    answer = manager.report("a", stats(), None)
    assert answer["changes"] == {}
    assert answer["targets"] == {
        "version": 0,
        "slots": 32,
        "max_slots": 32,
        "budget": 8,
        "policy": "spatio",
        "score_file": None,
    }


def test_what_is_set_reaches_every_replica() -> None:
    manager = CacheManager(None, Clock())
    manager.report("a", stats(), None)
    manager.set_targets(slots=16, budget=4)
    for replica in ("a", "b"):
        answer = manager.report(replica, stats(), None)
        assert answer["changes"] == {"slots": 16, "budget": 4}
    done = manager.report("a", stats(slots=16, budget=4), answer["targets"])
    assert done["changes"] == {}
    status = manager.status()
    assert set(status["replicas"]) == {"a", "b"}
    assert status["totals"]["tokens"] == 2


def test_restarted_manager_goes_on_with_the_newest_targets() -> None:
    manager = CacheManager(None, Clock())
    manager.report("a", stats(), None)
    old = manager.report("a", stats(), None)["targets"]
    manager.set_targets(slots=16)
    new = manager.report("a", stats(), None)["targets"]
    again = CacheManager(None, Clock())
    assert again.report("b", stats(), old)["changes"] == {}
    assert again.report("a", stats(slots=16), new)["changes"] == {}
    assert again.report("b", stats(), old)["changes"] == {"slots": 16}


def test_manager_restarted_under_pressure_gives_the_slots_back_later() -> None:
    clock, settings = Clock(), ControlSettings(interval_s=1.0, patience=1)
    known: dict[str, Any] | None = None

    def slots_after(manager: CacheManager, free: int) -> int:
        nonlocal known
        slots = 32 if known is None else known["slots"]
        for _ in range(20):
            clock.now += 1
            now = stats(slots=slots, budget=0, policy="lrfu", memory_free=free)
            known = manager.report("a", now, known)["targets"]
            slots = known["slots"]
        return int(slots)

    assert slots_after(CacheManager(settings, clock), 1) == 4
    assert slots_after(CacheManager(settings, clock), 50) == 32


def test_restarted_worker_is_given_the_targets_again() -> None:
    clock = Clock()
    manager = CacheManager(ControlSettings(), clock)
    manager.report("a", stats(copy_s=50.0), None)
    manager.set_targets(slots=16)
    clock.now += 1
    answer = manager.report("a", stats(copy_s=0.1), None)
    assert answer["changes"] == {"slots": 16}
    assert manager.status()["replicas"]["a"]["link_busy"] is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slots": 3}, "below top-k 4"),
        ({"slots": 65}, "exceeds the 64 experts"),
        ({"budget": 33}, r"must be in \[0, 32\]"),
        ({"size": 3}, "unknown settings size"),
    ],
)
def test_values_that_do_not_fit_are_refused(changes: dict[str, Any], text: str) -> None:
    manager = CacheManager(None, Clock())
    with pytest.raises(ValueError, match="no decode replica"):
        manager.set_targets(slots=8)
    manager.report("a", stats(), None)
    with pytest.raises(ValueError, match=text):
        manager.set_targets(**changes)
    assert manager.report("a", stats(), None)["changes"] == {}


def test_what_an_engine_refuses_is_taken_back() -> None:
    manager = CacheManager(None, Clock())
    manager.report("a", stats(policy="lru", budget=0), None)
    manager.set_targets(budget=4)
    asked = manager.report("a", stats(policy="lru", budget=0), None)
    assert asked["changes"] == {"budget": 4}
    answer = manager.report("a", stats(policy="lru", budget=0), asked["targets"], "no loads ahead")
    assert answer["changes"] == {}
    assert manager.status()["replicas"]["a"]["refused"] == "no loads ahead"


def test_silent_replica_is_forgotten() -> None:
    clock = Clock()
    manager = CacheManager(None, clock)
    manager.report("a", stats(), None)
    clock.now += 6
    assert manager.status()["replicas"] == {}
    manager.report("a", stats(), None)
    manager.forget("a")
    assert manager.status()["replicas"] == {}


def test_busy_link_halves_the_budget_and_headroom_raises_it_slowly() -> None:
    controller = Controller(ControlSettings(patience=3), top_k=4)
    now = targets()
    now = controller.decide(now, 0.9, 0.5)
    assert now.budget == 4
    seen = [now := controller.decide(now, 0.1, 0.5) for _ in range(6)]
    assert [t.budget for t in seen] == [4, 4, 6, 6, 6, 8]
    for _ in range(100):
        now = controller.decide(now, 0.0, 0.5)
    assert now.budget == now.slots == 30
    for _ in range(100):
        now = controller.decide(now, 1.0, 0.5)
    assert now.budget == 1


def test_nothing_changes_inside_the_bands() -> None:
    controller = Controller(ControlSettings(), top_k=4)
    now = targets()
    for busy, free in ((0.3, 0.1), (0.49, 0.06), (0.21, 0.14), (None, None)) * 10:
        assert controller.decide(now, busy, free) is now
    # One reading with headroom between busy ones is no headroom.
    for busy in (0.1, 0.1, 0.3) * 10:
        assert controller.decide(now, busy, 0.1) is now


def test_memory_pressure_takes_slots_and_gives_them_back() -> None:
    controller = Controller(ControlSettings(patience=2), top_k=4)
    now = targets(budget=0, policy="lrfu")
    for _ in range(50):
        now = controller.decide(now, 0.0, 0.01)
    assert now.slots == 4
    for _ in range(100):
        now = controller.decide(now, 0.0, 0.5)
    assert now.slots == 30
    assert now.budget == 0


def test_budget_never_exceeds_the_slots() -> None:
    controller = Controller(ControlSettings(), top_k=4)
    now = targets(budget=29)
    for _ in range(5):
        now = controller.decide(now, 0.3, 0.0)
        assert now.budget <= now.slots


def test_loop_measures_the_link_between_reports() -> None:
    clock = Clock()
    manager = CacheManager(ControlSettings(interval_s=2.0), clock)
    busy, budgets = 0.0, []
    for _ in range(9):
        clock.now += 1
        busy += 0.8
        answer = manager.report("a", stats(copy_s=busy), None)
        budgets.append(answer["targets"]["budget"])
    assert budgets == [8, 4, 4, 2, 2, 1, 1, 1, 1]
    manager.configure(None)
    clock.now += 10
    assert manager.report("a", stats(copy_s=busy), None)["targets"]["budget"] == 1
    assert not manager.status()["control"]
