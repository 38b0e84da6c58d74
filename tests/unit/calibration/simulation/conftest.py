"""Small workloads and configurations of the simulator's tests."""

from typing import Any

import pytest

from calibration.simulation.config import SimulationConfig
from calibration.simulation.routing import FittedRouter, fit_router
from calibration.simulation.simulator import RunResult, Simulator
from calibration.simulation.workload import Workload, make_workload
from calibration.step_time import StepTimeLaw

SMALL = {
    "name": "test",
    "workload": {
        "source": "synthetic",
        "num_requests": 120,
        "num_layers": 4,
        "num_experts": 32,
        "top_k": 4,
        "output_tokens": 40,
    },
    "traffic": {"rates": [20.0], "duration_s": 10.0, "warm_up_s": 0.0},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 4},
    "seeds": 1,
}
LAW = StepTimeLaw(2e-3, 1e-4, 1e-3)


def make_config(**sections: Any) -> SimulationConfig:
    """SMALL with some fields of its sections, or whole values, replaced."""
    data: dict[str, Any] = {**SMALL}
    for name, value in sections.items():
        both = isinstance(value, dict) and isinstance(data.get(name), dict)
        data[name] = {**data[name], **value} if both else value
    return SimulationConfig.model_validate(data)


@pytest.fixture(scope="session")
def workload() -> Workload:
    return make_workload(make_config().workload)


@pytest.fixture(scope="session")
def router(workload: Workload) -> FittedRouter:
    return fit_router(workload, 4, "count_idf", "balanced")


@pytest.fixture(scope="session")
def simulate(workload: Workload, router: FittedRouter) -> Any:
    """Run one simulation of the small workload."""

    def run(
        policy: str = "jsq", seed: int = 0, law: StepTimeLaw = LAW, **sections: Any
    ) -> RunResult:
        config = make_config(**sections)
        rate = config.traffic.rates[0]
        return Simulator(config, workload, router, law, policy, rate, seed).run()

    return run
