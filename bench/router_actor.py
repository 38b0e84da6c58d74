"""`eldr bench router --actor`: decisions per second through the router actor's own interface.

The actor is the live one, with an artifact and a heartbeat a second from each decode replica. It is
asked by processes of their own through the ingress's `RouterClient`: with a full count matrix, and
a release for each selection.

Axes: K decode replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from app.pd_flow import Handoff, PdRequest
from bench.report import stdout_to_stderr, table
from bench.router import NUM_PROMPTS, PROMPT_TOKENS, bench_artifact, bench_counts
from deployments.clients import RouterClient
from router.actor import create_router
from router.service import RouterSettings

WARMUP_S = 1.0
LONE_SELECTIONS = 300
TIMEOUT_S = 5.0  # so that overload shows as latency and not as decisions made without the router


def measure(
    policy: str,
    replicas: Sequence[int],
    num_callers: int,
    concurrency: int,
    seconds: float,
) -> dict[str, Any]:
    """Starts a local Ray, and a router for each number of replicas.

    Returns:
        By K as text: decisions_per_s; latency in microseconds under that load (p50_us, p99_us) and
        of one request alone (lone_p50_us, lone_p99_us); processor time of the router for each
        decision, heartbeats included (router_cpu_us).
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the actors: see bench.router.measure
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        return {
            str(k): asyncio.run(_measure(policy, k, num_callers, concurrency, seconds))
            for k in replicas
        }
    finally:
        ray.shutdown()


def command(args: argparse.Namespace) -> int:
    """Runs the measurement and prints it."""
    with stdout_to_stderr():
        report = measure(args.policy, args.replicas, args.callers, args.concurrency, args.seconds)
    if args.json:
        print(json.dumps({"actor": report}))
        return 0
    print(
        f"policy {args.policy}, {args.callers} callers x {args.concurrency} requests, "
        "select + release through the actor"
    )
    header = [
        "replicas",
        "decisions/s",
        "p50 us",
        "p99 us",
        "router CPU us",
        "alone p50 us",
        "alone p99 us",
    ]
    keys = ("decisions_per_s", "p50_us", "p99_us", "router_cpu_us", "lone_p50_us", "lone_p99_us")
    rows = [[k, *(f"{row[key]:,.0f}" for key in keys)] for k, row in report.items()]
    print(table([header, *rows]))
    return 0


async def _measure(
    policy: str, k: int, num_callers: int, concurrency: int, seconds: float
) -> dict[str, float]:
    app_name = f"bench-{k}"
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "artifact"
        bench_artifact(k, np.random.default_rng(1)).save(artifact)
        settings = RouterSettings(policy, 0.1, 0.5, 1, str(artifact), 1024, 60.0)
        router = create_router(app_name, settings)
        await _beat(router, range(k), {})
        beating = asyncio.create_task(_keep_beating(router, k))
        try:
            callers = [
                Caller.remote(app_name, settings, i)  # type: ignore[attr-defined]
                for i in range(num_callers)
            ]
            await asyncio.gather(*(caller.start.remote() for caller in callers))
            lone_s = await callers[0].alone.remote(LONE_SELECTIONS)
            process = psutil.Process((await router.stats.remote())["pid"])
            before_s, num_before = sum(process.cpu_times()[:2]), await _num_selected(router)
            answers = await asyncio.gather(
                *(caller.run.remote(concurrency, WARMUP_S, seconds) for caller in callers)
            )
            cpu_s = sum(process.cpu_times()[:2]) - before_s
            num_selected = await _num_selected(router) - num_before
        finally:
            beating.cancel()
            ray.kill(router)
    times_s = np.concatenate(answers)
    p50, p99 = np.percentile(times_s, [50, 99]) * 1e6
    lone_p50, lone_p99 = np.percentile(lone_s, [50, 99]) * 1e6
    figures = {
        "decisions_per_s": len(times_s) / seconds,
        "p50_us": p50,
        "p99_us": p99,
        "router_cpu_us": cpu_s / num_selected * 1e6,
        "lone_p50_us": lone_p50,
        "lone_p99_us": lone_p99,
    }
    return {name: round(float(value), 1) for name, value in figures.items()}


async def _num_selected(router: Any) -> int:
    return int((await router.stats.remote())["counters"].get("selected", 0))


async def _keep_beating(router: Any, k: int) -> None:
    """A heartbeat a second from each of K decode replicas, spread over the second."""
    centroids: dict[int, int | None] = {}
    parts = min(k, 50)
    while True:
        for part in range(parts):
            started = time.perf_counter()
            await _beat(router, range(part, k, parts), centroids)
            await asyncio.sleep(max(0.0, 1 / parts - (time.perf_counter() - started)))


async def _beat(router: Any, numbers: range, centroids: dict[int, int | None]) -> None:
    calls = [
        router.heartbeat.remote("decode", f"decode-{i}", f"http://{i}", 0, centroids.get(i), None)
        for i in numbers
    ]
    for i, answer in zip(numbers, await asyncio.gather(*calls), strict=True):
        centroids[i] = answer["centroid"]


@ray.remote(num_cpus=0)
class Caller:
    """One ingress process."""

    def __init__(self, app_name: str, settings: RouterSettings, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._counts = [bench_counts(rng).astype("<u2").tobytes() for _ in range(NUM_PROMPTS)]
        self._client = RouterClient(app_name, settings, TIMEOUT_S, seed)
        self._number = 0
        self._name = f"caller-{seed}"

    async def start(self) -> None:
        await self._client.start()

    async def alone(self, number: int) -> list[float]:
        """Seconds of each selection, one after the other; the first tenth is left out."""
        return [await self._select() for _ in range(number + number // 10)][number // 10 :]

    async def run(self, concurrency: int, warmup_s: float, seconds: float) -> list[float]:
        """Seconds of each selection that ended in the measured time."""
        begin = time.perf_counter() + warmup_s
        times_s: list[float] = []

        async def loop() -> None:
            while (now := time.perf_counter()) < begin + seconds:
                took_s = await self._select()
                if begin <= now + took_s < begin + seconds:
                    times_s.append(took_s)

        await asyncio.gather(*(loop() for _ in range(concurrency)))
        if self._client.num_fallbacks:
            raise RuntimeError(f"{self._client.num_fallbacks} selections were made without router")
        return times_s

    async def _select(self) -> float:
        self._number += 1
        request_id = f"{self._name}-{self._number}"
        request = PdRequest(request_id, "chat", {}, None, None)
        handoff = Handoff({}, self._counts[self._number % NUM_PROMPTS], PROMPT_TOKENS)
        started = time.perf_counter()
        await self._client.select(request, handoff, frozenset())
        took_s = time.perf_counter() - started
        self._client.release(request_id)
        return took_s
