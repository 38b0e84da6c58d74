"""The step-time bench without its engine: plan, prompts, fit, widened experts."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.step_time import (
    BATCHES,
    GROUPS,
    Row,
    draw_prompts,
    expert_bytes,
    make_plan,
    make_report,
    widen_experts,
)
from calibration.simulation.config import StepTimeSection
from calibration.simulation.laws import make_law


def _rows(per_distinct, noise=0.0):
    rng = np.random.default_rng(0)
    rows = []
    for batch in BATCHES:
        for mix, share in (("code", 0.8), ("mixed tasks", 1.0)) * 3:
            distinct = share * 40 * (1 - 0.9**batch) * rng.uniform(0.95, 1.05)
            seconds = 5e-3 + 2e-4 * batch + per_distinct * distinct
            rows.append(Row(batch, distinct, seconds * (1 + noise * rng.normal()), mix))
    return rows


def test_the_report_gives_back_the_law(tmp_path):
    report = make_report(_rows(3e-4))
    assert report["law_s"]["per_distinct"] == pytest.approx(3e-4, rel=1e-6)
    assert report["r_squared"] == report["r_squared_within"] == pytest.approx(1)
    assert report["r_squared_batch"] < 1
    assert report["sizes"]["32"]["mixed_distinct"] > report["sizes"]["32"]["one_distinct"]
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    law = make_law(StepTimeSection(law="file", file=str(file))).law
    assert law.per_distinct == report["law_s"]["per_distinct"]


def test_free_experts_explain_nothing_within_a_size():
    report = make_report(_rows(0.0, noise=0.02))
    assert report["r_squared"] > 0.9
    assert report["r_squared_within"] < 0.2


def test_the_plan_has_each_size_and_mix_and_a_drawn_order():
    plan = make_plan(2, np.random.default_rng(0))
    assert len(plan) == len(BATCHES) * 6 * 2
    assert plan.count((8, "mixed languages")) == 2
    assert plan != sorted(plan)


def test_mixed_batches_take_domains_in_turn():
    pools = {domain: [[i]] for i, domain in enumerate(d for g in GROUPS.values() for d in g)}
    rng = np.random.default_rng(0)
    assert draw_prompts(pools, "mixed tasks", 6, rng) == [[0], [1], [2], [3], [0], [1]]
    assert draw_prompts(pools, "en", 3, rng) == [[4], [4], [4]]


def test_wide_experts_compute_the_same(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"moe_intermediate_size": 6, "hidden_size": 4, "model_type": "qwen3_moe"})
    )
    torch.manual_seed(0)
    expert = "model.layers.0.mlp.experts.0."
    tensors = {
        f"{expert}gate_proj.weight": torch.randn(6, 4),
        f"{expert}up_proj.weight": torch.randn(6, 4),
        f"{expert}down_proj.weight": torch.randn(4, 6),
        "model.norm.weight": torch.randn(4),
    }
    save_file(tensors, model / "model.safetensors")
    wide = load_file(widen_experts(model, tmp_path / "wide", 16) / "model.safetensors")

    def run(weights):
        gate, up, down = (weights[f"{expert}{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = torch.linspace(-1, 1, 4)
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))

    assert wide[f"{expert}gate_proj.weight"].shape == (16, 4)
    torch.testing.assert_close(run(wide), run(tensors))
    torch.testing.assert_close(wide["model.norm.weight"], tensors["model.norm.weight"])
    assert expert_bytes(tmp_path / "wide", None) == expert_bytes(model, 16) == 3 * 4 * 16 * 2
    with pytest.raises(ValueError, match="above the 6 columns"):
        widen_experts(model, tmp_path / "narrow", 6)
