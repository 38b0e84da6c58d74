"""Prefill and decode replicas: Ray Serve LLM's server that also speaks HTTP itself.

Requests and tokens go between ingress and replica as bytes over HTTP: a Ray object per token costs
more than the decode step of a small model, and a Serve call per request more than its relay. Serve
still knows which replicas are busy: while an ingress has requests at a replica it keeps one call to
`attend` open there, so that draining waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import ray
import uvicorn
from ray import serve
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from app.metrics import CacheMetrics, PlacementMetrics, ReplicaMetrics
from cachemgr.manager import ControlSettings
from cachemgr.planner import PlannerSettings
from deployments.engine import Phase
from deployments.gate import Gate
from deployments.replica import (
    CacheReporter,
    Heartbeat,
    PlacementReporter,
    overlap_artifact,
    set_plan_file,
    set_side_channel,
)

# Requests that follow each other share one call: opening it costs as much as a decode step.
_QUIET_S = 1.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the replica's process belongs to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class EngineServer(LLMServer):
    """One engine with an HTTP port of its own; its configuration says for which phase."""

    async def __init__(  # type: ignore[misc]
        self,
        llm_config: LLMConfig,
        *,
        phase: Phase,
        app_name: str,
        port_base: int,
        internal_key: str,
        cache_control: ControlSettings | None = None,
        has_cache: bool = False,
        artifact: str | None = None,
        planning: PlannerSettings | None = None,
    ) -> None:
        host = ray.util.get_node_ip_address()
        set_side_channel(host, port_base)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        if planning is not None and not has_cache:
            set_plan_file(planning, self._replica_id)
        await super().__init__(llm_config)
        # Public hook of serve.ingress for late-bound apps; here our own server serves what it
        # builds, because Serve gives HTTP ports to the ingress deployment alone.
        self._gate = Gate(await self.__serve_build_asgi_app__(), internal_key)
        listener = socket.create_server((host, 0), backlog=1024)
        url = f"http://{host}:{listener.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                self._gate,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=120,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._cache_reporter: CacheReporter | None = None
        self._metrics = ReplicaMetrics(str(phase))
        self._heartbeat = Heartbeat(
            app_name,
            str(phase),
            self._replica_id,
            url,
            self._load,
            self.check_health,
            self._resident if has_cache else None,
        )
        self._heartbeat.start()
        if has_cache:
            cache_metrics = CacheMetrics()
            self._cache_reporter = CacheReporter(
                app_name,
                self._replica_id,
                cache_control,
                self.collective_rpc,
                artifact=overlap_artifact(artifact),
                home=lambda: self._heartbeat.home,
                export=cache_metrics.overlap,
                export_size=cache_metrics.size,
            )
            self._cache_reporter.start()
        self._placement_reporter: PlacementReporter | None = None
        if planning is not None:
            self._placement_reporter = PlacementReporter(
                app_name,
                self._replica_id,
                cache_control,
                self.collective_rpc,
                settings=planning,
                home=lambda: self._heartbeat.home,
                has_cache=has_cache,
                export=PlacementMetrics().export,
            )
            self._placement_reporter.start()

    async def attend(self, replica_id: str) -> bool:
        """Last until this replica has no requests.

        Returns:
            False when the call landed on another replica than the one it names: that one is
            draining and Serve no longer routes to it.
        """
        if replica_id != self._replica_id:
            return False
        await self._gate.wait_idle(_QUIET_S)
        return True

    def _load(self) -> int:
        self._metrics.holds(self._gate.num_running)
        return self._gate.num_running

    async def _resident(self) -> bytes | None:
        return None if self._cache_reporter is None else await self._cache_reporter.resident()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Requests held, for autoscaling policies: Serve's own count sees only `attend`."""
        return {"num_requests": float(self._gate.num_running)}

    async def __del__(self) -> None:
        # Serve has drained the calls it knows of; requests that came since may still run.
        await self._heartbeat.stop()
        await self._gate.wait_idle()
        for reporter in (self._placement_reporter, self._cache_reporter):
            if reporter is not None:
                await reporter.stop()
        self._server.should_exit = True
        await self._serving
