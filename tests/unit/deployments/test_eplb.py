"""The placement policy inside the installed vLLM: two ranks on CPU, and single calls."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cachemgr.eplb import eplb
from cachemgr.placement_plan import PlacementPlan
from deployments.vllm_adapter import eplb as adapter
from deployments.vllm_adapter.bindings import IncompatibleVllm, check_bindings

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS = 3, 8, 2
ROOT = Path(__file__).resolve().parents[3]


def build_plan(**changes) -> PlacementPlan:
    rng = np.random.default_rng(5)
    layers = [rng.permutation(NUM_EXPERTS) for _ in range(NUM_LAYERS)]
    plan = PlacementPlan(
        version=7,
        created_at=time.time(),
        model_id="test/moe",
        fingerprint="model",
        num_experts=NUM_EXPERTS,
        num_ranks=NUM_RANKS,
        physical_to_logical_LP=np.stack(layers),
    )
    return dataclasses.replace(plan, **changes)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each of two real ranks answered in each case."""
    folder = tmp_path_factory.mktemp("plans")
    np.save(
        folder / "load.npy", np.random.default_rng(1).integers(1, 999, (NUM_LAYERS, NUM_EXPERTS))
    )
    build_plan().save(folder / "good.json")
    build_plan(fingerprint="other").save(folder / "other_model.json")
    build_plan(created_at=time.time() - 7200).save(folder / "stale.json")
    text = (folder / "good.json").read_text()
    (folder / "damaged.json").write_text(text.replace('"version": 7', '"version": 8'))
    script = Path(__file__).with_name("eplb_rank.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), folder / "store", folder],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_both_ranks_take_rank_0s_plan(ranks):
    expected = build_plan().physical_to_logical_LP.tolist()
    assert [rank["good"] for rank in ranks] == [expected, expected]
    assert ranks[0]["vllm"] != expected


@pytest.mark.parametrize("case", ["absent", "damaged", "other_model", "stale"])
def test_vllms_policy_answers_where_no_plan_is_usable(ranks, case):
    assert [rank[case] for rank in ranks] == [ranks[0]["vllm"]] * 2


def test_vllms_policy_answers_for_a_model_of_another_shape(ranks):
    assert ranks[0]["vllm, draft"] == ranks[1]["vllm, draft"] == ranks[0]["vllm"][:1]


def test_vllm_moves_the_weights_where_the_plan_says(ranks):
    moved_LP = np.concatenate([np.array(rank["moved"]) for rank in ranks], axis=1)
    expected_LP = build_plan().physical_to_logical_LP
    np.testing.assert_array_equal(moved_LP, np.repeat(expected_LP[:, :, None], 3, axis=2))


def test_installed_vllm_has_every_bound_name():
    check_bindings(adapter.BINDINGS)


def test_other_arguments_of_the_policy_stop_the_start(monkeypatch):
    from vllm.distributed.eplb.policy import DefaultEplbPolicy

    def rebalance_experts(cls, weight, num_replicas, topology):
        raise AssertionError

    monkeypatch.setattr(DefaultEplbPolicy, "rebalance_experts", classmethod(rebalance_experts))
    with pytest.raises(IncompatibleVllm, match="topology"):
        adapter.install(adapter.PlanSource(Path("plan.json"), "model"))


@pytest.mark.parametrize(("fingerprint", "age"), [("", None), ("model", "soon")])
def test_incomplete_environment_stops_the_start(monkeypatch, fingerprint, age):
    monkeypatch.setenv(adapter.PLAN_PATH, "plan.json")
    monkeypatch.setenv(adapter.FINGERPRINT, fingerprint)
    if age is not None:
        monkeypatch.setenv(adapter.MAX_AGE_S, age)
    with pytest.raises(ValueError, match=adapter.MAX_AGE_S if age else adapter.FINGERPRINT):
        adapter.register()


@pytest.mark.parametrize("seed", range(20))
def test_our_eplb_is_vllms(seed):
    """The baseline that we measure against plans as the code that vLLM runs."""
    import torch
    from vllm.distributed.eplb.policy import DefaultEplbPolicy

    rng = np.random.default_rng(seed)
    nodes, ranks_per_node, group_size = rng.integers(1, 4, 3)
    groups = int(nodes * rng.integers(1, 3)) if seed % 4 else 3
    ranks, experts = int(nodes * ranks_per_node), int(groups * group_size)
    slots = ranks * -(-(experts + int(rng.integers(0, 9))) // ranks)
    load_LE = rng.random((4, experts), dtype=np.float32)
    theirs = DefaultEplbPolicy.rebalance_experts(
        torch.from_numpy(load_LE), slots, groups, int(nodes), ranks
    )
    np.testing.assert_array_equal(eplb(load_LE, slots, ranks, groups, int(nodes)), theirs.numpy())
