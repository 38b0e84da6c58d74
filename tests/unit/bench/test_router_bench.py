from __future__ import annotations

import argparse
import json

from bench import router as router_bench


def run(capsys, monkeypatch, *words: str) -> str:
    monkeypatch.setattr(router_bench, "DECISIONS", {4: 20, 8: 20})
    parser = argparse.ArgumentParser()
    router_bench.add_cli(parser.add_subparsers())
    args = parser.parse_args(["router", *words])
    assert args.func(args) == 0
    return capsys.readouterr().out


def test_json(capsys, monkeypatch):
    report = json.loads(run(capsys, monkeypatch, "--json"))
    assert set(report["decision_us"]) == {"4", "8"}
    for times in report["decision_us"].values():
        assert 0 < times["p50"] <= times["p99"]


def test_table(capsys, monkeypatch):
    lines = run(capsys, monkeypatch, "--policy", "soft").splitlines()
    assert "policy soft" in lines[0]
    assert len({len(line) for line in lines[1:]}) == 1


def test_refit_is_measured_beside_decisions():
    report = router_bench.measure_refit("band", num_refits=1)
    assert report["refit_s"] > 0
    for times in (report["alone"], report["beside"]):
        assert 0 < times["p50"] <= times["p99"] <= times["max"]
