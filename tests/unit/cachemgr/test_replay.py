"""`eldr cache replay` from files to figures."""

from __future__ import annotations

import json

import numpy as np
import pytest

from app.cli import main
from cachemgr.replay import layer_demands, load_gate_weights, pool_demands, replay
from calibration.traces import RoutingTrace, load_trace


@pytest.fixture
def trace() -> RoutingTrace:
    """Six requests of uneven length on 2 layers of 8 experts, with a taste of their own."""
    rng = np.random.default_rng(3)
    lengths = [9, 30, 1, 22, 30, 14]
    ids = [
        np.stack(
            [
                rng.choice(8, 2, replace=False, p=taste)
                for taste in rng.dirichlet(np.full(8, 0.5), 2) * 0.9 + 0.1 / 8
                for _ in range(length)
            ]
        ).reshape(2, length, 2)
        for length in lengths
    ]
    return RoutingTrace(
        np.concatenate(ids, axis=1).transpose(1, 0, 2).astype(np.uint8),
        np.cumsum([0, *lengths]),
        8,
        ("",) * 6,
    )


@pytest.fixture
def files(trace, tmp_path):
    ids = tmp_path / "ids.npz"
    np.savez(ids, ids=trace.ids_TLk.transpose(1, 2, 0), offsets=trace.offsets)
    chosen = np.array([1, 4])
    part = trace.subset(chosen)
    probs = tmp_path / "probs.npz"
    np.savez(
        probs,
        probs_u8=np.full((2, 2, len(part.ids_TLk)), 127, dtype=np.uint8),
        offsets=part.offsets,
        trace=chosen,
    )
    return ids, probs


def one_by_one(trace: RoutingTrace, capacity: int) -> int:
    """Misses of LRU, a request and a layer at a time, with a list."""
    misses = 0
    for request in range(len(trace)):
        for layer in range(trace.num_layers):
            recent: list[int] = []
            for chosen in trace.tokens(request)[:, layer].tolist():
                misses += sum(expert not in recent for expert in chosen)
                # Uses of one step are equally old: the lower id leaves first.
                recent = [e for e in recent if e not in chosen] + sorted(chosen)
                recent = recent[-capacity:]
    return misses


def test_rows_are_requests_and_layers(trace):
    outcome = replay(trace, ["lru"], 4)["lru"]
    assert outcome.totals.demand == one_by_one(trace, 4)
    assert outcome.totals.accesses == trace.ids_TLk.size
    assert outcome.loads_L.sum() == outcome.totals.loads
    assert outcome.num_tokens == 106


def test_demands_hold_every_choice_once(trace):
    layers, pool = layer_demands(trace), pool_demands(trace)
    assert layers.ids_SRU.shape == (30, 12, 2)
    assert pool.ids_SRU.shape == (60, 6, 2)
    assert (layers.ids_SRU >= 0).sum() == (pool.ids_SRU >= 0).sum() == trace.ids_TLk.size
    first = trace.tokens(1)
    assert (layers.ids_SRU[:, 0] == first[:, 0]).all()
    assert (pool.ids_SRU[1::2, 0] == first[:, 1] + 8).all()


def test_bounds_are_ordered(trace):
    outcomes = replay(trace, ["lfu", "min", "min-bypass", "min-shared"], 4, prove=True)
    loads = {name: outcome.totals.loads for name, outcome in outcomes.items()}
    assert loads["min-bypass"] <= loads["min"] <= loads["lfu"]
    assert loads["min-shared"] <= loads["min"]


def test_refinement_only_adds_proactive_loads(trace):
    plain = replay(trace, ["lfu"], 4)["lfu"].totals
    refined = replay(trace, ["lfu", "min"], 4, budget=4)
    assert plain.proactive == 0
    assert refined["lfu"].totals.proactive > 0
    assert refined["lfu"].totals.demand < plain.demand
    assert refined["lfu"].totals.loads >= refined["min"].totals.loads


def test_json_of_the_command(files, capsys):
    ids, _ = files
    command = ["cache", "replay", "--ids", str(ids), "--capacity", "4", "--json"]
    assert main([*command, "--policies", "lru,lfu,lrfu,min"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["lru", "lfu", "lrfu", "min"]
    for row in figures.values():
        assert {"hit", "adj_hit", "demand_per_token", "proactive_per_token"} <= set(row)
        assert row["hit"] == row["adj_hit"]
    assert figures["min"]["demand_per_token"] <= figures["lrfu"]["demand_per_token"]
    assert main([*command, "--policies", "lru", "--requests", "3", "--seed", "2"]) == 0
    first = capsys.readouterr().out
    assert main([*command, "--policies", "lru", "--requests", "3", "--seed", "2"]) == 0
    assert capsys.readouterr().out == first


def test_table_of_all_policies(files, capsys):
    ids, probs = files
    command = ["cache", "replay", "--ids", str(ids), "--probs", str(probs), "--certify"]
    assert main([*command, "--capacity", "4", "--policies", "all", "--expert-bytes", "2e6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 requests, 60 tokens, 2 layers x 8 experts, top-2, 4 slots")
    names = [line.split()[0] for line in lines[2:-1]]
    assert names == ["lru", "lfu", "lrfu", "static", "gate", "min", "min-bypass", "min-shared"]
    assert lines[1].split()[-2:] == ["x", "min"]
    assert "certified" in lines[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capacity", "1"], "below top-k 2"),
        (["--capacity", "9"], "exceeds the 8 experts"),
        (["--capacity", "4", "--budget", "5"], "budget 5"),
        (["--capacity", "4", "--policies", "arc"], "unknown cache policy 'arc'"),
        (["--capacity", "4", "--policies", ","], "',' names no policy: choose from lru"),
        (["--capacity", "4", "--policies", "gate"], "give --probs"),
        (["--capacity", "4", "--policies", "learned"], "give --score"),
        ([], "give --capacity, or --joint"),
        (["--joint", "--capacities", "4,x"], "--capacities must be numbers with commas"),
        (["--joint", "--capacities", "1"], "below top-k 2"),
        (["--joint", "--policies", "gate"], "unknown cache policy 'gate' of batches"),
        (["--joint", "--seeds", "0"], "--seeds must be at least 1"),
        (["--capacity", "4", "--requests", "7"], r"--requests must be in [1, 6]"),
        (["--capacity", "4", "--expert-bytes", "0"], "--expert-bytes must be above 0"),
        (["--capacity", "4", "--experts", "5"], "outside [0, 5)"),
        (["--capacity", "4", "--lambda", "2"], "lambda of LRFU must be in [0, 1]"),
    ],
)
def test_bad_options(files, capsys, options, message):
    assert main(["cache", "replay", "--ids", str(files[0]), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_bad_files(files, trace, tmp_path, capsys):
    ids, probs = files
    text = tmp_path / "text.npz"
    text.write_text("not an archive")
    assert main(["cache", "replay", "--ids", str(text), "--capacity", "4"]) == 2
    assert "not an .npz archive" in capsys.readouterr().err
    command = ["cache", "replay", "--ids", str(ids), "--capacity", "4", "--probs"]
    assert main([*command, str(text)]) == 2
    assert main([*command, str(ids)]) == 2
    assert "probs_u8, trace missing" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "none.npz")]) == 1
    with pytest.raises(ValueError, match="right pair of files"):
        load_gate_weights(probs, load_trace(ids).subset([0, 1, 2]))
