"""What of the expert cache needs no engine: which rank computes an expert, and the score file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cachemgr.learned import ScoreTable
from cachemgr.placement_plan import PlacementPlan
from cachemgr.scores import load_learned, load_scores
from cachemgr.settings import CacheSettings
from deployments.vllm_adapter.expert_cache import (
    ExpertShare,
    InstalledCache,
    owned_experts,
)
from deployments.vllm_adapter.slots import HostCopier, SlotRuntime

L, E, H = 3, 8, 4
MODEL = "f" * 16


def plan(path: Path, order_LP: Any, **changes: Any) -> str:
    PlacementPlan(
        **{
            "version": 1,
            "created_at": 0.0,
            "model_id": "test",
            "fingerprint": MODEL,
            "num_experts": E,
            "num_ranks": 2,
            "physical_to_logical_LP": np.array(order_LP, dtype=np.int64),
            **changes,
        }
    ).save(path)
    return str(path)


def test_one_rank_computes_all() -> None:
    assert owned_experts(ExpertShare(0, 1, E), MODEL, L, E, None) is None
    with pytest.raises(ValueError, match="experts on several ranks"):
        owned_experts(ExpertShare(0, 1, E), MODEL, L, E, "plan.json")


def test_without_a_plan_ranks_compute_what_they_loaded() -> None:
    for rank in range(2):
        owned_LE = owned_experts(ExpertShare(rank, 2, 4), MODEL, L, E, None)
        assert owned_LE is not None
        assert (owned_LE.nonzero()[1] // 4 == rank).all()
        assert owned_LE.sum() == L * 4


def test_every_expert_of_a_plan_has_one_rank(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    order_LP = np.stack([rng.permutation(E) for _ in range(L)])
    path = plan(tmp_path / "plan.json", order_LP)
    first, second = (owned_experts(ExpertShare(r, 2, 4), MODEL, L, E, path) for r in range(2))
    assert first is not None
    assert second is not None
    assert (first ^ second).all()
    for layer in range(L):
        assert set(first[layer].nonzero()[0]) == set(order_LP[layer, :4])


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "0" * 16},
        {"num_ranks": 4},
        {"physical_to_logical_LP": np.array([[*range(E), 0, 1]] * L)},  # copies
        {"physical_to_logical_LP": np.array([range(E)])},
    ],
)
def test_plan_of_another_engine_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = plan(tmp_path / "plan.json", [range(E)] * L, **changes)
    with pytest.raises(ValueError, match="make a plan for this engine"):
        owned_experts(ExpertShare(0, 2, 4), MODEL, L, E, path)


def test_score_file_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    temporal = np.random.default_rng(0).normal(size=(L, E, H))
    np.savez(path, temporal_LEH=temporal, fingerprint=MODEL)
    scores = load_scores(path, MODEL, L, E, H)
    assert scores.temporal_LEH is not None
    np.testing.assert_allclose(scores.temporal_LEH, temporal, rtol=1e-6)
    assert scores.hotness_LE is None
    np.save(tmp_path / "one.npy", np.zeros((L, E), dtype=np.float32))
    with pytest.raises(ValueError, match=r"one.npy cannot be read as .npz \(it is a single array"):
        load_scores(tmp_path / "one.npy", MODEL, L, E, H)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"hotness_LE": np.zeros((L, E)), "fingerprint": "0" * 16}, "was made for model 0000"),
        ({"hotness_LE": np.zeros((L, E))}, "without a fingerprint"),
        ({"hotness_LE": np.zeros((E, L)), "fingerprint": MODEL}, r"shape \(3, 8\), got shape"),
        ({"hotness_LE": np.full((L, E), np.nan), "fingerprint": MODEL}, "finite numbers"),
        ({"heat": np.zeros((L, E)), "fingerprint": MODEL}, "unknown arrays heat: known are"),
        ({"hotness_LE": np.array([{}] * 3), "fingerprint": MODEL}, r"cannot be read as \.npz"),
    ],
)
def test_bad_score_file_is_refused(tmp_path: Path, arrays: dict[str, Any], text: str) -> None:
    path = tmp_path / "scores.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=text):
        load_scores(path, MODEL, L, E, H)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"cannot be read as \.npz"):
        load_scores(path, MODEL, L, E, H)


def test_learned_score_is_read_and_checked(tmp_path: Path) -> None:
    path = str(tmp_path / "score")
    with pytest.raises(ValueError, match=r"policy learned needs cache\.score_file: the folder"):
        load_learned(None, MODEL, L, E)
    with pytest.raises(ValueError, match=r"cache\.score_file .*has no file score\.json"):
        load_learned(path, MODEL, L, E)
    rng = np.random.default_rng(0)
    matrices = rng.normal(size=(L, 4, E, E)).astype(np.float16).astype(np.float32)
    table = ScoreTable(
        "m", MODEL, (1, 2, 4), 0.5, matrices[:, :3, 0], matrices[:, 3:], matrices[:, 3, 0], {}
    )
    table.save(path)
    assert (load_learned(path, MODEL, L, E).window_LWEE == table.window_LWEE).all()
    for given, text in (
        (("0" * 16, L, E), "fingerprint f{16}, not 0{16}"),
        ((MODEL, L + 1, E), "3 layers x 8 experts"),
    ):
        with pytest.raises(ValueError, match=rf"cache\.score_file .* does not fit .*{text}"):
            load_learned(path, *given)


def test_slots_that_find_no_memory_leave_those_that_were() -> None:
    num_experts, num_bytes = 2**18, 2**26  # all of them: 16 TiB, of which no slot takes any yet
    runners = [SimpleNamespace(routed_experts=SimpleNamespace()) for _ in range(2)]
    installed = InstalledCache.__new__(InstalledCache)  # all but the layers of a model
    installed._runners = runners
    installed.settings = CacheSettings("lru", 2, 0.5, 0.03, 0, "", None, None, exact_tokens=4)
    installed.device, installed.num_experts, installed._top_k = torch.device("cpu"), num_experts, 2
    installed._load_owned = lambda placement: None  # type: ignore[assignment]
    installed._source = [{"w13_weight": torch.zeros(1).expand(num_experts, num_bytes // 4)}] * 2
    cache, _ = installed._make_policy(installed.settings, None)
    installed.runtime = SlotRuntime(
        cache, installed._allocate(2), HostCopier(), exact_tokens=4, reads_source=True
    )
    with pytest.raises(ValueError, match=f"no memory for {num_experts} slots .* went on with 2"):
        installed.configure(slots=num_experts)
    runtime = installed.runtime
    assert (installed.settings.slots, runtime.cache.capacity, len(runtime.layers)) == (2, 2, 2)
    for runner in runners:
        assert runner.routed_experts.w13_weight.shape == (2, num_bytes // 4)
    installed.configure(slots=3)
    assert (installed.settings.slots, runtime.cache.capacity) == (3, 3)
