"""The Ray actor around `RouterService`: one per application, named, detached, self-restarting.

After a crash Ray starts it again; it loads the artifact and gets replicas, loads and centroids back
from the next heartbeats (within a second). Until then callers choose by least load themselves.

Not an asyncio actor: no method waits for anything, and a call through an event loop of the actor
takes a third longer. Calls of one process are served in the order sent, so a release never
overtakes its selection. Refits run on a thread of their own; heartbeats, which come at least once a
second, start them and take their results.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray

from app.metrics import RouterMetrics
from router.refit import RefitJob, RefitResult, run_refit
from router.service import RouterService, RouterSettings, WireRequest

logger = logging.getLogger(__name__)

NAMESPACE = "eldr"


def actor_name(app_name: str) -> str:
    """Name of an application's router actor."""
    return f"{app_name}-router"


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class RouterActor:
    """Thin: each method calls the service and returns what it says."""

    def __init__(self, settings: RouterSettings, app_name: str) -> None:
        self._service = RouterService(settings, time.monotonic)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="refit")
        self._metrics = RouterMetrics(app_name)
        self._refit: tuple[RefitJob, Future[RefitResult]] | None = None

    def configure(self, settings: RouterSettings) -> bool:
        return self._service.configure(settings)

    def heartbeat(
        self,
        role: str,
        replica_id: str,
        url: str,
        load: int,
        centroid: int | None,
        home_tag: str | None,
        resident: bytes | None = None,
    ) -> dict[str, Any]:
        self._refit_step()
        self._export()
        return self._service.heartbeat(role, replica_id, url, load, centroid, home_tag, resident)

    def restore_home(self, replica_id: str, home: bytes) -> bool:
        return self._service.restore_home(replica_id, home)

    def _refit_step(self) -> None:
        """Take the result of a refit that has ended, or start one that is due."""
        if self._refit is None:
            if (job := self._service.next_refit()) is not None:
                self._refit = job, self._thread.submit(run_refit, job)
            return
        job, future = self._refit
        if not future.done():
            return
        self._refit = None
        error = future.exception()
        if error is not None:
            logger.error("refit for %s failed: the centroids stay", job.reason, exc_info=error)
        self._service.finish_refit(job, future.result() if error is None else None)

    def _export(self) -> None:
        if self._metrics.is_due(time.monotonic()):
            self._metrics.export(self._service.totals(), self._service.gauges())

    def deregister(self, replica_id: str) -> None:
        self._service.deregister(replica_id)

    def suspect(self, replica_id: str) -> None:
        self._service.suspect(replica_id)

    def select(
        self,
        request_id: str,
        counts: bytes | None,
        prompt_tokens: int | None,
        domain: str | None,
        exclude: Collection[str],
        known_version: int,
        released: Sequence[str],
    ) -> dict[str, Any]:
        return self._service.select(
            request_id, counts, prompt_tokens, domain, exclude, known_version, released
        )

    def select_many(
        self, known_version: int, released: Sequence[str], *parts: Sequence[WireRequest]
    ) -> dict[str, Any]:
        # In parts, because Ray puts an argument above 100 KB into its object store: a detour.
        requests = [request for part in parts for request in part]
        return self._service.select_many(requests, known_version, released)

    def release(self, request_ids: Sequence[str]) -> None:
        self._service.release(request_ids)

    def view(self) -> dict[str, Any]:
        self._service.tick()
        self._export()
        return self._service.view()

    def stats(self) -> dict[str, Any]:
        return {**self._service.stats(), "pid": os.getpid()}


_handles: dict[str, Any] = {}


def router_handle(app_name: str) -> Any:
    """Handle of the router actor, cached for the process.

    Raises:
        ValueError: there is no such actor (yet).
    """
    handle = _handles.get(app_name)
    if handle is None:
        handle = _handles[app_name] = ray.get_actor(actor_name(app_name), namespace=NAMESPACE)
    return handle


def forget_handle(app_name: str) -> None:
    """Look the actor up again next time: the cached one is dead for good."""
    _handles.pop(app_name, None)


def create_router(app_name: str, settings: RouterSettings) -> Any:
    """The application's router actor, started if there is none; takes the given settings."""
    handle = RouterActor.options(  # type: ignore[attr-defined]
        name=actor_name(app_name),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
    ).remote(settings, app_name)
    _handles[app_name] = handle
    return handle
