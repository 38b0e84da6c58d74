from __future__ import annotations

import argparse
import json
import re

import numpy as np
import pytest

from calibration.artifact import Artifact
from calibration.cli import add_cli
from tests.builders import build_capture, build_trace


def run(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="eldr")
    add_cli(parser.add_subparsers())
    args = parser.parse_args(["calibrate", *map(str, words)])
    return args.func(args)


def test_fit_then_show(tmp_path, capsys):
    build_capture(24).save(tmp_path / "capture")
    options = ["--k", 3, "--seed", 5, "--tau", 0.2, "--workload", "tasks"]
    assert run("fit", tmp_path / "capture", "--out", tmp_path / "artifact", *options) == 0
    artifact = Artifact.load(tmp_path / "artifact")
    assert (artifact.k, artifact.seed, artifact.tau, artifact.workload) == (3, 5, 0.2, "tasks")
    assert run("show", tmp_path / "artifact", "--out", tmp_path / "pictures") == 0
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 3
    assert run("show", tmp_path / "artifact", "--capture", tmp_path / "capture") == 0
    assert "K = 3, tau = 0.2, seed = 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "CAPTURE", "--k", 99, "--out", "OUT"], "k=99 clusters need at least 99"),
        (["fit", "CAPTURE", "--k", 2, "--out", "OUT", "--tau", 3], "tau in [0, 1]"),
        (["fit", "NOWHERE", "--k", 2, "--out", "OUT"], "no file capture.json"),
        (["show", "CAPTURE"], "no file calibration.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, capsys, words, message):
    build_capture(6).save(tmp_path / "CAPTURE")
    paths = {"CAPTURE", "OUT", "NOWHERE"}
    assert run(*(tmp_path / word if word in paths else word for word in words)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "OUT").exists()


def write_trace(path):
    trace = build_trace(24, gates="weights")
    weights_TLk = np.round(trace.weights_TLk * 255).astype(np.uint8)
    np.savez(
        path,
        ids=trace.ids_TLk.transpose(1, 2, 0),
        offsets=trace.offsets,
        weights_u8=weights_TLk.transpose(1, 2, 0),
        domain=np.array(trace.domains),
    )
    return path


def test_compare_a_trace(tmp_path, capsys):
    trace = write_trace(tmp_path / "trace.npz")
    page = tmp_path / "new" / "page.html"
    options = ["--prefix-tokens", 12, "--seeds", 2, "--pairs", 200, "--k", 3, "--out", page]
    assert run("compare", "--ids", trace, *options) == 0
    out = capsys.readouterr().out
    assert "gate values: of chosen experts only" in out
    assert re.search(r"gate logit .* not recorded", out)
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_compare_a_capture(tmp_path, capsys):
    build_capture(24).save(tmp_path / "capture")
    options = ["--seeds", 1, "--pairs", 200, "--k", 3, "--out", tmp_path / "page.html"]
    assert run("compare", tmp_path / "capture", *options, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["source"], report["num_requests"]) == ("test/moe", 24)
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either a capture folder or a trace"),
        (["CAPTURE", "--ids", "x.npz"], "not both"),
        (["CAPTURE", "--meta", "x.jsonl"], "belong to a trace"),
        (["--ids", "nowhere.npz"], "no trace at nowhere.npz"),
        (["CAPTURE", "--seeds", 0], "--seeds must be >= 1, got 0"),
        (["CAPTURE", "--k", 99], "k must be in [1, 6]"),
    ],
)
def test_compare_refuses_and_writes_nothing(tmp_path, capsys, words, message):
    build_capture(6).save(tmp_path / "CAPTURE")
    words = [tmp_path / word if word == "CAPTURE" else word for word in words]
    assert run("compare", *words, "--out", tmp_path / "page.html") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_other_commands_can_join():
    parser = argparse.ArgumentParser()
    commands = add_cli(parser.add_subparsers())
    commands.add_parser("capture").set_defaults(func=lambda args: 7)
    args = parser.parse_args(["calibrate", "capture"])
    assert args.func(args) == 7
