"""The router actor on a local Ray: heartbeats, several ingress clients, a crash. No engines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import ray

from app.pd_flow import Handoff, PdRequest
from deployments import clients
from deployments.clients import RouterClient, in_parts
from deployments.replica import Heartbeat
from router.actor import create_router, forget_handle, router_handle
from router.refit import RefitSettings
from router.service import RouterSettings
from tests.builders import build_artifact, build_counts

TTL_S = 3.0


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    build_artifact(k=4, num_experts=32).save(tmp_path / "artifact")
    return tmp_path / "artifact"


def settings(policy: str = "jsq", artifact: Path | None = None) -> RouterSettings:
    return RouterSettings(
        policy,
        0.1,
        0.5,
        0,
        None if artifact is None else str(artifact),
        256,
        TTL_S,
        refit=RefitSettings(when="pool", settle_s=0.5),
    )


class App:
    """A router with decode replicas that send heartbeats ten times as often as real ones."""

    def __init__(self, name: str, given: RouterSettings) -> None:
        self.name, self.settings = name, given
        self.beats: dict[str, Heartbeat] = {}
        self._task: asyncio.Task[None] | None = None
        create_router(name, given)

    async def __aenter__(self) -> App:
        self._task = asyncio.create_task(self._keep_beating())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        ray.kill(router_handle(self.name))
        forget_handle(self.name)

    async def add(self, *replicas: str) -> None:
        for replica in replicas:
            beat = Heartbeat(self.name, "decode", replica, f"http://{replica}", lambda: 0, _healthy)
            await beat.beat()
            self.beats[replica] = beat

    async def clients(self, number: int, timeout_s: float = 2.0) -> list[RouterClient]:
        made = [RouterClient(self.name, self.settings, timeout_s, seed) for seed in range(number)]
        await asyncio.gather(*(client.start() for client in made))
        for client in made:
            await until(lambda client=client: client.replicas("decode"))
        return made

    async def stats(self) -> dict:
        return await router_handle(self.name).stats.remote()

    async def homes(self, domains: int) -> list[str]:
        """Replica of one request of each domain."""
        router, chosen = router_handle(self.name), []
        for domain in range(domains):
            counts = build_counts([domain, 7], [40, 1], num_experts=32)[0].astype("<u2")
            answer = await router.select.remote("h", counts.tobytes(), 40, None, (), -1, ())
            chosen.append(answer["replica_id"])
            await router.release.remote(["h"])
        return chosen

    async def _keep_beating(self) -> None:
        while True:
            for replica in list(self.beats):
                if replica not in self.beats:
                    continue  # it has stopped meanwhile: one more would bring it back
                try:
                    await self.beats[replica].beat()
                except ray.exceptions.RayError:
                    pass  # the router is being started again
            await asyncio.sleep(0.1)


async def _healthy() -> None:
    return None


async def until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            try:
                result = await result
            except ray.exceptions.RayError:
                result = False
        if result:
            return
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.05)


def request(request_id: str) -> PdRequest:
    return PdRequest(request_id, "chat", {}, None, None)


async def select(client: RouterClient, request_id: str, counts: bytes | None = None) -> str:
    handoff = None if counts is None else Handoff({}, counts, 40)
    return (await client.select(request(request_id), handoff, frozenset())).replica_id


def test_clients_share_one_ledger():
    """Three ingress replicas that all start at the same moment do not herd, batched or not."""

    async def run() -> None:
        async with App("shared", settings()) as app:
            await app.add("a", "b", "c", "d")
            made = await app.clients(3)
            chosen = await asyncio.gather(
                *(select(c, f"r{n}-{i}") for n, c in enumerate(made) for i in range(40))
            )
            assert set(Counter(chosen).values()) == {30}
            for n, client in enumerate(made):
                for i in range(40):
                    client.release(f"r{n}-{i}")
            await until(lambda: _is_idle(app))

    asyncio.run(run())


async def _is_idle(app: App) -> bool:
    return not any((await app.stats())["loads"].values())


def test_lost_release_expires():
    async def run() -> None:
        async with App("expiry", settings()) as app:
            await app.add("a", "b")
            (client,) = await app.clients(1)
            await select(client, "never-released")
            started = time.monotonic()
            await until(lambda: _is_idle(app))
            assert time.monotonic() - started > TTL_S / 2

    asyncio.run(run())


def test_clients_map_of_replicas_is_seconds_old_at_most():
    async def run() -> None:
        async with App("view", settings()) as app:
            await app.add("a", "b")
            idle, busy = await app.clients(2, timeout_s=20.0)
            await until(lambda: _knows_all(app))  # before, clients keep what it may not know yet
            del app.beats["b"]
            await router_handle(app.name).deregister.remote("b")
            await select(busy, "r")
            assert set(busy.replicas("decode")) == {"a"}  # at once, with the selection
            await until(lambda: set(idle.replicas("decode")) == {"a"}, timeout_s=20.0)

    asyncio.run(run())


async def _knows_all(app: App) -> bool:
    return (await router_handle(app.name).view.remote())["is_complete"]


def test_cancelled_selection_leaves_no_reservation():
    async def run() -> None:
        async with App("cancel", settings()) as app:
            await app.add("a", "b")
            (client,) = await app.clients(1)
            # More than go singly: some are on their way, some wait for a batch.
            tasks = [asyncio.create_task(select(client, f"r{i}")) for i in range(20)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            started = time.monotonic()
            await until(lambda: _is_idle(app))
            assert time.monotonic() - started < TTL_S / 2
            assert await select(client, "next") in ("a", "b")

    asyncio.run(run())


def test_clients_spread_while_the_router_is_away():
    """Each by its own counts, and not all of them with the same replica first."""

    async def run() -> None:
        async with App("away", settings()) as app:
            await app.add("a", "b", "c", "d")
            made = await app.clients(12, timeout_s=0.02)
            pid = (await app.stats())["pid"]
            os.kill(pid, signal.SIGSTOP)
            try:
                first = [await select(client, f"first-{n}") for n, client in enumerate(made)]
                assert len(set(first)) == 4
                assert max(Counter(first).values()) <= 6
                for n, client in enumerate(made[:2]):
                    rest = [await select(client, f"r{n}-{i}") for i in range(7)]
                    assert set(Counter([first[n], *rest]).values()) == {2}
                assert all(client.num_fallbacks for client in made)
            finally:
                os.kill(pid, signal.SIGCONT)

    asyncio.run(run())


def test_refit_in_the_background_and_homes_after_a_crash(artifact: Path):
    async def run() -> None:
        async with App("crash", settings("soft", artifact)) as app:
            await app.add("a", "b", "c", "d")
            router = router_handle(app.name)
            for i in range(120):
                counts = build_counts([i % 6, 7], [40, 1], num_experts=32, seed=i)[0]
                content = counts.astype("<u2").tobytes()
                await router.select.remote(f"r{i}", content, 40, None, (), -1, ())
                await router.release.remote([f"r{i}"])
            await app.add("e", "f")  # now there is enough traffic to refit on
            await until(lambda: _have_homes(app))
            before = await app.homes(6)
            assert sorted(before) == ["a", "b", "c", "d", "e", "f"]
            os.kill((await app.stats())["pid"], signal.SIGKILL)
            await until(lambda: _has_counter(app, "restored_homes", 6))
            assert await app.homes(6) == before
            assert (await app.stats())["counters"].get("refits", 0) == 0

    asyncio.run(run())


async def _has_counter(app: App, name: str, value: int) -> bool:
    return (await app.stats())["counters"].get(name) == value


def _have_homes(app: App) -> bool:
    """Whether every replica was given its refitted centroid."""
    homes = [beat.home for beat in app.beats.values()]
    return all(home is not None and home[1] is not None for home in homes)


def test_refit_that_cannot_work_keeps_the_old_centroids(artifact: Path):
    """Four signatures in the artifact and none from traffic are too few for five replicas."""

    async def run() -> None:
        async with App("failing", settings("soft", artifact)) as app:
            await app.add("a", "b", "c", "d", "e")
            await until(lambda: _has_counter(app, "failed_refits", 1))
            stats = await app.stats()
            assert sorted(c for c in stats["assignment"].values() if c is not None) == [0, 1, 2, 3]
            assert (await app.homes(4))[0] in "abcd"

    asyncio.run(run())


def test_parts_stay_below_what_ray_sends_inline():
    blob = np.zeros(6144, "<u2").tobytes()
    wires = [(f"r{i}", blob, 1, None, ()) for i in range(64)]
    parts = in_parts(wires, clients.MAX_PART_BYTES)
    assert [wire for part in parts for wire in part] == wires
    assert max(sum(len(wire[1]) for wire in part) for part in parts) <= clients.MAX_PART_BYTES
    assert in_parts([("r", bytes(200_000), 1, None, ())], 64_000)[0][0][0] == "r"
