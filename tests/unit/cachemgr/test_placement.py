"""Plan files, bad arguments, and how good the estimates are."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest

from bench.placement import active_per_rank, measure
from cachemgr.activity import (
    active_probability,
    copy_activity,
    expected_max_active,
    independent_activity,
    step_activity,
    token_activity,
)
from cachemgr.eplb import eplb, linear, round_robin
from cachemgr.migration import MigrationCost, relabel, replan
from cachemgr.placement import figures, place, plan_report
from cachemgr.placement_plan import PlacementPlan, PlanMismatch, num_moves
from calibration.traces import RoutingTrace


def build_plan(**changes) -> PlacementPlan:
    plan = PlacementPlan(
        version=3,
        created_at=12.5,
        model_id="test/moe",
        fingerprint="f" * 16,
        num_experts=4,
        num_ranks=2,
        physical_to_logical_LP=np.array([[0, 1, 2, 2, 3, 0], [3, 1, 0, 1, 2, 3]]),
    )
    return dataclasses.replace(plan, **changes)


def build_trace(seed: int = 0, num_requests: int = 24, num_experts: int = 8) -> RoutingTrace:
    """Requests of two kinds, each with experts of its own that its tokens prefer."""
    rng = np.random.default_rng(seed)
    ids, lengths = [], []
    for request in range(num_requests):
        taste = np.random.default_rng(request % 2).normal(size=(3, num_experts)) * 2
        lengths.append(int(rng.integers(20, 40)))
        keys = taste + rng.gumbel(size=(lengths[-1], 3, num_experts))
        ids.append(np.argsort(-keys, axis=2)[:, :, :2])
    offsets = np.cumsum([0, *lengths])
    domains = tuple("ab"[r % 2] for r in range(num_requests))
    return RoutingTrace(np.concatenate(ids).astype(np.uint8), offsets, num_experts, domains)


class TestPlan:
    def test_save_and_load(self, tmp_path):
        plan = build_plan()
        plan.save(tmp_path / "deep" / "plan.json")
        loaded = PlacementPlan.load(tmp_path / "deep" / "plan.json")
        for field in dataclasses.fields(plan):
            np.testing.assert_array_equal(getattr(plan, field.name), getattr(loaded, field.name))
        assert loaded.physical_to_logical_LP.dtype == np.int64

    def test_maps_agree(self):
        plan = build_plan()
        assert plan.rank_of_slot_P.tolist() == [0, 0, 0, 1, 1, 1]
        assert plan.num_copies_LE.tolist() == [[2, 1, 2, 1], [1, 2, 1, 2]]
        assert plan.logical_to_physical_LEC[0].tolist() == [[0, 5], [1, -1], [2, 3], [4, -1]]
        for layer, expert, copy in np.argwhere(plan.logical_to_physical_LEC >= 0):
            slot = plan.logical_to_physical_LEC[layer, expert, copy]
            assert plan.physical_to_logical_LP[layer, slot] == expert

    @pytest.mark.parametrize("key", ["version", "fingerprint", "physical_to_logical"])
    def test_edited_file_is_refused(self, tmp_path, key):
        path = tmp_path / "plan.json"
        build_plan().save(path)
        stored = json.loads(path.read_text())
        stored[key] = {"version": 4, "fingerprint": "g", "physical_to_logical": [[0]]}[key]
        path.write_text(json.dumps(stored))
        with pytest.raises(ValueError, match="damaged or was edited"):
            PlacementPlan.load(path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "not valid JSON"),
            ("[]", "must hold a JSON object"),
            ('{"format_version": 9}', "format_version 9"),
        ],
    )
    def test_other_content_is_refused(self, tmp_path, text, message):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            PlacementPlan.load(tmp_path / "plan.json")

    def test_failed_write_leaves_nothing(self, tmp_path):
        (tmp_path / "plan.json").mkdir()
        with pytest.raises(OSError, match=r"plan\.json"):
            build_plan().save(tmp_path / "plan.json")
        assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]

    @pytest.mark.parametrize(
        "engine",
        [
            ("g" * 16, 2, 4, 6, 2),
            ("f" * 16, 3, 4, 6, 2),
            ("f" * 16, 2, 5, 6, 2),
            ("f" * 16, 2, 4, 8, 2),
            ("f" * 16, 2, 4, 6, 3),
        ],
    )
    def test_other_engine_is_refused(self, engine):
        build_plan().verify("f" * 16, 2, 4, 6, 2)
        with pytest.raises(PlanMismatch, match="make a plan for this engine"):
            build_plan().verify(*engine)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_experts": 5}, "layer 0: expert 4 has no slot"),
            ({"num_experts": 3}, r"must be in \[0, 3\)"),
            ({"num_ranks": 4}, "multiple of the ranks"),
            ({"version": -1}, "version >= 0"),
            ({"physical_to_logical_LP": np.zeros((2, 6))}, "int64"),
        ],
    )
    def test_contradictions_are_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            build_plan(**changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: active_probability(np.array([[1.2]]), 4), "rates must be in"),
        (lambda: active_probability(np.array([[np.nan]]), 4), "rates must be in"),
        (lambda: active_probability(np.array([[0.2]]), 0), "batch must be >= 1, got 0"),
        (lambda: step_activity(np.zeros((0, 1, 4), bool)), "at least one recorded step"),
        (lambda: place(np.zeros((1, 4)), 2), "independent_activity"),
        (lambda: place(np.zeros((1, 4, 4)), 3), "multiple of the ranks"),
        (lambda: place(np.zeros((1, 4, 4)), 2, 10), "at most 8"),
        (lambda: place(np.zeros((1, 4, 4)), 2, dispatch="all"), "'split' or 'single'"),
        (lambda: eplb(np.ones((1, 4)), 4, 2, num_groups=3), "3 groups must divide 4"),
        (lambda: round_robin(1, 5, 2), "multiple of the ranks"),
        (lambda: MigrationCost(1.0, -1.0, 1.0), "move_s must be >= 0"),
        (lambda: relabel(linear(1, 4, 2), linear(2, 4, 2), 2), "one shape"),
        (
            lambda: replan(linear(2, 4, 2), np.zeros((1, 4, 4)), 2, MigrationCost(1, 1, 1)),
            "2 layers, joint activity 1",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_estimated_maximum_is_near_the_counted_one(num_ranks):
    rng = np.random.default_rng(num_ranks)
    chance_LE = rng.beta(0.6, 1.0, (2, 32))
    is_hard = rng.random((4000, 2, 1)) < 0.5  # half of the steps use more experts: correlation
    active_MLE = rng.random((4000, 2, 32)) < np.where(is_hard, chance_LE, chance_LE / 2)
    placed_LP = place(step_activity(active_MLE), num_ranks)
    counted_L = [
        active_MLE[:, layer, placed_LP[layer]].reshape(4000, num_ranks, -1).sum(2).max(1).mean()
        for layer in range(2)
    ]
    estimate_L = expected_max_active(step_activity(active_MLE), placed_LP, num_ranks)
    np.testing.assert_allclose(estimate_L, counted_L, rtol=0.025)


def test_activity_of_copies_is_near_that_of_spread_tokens():
    rate_E = np.linspace(0.0, 0.6, 13)
    active_E = active_probability(rate_E[None], 16)[0]
    for num_copies in (2, 3, 4):
        exact_E = 1 - (1 - rate_E / num_copies) ** 16
        np.testing.assert_allclose(
            copy_activity(active_E, np.array(num_copies), "split"), exact_E, atol=0.06
        )


def test_estimate_of_copies_is_near_vllms_dispatch():
    trace = build_trace()
    rng = np.random.default_rng(1)
    steps_MbLk = trace.ids_TLk[rng.integers(len(trace.ids_TLk), size=(3000, 4))]
    joint_LEE = token_activity(trace.ids_TLk, trace.num_experts, 4)
    placed_LP = eplb(np.diagonal(joint_LEE, axis1=1, axis2=2), 12, 2)
    counted_L = active_per_rank(steps_MbLk, placed_LP, 2).max(axis=2).mean(axis=0)
    np.testing.assert_allclose(expected_max_active(joint_LEE, placed_LP, 2), counted_L, rtol=0.05)


def test_measure_orders_the_placements():
    result = measure(build_trace(), 2, seed=0, batch=4, num_clusters=2, num_steps=500)
    assert result["floor"] <= result["ours, oracle"] <= result["ours"] * 1.01
    assert result["ours"] < min(result["linear"], result["round robin"])


def test_report_counts_moves_from_the_current_placement():
    joint_LEE = independent_activity(np.random.default_rng(0).random((3, 8)))
    linear_LP, ours_LP = linear(3, 8, 2), place(joint_LEE, 2)
    compared = {
        "linear": figures(joint_LEE, linear_LP, 2, current_LP=linear_LP),
        "ours": figures(joint_LEE, ours_LP, 2, current_LP=linear_LP),
    }
    rows = plan_report(compared)
    assert [row[0] for row in rows] == ["placement", "linear", "ours"]
    assert [len(row) for row in rows] == [6, 6, 6]
    assert rows[1][-1] == "0"
    assert rows[2][-1] == str(num_moves(linear_LP, ours_LP, 2).sum())
    assert float(rows[2][1]) <= float(rows[1][1])
    assert len(plan_report({"ours": figures(joint_LEE, ours_LP, 2)})[0]) == 5


def test_balance_is_the_fullest_rank_over_the_mean():
    joint_LEE = independent_activity(np.array([[0.4, 0.4, 0.1, 0.1], [0.2, 0.2, 0.2, 0.2]]))
    one = figures(joint_LEE, linear(2, 4, 2), 2)
    np.testing.assert_allclose((one.max_expected, one.bound), ((0.8 + 0.4) / 2, (0.5 + 0.4) / 2))
    np.testing.assert_allclose(one.balance, (0.8 / 0.5 + 1.0) / 2)
    assert figures(np.zeros((1, 4, 4)), linear(1, 4, 2), 2).balance == 1.0


def test_48_layers_of_128_experts_within_seconds():
    joint_LEE = independent_activity(np.random.default_rng(0).beta(0.5, 1, (48, 128)))
    started = time.process_time()
    place(joint_LEE, 8)
    assert time.process_time() - started < 10  # half a second on one thread of an idle core
