"""Signatures on real engines: exact under prefix hits, chunked prefill and batches."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from app.config import load_config
from app.model_facts import model_facts
from app.prefill_request import ASK_FOR_HANDOFF
from calibration.capture import Prompt, capture
from deployments.engine import Phase, engine_env, engine_kwargs
from deployments.replica import set_side_channel
from tests.e2e.conftest import MODEL, ROOT


class Engine:
    """An in-process prefill engine with its own event loop."""

    def __init__(self, **kwargs: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = load_config(ROOT / "examples" / "demo-jsq.yaml")
        os.environ.update(engine_env(config, Phase.PREFILL, "cpu"), VLLM_LOGGING_LEVEL="WARNING")
        set_side_channel("127.0.0.1", 24000)
        arguments = {**engine_kwargs(config, Phase.PREFILL, "cpu", capture="prefill"), **kwargs}
        self.loop = asyncio.new_event_loop()

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(MODEL), **arguments))

        self.engine = self.loop.run_until_complete(start())
        self.num = 0

    def counts(self, prompts: list[list[int]], salt: str) -> list[tuple[np.ndarray[Any, Any], int]]:
        """Count matrix and prefix-cached tokens of prompts that are sent at once.

        Prompts of another `salt` share no prefix cache: a new one makes a run cold.
        """

        async def one(tokens: list[int]) -> tuple[np.ndarray[Any, Any], int]:
            from vllm import SamplingParams

            self.num += 1
            params = SamplingParams(
                max_tokens=1,
                temperature=0,
                extra_args={"kv_transfer_params": dict(ASK_FOR_HANDOFF)},
            )
            final = None
            async for output in self.engine.generate(
                {"prompt_token_ids": tokens, "cache_salt": salt}, params, f"r{self.num}"
            ):
                final = output
            assert final is not None
            payload = final.kv_transfer_params
            assert payload["eldr_prompt_tokens"] == len(tokens)
            facts = model_facts(MODEL)
            flat = np.frombuffer(base64.b64decode(payload["eldr_counts"]), dtype="<u2")
            counts = flat.reshape(facts.num_moe_layers, facts.num_experts).astype(int)
            assert (counts.sum(1) == len(tokens) * facts.top_k).all()
            return counts, final.num_cached_tokens

        async def all_of_them() -> Any:
            return await asyncio.gather(*map(one, prompts))

        return list(self.loop.run_until_complete(all_of_them()))

    def close(self) -> None:
        self.engine.shutdown()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        del self.engine  # one that is left to the interpreter's end complains there
        self.loop.close()


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(300, 8000, length).tolist()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(max_num_batched_tokens=4096)
    yield engine
    engine.close()


def test_prefix_hit_gives_the_counts_of_a_cold_run(engine: Engine) -> None:
    shared = tokens_of(1, 256)
    longer = shared + tokens_of(2, 200)
    ((cold, cached),) = engine.counts([longer], "cold")
    assert cached == 0
    engine.counts([shared], "warm")
    ((warm, cached),) = engine.counts([longer], "warm")
    assert cached == 256
    assert (warm == cold).all()
    ((again, cached),) = engine.counts([longer], "warm")
    assert cached > 256
    assert (again == cold).all()


def test_several_prompts_in_one_step_are_kept_apart(engine: Engine) -> None:
    prompts = [tokens_of(10 + i, 40 + 37 * i) for i in range(8)]
    alone = [engine.counts([p], "alone")[0] for p in prompts]
    together = engine.counts(prompts, "together")
    for i, ((a, _), (b, cached)) in enumerate(zip(alone, together, strict=True)):
        assert cached == 0
        assert (a == b).all(), f"prompt {i} differs in {int(abs(a - b).sum())} choices"


def test_prompts_with_one_prefix_in_one_step(engine: Engine) -> None:
    shared = tokens_of(30, 256)
    prompts = [shared + tokens_of(31, 20), shared + tokens_of(32, 150)]
    alone = [engine.counts([p], f"one {i}")[0][0] for i, p in enumerate(prompts)]
    for a, (b, _) in zip(alone, engine.counts(prompts, "both"), strict=True):
        assert (a == b).all()


def test_recycled_blocks_do_not_leak(engine: Engine) -> None:
    """Later runs write over rows of earlier ones; each count is that of the first run."""
    tokens = tokens_of(40, 300)
    first = engine.counts([tokens], "first")[0][0]
    for i in range(40):
        engine.counts([tokens_of(100 + i, 900)], "between")
        if i % 10 == 0:
            assert (engine.counts([tokens], f"again {i}")[0][0] == first).all()


def test_chunked_prefill_gives_the_counts_of_a_whole_one(engine: Engine) -> None:
    prompts = [tokens_of(50, 333), tokens_of(51, 190), tokens_of(52, 64)]
    whole = [engine.counts([p], "whole")[0][0] for p in prompts]
    chunked = Engine(max_num_batched_tokens=96, max_num_seqs=8)
    try:
        parts = [chunked.counts([p], "parts")[0][0] for p in prompts]
        mixed = [counts for counts, _ in chunked.counts(prompts, "mixed")]
    finally:
        chunked.close()
    for a, b, c in zip(whole, parts, mixed, strict=True):
        assert (a == b).all()
        assert (a == c).all()


def test_calibration_capture_splits_prefill_from_decode(prompts: list[Prompt]) -> None:
    """Capture checks conservation itself: a wrong split could not be constructed."""
    config = load_config(ROOT / "examples" / "demo-jsq.yaml")
    result = asyncio.run(capture(config, prompts[:6], max_tokens=8, concurrency=3))
    assert 1 <= len(result) <= 6
    assert (result.decode_tokens_N <= 7).all()
    assert set(result.domains_N) <= {p.label for p in prompts}
