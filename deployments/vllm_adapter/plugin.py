"""vLLM plug-in (entry point `vllm.general_plugins`): one-worker CPU engines compute in EngineCore.

It also installs the placement policy (`eplb.py`) where a plan is named.

Upstream: `vllm.v1.executor`, vLLM 0.32. On CPU vLLM always starts a worker process, because it sets
OpenMP's environment there; an engine of ours gets that environment from its replica. EngineCore and
worker then spin on a queue between them: half a core, 0.7 GB and a second import of vLLM for each
engine. No public way: Ray Serve LLM and the CPU platform both overwrite the executor setting. When
vLLM lets a CPU engine keep `distributed_executor_backend="uni"`, this file can go.
"""

from __future__ import annotations

import os
from typing import Any

from deployments.vllm_adapter import eplb

IN_PROCESS_WORKER = "ELDR_IN_PROCESS_WORKER"


def register() -> None:
    """Called by vLLM in each of its processes before it does anything."""
    eplb.register()
    if os.environ.get(IN_PROCESS_WORKER) != "1":
        return
    from vllm.v1.executor.abstract import Executor

    original = Executor.get_class
    if getattr(original, "is_eldr", False):
        return

    def get_class(vllm_config: Any) -> Any:
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "mp" and parallel.world_size == 1:
            from vllm.v1.executor.uniproc_executor import UniProcExecutor

            return UniProcExecutor
        return original(vllm_config)

    get_class.is_eldr = True  # type: ignore[attr-defined]
    Executor.get_class = staticmethod(get_class)
