"""Runs in other processes: the same results, in order, and what happens when one ends badly."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from threadpoolctl import threadpool_info

from app.cli import main
from cachemgr.joint import joint, num_runs, priced
from calibration.parallel import WORKER_START_S, choose_jobs, run_parallel
from calibration.replay import Arrivals, Workload
from calibration.replay_report import Settings, run
from calibration.simulation import experiment
from calibration.simulation.config import SimulationConfig
from calibration.traces import RoutingTrace


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    """Requests large enough for their bit sets to be handed over as memory maps."""
    rng = np.random.default_rng(3)
    ids_TLk = rng.random((200 * 40, 18, 12)).argsort(axis=2)[:, :, :2]
    return RoutingTrace(
        ids_TLk.astype(np.uint8), np.arange(201) * 40, 12, tuple("ab"[r % 2] for r in range(200))
    )


# Functions inside of tests travel to workers by value: they need not find this module.


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_calls(jobs):
    def square(number: int) -> tuple[int, int]:
        time.sleep(0.0 if number else 0.3)
        return number**2, os.getpid()

    told: list[int] = []
    results = run_parallel(square, [(number,) for number in range(6)], jobs, told.append)
    assert [square for square, _ in results] == [0, 1, 4, 9, 16, 25]
    assert sorted(told) == list(range(6))
    is_here = {pid == os.getpid() for _, pid in results}
    assert is_here == {jobs == 1}


@pytest.mark.parametrize("jobs", [1, 2])
def test_linear_algebra_has_one_thread(jobs):
    def threads() -> set[int]:
        np.ones((64, 64)) @ np.ones((64, 64))
        return {library["num_threads"] for library in threadpool_info()}

    assert run_parallel(threads, [(), ()], jobs) == [{1}, {1}]


def test_large_arrays_are_mapped(trace):
    def mean(values: np.ndarray) -> tuple[bool, float]:
        return isinstance(values, np.memmap), float(values.mean())

    values = np.arange(300_000.0)
    assert run_parallel(mean, [(values,)] * 2, 2) == [(True, values.mean())] * 2
    assert Workload.split(trace, 8, 0).bits_TLW.nbytes > 2**20


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_a_run_is_raised_as_it_is(jobs):
    def check_rate(rate: int) -> None:
        if rate < 0:
            raise ValueError(f"rate must be >= 0, got {rate}")

    with pytest.raises(ValueError, match=r"^rate must be >= 0, got -1$"):
        run_parallel(check_rate, [(1,), (-1,), (2,)], jobs)


def test_a_worker_that_dies_is_told_clearly():
    with pytest.raises(ChildProcessError, match=r"one of 2 processes ended .* use fewer --jobs"):
        run_parallel(os._exit, [(1,), (1,)], 2)


@pytest.mark.parametrize("to_all", [False, True])
def test_an_interrupt_ends_the_workers(to_all):
    """To the parent alone, and to all of the terminal's processes as Ctrl-C sends it."""
    script = (
        "import sys, time; from calibration.parallel import run_parallel\n"
        "try: run_parallel(time.sleep, [(0,)] * 4 + [(120,)] * 4, 2, lambda number: print(number, "
        "flush=True))\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        for _ in range(4):
            process.stdout.readline()  # both workers have started
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        _, words = process.communicate(timeout=30)
        assert process.returncode == 130
        assert to_all or words == ""  # a worker that was just starting may say that it was ended
        assert not psutil.wait_procs(workers, timeout=10)[1]
    finally:
        process.kill()


def test_processes_are_started_where_they_pay(monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 4)
    long = 100 * WORKER_START_S
    assert choose_jobs(None, 40, long) == 4
    assert choose_jobs(None, 3, long) == 3
    assert choose_jobs(None, 1, long) == choose_jobs(None, 0, long) == 1
    assert choose_jobs(None, 40, WORKER_START_S) == 1
    assert choose_jobs(3, 40, 0.0) == 3
    assert choose_jobs(30, 2, 0.0) == 2


def test_a_simulation_does_not_depend_on_jobs():
    config = SimulationConfig.model_validate(
        {
            "name": "jobs",
            "workload": {"source": "synthetic", "num_requests": 320, "num_layers": 14},
            "traffic": {"rates": [20.0], "duration_s": 5.0, "warm_up_s": 1.0},
            "decode": {"replicas": 4},
            "router": {"policies": ["jsq", "band", "live"], "refit": True},
            "failures": [{"at_s": 3.0, "replica": 1, "restart_after_s": 1.0}],
            "seeds": 2,
        }
    )
    here, there = (experiment.run_all(config, jobs=jobs) for jobs in (1, 2))
    assert (here.jobs, there.jobs) == (1, 2)
    assert here.settings[0].workload.log_absent_NX.nbytes > 2**20
    for one, other in zip(here.settings, there.settings, strict=True):
        for policy, cell in one.cells[20.0].items():
            for ours, same in zip(cell.runs, other.cells[20.0][policy].runs, strict=True):
                for name in ("tpot_M", "ttft_M", "e2e_M", "arrived_M"):
                    np.testing.assert_array_equal(getattr(ours, name), getattr(same, name))
                assert ours.steps == same.steps
                assert ours.counters == same.counters
                assert ours.samples == same.samples
    speed = experiment.summary(config, there)["speed"]
    assert speed["least"] <= speed["median"]
    assert speed["speedup"] == pytest.approx(speed["virtual_s"] / speed["wall_s"], rel=0.01)


def test_replays_do_not_depend_on_jobs(trace):
    arrivals = Arrivals("closed", 8)
    settings = Settings(["jsq", "band", "live"], 2, arrivals, 8, None, (0, 1), 40, 16)
    told = []
    shared = run(trace, settings, lambda *done: told.append(done), jobs=2)
    assert shared == run(trace, settings)
    assert sorted(told) == [(policy, seed) for policy in ("band", "jsq", "live") for seed in (0, 1)]


def test_joint_replays_do_not_depend_on_jobs(trace):
    settings = Settings(
        ["jsq", "live"], 2, Arrivals("closed", 8), 8, None, (0, 1), 40, 0, caches_experts=True
    )
    told = []
    shared = joint(trace, settings, [4, 6], ["lru", "lrfu"], tell=told.append, jobs=2)
    assert shared == joint(trace, settings, [4, 6], ["lru", "lrfu"])
    assert len(told) == num_runs(settings, [4, 6]) == 2 * (1 + 2)
    assert priced(trace, settings, [4, 6], jobs=2) == priced(trace, settings, [4, 6])


def test_the_command_refuses_no_processes(capsys):
    assert main(["simulate", "examples/simulate/8p16d.yaml", "--jobs", "0"]) == 2
    assert "need a number of processes, 1 or more, got '0'" in capsys.readouterr().err
