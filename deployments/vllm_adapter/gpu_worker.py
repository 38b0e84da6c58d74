"""vLLM's GPU worker, with an expert cache if the engine was started with one (`worker_cls`).

Not run: no GPU was at hand.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from deployments.vllm_adapter.expert_cache import install, settings_of


class CachingGPUWorker(Worker):
    """Installs the cache when the model is loaded: before memory is measured and KV allocated."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, then move the experts out."""
        super().load_model(*args, **kwargs)
        if (settings := settings_of(self.vllm_config)) is not None:
            install(self.vllm_config, settings)
