"""What prefill and decode replicas share: ports of the engine, and the heartbeat to the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayError

from cachemgr.actor import create_manager
from cachemgr.manager import ControlSettings
from router.actor import router_handle

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0


def free_port(host: str, base: int, span: int = 2000) -> int:
    """First port from `base` on that can be bound on `host`.

    Raises:
        OSError: none of `span` ports is free.
    """
    # Replicas that start side by side would all probe the same first port: start apart.
    start = os.getpid() % span
    for offset in range(span):
        port = base + (start + offset) % span
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(
        f"no free port in [{base}, {base + span}) on {host}: change "
        "kv_transfer.side_channel_port_base"
    )


def set_side_channel(host: str, base: int) -> None:
    """Give this replica's engine a NIXL handshake address of its own.

    vLLM reads it from the environment of the process that starts the engine.
    """
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port(host, base))


class Heartbeat:
    """Tells the router that this replica is alive and how many requests it holds.

    Runs on the replica's event loop. The router forgets a replica that stops. The centroid that the
    router gave is sent along, so that a restarted router gives it again; of a refitted one its name
    is sent, and the vector when a router asks that does not know it. Nothing is sent while the
    engine is dead: the process may outlive it until Serve's own check ends it.
    """

    def __init__(
        self,
        app_name: str,
        role: str,
        replica_id: str,
        url: str,
        load: Callable[[], int],
        check_health: Callable[[], Awaitable[None]],
    ) -> None:
        self._app_name, self._role, self._replica_id, self._url = app_name, role, replica_id, url
        self._load, self._check_health = load, check_health
        self._centroid: int | None = None
        self._home_tag: str | None = None
        self._home: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_lost = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Leave the router's pool; called when the replica drains."""
        if self._task is not None:
            self._task.cancel()
        try:
            await asyncio.wait_for(self._call("deregister", self._replica_id), timeout=2)
        except Exception as err:  # the router may be gone too; it forgets us by itself
            logger.info("could not deregister %s: %r", self._replica_id, err)

    async def _run(self) -> None:
        while True:
            try:
                await self._check_health()
                await self.beat()
                if self._is_lost:
                    logger.info("%s sends heartbeats again", self._replica_id)
                self._is_lost = False
            except Exception as err:
                if not self._is_lost:
                    logger.warning("%s sends no heartbeat: %r", self._replica_id, err)
                self._is_lost = True
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def beat(self) -> None:
        """One heartbeat; raises what the call to the router raises."""
        answer: dict[str, Any] = await self._call(
            "heartbeat",
            self._role,
            self._replica_id,
            self._url,
            self._load(),
            self._centroid,
            self._home_tag,
        )
        self._centroid = answer["centroid"]
        if answer.get("send_home"):
            await self._call("restore_home", self._replica_id, self._home)
            return
        self._home_tag = answer.get("home_tag")
        self._home = answer.get("home", self._home) if self._home_tag else None

    async def _call(self, method: str, *args: Any) -> Any:
        return await getattr(router_handle(self._app_name), method).remote(*args)


class CacheReporter:
    """Reports this replica's expert cache to its node's manager, and changes what that one says.

    Runs on the replica's event loop, once a second. Without a manager the cache goes on as it is;
    one that is gone for good is started again. The targets travel with each report, so that a
    restarted manager gets them back.
    """

    def __init__(
        self,
        app_name: str,
        replica_id: str,
        control: ControlSettings | None,
        call: Callable[..., Awaitable[list[Any]]],
    ) -> None:
        self._app_name, self._replica_id, self._control = app_name, replica_id, control
        self._call = call
        self._known: dict[str, Any] | None = None
        self._refused: str | None = None
        self._manager: Any = None
        self._task: asyncio.Task[None] | None = None
        self._is_away = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Called when the replica drains."""
        if self._task is not None:
            self._task.cancel()
        if self._manager is not None:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._manager.forget.remote(self._replica_id), timeout=2)

    async def _run(self) -> None:
        while True:
            try:
                await self.report()
                if self._is_away:
                    logger.info("the cache manager answers again")
                self._is_away = False
            except Exception as err:
                if not self._is_away:
                    logger.warning("no report to the cache manager: %r", err)
                self._is_away, self._manager = True, None
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def report(self) -> None:
        """One exchange with the manager."""
        if self._manager is None:
            node_id = ray.get_runtime_context().get_node_id()
            self._manager = create_manager(self._app_name, node_id, self._control)
            await self._manager.configure.remote(self._control)
        stats = await self._call("eldr_cache_stats")
        answer = await self._manager.report.remote(
            self._replica_id, stats[0], self._known, self._refused
        )
        self._known, self._refused = answer["targets"], None
        if answer["changes"]:
            results = await self._call("eldr_cache_configure", args=(answer["changes"],))
            self._refused = next((r["error"] for r in results if "error" in r), None)
