"""Plans from an artifact: what `eldr cache place` writes, and what a node's manager decides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from app.cli import main
from cachemgr.activity import (
    active_probability,
    expected_max_active,
    independent_activity,
    token_activity,
)
from cachemgr.migration import MigrationCost
from cachemgr.place_cli import DEFAULT_HYSTERESIS, DEFAULT_MOVE_PRICE
from cachemgr.placement import place
from cachemgr.placement_plan import IntArray, PlacementPlan
from cachemgr.planner import (
    MIN_STEPS,
    MOVE_PRICE,
    PlanKeeper,
    Planner,
    PlannerSettings,
    as_loaded,
    balance,
    cluster_activity,
    plan_file,
)
from calibration.artifact import Artifact
from tests.builders import build_artifact


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    build_artifact(2).save(tmp_path / "artifact")
    return tmp_path / "artifact"


def run(capsys: Any, artifact: Path, *more: object) -> tuple[int, str, str]:
    command = ["cache", "place", "--artifact", artifact, "--batch", 4, *more]
    status = main([str(word) for word in command])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_defaults_are_those_of_the_planner() -> None:
    assert MigrationCost(1, 1, 1).hysteresis == DEFAULT_HYSTERESIS
    assert MOVE_PRICE == DEFAULT_MOVE_PRICE


def test_plan_is_that_of_the_cluster(capsys: Any, artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "plan.json"
    status, text, _ = run(capsys, artifact, "--cluster", 1, "--ranks", 4, "--out", out)
    assert status == 0
    names = [line.split("  ")[0] for line in text.splitlines()[2:6]]
    assert names == ["linear", "round robin", "EPLB", "ours"]
    assert "bound of the linear program" in text
    plan, made = PlacementPlan.load(out), build_artifact(2)
    assert (plan.version, plan.fingerprint) == (1, made.fingerprint)
    one_LEE, other_LEE = (independent_activity(cluster_activity(made, k, 4)) for k in (1, 0))
    np.testing.assert_array_equal(plan.physical_to_logical_LP, place(one_LEE, 4))
    assert (place(other_LEE, 4) != plan.physical_to_logical_LP).any()


def test_going_on_from_a_plan_moves_what_pays(capsys: Any, artifact: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    run(capsys, artifact, "--cluster", 0, "--ranks", 4, "--out", first)
    moved = []
    for horizon in (0, 3000, 1e7):
        more = ("--from", first, "--horizon", horizon, "--out", second, "--json")
        status, text, _ = run(capsys, artifact, "--cluster", 1, *more)
        told = json.loads(text)
        assert (status, told["version"]) == (0, 2)
        assert PlacementPlan.load(second).version == 2
        moved.append(told["num_moves"])
        now, before = (told["placements"][name]["max_active"] for name in ("ours", "current"))
        assert now < before if moved[-1] else now == before
    assert moved[0] == 0 < moved[1] <= moved[2]
    status, text, _ = run(capsys, artifact, "--cluster", 0, "--from", first)
    assert "0 of 64 experts move, in 0 of 4 layers" in text


def test_recorded_choices_of_the_clusters_requests(
    capsys: Any, artifact: Path, tmp_path: Path
) -> None:
    """Even requests choose as cluster 0 does, odd ones as cluster 1."""
    made, rng = build_artifact(2), np.random.default_rng(0)
    likely_KLE = made.cluster_activation_KLE
    ids, offsets = [], [0]
    for request in range(8):
        weights_LE = likely_KLE[request % 2] + 1e-6
        for _ in range(20):
            ids.append([rng.choice(16, 2, replace=False, p=w_E / w_E.sum()) for w_E in weights_LE])
        offsets.append(len(ids))
    ids_TLk = np.array(ids, dtype=np.uint8)
    np.savez(tmp_path / "ids.npz", ids=ids_TLk.transpose(1, 2, 0), offsets=np.array(offsets))
    out = tmp_path / "plan.json"
    more = ("--ranks", 2, "--ids", tmp_path / "ids.npz", "--out", out, "--json")
    status, text, err = run(capsys, artifact, "--cluster", 1, *more)
    assert status == 0, err
    mine_TLk = np.concatenate([ids_TLk[20 * r : 20 * r + 20] for r in range(1, 8, 2)])
    joint_LEE = token_activity(mine_TLk, 16, 4)
    placed_LP = PlacementPlan.load(out).physical_to_logical_LP
    np.testing.assert_array_equal(placed_LP, place(joint_LEE, 2))
    np.testing.assert_allclose(
        json.loads(text)["placements"]["ours"]["max_active"],
        expected_max_active(joint_LEE, placed_LP, 2).mean(),
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--cluster", 2, "--ranks", 4), "cluster must be in [0, 2), got 2"),
        (("--cluster", 0, "--ranks", 3), "16 slots on 3 ranks for 16 experts"),
        (("--cluster", 0, "--ranks", 4, "--slots", 18), "18 slots on 4 ranks"),
        (("--cluster", 0), "give --ranks, or --from"),
        (("--cluster", 0, "--ranks", 4, "--batch", 0), "batch must be >= 1, got 0"),
        (("--cluster", 0, "--ranks", 4, "--from", "none.json"), "no placement plan at none.json"),
        (("--cluster", 0, "--from", "PLAN", "--ranks", 2), "--ranks is 2, but the plan"),
        (("--cluster", 0, "--from", "PLAN", "--slots", 32), "--slots is 32, but the plan"),
        (("--cluster", 0, "--from", "PLAN", "--move-price", -1), "move_s must be >= 0"),
        (("--cluster", 0, "--from", "OTHER"), "take a plan and an artifact of one model"),
        (("--cluster", 0, "--ranks", 4, "--ids", "IDS"), "(3, 16, 2), the artifact has (4, 16, 2)"),
    ],
)
def test_what_does_not_fit_is_refused(
    capsys: Any, artifact: Path, tmp_path: Path, words: tuple[object, ...], text: str
) -> None:
    made = build_artifact(2)
    as_loaded(made, 4, 16).save(tmp_path / "PLAN")
    as_loaded(build_artifact(2, num_layers=3), 4, 16).save(tmp_path / "OTHER")
    np.savez(
        tmp_path / "IDS.npz",
        ids=np.tile(np.array([[0], [1]], np.uint8), (3, 1, 4)),
        offsets=np.array([0, 4]),
    )
    files = {"PLAN": tmp_path / "PLAN", "OTHER": tmp_path / "OTHER", "IDS": tmp_path / "IDS.npz"}
    out = tmp_path / "out.json"
    given = [files.get(str(word), word) for word in words]
    status, _, err = run(capsys, artifact, *given, "--out", out)
    assert status != 0
    assert text in err
    assert not out.exists()


def settings(folder: Path, **changes: Any) -> PlannerSettings:
    base = PlannerSettings(
        artifact=str(folder / "artifact"),
        folder=str(folder / "plans"),
        num_ranks=4,
        num_spare=0,
        batch=4,
        interval_s=30.0,
        cost=MigrationCost(1.0, MOVE_PRICE, 3000),
    )
    return replace(base, **changes)


def uses_of(artifact: Artifact, cluster: int, steps: int) -> IntArray:
    """What a worker counts in steps of a cluster's tokens, without chance."""
    active_LE = cluster_activity(artifact, cluster, 4)
    return np.asarray(np.round(active_LE * steps), dtype=np.int64)


