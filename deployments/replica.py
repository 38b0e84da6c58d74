"""What prefill and decode replicas share: ports of the engine, and the heartbeat to the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from cachemgr.activity import resident_share
from cachemgr.actor import create_manager
from cachemgr.manager import ControlSettings
from cachemgr.planner import PlannerSettings, nearest_cluster, plan_file
from calibration.artifact import Artifact
from deployments.vllm_adapter.eplb import PLAN_PATH
from router.actor import router_handle
from router.service import HEARTBEAT_S

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
RESIDENT_TIMEOUT_S = 1.0

Home = tuple[int | None, bytes | None]
"""Centroid of a replica: the router's number for it, and its vector after a refit."""


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


def set_plan_file(settings: PlannerSettings, replica_id: str) -> None:
    """Name the file in which this replica's EPLB finds its placement plan.

    Read from the environment of the process that starts the engine.
    """
    os.environ[PLAN_PATH] = str(plan_file(settings.folder, replica_id))


class Heartbeat:
    """Tells the router that this replica is alive, how many requests and which experts it holds.

    Runs on the replica's event loop. The router forgets a replica that stops. The centroid that the
    router gave is sent along, so that a restarted router gives it again; of a refitted one its name
    is sent, and the vector when a router asks that does not know it. Nothing is sent while the
    engine is dead: the process may outlive it until Serve's own check ends it. The router says
    how soon it wants the next one; a replica without requests takes its time.

    Args:
        load: requests that the replica holds.
        check_health: raises if the engine is dead.
        resident: experts that the replica's cache holds, as bits; None where that is not known.
    """

    def __init__(
        self,
        app_name: str,
        role: str,
        replica_id: str,
        url: str,
        load: Callable[[], int],
        check_health: Callable[[], Awaitable[None]],
        resident: Callable[[], Awaitable[bytes | None]] | None = None,
    ) -> None:
        self._resident = resident
        self._app_name, self._role, self._replica_id, self._url = app_name, role, replica_id, url
        self._load, self._check_health = load, check_health
        self._centroid: int | None = None
        self._home_tag: str | None = None
        self._home: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_lost = False
        self._is_known = False
        self._interval_s = HEARTBEAT_S

    @property
    def home(self) -> Home | None:
        """The centroid that the router gave; None before its first answer."""
        return (self._centroid, self._home) if self._is_known else None

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
            await asyncio.sleep(self._interval_s if self._load() else HEARTBEAT_S)

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
            None if self._resident is None else await self._resident(),
        )
        self._centroid, self._is_known = answer["centroid"], True
        self._interval_s = answer["interval_s"]
        if answer.get("send_home"):
            await self._call("restore_home", self._replica_id, self._home)
            return
        self._home_tag = answer.get("home_tag")
        self._home = answer.get("home", self._home) if self._home_tag else None

    async def _call(self, method: str, *args: Any) -> Any:
        return await getattr(router_handle(self._app_name), method).remote(*args)


def home_overlap(
    artifact: Artifact, centroid: int | None, home: bytes | None, resident: bytes
) -> float:
    """Share of the uses expected of a replica's cluster that fall on its resident experts.

    Args:
        artifact: see `nearest_cluster`.
        centroid: see `nearest_cluster`.
        home: see `nearest_cluster`.
        resident: resident experts as bits, each layer from a byte of its own.
    """
    cluster = nearest_cluster(artifact, centroid, home)
    rate_KLE = artifact.cluster_activation_KLE
    rate_LE = rate_KLE.mean(axis=0) if cluster is None else rate_KLE[cluster]
    return resident_share(rate_LE, artifact.unpack_experts(resident))


def of_all_ranks(residents: Sequence[bytes]) -> bytes:
    """Experts that are resident on any rank; bits as each rank gives them."""
    bits_RN = np.stack([np.frombuffer(bits, dtype=np.uint8) for bits in residents])
    merged: bytes = np.bitwise_or.reduce(bits_RN, axis=0).tobytes()
    return merged


def overlap_artifact(path: str | None) -> Artifact | None:
    """The artifact for `home_overlap`; None, and a warning, where this node cannot read it."""
    if path is None:
        return None
    try:
        return Artifact.load(path)
    except (OSError, ValueError) as err:
        logger.warning("no cache overlap: %s", err)
        return None


