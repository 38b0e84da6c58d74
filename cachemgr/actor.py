"""The Ray actor of a node's decode replicas, named and pinned to it: caches and placement plans.

After a crash Ray starts it again on its node; the next reports (within a second) bring back the
targets of caches, and plans are in files. A replica whose manager does not answer goes on with what
it has.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cachemgr.manager import CacheManager, ControlSettings
from cachemgr.planner import PlanKeeper, PlannerSettings

NAMESPACE = "eldr"


def manager_name(app_name: str, node_id: str) -> str:
    """Name of the cache manager of an application on a node."""
    return f"{app_name}-cache-{node_id}"


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class CacheManagerActor:
    """Thin: each method calls the manager and returns what it says."""

    def __init__(self, control: ControlSettings | None) -> None:
        self._manager = CacheManager(control, time.monotonic)
        self._plans, self._planning = PlanKeeper(time.time), asyncio.Lock()

    async def configure(self, control: ControlSettings | None) -> None:
        self._manager.configure(control)

    async def report(
        self,
        replica_id: str,
        stats: Mapping[str, Any],
        known: Mapping[str, Any] | None,
        refused: str | None,
    ) -> dict[str, Any]:
        return self._manager.report(replica_id, stats, known, refused)

    async def set_targets(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._manager.set_targets(**changes)
        except ValueError as err:
            return {"error": str(err)}
        return self._manager.status()

    async def place(
        self, settings: PlannerSettings, replica_id: str, report: Mapping[str, Any]
    ) -> dict[str, Any]:
        # A plan of a large model takes a second: reports of caches must not wait for it.
        async with self._planning:
            return await asyncio.to_thread(self._plans.place, settings, replica_id, report)

    async def forget(self, replica_id: str) -> None:
        self._manager.forget(replica_id)
        async with self._planning:
            self._plans.forget(replica_id)

    async def status(self) -> dict[str, Any]:
        return {**self._manager.status(), "pid": os.getpid()}


def create_manager(app_name: str, node_id: str, control: ControlSettings | None) -> Any:
    """The node's cache manager, started if there is none."""
    return CacheManagerActor.options(  # type: ignore[attr-defined]
        name=manager_name(app_name, node_id),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        # Hard: a manager is of no use elsewhere, and its node's end is its own.
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ).remote(control)
