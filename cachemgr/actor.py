"""The Ray actor around `CacheManager`: one per node with decode replicas, named and pinned to it.

After a crash Ray starts it again on its node; the next reports (within a second) bring back the
targets. A replica whose manager does not answer goes on with what it has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cachemgr.manager import CacheManager, ControlSettings

NAMESPACE = "eldr"


def manager_name(app_name: str, node_id: str) -> str:
    """Name of the cache manager of an application on a node."""
    return f"{app_name}-cache-{node_id}"


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class CacheManagerActor:
    """Thin: each method calls the manager and returns what it says."""

    def __init__(self, control: ControlSettings | None) -> None:
        self._manager = CacheManager(control, time.monotonic)

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

    async def forget(self, replica_id: str) -> None:
        self._manager.forget(replica_id)

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