class TestPlanner:
    artifact = build_artifact(2)

    def planner(self, tmp_path: Path, **changes: Any) -> Planner:
        planner = Planner(settings(tmp_path, **changes), self.artifact)
        planner.add("a")
        return planner

    def take(self, planner: Planner, *report: Any) -> PlacementPlan | None:
        plan = planner.propose("a", *report, now=1.0)
        if plan is not None:
            planner.accept("a", plan)
        return plan

    def test_first_plan_is_that_of_the_cluster(self, tmp_path: Path) -> None:
        planner = self.planner(tmp_path)
        before = planner.status("a")
        plan = self.take(planner, 1, None, None)
        assert plan is not None
        assert plan.version == 1
        status = planner.status("a")
        active_LE = cluster_activity(self.artifact, 1, 4)
        assert status["expected_balance"] == balance(active_LE, plan)
        assert (
            1.0 <= status["expected_balance"] < balance(active_LE, as_loaded(self.artifact, 4, 16))
        )
        assert (before["version"], status["version"]) == (0, 1)
        assert status["num_moves"] > 0
        assert status["measured_balance"] is None

    def test_nothing_new_changes_nothing(self, tmp_path: Path) -> None:
        planner = self.planner(tmp_path)
        self.take(planner, 1, None, None)
        for _ in range(3):
            assert self.take(planner, 1, None, None) is None
        assert planner.status("a")["version"] == 1

    def test_first_plan_is_written_also_where_moves_do_not_pay(self, tmp_path: Path) -> None:
        planner = self.planner(tmp_path, cost=MigrationCost(1.0, MOVE_PRICE, 1))
        plan = self.take(planner, 1, None, None)
        assert plan is not None
        assert (plan.version, planner.status("a")["num_moves"]) == (1, 0)
        assert self.take(planner, 0, None, None) is None

    def test_another_centroid_is_planned_for(self, tmp_path: Path) -> None:
        planner = self.planner(tmp_path)
        self.take(planner, 0, None, None)
        plan = self.take(planner, 1, None, None)
        assert plan is not None
        assert plan.version == 2
        assert self.take(planner, 1, None, None) is None

    def test_refitted_centroid_counts_as_the_nearest_cluster(self, tmp_path: Path) -> None:
        planner = self.planner(tmp_path)
        self.take(planner, 1, None, None)
        near_1_D = 0.9 * self.artifact.centroids_KD[1] + 0.1 * self.artifact.centroids_KD[0]
        assert self.take(planner, 7, near_1_D.astype("<f4").tobytes(), None) is None
        plan = self.take(planner, 7, self.artifact.centroids_KD[0].astype("<f4").tobytes(), None)
        assert plan is not None
        with pytest.raises(ValueError, match="has 64 values, the router gave 3"):
            self.take(planner, 7, np.zeros(3, "<f4").tobytes(), None)

    def test_what_was_measured_replaces_what_was_expected(self, tmp_path: Path) -> None:
        planner = self.planner(tmp_path)
        counted_LE = uses_of(self.artifact, 0, 1000)
        self.take(planner, 0, None, (0, counted_LE * 0))
        assert self.take(planner, 0, None, (1000, counted_LE)) is None
        # The traffic turns into that of the other cluster, and the router has not noticed.
        few_LE = counted_LE + uses_of(self.artifact, 1, MIN_STEPS // 2)
        assert self.take(planner, 0, None, (1000 + MIN_STEPS // 2, few_LE)) is None
        more_LE = counted_LE + uses_of(self.artifact, 1, 1000)
        plan = self.take(planner, 0, None, (2000, more_LE))
        assert plan is not None
        assert plan.version == 2
        active_LE = cluster_activity(self.artifact, 1, 4)
        assert planner.status("a")["measured_balance"] == pytest.approx(
            balance(active_LE, plan), rel=0.01
        )
        first = planner.status("a")["measured_balance"]
        assert (
            self.take(planner, 0, None, (3000, more_LE + uses_of(self.artifact, 1, 1000))) is None
        )
        assert planner.status("a")["measured_balance"] == pytest.approx(first, rel=0.01)

    def test_counts_of_a_new_worker_begin_at_zero(self, tmp_path: Path) -> None:
        planner = self.planner(tmp_path)
        counted_LE = uses_of(self.artifact, 0, 1000)
        self.take(planner, 0, None, (1000, counted_LE))
        again_LE = uses_of(self.artifact, 0, 300)
        assert self.take(planner, 0, None, (300, again_LE)) is None
        assert planner.status("a")["measured_balance"] is not None
        with pytest.raises(ValueError, match=r"must have shape \(4, 16\), got \(1, 2\)"):
            self.take(planner, 0, None, (400, np.zeros((1, 2), np.int64)))

    def test_replica_without_centroid_gets_the_mean_of_clusters(self, tmp_path: Path) -> None:
        planner = self.planner(tmp_path)
        plan = self.take(planner, None, None, None)
        assert plan is not None
        rate_LE = self.artifact.cluster_activation_KLE.mean(axis=0)
        assert planner.status("a")["expected_balance"] == pytest.approx(
            balance(active_probability(rate_LE, 4), plan)
        )
        assert self.take(planner, 9, None, None) is None  # a centroid the artifact does not have


class TestPlanKeeper:
    report: ClassVar[dict[str, Any]] = {"centroid": 1, "home": None, "num_steps": 0, "uses_LE": []}

    def test_restarted_manager_goes_on_from_the_file(self, tmp_path: Path, artifact: Path) -> None:
        answer = PlanKeeper(lambda: 5.0).place(settings(tmp_path), "a", self.report)
        path = Path(answer["path"])
        first = PlacementPlan.load(path)
        assert (answer["version"], first.version, first.created_at) == (1, 1, 5.0)
        keeper = PlanKeeper(lambda: 6.0)
        assert keeper.place(settings(tmp_path), "a", self.report)["version"] == 1
        assert PlacementPlan.load(path).created_at == 5.0
        assert keeper.place(settings(tmp_path), "a", {**self.report, "centroid": 0})["version"] == 2
        assert PlacementPlan.load(path).version == 2
        keeper.forget("a")
        assert not path.exists()
        keeper.forget("a")

    def test_plan_that_was_not_written_is_proposed_again(
        self, tmp_path: Path, artifact: Path
    ) -> None:
        (tmp_path / "plans").write_text("no folder")
        keeper = PlanKeeper(lambda: 5.0)
        for _ in range(2):
            with pytest.raises(OSError, match="plans"):
                keeper.place(settings(tmp_path), "a", self.report)
        (tmp_path / "plans").unlink()
        assert keeper.place(settings(tmp_path), "a", self.report)["version"] == 1

    def test_file_of_another_engine_is_refused(self, tmp_path: Path, artifact: Path) -> None:
        as_loaded(build_artifact(2), 2, 16).save(plan_file(str(tmp_path / "plans"), "a"))
        with pytest.raises(ValueError, match="16 slots on 2 ranks, but the engine runs"):
            PlanKeeper(lambda: 5.0).place(settings(tmp_path), "a", self.report)

    def test_measured_uses_arrive(self, tmp_path: Path, artifact: Path) -> None:
        keeper, uses_LE = PlanKeeper(lambda: 5.0), uses_of(build_artifact(2), 1, 1000)
        keeper.place(settings(tmp_path), "a", {**self.report, "uses_LE": (0 * uses_LE).tolist()})
        report = {**self.report, "num_steps": 1000, "uses_LE": uses_LE.tolist()}
        answer = keeper.place(settings(tmp_path), "a", report)
        assert answer["measured_balance"] == pytest.approx(answer["expected_balance"], rel=0.01)
