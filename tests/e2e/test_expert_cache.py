"""The expert cache in a real engine: half of the experts in slots, the tokens of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from app.config import CacheConfig, load_config
from cachemgr.actor import create_manager
from cachemgr.manager import ControlSettings
from cachemgr.memory import host_memory
from calibration.artifact import Artifact
from calibration.capture import Prompt
from deployments.engine import Phase, engine_env, engine_kwargs
from deployments.replica import CacheReporter, set_side_channel
from tests.e2e.conftest import MAX_TOKENS, MODEL, ROOT, wait_until

POLICIES = ("lru", "lfu", "lrfu", "temporal", "spatio", "learned")
SCORE = str(ROOT / "models" / "demo" / "cache-score")


class Engine:
    """An in-process decode engine that computes its prompts itself."""

    def __init__(self, cache: CacheConfig, model: Path = MODEL, **kwargs: Any) -> None:
        from transformers import AutoTokenizer
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = load_config(ROOT / "examples" / "demo-jsq.yaml")
        config = config.model_copy(update={"cache": cache})
        os.environ.update(engine_env(config, Phase.DECODE, "cpu"), VLLM_LOGGING_LEVEL="WARNING")
        set_side_channel("127.0.0.1", 24000)
        arguments = {**engine_kwargs(config, Phase.DECODE, "cpu"), **kwargs}
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.loop = asyncio.new_event_loop()

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **arguments))

        self.engine = self.loop.run_until_complete(start())
        self.num = 0

    def answers(self, prompts: list[Prompt], salt: str, limit: int = 64) -> dict[str, list[int]]:
        """Greedy tokens by prompt id, `limit` requests at once; a new salt shares no prefix."""

        async def one(prompt: Prompt, slots: asyncio.Semaphore) -> list[int]:
            from vllm import SamplingParams

            self.num += 1
            request = f"r{self.num}"
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
            final = None
            tokens = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.text}],
                add_generation_prompt=True,
                return_dict=False,
            )
            async with slots:
                async for output in self.engine.generate(
                    {"prompt_token_ids": tokens, "cache_salt": salt}, params, request
                ):
                    final = output
            assert final is not None
            return list(final.outputs[0].token_ids)

        async def all_of_them() -> list[list[int]]:
            slots = asyncio.Semaphore(limit)
            return await asyncio.gather(*(one(prompt, slots) for prompt in prompts))

        answers = self.loop.run_until_complete(all_of_them())
        return {prompt.id: answer for prompt, answer in zip(prompts, answers, strict=True)}

    def call_all(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of every worker."""
        results: list[dict[str, Any]] = self.loop.run_until_complete(
            self.engine.collective_rpc(method, args=args)
        )
        return results

    def call(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of the one worker."""
        (result,) = self.call_all(method, *args)
        return result

    def close(self) -> None:
        """End the engine; a second call does nothing."""
        if self.loop.is_closed():
            return
        self.engine.shutdown()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        del self.engine  # one that is left to the interpreter's end complains there
        self.loop.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def engine(reference: dict[str, Any], store: Path) -> Iterator[Engine]:
    engine = Engine(CacheConfig(enabled=True, fraction=0.5, policy="lru", store_dir=str(store)))
    yield engine
    engine.close()


def expected(reference: dict[str, Any], prompts: list[Prompt]) -> dict[str, list[int]]:
    return {prompt.id: reference[prompt.id]["token_ids"] for prompt in prompts}


def test_memory_holds_half_of_the_experts(engine: Engine, prompts: list[Prompt]) -> None:
    engine.answers(prompts, "memory")
    stats = engine.call("eldr_cache_stats")
    assert (stats["slots"], stats["num_experts"]) == (32, 64)
    assert stats["slot_bytes"] * 2 == stats["full_bytes"]
    freed = []
    for attempt in range(3):  # what the process itself takes or gives back may hide it once
        full = engine.call("eldr_cache_configure", {"slots": 64})
        assert full["slot_bytes"] == full["full_bytes"]
        engine.answers(prompts[:8], f"memory of all {attempt}")
        full = engine.call("eldr_cache_stats")
        half = engine.call("eldr_cache_configure", {"slots": 32})
        assert half["slot_bytes"] * 2 == half["full_bytes"]
        engine.answers(prompts[:8], f"memory of half {attempt}")
        half = engine.call("eldr_cache_stats")
        freed.append(full["anonymous_bytes"] - half["anonymous_bytes"])
    # The slots are exact (above); the process's memory has noise of some megabytes.
    assert max(freed) > 0.7 * stats["full_bytes"] / 2, freed


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_without_a_cache(
    engine: Engine, reference: dict[str, Any], prompts: list[Prompt], policy: str
) -> None:
    """27 prompts at once from slots that start empty: decode steps need more than 32 experts."""
    budget = 8 if policy == "spatio" else 0
    score = SCORE if policy == "learned" else None
    changes = {"policy": policy, "budget": budget, "score_file": score}
    before = engine.call("eldr_cache_configure", changes)
    assert before["policy"] == policy
    assert engine.answers(prompts, f"all {policy}") == expected(reference, prompts)
    assert engine.answers(prompts, f"few {policy}", limit=3) == expected(reference, prompts)
    after = engine.call("eldr_cache_stats")
    assert after["kernel_calls"] - before["kernel_calls"] > (
        after["layer_steps"] - before["layer_steps"]
    )
    assert after["demand_loads"] > before["demand_loads"]
    assert after["hits"] > before["hits"]
    assert (after["proactive_loads"] > before["proactive_loads"]) == (policy == "spatio")


@pytest.mark.parametrize("slots", [4, 10])
def test_tokens_are_right_with_the_fewest_slots(
    engine: Engine, reference: dict[str, Any], prompts: list[Prompt], slots: int
) -> None:
    some = prompts[::3]
    engine.call("eldr_cache_configure", {"policy": "lru", "budget": 0, "slots": slots})
    assert engine.answers(some, f"{slots} slots") == expected(reference, some)
    engine.call("eldr_cache_configure", {"slots": 32})


def test_settings_that_do_not_fit_are_refused_and_change_nothing(engine: Engine) -> None:
    before = engine.call("eldr_cache_stats")
    for changes, text in (
        ({"slots": 3}, "below top-k 4"),
        ({"slots": 65}, "exceeds the 64 experts"),
        ({"policy": "best"}, "unknown cache policy"),
        ({"policy": "lru", "budget": 4}, "loads nothing ahead"),
        ({"policy": "spatio", "budget": 33, "score_file": None}, r"must be in [0, 32]"),
        ({"policy": "learned", "score_file": None}, "policy learned needs cache.score_file"),
        ({"policy": "learned", "score_file": str(MODEL)}, "has no file score.json"),
        ({"capacity": 8}, "capacity"),
    ):
        assert text in engine.call("eldr_cache_configure", changes)["error"]
    after = engine.call("eldr_cache_stats")
    assert {k: after[k] for k in ("slots", "policy", "budget")} == {
        k: before[k] for k in ("slots", "policy", "budget")
    }


def test_counts_are_exported(engine: Engine, prompts: list[Prompt]) -> None:
    from prometheus_client import REGISTRY

    from deployments.vllm_adapter.connector import CACHE_COUNTERS

    def exported() -> dict[str, float]:
        return {
            sample.name.removeprefix("vllm:eldr_cache_").removesuffix("_total"): sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name.startswith("vllm:eldr_cache_") and sample.name.endswith("_total")
        }

    engine.answers(prompts[:4], "exported")
    stats, values = engine.call("eldr_cache_stats"), exported()
    assert set(values) == set(CACHE_COUNTERS)
    for name, value in values.items():
        # The last tenth of a second is not exported yet.
        assert 0.5 * stats[name] <= value <= stats[name], name


@contextlib.contextmanager
def managed(
    engine: Engine, control: ControlSettings | None, export: Callable[[float], None]
) -> Iterator[tuple[Any, CacheReporter]]:
    """A node's manager, and the engine's reporter to it."""
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        manager = create_manager("test", ray.get_runtime_context().get_node_id(), control)
        yield (
            manager,
            CacheReporter(
                "test",
                "decode-1",
                control,
                engine.engine.collective_rpc,
                artifact=Artifact.load(ROOT / "models" / "demo" / "calibration"),
                home=lambda: (0, None),
                export=export,
            ),
        )
        ray.kill(manager)
    finally:
        ray.shutdown()
        engine.call(
            "eldr_cache_configure",
            {"policy": "lru", "budget": 0, "slots": 32, "score_file": None},
        )


def test_manager_sets_a_running_engine_and_survives_its_end(
    engine: Engine, prompts: list[Prompt]
) -> None:
    shares: list[float] = []
    with managed(engine, None, shares.append) as (manager, reporter):

        def report() -> int:
            engine.loop.run_until_complete(reporter.report())
            return int(engine.call("eldr_cache_stats")["slots"])

        engine.answers(prompts[:4], "resident")
        assert report() == 32
        assert 32 / 64 < shares[-1] < 1  # experts in slots are those that requests use
        # What the heartbeat tells the router; this engine has one rank.
        held: Any = engine.call("eldr_cache_resident")
        assert engine.loop.run_until_complete(reporter.resident()) == held != bytes(6 * 8)
        assert "below top-k" in ray.get(manager.set_targets.remote({"slots": 3}))["error"]
        assert ray.get(manager.set_targets.remote({"slots": 16}))["targets"]["slots"] == 16
        assert report() == 16
        # The manager's process dies: Ray starts it again, and the replica brings the targets back.
        pid = ray.get(manager.status.remote())["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid_of(manager) not in (None, pid), 30, "the manager is back")
        assert report() == 16
        assert ray.get(manager.status.remote())["targets"]["slots"] == 16
        # The worker comes back as it was configured: it is told again.
        engine.call("eldr_cache_configure", {"slots": 32})
        assert report() == 16
        assert ray.get(manager.status.remote())["replicas"]["decode-1"]["slots"] == 32
        report()
        assert ray.get(manager.status.remote())["replicas"]["decode-1"]["slots"] == 16
        engine.loop.run_until_complete(reporter.stop())
        assert ray.get(manager.status.remote())["replicas"] == {}


def test_memory_pressure_takes_slots_and_gives_them_back(
    engine: Engine, reference: dict[str, Any], prompts: list[Prompt]
) -> None:
    """Real memory, held here; the bands lie where holding some of it crosses them."""
    memory = host_memory()
    block = memory.free // 10
    now = memory.free / memory.total
    step = block / memory.total
    control = ControlSettings(
        interval_s=0.0, memory_low=now - 1.5 * step, memory_high=now - 0.5 * step, patience=3
    )
    with managed(engine, control, lambda share: None) as (_, reporter):

        def slots_of_reports(number: int) -> list[int]:
            slots = []
            for _ in range(number):
                engine.loop.run_until_complete(reporter.report())
                slots.append(int(engine.call("eldr_cache_stats")["slots"]))
            return slots

        some = prompts[::3]
        assert slots_of_reports(4) == [32] * 4
        held = [np.ones(block, dtype=np.uint8) for _ in range(2)]
        assert slots_of_reports(3) == [29, 26, 23]
        assert engine.answers(some, "pressed") == expected(reference, some)
        assert slots_of_reports(8) == [20, 17, 14, 11, 8, 5, 4, 4]
        assert engine.answers(some, "least slots") == expected(reference, some)
        held.pop()
        assert slots_of_reports(5) == [4] * 5  # between the bands
        held.pop()
        assert slots_of_reports(7) == [4, 4, 7, 7, 7, 10, 10]
        assert engine.answers(some, "relieved") == expected(reference, some)
        assert slots_of_reports(25)[-1] == 32
        assert engine.answers(some, "as before") == expected(reference, some)


def pid_of(manager: Any) -> int | None:
    try:
        return int(ray.get(manager.status.remote(), timeout=5)["pid"])
    except ray.exceptions.RayError:
        return None


def test_damaged_store_stops_the_start(engine: Engine, store: Path) -> None:
    """Checked on a copy of the running engine's file, as a second engine would open it."""
    (file,) = store.glob("*.experts")
    from cachemgr.store import ExpertStore, StoreError, _key_of, _read_header

    key = _key_of(_read_header(file))
    ExpertStore.open(file, key)
    copy = store / "copy.experts"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)
    with pytest.raises(StoreError, match=r"damaged: w.*delete it"):
        ExpertStore.open(copy, key)
