"""Experts on two ranks of a CPU engine, which stock vLLM cannot run: any placement, same tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from app.config import CacheConfig
from app.model_facts import model_facts
from cachemgr.actor import create_manager
from cachemgr.migration import MigrationCost
from cachemgr.placement_plan import IntArray, PlacementPlan
from cachemgr.planner import MOVE_PRICE, PlannerSettings
from calibration.capture import Prompt
from deployments.replica import Home, PlacementReporter
from tests.e2e.conftest import MODEL, ROOT, wait_until
from tests.e2e.test_expert_cache import Engine, pid_of

# Steps of up to 128 tokens count as decode steps: what is left of a prompt that is cached is less.
RANKS = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "max_num_seqs": 128}
Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def some(prompts: list[Prompt]) -> list[Prompt]:
    return prompts[::2]


@pytest.fixture(scope="module")
def alone(some: list[Prompt]) -> Answers:
    """Float32 tokens of one rank without a cache."""
    engine = Engine(CacheConfig(), dtype="float32")
    try:
        return engine.answers(some, "alone")
    finally:
        engine.close()


@pytest.fixture(scope="module")
def ranks(alone: Answers, store: Path) -> Iterator[Engine]:
    """Two ranks that hold every expert they compute; started after `alone` has ended."""
    cache = CacheConfig(enabled=True, fraction=1.0, policy="lru", store_dir=str(store))
    engine = Engine(cache, dtype="float32", **RANKS)
    yield engine
    engine.close()


def configure(engine: Engine, **changes: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = engine.call_all("eldr_cache_configure", changes)
    assert all("error" not in result for result in results), results
    return results


def write_plan(path: Path, order_LP: Any) -> str:
    facts = model_facts(MODEL)
    PlacementPlan(
        version=1,
        created_at=0.0,
        model_id="demo",
        fingerprint=facts.fingerprint,
        num_experts=facts.num_experts,
        num_ranks=2,
        physical_to_logical_LP=np.array(order_LP, dtype=np.int64),
    ).save(path)
    return str(path)


def test_tokens_are_those_of_one_rank(ranks: Engine, alone: Answers, some: list[Prompt]) -> None:
    assert ranks.answers(some, "loaded") == alone
    for stats in ranks.call_all("eldr_cache_stats"):
        assert stats["slots"] == 32
        assert stats["slot_bytes"] == stats["full_bytes"]
        assert stats["accesses"] > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_any_placement_gives_the_same_tokens(
    ranks: Engine, alone: Answers, some: list[Prompt], tmp_path: Path, seed: int
) -> None:
    rng, facts = np.random.default_rng(seed), model_facts(MODEL)
    order_LP = [rng.permutation(facts.num_experts) for _ in range(facts.num_moe_layers)]
    configure(ranks, placement=write_plan(tmp_path / "plan.json", order_LP))
    assert ranks.answers(some, f"plan {seed}") == alone


def test_managers_plan_reaches_both_ranks(
    ranks: Engine, alone: Answers, some: list[Prompt], tmp_path: Path
) -> None:
    """Planned by the artifact's clusters, then by what both ranks ran; a killed manager goes on."""
    home: list[Home] = [(0, None)]
    told: list[Mapping[str, Any]] = []
    settings = PlannerSettings(
        artifact=str(ROOT / "models" / "demo" / "calibration"),
        folder=str(tmp_path),
        num_ranks=2,
        num_spare=0,
        batch=1,
        interval_s=0.0,
        cost=MigrationCost(1.0, MOVE_PRICE, 1e6),
    )

    def accesses() -> list[int]:
        return [int(stats["accesses"]) for stats in ranks.call_all("eldr_cache_stats")]

    def uses() -> IntArray:
        one, other = ranks.call_all("eldr_expert_uses")
        assert one == other  # routing is the same on both ranks
        return np.array(one["uses_LE"])

    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        reporter = PlacementReporter(
            "test",
            "decode-1",
            None,
            ranks.engine.collective_rpc,
            settings=settings,
            home=lambda: home[0],
            has_cache=True,
            export=told.append,
        )

        def report() -> Mapping[str, Any]:
            ranks.loop.run_until_complete(reporter.report())
            return told[-1]

        first = report()
        assert first["version"] == 1
        assert first["num_moves"] > 0
        assert ranks.answers(some, "managed") == alone
        counted, ran = uses(), accesses()
        # Prompts are cached now but for their last block, so that every step is counted.
        for _ in range(2):
            ranks.answers(some, "managed", limit=1)
        plan = PlacementPlan.load(told[-1]["path"])
        uses_LE, num_ran = uses() - counted, np.subtract(accesses(), ran)
        uses_LR = np.take_along_axis(uses_LE, plan.physical_to_logical_LP, axis=1)
        assert num_ran.tolist() == uses_LR.reshape(len(uses_LE), 2, -1).sum(axis=(0, 2)).tolist()
        assert report()["measured_balance"] >= 1
        manager = create_manager("test", ray.get_runtime_context().get_node_id(), None)
        pid = ray.get(manager.status.remote())["pid"]
        os.kill(pid, signal.SIGKILL)
        version, home[0] = told[-1]["version"], (1, None)
        wait_until(lambda: pid_of(manager) not in (None, pid), 30, "the manager is back")
        assert report()["version"] == version + 1
        assert report()["num_moves"] > 0
        assert ranks.answers(some, "other centroid") == alone
        ranks.loop.run_until_complete(reporter.stop())
        assert not list(tmp_path.iterdir())
        ray.kill(manager)
    finally:
        ray.shutdown()