class ManagerReporter:
    """Reports from a replica to its node's manager, on the replica's event loop, once a second.

    Without a manager the engine goes on as it is; one that is gone for good is started again.
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
                    logger.info("%s: the manager answers again", type(self).__name__)
                self._is_away = False
            except Exception as err:
                if not self._is_away:
                    logger.warning("%s: no report to the manager: %r", type(self).__name__, err)
                self._is_away, self._manager = True, None
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def report(self) -> None:
        """One exchange with the manager."""
        raise NotImplementedError

    async def _connect(self) -> Any:
        """The manager; a handle that was lost is looked up anew."""
        if self._manager is None:
            node_id = ray.get_runtime_context().get_node_id()
            self._manager = create_manager(self._app_name, node_id, self._control)
            await self._manager.configure.remote(self._control)
        return self._manager


class CacheReporter(ManagerReporter):
    """Reports this replica's expert cache to its node's manager, and changes what that one says.

    The targets travel with each report, so that a restarted manager gets them back.

    Args:
        artifact: says which experts the replica's cluster is expected to use; None: not known.
        home: the replica's centroid, as `Heartbeat.home`.
        export: takes the share of those uses that fall on resident experts.
        export_size: takes slots of a layer and experts it may load ahead.
    """

    _known: dict[str, Any] | None = None
    _refused: str | None = None

    def __init__(
        self,
        app_name: str,
        replica_id: str,
        control: ControlSettings | None,
        call: Callable[..., Awaitable[list[Any]]],
        *,
        artifact: Artifact | None,
        home: Callable[[], Home | None],
        export: Callable[[float], None],
        export_size: Callable[[int, int], None] = lambda slots, budget: None,
    ) -> None:
        super().__init__(app_name, replica_id, control, call)
        self._artifact, self._home, self._export = artifact, home, export
        self._export_size = export_size

    async def resident(self) -> bytes | None:
        """Experts that the cache holds now, all ranks together, as bits.

        Each layer starts at a byte of its own. None if the engine does not say in time: a heartbeat
        is not to wait for it.
        """
        try:
            async with asyncio.timeout(RESIDENT_TIMEOUT_S):
                return of_all_ranks(await self._call("eldr_cache_resident"))
        except TimeoutError:
            return None

    async def report(self) -> None:
        """One exchange with the manager."""
        stats = await self._call("eldr_cache_stats")
        self.export_overlap(of_all_ranks(await self._call("eldr_cache_resident")))
        self._export_size(stats[0]["slots"], stats[0]["budget"])
        manager = await self._connect()
        answer = await manager.report.remote(self._replica_id, stats[0], self._known, self._refused)
        self._known, self._refused = answer["targets"], None
        if answer["changes"]:
            results = await self._call("eldr_cache_configure", args=(answer["changes"],))
            self._refused = next((r["error"] for r in results if "error" in r), None)

    def export_overlap(self, resident: bytes) -> None:
        """Export `home_overlap`; a metric that cannot be had stops no report."""
        if (home := self._home()) is None or self._artifact is None:
            return
        try:
            self._export(home_overlap(self._artifact, *home, resident))
        except ValueError as err:
            logger.warning("no cache overlap from now on: %s", err)
            self._artifact = None


class PlacementReporter(ManagerReporter):
    """Asks the node's manager where this replica's experts are to be.

    It asks when the router gives the replica another centroid, and at intervals for what was
    measured since. EPLB reads the plan's file by itself; an engine with a cache is told. One plan
    is taken by all ranks before the manager is asked again, so that all read the same file.

    Args:
        settings: how to plan.
        home: the replica's centroid, as `Heartbeat.home`.
        has_cache: whether the engine's cache carries plans out.
        export: takes the manager's last answer with each report, for metrics.
    """

    def __init__(
        self,
        app_name: str,
        replica_id: str,
        control: ControlSettings | None,
        call: Callable[..., Awaitable[list[Any]]],
        *,
        settings: PlannerSettings,
        home: Callable[[], Home | None],
        has_cache: bool,
        export: Callable[[Mapping[str, Any]], None],
    ) -> None:
        super().__init__(app_name, replica_id, control, call)
        self._settings, self._home, self._has_cache = settings, home, has_cache
        self._export = export
        self._version = 0
        self._asked: tuple[Home, float] | None = None
        self._answer: Mapping[str, Any] | None = None

    async def report(self) -> None:
        """One exchange with the manager, if it is time."""
        home, now = self._home(), time.monotonic()
        if home is None or (
            self._asked is not None
            and home == self._asked[0]
            and now - self._asked[1] < self._settings.interval_s
        ):
            if self._answer is not None:
                self._export(self._answer)  # Ray forgets a gauge that is not set for a while
            return
        manager = await self._connect()
        uses = await self._call("eldr_expert_uses")
        centroid, vector = home
        report = {"centroid": centroid, "home": vector, **uses[0]}
        answer = await manager.place.remote(self._settings, self._replica_id, report)
        if self._has_cache and answer["version"] != self._version:
            changes = {"placement": answer["path"]}
            results = await self._call("eldr_cache_configure", args=(changes,))
            if refused := next((r["error"] for r in results if "error" in r), None):
                logger.error("placement plan %d was refused: %s", answer["version"], refused)
        self._version, self._asked = answer["version"], (home, now)
        self._answer = answer
        self._export(answer)
