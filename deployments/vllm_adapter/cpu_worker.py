"""vLLM's CPU worker, with an expert cache if the engine was started with one (`worker_cls`)."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from deployments.vllm_adapter.expert_cache import install, settings_of
from deployments.vllm_adapter.expert_loading import loading_to_store


class CachingCPUWorker(CPUWorker):
    """Installs the cache when the model is loaded: before memory is measured and KV allocated."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load with the experts on disk, then give each MoE layer its slots."""
        if (settings := settings_of(self.vllm_config)) is None:
            super().load_model(*args, **kwargs)
            return
        with loading_to_store(self.vllm_config, settings) as loading:
            super().load_model(*args, **kwargs)
            source = loading.finish()
        install(self.vllm_config, settings, source)
