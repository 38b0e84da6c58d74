"""What an engine is started with."""

from pathlib import Path
from typing import Any

import pytest

from app.config import EldrConfig
from app.model_facts import model_facts
from cachemgr.settings import SETTINGS_KEY, CacheSettings
from deployments.engine import Phase, deployment_options, engine_env, engine_kwargs
from deployments.vllm_adapter import eplb


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
    given = config(decode={"kv_cache_gib": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0"}})
    env = engine_env(given, Phase.DECODE, "cpu")
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert "OMP_NUM_THREADS" not in engine_env(given, Phase.DECODE, "gpu")


def test_placement_plan_reaches_eplb_or_the_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts": 4, "num_hidden_layers": 1}')
    sections: dict[str, Any] = {
        "model": {"path": str(tmp_path), "served_name": "m"},
        "placement": {"plan": "~/plan.json"},
    }
    ranks = {"enable_expert_parallel": True}
    by_eplb = config(
        **sections | {"placement": {"plan": "~/plan.json", "max_age_s": 60.0}},
        decode={"tensor_parallel_size": 2, "engine_kwargs": {**ranks, "enable_eplb": True}},
    )
    env = engine_env(by_eplb, Phase.DECODE, "gpu")
    assert env[eplb.PLAN_PATH] == str(Path.home() / "plan.json")
    assert env[eplb.FINGERPRINT] == model_facts(tmp_path).fingerprint
    assert float(env[eplb.MAX_AGE_S]) == 60
    assert eplb.PLAN_PATH not in engine_env(by_eplb, Phase.PREFILL, "gpu")
    managed = config(
        **sections | {"placement": {"managed": True}},
        router={"policy": "jsq", "artifact": "artifact"},
        decode={
            "tensor_parallel_size": 2,
            "engine_kwargs": {**ranks, "enable_eplb": True},
            "env": {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "OTHER"},
        },
    )
    env = engine_env(managed, Phase.DECODE, "gpu")
    assert eplb.PLAN_PATH not in env  # each replica names its own
    assert env["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == f"OTHER,{eplb.PLAN_PATH}"
    assert env[eplb.FINGERPRINT] == model_facts(tmp_path).fingerprint
    by_cache = config(
        **sections,
        decode={"tensor_parallel_size": 2, "engine_kwargs": ranks},
        cache={"enabled": True},
    )
    assert eplb.PLAN_PATH not in engine_env(by_cache, Phase.DECODE, "cpu")
    kwargs = engine_kwargs(by_cache, Phase.DECODE, "cpu")
    settings = CacheSettings.of(kwargs["additional_config"][SETTINGS_KEY])
    assert settings.placement == str(Path.home() / "plan.json")


def test_replicas_go_only_to_nodes_with_the_labels_of_their_pool() -> None:
    labels = {"eldr-serve/pool": "decode"}
    settings = config(decode={"node_labels": labels})
    decode = deployment_options(settings.decode)
    assert decode["placement_group_bundle_label_selector"] == [labels]
    # Serve refuses an empty selector.
    assert "placement_group_bundle_label_selector" not in deployment_options(settings.prefill)
