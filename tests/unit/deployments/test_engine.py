"""What an engine is started with."""

from pathlib import Path
from typing import Any

import pytest

from app.config import EldrConfig
from cachemgr.settings import SETTINGS_KEY, CacheSettings
from deployments.engine import Phase, engine_env, engine_kwargs


def config(**sections: Any) -> EldrConfig:
    base = {"model": {"path": "org/model", "served_name": "m"}, "router": {"policy": "jsq"}}
    return EldrConfig.model_validate({**base, **sections})


def extra(kwargs: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = kwargs["kv_transfer_config"]["kv_connector_extra_config"]
    return result


def test_phases_differ_in_role_capture_and_scheduler() -> None:
    prefill = engine_kwargs(config(), Phase.PREFILL, "cpu")
    decode = engine_kwargs(config(), Phase.DECODE, "cpu")
    assert prefill["kv_transfer_config"]["kv_role"] == "kv_producer"
    assert decode["kv_transfer_config"]["kv_role"] == "kv_consumer"
    assert extra(prefill)["eldr_capture"] == "prefill"
    assert extra(decode)["eldr_capture"] == "decode"
    assert prefill["scheduler_cls"].endswith(".SignatureScheduler")
    assert "scheduler_cls" not in decode


def test_gpu_prefill_keeps_asynchronous_scheduling() -> None:
    kwargs = engine_kwargs(config(), Phase.PREFILL, "gpu")
    assert kwargs["scheduler_cls"].endswith(".AsyncSignatureScheduler")


def test_capture_can_be_switched_off() -> None:
    kwargs = engine_kwargs(config(router={"policy": "jsq", "capture": False}), Phase.PREFILL, "cpu")
    assert extra(kwargs)["eldr_capture"] == "off"
    assert "scheduler_cls" not in kwargs


@pytest.mark.parametrize(
    ("setting", "device", "on"),
    [("auto", "cpu", False), ("auto", "gpu", True), (True, "cpu", True), (False, "gpu", False)],
)
def test_progress_thread(setting: Any, device: str, on: bool) -> None:
    transfer = config(kv_transfer={"progress_thread": setting})
    assert extra(engine_kwargs(transfer, Phase.DECODE, device))["eldr_progress_thread"] is on


def test_users_engine_kwargs_are_passed_on() -> None:
    kwargs = engine_kwargs(
        config(decode={"engine_kwargs": {"max_logprobs": 5}}), Phase.DECODE, "cpu"
    )
    assert kwargs["max_logprobs"] == 5


def test_cache_is_for_decode_engines_alone() -> None:
    cached = config(cache={"enabled": True, "slots": 8, "store_dir": "~/experts"})
    assert "worker_cls" not in engine_kwargs(cached, Phase.PREFILL, "cpu")
    assert "worker_cls" not in engine_kwargs(config(), Phase.DECODE, "cpu")
    for device, worker in (("cpu", "CachingCPUWorker"), ("gpu", "CachingGPUWorker")):
        kwargs = engine_kwargs(cached, Phase.DECODE, device)
        assert kwargs["worker_cls"].endswith(f".{worker}")
        assert kwargs["enforce_eager"] is True
        settings = CacheSettings.of(kwargs["additional_config"][SETTINGS_KEY])
        assert settings.slots == 8
        assert settings.exact_tokens == cached.decode.max_num_seqs
        assert settings.store_dir == str(Path.home() / "experts")


def test_cpu_environment_and_its_override() -> None:
    section = config(decode={"kv_cache_gib": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0"}}).decode
    env = engine_env(section, "cpu")
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert "OMP_NUM_THREADS" not in engine_env(section, "gpu")
