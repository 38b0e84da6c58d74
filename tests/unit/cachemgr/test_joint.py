"""Caches of decode replicas, and the matrix of routing and cache policies."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from app.cli import main
from cachemgr.bound import minimum
from cachemgr.joint import ReplicaCaches, UnionRecorder, joint, num_runs
from cachemgr.policies import LRFU, make_retention
from cachemgr.replay import run
from calibration.replay import Arrivals
from calibration.replay_report import Settings
from calibration.traces import RoutingTrace


def steps_of(rng, number: int):
    """Steps of two replicas that take turns unevenly, 3 layers of 10 experts."""
    steps = []
    for _ in range(number):
        union_LE = rng.random((3, 10)) < 0.35
        union_LE[:, rng.integers(10)] = True  # a batch never activates nothing
        steps.append((int(rng.random() < 0.3), union_LE, 2))
    return steps


@pytest.mark.parametrize("capacity", [2, 4, 8])
def test_recorded_unions_replay_as_they_came(capacity):
    steps = steps_of(np.random.default_rng(5), 60)
    caches = ReplicaCaches(3, 10, capacity, lambda: LRFU(3, 10, 0.1))
    recorder = UnionRecorder()
    loads = 0.0
    for step in steps:
        loads += 3 * caches.on_step(*step)
        assert recorder.on_step(*step) == 0
    demands = recorder.demands()
    assert demands.ids_SRU.shape[1] == 6
    ledger = run(demands, capacity, make_retention("lrfu", 6, 10, lambda_=0.1))
    assert ledger.totals().loads == pytest.approx(loads)
    assert caches.num_tokens == recorder.num_tokens == 120
    assert caches.loads_per_token == pytest.approx(loads / 120)
    assert minimum(demands, capacity, "union").loads_R.sum() <= loads
    assert demands.sizes_SR.sum() == sum(union.sum() for _, union, _ in steps)


def test_matrix_of_the_command(tmp_path, capsys):
    rng = np.random.default_rng(0)
    tastes = rng.dirichlet(np.full(12, 0.3), (2, 3)) * 0.9 + 0.1 / 12
    ids = np.stack(
        [
            [rng.choice(12, 2, replace=False, p=tastes[request % 2, layer]) for layer in range(3)]
            for request in range(24)
            for _ in range(20)
        ]
    )
    file = tmp_path / "ids.npz"
    offsets = np.arange(25) * 20
    domain = np.array([f"d{request % 2}" for request in range(24)])
    np.savez(file, ids=ids.transpose(1, 2, 0).astype(np.uint8), offsets=offsets, domain=domain)
    command = ["cache", "replay", "--ids", str(file), "--joint", "--replicas", "2"]
    command += ["--concurrency", "8", "--requests", "30", "--seeds", "2", "--capacities", "3,8"]
    command += ["--policies", "lrfu,min", "--routing", "jsq,band"]
    assert main(command) == 2  # shorter than twice the default prefix
    assert "128 tokens" in capsys.readouterr().err
    command += ["--prefix-tokens", "8"]
    assert main([*command, "--json"]) == 0
    matrix = json.loads(capsys.readouterr().out)
    assert list(matrix) == ["lrfu", "min"]
    for routing in ("jsq", "band"):
        for capacity in ("3", "8"):
            ours, least = (matrix[name][routing][capacity] for name in ("lrfu", "min"))
            assert len(ours["loads_per_token"]) == 2
            assert all(
                a >= b
                for a, b in zip(ours["loads_per_token"], least["loads_per_token"], strict=True)
            )
        assert max(matrix["lrfu"][routing]["8"]["passes"]) < 1.3
        assert min(matrix["lrfu"][routing]["3"]["passes"]) > 1
    assert main([*command, "--policies", "lrfu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 replicas, 8 requests in flight, 2 seeds")
    assert lines[1].split() == ["lrfu,", "slots", "3", "8"]
    assert lines[2].startswith("jsq (loads/token)")
    assert " % (" in lines[3]
    command += ["--policies", "lrfu", "--load-time", "2"]
    assert main([*command, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["lrfu"]
    for routing in ("jsq", "band"):
        few, many = figures[routing]["3"], figures[routing]["8"]
        assert np.less(many["loads_per_token"], few["loads_per_token"]).all()
        assert np.less(many["tpot_p50"], few["tpot_p50"]).all()
        assert np.greater(many["tokens_per_time"], few["tokens_per_time"]).all()
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("cache policy lrfu, 2 a load")
    assert main([*command, "--policies", "min"]) == 2
    assert "min" in capsys.readouterr().err
    assert main([*command, "--policies", "lru,lrfu"]) == 2
    assert "one cache policy" in capsys.readouterr().err


def test_live_is_replayed_with_caches_of_each_size(monkeypatch):
    asked: set[int] = set()
    resident = ReplicaCaches.resident

    def asks(self, replica):
        asked.add(self.caches[replica].capacity)
        return resident(self, replica)

    monkeypatch.setattr(ReplicaCaches, "resident", asks)
    rng = np.random.default_rng(1)
    ids = np.stack([[rng.choice(6, 2, replace=False) for _ in range(2)] for _ in range(24 * 20)])
    trace = RoutingTrace(ids.astype(np.uint8), np.arange(25) * 20, 6, ("",) * 24)
    settings = Settings(
        ("jsq", "live"),
        num_replicas=2,
        arrivals=Arrivals(concurrency=4),
        prefix_tokens=4,
        seeds=(0,),
        num_requests=10,
        num_warmup=0,
        caches_experts=True,
    )
    told: list[str] = []
    joint(trace, settings, [2, 4, 6], ["lru", "lrfu"], tell=told.append)
    assert len(told) == num_runs(settings, [2, 4, 6]) == 4
    assert asked == {2, 4, 6}
    asked.clear()
    joint(trace, replace(settings, resident_weight=0.0), [4], tell=told.append)
    assert not asked
