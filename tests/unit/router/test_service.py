"""The router service with a clock of our own: replicas come and go, the router restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.fit import fit
from router import core
from router.refit import RefitResult, RefitSettings, run_refit
from router.service import HEARTBEAT_TIMEOUT_S, RouterService, RouterSettings, heartbeat_s
from tests.builders import build_artifact, build_capture, build_counts, build_domain_request


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


# ---- refits


def fitted_settings(artifact: Path, policy: str = "soft", **refit: object) -> RouterSettings:
    return RouterSettings(
        policy,
        0.1,
        0.5,
        0,
        str(artifact),
        256,
        100,
        refit=RefitSettings(**{"when": "pool", "settle_s": 2.0} | refit),  # type: ignore[arg-type]
    )


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    build_artifact(k=4, num_experts=32).save(tmp_path / "artifact")
    return tmp_path / "artifact"


class Pool:
    """Decode replicas with their heartbeats, as `deployments.replica.Heartbeat` sends them."""

    def __init__(self, router: RouterService, clock: Clock) -> None:
        self.router, self.clock = router, clock
        self.kept: dict[str, dict[str, object]] = {}
        self.num_requests = 0

    def beat(self, *replicas: str) -> None:
        for replica in replicas:
            mine = self.kept.setdefault(replica, {"centroid": None, "tag": None, "home": None})
            answer = self.router.heartbeat(
                "decode", replica, f"http://{replica}", 0, mine["centroid"], mine["tag"]
            )
            mine["centroid"] = answer["centroid"]
            if answer.get("send_home"):
                self.router.restore_home(replica, mine["home"])
                continue
            mine["tag"] = answer.get("home_tag")
            mine["home"] = answer.get("home", mine["home"]) if mine["tag"] else None

    def run(self, seconds: int, domains: int = 0, taste_seed: int = 0) -> list[RefitResult]:
        """Heartbeats and some requests of each domain, second by second, with refits."""
        results = []
        for _ in range(seconds):
            self.clock.now += 1
            self.beat(*self.kept)
            for domain in range(domains):
                self.num_requests += 1
                self.select(domain, self.num_requests, taste_seed)
            if (job := self.router.next_refit()) is not None:
                results.append(run_refit(job))
                self.router.finish_refit(job, results[-1])
        return results

    def select(self, domain: int, seed: int = 0, taste_seed: int = 0) -> str:
        counts = build_counts(
            [domain, 7], [40, 1], num_experts=32, seed=seed, taste_seed=taste_seed
        )[0]
        answer = self.router.select("r", counts.astype("<u2").tobytes(), 40, None)
        self.router.release(["r"])
        return str(answer["replica_id"])

    def homes(self, domains: int) -> list[str]:
        return [self.select(domain) for domain in range(domains)]


def test_grown_pool_is_fitted_once_it_has_settled(clock: Clock, artifact: Path) -> None:
    router = RouterService(fitted_settings(artifact), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d")
    assert pool.run(5, domains=6) == []
    before = pool.homes(4)
    pool.beat("e", "f")
    assert pool.kept["e"]["centroid"] is None
    results = pool.run(10, domains=6)
    assert [result.job.reason for result in results] == ["pool"]
    assert router.core.is_paired
    homes = pool.homes(6)
    assert homes[:4] == before
    assert sorted(homes[4:]) == ["e", "f"]
    assert router.stats()["counters"]["refits"] == 1
    assert 0.2 < router.stats()["moved_share"] < 0.5


def test_start_with_more_replicas_than_centroids_fits_from_the_artifact(
    clock: Clock, tmp_path: Path
) -> None:
    capture = build_capture(60)
    fit(capture, 2, show_progress=False).save(tmp_path / "artifact")
    router = RouterService(fitted_settings(tmp_path / "artifact"), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d", "e")
    assert len(pool.run(4)) == 1
    assert router.core.is_paired
    assert router.core.centroids_CD.shape[0] == 5


def test_lost_replica_leaves_the_others_their_homes(clock: Clock, artifact: Path) -> None:
    router = RouterService(fitted_settings(artifact), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d")
    pool.run(5, domains=4)
    before = pool.homes(4)
    router.deregister(before[1])
    del pool.kept[before[1]]
    immediately = pool.homes(4)
    assert [h for d, h in enumerate(immediately) if d != 1] == before[:1] + before[2:]
    assert len(pool.run(5, domains=4)) == 1
    assert [h for d, h in enumerate(pool.homes(4)) if d != 1] == before[:1] + before[2:]


def test_short_absence_is_no_reason_for_a_refit(clock: Clock, artifact: Path) -> None:
    router = RouterService(fitted_settings(artifact), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d")
    pool.run(5, domains=4)
    before = pool.homes(4)
    router.suspect("b")
    assert pool.run(20, domains=4) == []
    assert pool.homes(4) == before


def test_failed_refit_changes_nothing_and_is_tried_again(clock: Clock, artifact: Path) -> None:
    router = RouterService(fitted_settings(artifact, interval_s=10.0), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d", "e")
    pool.run(1, domains=5)
    clock.now += 2
    job = router.next_refit()
    assert job is not None
    before = router.core.centroids_CD
    assert router.next_refit() is None  # one at a time
    router.finish_refit(job, None)
    assert router.core.centroids_CD is before
    assert router.stats()["counters"]["failed_refits"] == 1
    assert pool.run(9, domains=5) == []
    assert len(pool.run(3, domains=5)) == 1
    assert router.core.is_paired


def test_too_few_signatures_are_counted_as_a_failure(clock: Clock, artifact: Path) -> None:
    router = RouterService(fitted_settings(artifact), clock)  # its artifact has 4 signatures
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d", "e")
    assert pool.run(5) == []
    assert router.stats()["counters"]["failed_refits"] == 1


def test_result_for_another_pool_is_dropped(clock: Clock, artifact: Path) -> None:
    router = RouterService(fitted_settings(artifact), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d", "e")
    pool.run(1, domains=6)
    clock.now += 2
    job = router.next_refit()
    assert job is not None
    pool.beat("f")
    router.finish_refit(job, run_refit(job))
    assert router.stats()["counters"]["overtaken_refits"] == 1
    assert router.core.centroids_CD.shape[0] == 4
    assert len(pool.run(8, domains=6)) == 1
    assert router.core.is_paired


def test_drift_is_answered_once(clock: Clock, artifact: Path) -> None:
    settings = fitted_settings(artifact, when="online", window_s=20.0, interval_s=5.0)
    router = RouterService(settings, clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d")
    assert all(not result.is_accepted for result in pool.run(40, domains=4)[1:])
    before = router.stats()["counters"].get("refits", 0)
    results = pool.run(60, domains=4, taste_seed=5)
    assert results[0].job.reason == "drift"
    assert 1 <= sum(result.is_accepted for result in results) <= 3
    assert not results[-1].is_accepted
    assert router.stats()["counters"]["refits"] > before
    assert router.stats()["counters"]["rejected_refits"] >= 1
    homes = [pool.select(domain, taste_seed=5) for domain in range(4)]
    assert len(set(homes)) == 4


def test_restarted_router_gets_refitted_homes_back(clock: Clock, artifact: Path) -> None:
    router = RouterService(fitted_settings(artifact), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d", "e", "f")
    pool.run(8, domains=6)
    before = pool.homes(6)
    assert sorted(before) == list("abcdef")
    old = router.core.centroids_CD.copy()
    pool.run(1)
    pool.router = restarted = RouterService(fitted_settings(artifact), clock)
    for replica in "dacfbe":  # one by one, as heartbeats come
        pool.beat(replica)
        clock.now += 0.15
        # Nobody gets a home that is not his.
        assert set(pool.homes(6)) <= set("dacfbe"["dacfbe".index(replica) :: -1])
    assert pool.run(10) == []
    assert pool.homes(6) == before
    np.testing.assert_array_equal(
        np.sort(restarted.core.centroids_CD, axis=0), np.sort(old, axis=0)
    )
    assert restarted.stats()["counters"]["restored_homes"] == 6
    assert restarted.core.is_paired


def test_replica_that_joins_after_a_restart_waits_for_the_refit(
    clock: Clock, artifact: Path
) -> None:
    router = RouterService(fitted_settings(artifact), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d", "e")
    pool.run(8, domains=6)
    pool.run(1)
    pool.router = RouterService(fitted_settings(artifact), clock)
    pool.beat("new", "a", "b", "c", "d", "e")
    assert len(pool.run(8, domains=6)) == 1
    assert pool.router.core.is_paired
    assert sorted(pool.homes(6)) == ["a", "b", "c", "d", "e", "new"]


@pytest.mark.parametrize(
    "home", [b"", b"123", np.ones(128, "<f4").tobytes(), np.full(128, np.nan, "<f4").tobytes()]
)
def test_home_that_is_none_is_refused(clock: Clock, artifact: Path, home: bytes) -> None:
    router = RouterService(fitted_settings(artifact), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d", "e")
    pool.run(8, domains=5)
    pool.run(1)
    pool.router = RouterService(fitted_settings(artifact), clock)
    pool.kept["a"]["home"] = home
    pool.beat("a", "b", "c", "d", "e")
    assert pool.router.stats()["counters"]["refused_homes"] == 1
    assert len(pool.run(8, domains=5)) == 1
    assert pool.router.core.is_paired


def test_home_of_another_signature_space_is_not_taken(
    clock: Clock, artifact: Path, tmp_path: Path
) -> None:
    router = RouterService(fitted_settings(artifact), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d", "e")
    pool.run(8, domains=5)
    pool.run(1)
    build_artifact(k=5, num_experts=32, layer_mask=[0, 2]).save(tmp_path / "other")
    pool.router = RouterService(fitted_settings(tmp_path / "other"), clock)
    pool.beat("a", "b", "c", "d", "e")
    assert pool.router.core.is_paired
    assert pool.run(8, domains=5) == []
    assert {mine["tag"] for mine in pool.kept.values()} == {None}


def test_other_settings_keep_refitted_homes(clock: Clock, artifact: Path) -> None:
    router = RouterService(fitted_settings(artifact), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d", "e", "f")
    pool.run(8, domains=6)
    before = pool.homes(6)
    assert router.configure(fitted_settings(artifact, policy="band"))
    assert pool.homes(6) == before
    assert router.configure(fitted_settings(artifact, when="never"))
    assert router.core.centroids_CD.shape[0] == 4


@pytest.mark.parametrize("policy", ["live", "soft", "band", "p2c"])
@pytest.mark.parametrize("small_pool", [0, core.SMALL_POOL])
def test_select_many_is_select_one_by_one(
    clock: Clock, artifact: Path, policy: str, small_pool: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "SMALL_POOL", small_pool)
    wires = []
    for i in range(40):
        counts = build_counts([i % 5, 7], [40, 1], num_experts=32, seed=i)[0].astype("<u2")
        content = (counts.tobytes(), b"xy", None)[(i % 10 == 8) + 2 * (i % 10 == 9)]
        exclude = frozenset("abcde") if i == 20 else frozenset("a" if i % 7 == 0 else "")
        wires.append((f"r{i % 30}", content, 40, None, exclude))
    one, many = (RouterService(fitted_settings(artifact, policy), clock) for _ in range(2))
    for router in (one, many):
        Pool(router, clock).beat("a", "b", "c", "d", "e")  # e has no centroid
    singly = [one.select(*wire) for wire in wires]
    together = [
        answer
        for batch in (wires[:1], wires[1:30], wires[30:])
        for answer in many.select_many(batch)["answers"]
    ]
    assert "excluded" in str(singly[20]["error"])
    for first, second in zip(singly, together, strict=True):
        first.pop("view", None)
        similarity = second.pop("similarity", None)
        assert first.pop("similarity", None) == pytest.approx(similarity, abs=1e-6)
        assert first == second
    assert one.stats()["loads"] == many.stats()["loads"]
    assert one.core.counters == many.core.counters


def test_select_many_carries_map_and_releases(clock: Clock) -> None:
    router = service(clock, "a", "b")
    first = router.select_many([("r1", None, None, None, ()), ("r2", None, None, None, ())])
    assert {answer["replica_id"] for answer in first["answers"]} == {"a", "b"}
    assert first["view"]["version"] == router.version
    second = router.select_many([("r3", None, None, None, ())], router.version, ["r1", "r2"])
    assert "view" not in second
    assert sum(router.stats()["loads"].values()) == 1  # type: ignore[attr-defined]


# ---- ramp


def test_new_replica_is_not_herded(clock: Clock) -> None:
    """JSQ would send the next 20 requests to it; it comes to its share within the ramp."""
    router = RouterService(replace(settings("jsq"), ramp_s=10.0), clock)
    for replica in "abcd":
        router.heartbeat("decode", replica, f"http://{replica}", 0, None)
    for i in range(80):
        select(router, f"standing-{i}")
    clock.now = 100.0
    number = 0
    to_new = []
    for _ in range(12):
        clock.now += 1
        for replica in "abcde":
            router.heartbeat("decode", replica, f"http://{replica}", 0, None)
        chosen = []
        for _i in range(10):
            # As many end as come, the oldest first.
            router.release([f"standing-{number}" if number < 80 else f"r{number - 80}"])
            chosen.append(select(router, f"r{number}")["replica_id"])
            number += 1
        to_new.append(chosen.count("e"))
    assert max(to_new) <= 4  # its share when loads are even is 2
    loads = router.stats()["loads"]
    assert abs(loads["e"] - 16) <= 1  # type: ignore[index]


def test_new_replicas_emptiness_does_not_draw_a_burst(clock: Clock) -> None:
    router = RouterService(replace(settings("jsq"), ramp_s=10.0), clock)
    for replica in "abcd":
        router.heartbeat("decode", replica, f"http://{replica}", 0, None)
    for i in range(80):
        select(router, f"standing-{i}")
    while clock.now < 20.0:
        clock.now += 2.0
        for replica in "abcd":
            router.heartbeat("decode", replica, f"http://{replica}", 20, None)
    router.heartbeat("decode", "e", "http://e", 0, None)
    for elapsed, expected in ((0.0, 2), (2.5, 7), (4.0, 11)):
        clock.now = 20.0 + elapsed
        batch = [(f"r{elapsed}-{i}", None, None, None, ()) for i in range(8)]
        chosen = [answer["replica_id"] for answer in router.select_many(batch)["answers"]]
        assert router.stats()["loads"]["e"] == pytest.approx(expected, abs=1), (  # type: ignore[index]
            elapsed,
            chosen,
        )


def test_pool_that_is_all_new_has_no_ramp(clock: Clock) -> None:
    router = RouterService(replace(settings("jsq"), ramp_s=10.0), clock)
    for replica in "ab":
        router.heartbeat("decode", replica, f"http://{replica}", 0, None)
    assert {select(router, f"r{i}")["replica_id"] for i in range(2)} == {"a", "b"}


def test_replica_that_was_briefly_away_has_no_ramp(clock: Clock) -> None:
    router = RouterService(replace(settings("jsq"), ramp_s=10.0), clock)
    for replica in "ab":
        router.heartbeat("decode", replica, f"http://{replica}", 0, None)
    clock.now = 3.0
    for i in range(6):
        select(router, f"r{i}")
    router.suspect("a")
    router.heartbeat("decode", "a", "http://a", 0, None)
    assert {select(router, f"s{i}")["replica_id"] for i in range(3)} == {"a"}


def test_heartbeats_of_caches_come_sooner_in_small_pools() -> None:
    pools = (1, 16, 32, 64, 1024)
    assert [heartbeat_s(k, tells_residents=True) for k in pools] == [0.2, 0.25, 0.5, 1.0, 1.0]
    assert {heartbeat_s(k, tells_residents=False) for k in pools} == {1.0}


def test_what_caches_hold_comes_with_heartbeats(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = build_artifact(2)
    artifact.save(tmp_path / "artifact")
    made = RouterSettings("live", 0.1, None, 0, str(tmp_path / "artifact"), 16, 100)
    router = RouterService(replace(made, caches_experts=True), clock)
    counts_LE = build_domain_request(0)
    holds, lacks = (np.packbits(side, axis=1).tobytes() for side in (counts_LE > 0, counts_LE == 0))

    def beat(replica: str, resident: bytes | None) -> float:
        answer = router.heartbeat("decode", replica, f"http://{replica}", 0, None, None, resident)
        return float(answer["interval_s"])

    assert beat("a", None) == 1.0
    assert beat("a", lacks) == beat("b", holds) == 0.2
    counts = counts_LE.astype("<u2").tobytes()
    assert router.select("r1", counts, 40, None)["replica_id"] == "b"
    router.release(["r1"])
    beat("a", holds)
    beat("b", lacks)
    assert router.select("r2", counts, 40, None)["replica_id"] == "a"
    for _ in range(2):
        assert beat("b", b"another model") == 1.0
    assert caplog.text.count("b: its cache does not count: 13 bytes are no experts of") == 1


# ---- metrics


def test_totals_add_up_and_outlive_other_settings(clock: Clock, artifact: Path) -> None:
    router = RouterService(fitted_settings(artifact, "band"), clock)
    pool = Pool(router, clock)
    pool.beat("a", "b", "c", "d")
    for i in range(5):
        pool.select(i % 3, seed=i)
    select(router, "held")
    before = router.totals()
    assert before["selections", "band", "none"] == 5
    assert before["selections", "band", "no_signature"] == 1
    assert before["decision", "5e-05"] == before["decision", "+Inf"] == 6
    assert before["scored",] == before["placed",] == before["banded",] == 5
    assert 0 < before["similarity",] <= before["best_similarity",] <= 5
    assert 5 <= before["band_size",] <= 20
    assert router.gauges() == {
        ("replicas", "prefill"): 0,
        ("replicas", "decode"): 4,
        ("load", "max"): 1,
        ("load", "mean"): 0.25,
    }
    router.configure(fitted_settings(artifact, "jsq"))
    select(router, "other")
    after = router.totals()
    assert {key: value for key, value in after.items() if value < before.get(key, 0)} == {}
    assert after["selections", "jsq", "none"] == 1
    assert after["scored",] == 5


def test_decision_times_fall_into_their_bucket(clock: Clock) -> None:
    class Slow(Clock):
        def __call__(self) -> float:
            self.now += 0.0015
            return self.now

    router = service(Slow(), "a")
    select(router, "r")
    totals = router.totals()
    assert (totals["decision", "0.001"], totals["decision", "0.002"]) == (0, 1)
    router.select_many([(f"m{i}", None, None, None, ()) for i in range(3)])
    totals = router.totals()
    assert (totals["decision", "0.0002"], totals["decision", "0.0005"]) == (0, 3)
    assert totals["decision", "+Inf"] == 4


def test_no_replica_is_no_load(clock: Clock) -> None:
    assert service(clock).gauges()["load", "mean"] == 0
