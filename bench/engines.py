"""Engines of a benchmark: vLLM's own, in this process, as the application would start them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from app.config import EldrConfig
from deployments.engine import Phase, engine_env, engine_kwargs, resolve_device


def start_engine(
    config: EldrConfig, phase: Phase, side_channel_port: int, *, capture: str | None = None
) -> Any:
    """Start one engine.

    Args:
        config: the application whose engine it is.
        phase: prefill or decode.
        side_channel_port: of its NIXL handshakes.
        capture: overrides the capture mode.

    Returns:
        An `AsyncLLM`; end it with `shutdown`.
    """
    env = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        **engine_env(config, phase, resolve_device(config)),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
    }
    with _environment(env):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        kwargs = engine_kwargs(config, phase, resolve_device(config), capture=capture)
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=config.model.path, **kwargs))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables while an engine starts: its processes inherit them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
