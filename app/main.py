"""The Serve application of a configuration: the `import_path` of manifests."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from app.config import EldrConfig, load_config
from app.model_facts import model_facts


def router_settings(config: EldrConfig) -> Any:
    """What the router actor needs of a configuration."""
    from router.refit import RefitSettings
    from router.service import RouterSettings

    router = config.router
    return RouterSettings(
        policy=router.policy,
        tau=router.tau,
        lambda_=router.lambda_,
        max_load=router.max_load,
        resident_weight=router.resident_weight,
        caches_experts=config.cache.enabled,
        seed=router.seed,
        artifact=router.artifact,
        reservoir_size=router.reservoir_size,
        reservation_ttl_s=config.reservation_ttl_s,
        ramp_s=router.ramp_s,
        refit=RefitSettings(**router.refit.model_dump()),
    )


def planner_settings(config: EldrConfig) -> Any:
    """What nodes' managers need to plan expert placement; None where they do not."""
    from cachemgr.migration import MigrationCost
    from cachemgr.planner import PlannerSettings

    placement, decode = config.placement, config.decode
    if not placement.managed:
        return None
    assert config.router.artifact is not None
    return PlannerSettings(
        artifact=config.router.artifact,
        folder=placement.folder,
        num_ranks=decode.num_expert_ranks,
        num_spare=decode.num_redundant_experts,
        batch=placement.batch or decode.max_num_seqs,
        interval_s=placement.interval_s,
        cost=MigrationCost(
            1.0, placement.move_price, placement.horizon_steps, placement.hysteresis
        ),
    )


def build_app(config: EldrConfig) -> Any:
    """Bind ingress, prefill and decode deployments.

    Returns:
        A `ray.serve.Application`.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.llm import build_llm_deployment

    from app.ingress import Ingress, api
    from cachemgr.manager import ControlSettings
    from deployments.engine import Phase, llm_config
    from deployments.server import EngineServer

    internal_key = secrets.token_hex(32)

    def engines(phase: Phase) -> Any:
        return build_llm_deployment(
            llm_config(config, phase),
            name_prefix=f"{phase}:",
            deployment_cls=EngineServer,
            bind_kwargs={
                "phase": phase,
                "app_name": config.app_name,
                "port_base": config.kv_transfer.side_channel_port_base,
                "internal_key": internal_key,
                "has_cache": config.cache.enabled and phase is Phase.DECODE,
                "cache_control": ControlSettings() if config.cache.adaptive else None,
                "artifact": config.router.artifact,
                "planning": planner_settings(config) if phase is Phase.DECODE else None,
            },
            override_serve_options={
                "request_router_config": RequestRouterConfig(
                    request_router_class="router.serve_router:PinnedRequestRouter"
                )
            },
        )

    ingress = serve.deployment(
        serve.ingress(api)(Ingress),
        name="ingress",
        num_replicas=config.http.num_ingress_replicas,
        max_ongoing_requests=4096,
        # It relays the streams that stopping engines are given this time to end.
        graceful_shutdown_timeout_s=max(
            pool.graceful_shutdown_timeout_s for pool in (config.prefill, config.decode)
        ),
        ray_actor_options={
            "num_cpus": 0.1,
            "runtime_env": {
                "env_vars": {
                    # One event loop for HTTP, relay and routing: a hop between threads for each
                    # chunk costs more than the chunk.
                    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
                    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
                }
            },
        },
    )
    return ingress.bind(
        config,
        router_settings(config),
        _model_type(config),
        internal_key,
        engines(Phase.PREFILL),
        engines(Phase.DECODE),
    )


def _model_type(config: EldrConfig) -> str | None:
    if not Path(config.model.path).is_dir():
        return None  # a hub id: no config.json here
    return model_facts(config.model.path).model_type


def build(args: dict[str, str]) -> Any:
    """Application builder for Serve config files: `args: {config: /path/to/eldr.yaml}`.

    Raises:
        ConfigError: the configuration is refused; names every field at fault.
    """
    config = load_config(args["config"])
    from router.actor import create_router

    create_router(config.app_name, router_settings(config))
    return build_app(config)
