"""A replica's placement reports to its node's manager on a local Ray. The engine is a fake."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from cachemgr.actor import create_manager
from cachemgr.migration import MigrationCost
from cachemgr.placement_plan import PlacementPlan
from cachemgr.planner import MOVE_PRICE, PlannerSettings
from deployments.replica import Home, PlacementReporter
from tests.builders import build_artifact


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


class Replica:
    """A replica with a reporter and an engine of two ranks that notes the plans it is given."""

    def __init__(self, folder: Path, *, interval_s: float = 0.0, has_cache: bool = True) -> None:
        build_artifact(2).save(folder / "artifact")
        self.home: Home | None = None
        self.answers: list[Mapping[str, Any]] = []
        self.given: list[PlacementPlan] = []
        self.fails = False
        settings = PlannerSettings(
            artifact=str(folder / "artifact"),
            folder=str(folder / "plans"),
            num_ranks=2,
            num_spare=0,
            batch=4,
            interval_s=interval_s,
            cost=MigrationCost(1.0, MOVE_PRICE, 3000),
        )
        self.reporter = PlacementReporter(
            "app",
            "decode-1",
            None,
            self.call,
            settings=settings,
            home=lambda: self.home,
            has_cache=has_cache,
            export=self.answers.append,
        )

    async def call(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "eldr_expert_uses":
            return [{"num_steps": 0, "uses_LE": []}] * 2
        assert method == "eldr_cache_configure"
        if self.fails:
            raise OSError("disk")
        self.given.append(PlacementPlan.load(args[0]["placement"]))
        return [{}, {}]


@pytest.fixture
def manager() -> Iterator[Any]:
    handle = create_manager("app", ray.get_runtime_context().get_node_id(), None)
    yield handle
    ray.kill(handle)


async def pid(manager: Any) -> int:
    status: dict[str, Any] = await manager.status.remote()
    return int(status["pid"])


def test_plans_follow_the_centroid_and_outlive_the_manager(tmp_path: Path, manager: Any) -> None:
    async def run() -> None:
        replica = Replica(tmp_path)
        await replica.reporter.report()
        assert replica.answers == []  # the router has not answered yet
        replica.home = (0, None)
        for _ in range(2):
            await replica.reporter.report()
        assert [answer["version"] for answer in replica.answers] == [1, 1]
        assert [plan.version for plan in replica.given] == [1]
        os.kill(await pid(manager), signal.SIGKILL)
        replica.home = (1, None)
        for _ in range(100):
            try:
                await replica.reporter.report()
                break
            except ray.exceptions.RayError:
                await asyncio.sleep(0.1)
        assert [plan.version for plan in replica.given] == [1, 2]
        moved = replica.given[0].physical_to_logical_LP != replica.given[1].physical_to_logical_LP
        assert moved.any()
        await replica.reporter.stop()
        assert list((tmp_path / "plans").iterdir()) == []

    asyncio.run(run())


def test_plan_is_told_again_until_the_engine_has_taken_it(tmp_path: Path, manager: Any) -> None:
    async def run() -> None:
        replica = Replica(tmp_path, interval_s=1000.0)
        replica.home, replica.fails = (0, None), True
        for _ in range(2):
            with pytest.raises(OSError, match="disk"):
                await replica.reporter.report()
        assert replica.answers == []
        replica.fails = False
        await replica.reporter.report()
        assert [plan.version for plan in replica.given] == [1]
        await replica.reporter.report()  # before the interval is over: nobody is asked
        first, again = replica.answers
        assert again is first
        replica.home = (1, None)
        await replica.reporter.report()
        assert [answer["version"] for answer in replica.answers] == [1, 1, 2]

    asyncio.run(run())


def test_eplb_reads_the_file_by_itself(tmp_path: Path, manager: Any) -> None:
    async def run() -> None:
        replica = Replica(tmp_path, has_cache=False)
        replica.home = (0, None)
        await replica.reporter.report()
        assert replica.given == []
        assert PlacementPlan.load(tmp_path / "plans" / "decode-1.json").version == 1
        await replica.reporter.stop()

    asyncio.run(run())
