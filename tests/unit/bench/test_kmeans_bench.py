from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from bench import kmeans


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(kmeans, "SMALL", {"num_requests": 60, "num_layers": 3, "k": 4})
    monkeypatch.setattr(kmeans, "LARGE", {"num_requests": 90, "num_layers": 2, "k": 7})


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    kmeans.add_cli(parser.add_subparsers())
    args = parser.parse_args(["kmeans", *words])
    return args.func(args)


def test_json(small, capsys):
    assert run("--json", "--rounds", "2") == 0
    report = json.loads(capsys.readouterr().out)
    for name in ("n1000_k16_s", "n10000_k64_s", "slots_s", "layer_selection_s"):
        assert 0 < report["spread"][name]["lo"] <= report[name] <= report["spread"][name]["hi"]
    assert report["objective_ratio"] <= 1.0
    assert report["peak_rss_mib"] > 10


def test_table(small, capsys):
    assert run("--rounds", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines[:6]}) == 1


def test_no_rounds(small):
    with pytest.raises(ValueError, match="rounds must be >= 1, got 0"):
        kmeans.measure(0)


def test_slot_form_respects_capacity(small):
    points_ND = kmeans.draw_signatures(61, 3, seed=2)
    model = kmeans.SlotAssignmentKMeans(4).fit(points_ND)
    assert np.bincount(model.labels_, minlength=4).max() <= 16


def test_made_up_signatures():
    points_ND = kmeans.draw_signatures(40, 3, seed=1)
    np.testing.assert_array_equal(points_ND, kmeans.draw_signatures(40, 3, seed=1))
    assert points_ND.shape == (40, 3 * 128)
    assert (points_ND >= 0).all()
    assert 0.2 < (points_ND == 0).mean() < 0.95
    np.testing.assert_allclose(np.linalg.norm(points_ND, axis=1), 1.0, atol=1e-5)
    first, second = kmeans.draw_counts(10, 2, seed=1, num_draws=2)
    assert not np.array_equal(first, second)
    assert (first.sum(axis=2) % kmeans.TOP_K == 0).all()
