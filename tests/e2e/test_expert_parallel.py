"""Experts on two ranks of a CPU engine, which stock vLLM cannot run: any placement, same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.config import CacheConfig
from app.model_facts import model_facts
from cachemgr.placement_plan import PlacementPlan
from calibration.capture import Prompt
from tests.e2e.conftest import MODEL
from tests.e2e.test_expert_cache import Engine

RANKS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
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
        assert max(abs(alone[t] - split[t]) for t in both) < 0.1