def test_ranks_with_half_of_their_experts_in_slots(
    ranks: Engine, alone: Answers, some: list[Prompt]
) -> None:
    results = configure(ranks, placement=None, slots=16)
    assert all(stats["slot_bytes"] * 2 == stats["full_bytes"] for stats in results)
    assert ranks.answers(some, "half") == alone


def test_plan_of_another_model_is_refused(ranks: Engine, tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", [range(64)] * 3)
    for result in ranks.call_all("eldr_cache_configure", {"placement": path}):
        assert "make a plan for this engine" in result["error"]


def first_logprobs(engine: Engine, prompts: list[Prompt]) -> list[dict[int, float]]:
    """Log probabilities of the 8 likeliest first tokens of each prompt."""

    async def one(prompt: Prompt) -> dict[int, float]:
        from vllm import SamplingParams

        params, final = SamplingParams(max_tokens=1, temperature=0, logprobs=8), None
        async for output in engine.engine.generate({"prompt": prompt.text}, params, prompt.id):
            final = output
        assert final is not None
        return {token: entry.logprob for token, entry in final.outputs[0].logprobs[0].items()}

    async def all_of_them() -> list[dict[int, float]]:
        return [await one(prompt) for prompt in prompts]

    return engine.loop.run_until_complete(all_of_them())


def test_bfloat16_differs_by_the_rounding_of_the_sum(
    ranks: Engine, some: list[Prompt], store: Path
) -> None:
    """Each rank's part is rounded before they are added: one rounding more in each of 6 layers."""
    ranks.close()
    results = []
    cache = CacheConfig(enabled=True, fraction=1.0, policy="lru", store_dir=str(store))
    for settings, kwargs in ((CacheConfig(), {}), (cache, RANKS)):
        engine = Engine(settings, **kwargs)
        try:
            results.append(first_logprobs(engine, some))
        finally:
            engine.close()
    for alone, split in zip(*results, strict=True):
        both = alone.keys() & split.keys()
        assert len(both) >= 6
        # Two steps of bfloat16 at logits from 16 to 32, where the least likely of them lie.
        assert max(abs(alone[t] - split[t]) for t in both) < 0.25
