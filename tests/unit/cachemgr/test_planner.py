"""Plans from an artifact: what `eldr cache place` writes, says and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.cli import main
from cachemgr.activity import expected_max_active, token_activity
from cachemgr.place_cli import DEFAULT_HYSTERESIS, DEFAULT_MOVE_PRICE
from cachemgr.placement import place
from cachemgr.placement_plan import PlacementPlan
from cachemgr.planner import MOVE_PRICE, as_loaded, cluster_activity
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
    from cachemgr.migration import MigrationCost

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
    joint_LEE = cluster_activity(made, 1, 4)
    np.testing.assert_array_equal(plan.physical_to_logical_LP, place(joint_LEE, 4))
    assert (place(cluster_activity(made, 0, 4), 4) != plan.physical_to_logical_LP).any()


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
