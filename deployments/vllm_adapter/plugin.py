"""vLLM plug-in (entry point `vllm.general_plugins`): engines start with one import of vLLM less.

vLLM forks its worker from EngineCore by default, but not below a Ray actor, where it spawns both
because an actor's process cannot be forked. EngineCore itself is a fresh process without Ray and
can fork as usual. Importing vLLM again takes 8 s of CPU per worker.
"""

from __future__ import annotations

import multiprocessing
import os

FORK_WORKER = "ELDR_FORK_WORKER"


def register() -> None:
    """Called by vLLM in each of its processes before it does anything."""
    is_engine_core = multiprocessing.current_process().name.startswith("EngineCore")
    if is_engine_core and os.environ.get(FORK_WORKER) == "1":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
