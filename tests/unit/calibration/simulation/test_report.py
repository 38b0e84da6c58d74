"""Laws, published figures, summary, tables, page and command."""

import json

import numpy as np
import pytest
import yaml

from app.cli import main
from calibration.simulation import experiment, html, published, report
from calibration.simulation.config import StepTimeSection, WorkloadSection
from calibration.simulation.laws import KV_READ_S, LAWS, SATURATION_EXPERTS, make_law
from calibration.simulation.synthetic import expected_distinct
from calibration.simulation.workload import make_workload
from calibration.step_time import StepTimeLaw, fit_step_time

from .conftest import SMALL, make_config


@pytest.fixture(scope="module")
def outcome():
    config = make_config(
        sweep={"router.tau": [0.0, 0.3]},
        router={"policies": ["rr", "jsq", "band"]},
        traffic={"rates": [30.0], "duration_s": 4.0},
        failures=[{"at_s": 2.0, "replica": 0, "restart_after_s": 1.0}],
        seeds=2,
        paper={"study": "tau", "workload": "task", "model": "qwen"},
    )
    told = []
    outcome = experiment.run_all(config, told.append)
    assert len(told) == experiment.num_runs(config) == 12
    return experiment.summary(config, outcome), outcome.settings


def test_the_law_of_qwen_follows_from_the_published_points():
    """Derived again: saturation from 4.7x, scale from round robin's TPOT by least squares."""
    law = LAWS["qwen3-30b-a3b-mi300x"].law
    ratio = (128 + SATURATION_EXPERTS) / (16 + SATURATION_EXPERTS)
    assert ratio == pytest.approx(4.7, rel=1e-3)
    assert law.base > law.per_distinct * SATURATION_EXPERTS
    tpot_s = np.array([p50 for p50, _ in published.TPOT_MS["task", "qwen"]["rr"]]) / 1e3
    batch = np.array(published.RATES) / 16 * 511 * tpot_s
    workload = make_workload(WorkloadSection(source="synthetic", num_layers=6))
    rng = np.random.default_rng(0)
    distinct = [
        np.mean(
            [
                expected_distinct(
                    workload.activation_NLE[rng.integers(len(workload), size=round(requests))]
                )
                for _ in range(30)
            ]
        )
        for requests in batch
    ]
    zeros = np.zeros_like(batch)
    fitted, r_squared = fit_step_time(zeros, distinct, zeros, tpot_s - KV_READ_S * batch)
    assert fitted.per_distinct == pytest.approx(law.per_distinct, rel=0.03)
    assert fitted.base == pytest.approx(law.base, rel=0.06)
    assert r_squared == pytest.approx(0.89, abs=0.02)


def test_a_law_from_a_measurement(tmp_path):
    file = tmp_path / "step.json"
    file.write_text(
        json.dumps({"law_s": {"base": 1e-3, "per_request": 0, "per_distinct": 2e-4, "per_load": 0}})
    )
    law = make_law(StepTimeSection(law="file", file=str(file))).law
    assert law == StepTimeLaw(1e-3, 0, 2e-4, 0)
    file.write_text('{"law_s": {"base": 1}}')
    with pytest.raises(ValueError, match="no report of `eldr bench step-time --json`"):
        make_law(StepTimeSection(law="file", file=str(file)))
    with pytest.raises(FileNotFoundError, match="run `eldr bench step-time"):
        make_law(StepTimeSection(law="file", file=str(tmp_path / "none.json")))


@pytest.mark.parametrize(
    ("key", "p50", "p99", "against_domain"),
    [
        (("task", "qwen"), -12.8, -5.6, -1.9),
        (("task", "gptoss"), -14.5, -3.6, -4.6),
        (("task", "gemma"), -8.6, -3.4, -1.4),
        (("lang", "qwen"), -9.8, -3.3, -7.9),
        (("lang", "gptoss"), -5.4, 1.2, -6.0),
        (("lang", "gemma"), -7.4, -3.3, -2.9),
    ],
)
def test_published_cells_give_the_published_means(key, p50, p99, against_domain):
    """Catches a cell that was copied wrong: means over rates of ELDR against RR and Domain."""
    table = {policy: np.array(row) for policy, row in published.TPOT_MS[key].items()}
    change = 100 * (table["band"] / table["rr"] - 1).mean(axis=0)
    np.testing.assert_allclose(change, [p50, p99], atol=0.35)
    domain = 100 * (table["band"] / table["domain"] - 1).mean(axis=0)
    assert domain[0] == pytest.approx(against_domain, abs=0.35)


def test_the_summary_is_plain_json(outcome):
    summary, _ = outcome
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    first = summary["variants"][0]
    assert first["reference"] in ("rr", "jsq")
    assert first["rates"][0]["policies"][first["reference"]]["ratio"]["tpot_p50"]["mean"] == 1
    ratio = first["rates"][0]["policies"]["band"]["ratio"]["tpot_p50"]
    assert ratio["ci"][0] <= ratio["mean"] <= ratio["ci"][1]


def test_ours_stand_beside_the_papers(outcome):
    summary, _ = outcome
    rows = summary["paper"]["rows"]
    assert [row["case"] for row in rows] == ["router.tau = 0.0", "router.tau = 0.3"]
    assert [row["paper_change"] for row in rows] == [[-15.3, -5.6], [-13.9, -5.3]]


def test_the_text_has_tables_that_line_up(outcome):
    summary, settings = outcome
    text = report.text(summary)
    variant = summary["variants"][0]
    rows = report.rate_rows(variant, variant["rates"][0])
    assert {len(row) for row in rows} == {len(rows[0])}
    assert "retries" in rows[0]
    assert "replicas" in rows[0]
    assert "Why they differ:" in text
    assert "times real time" in text
    assert settings[0].workload.source in text


def test_the_page_stands_alone(outcome, tmp_path):
    summary, settings = outcome
    html.write_html(tmp_path / "page.html", summary, settings)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 3  # two courses, one sweep
    assert "<script" not in page
    assert "http://www.w3.org" in page  # the name space of SVG, not fetched
    assert "Ours beside the paper" in page


def test_the_command_prints_tables_or_json(tmp_path, capsys):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "traffic": {"rates": [20.0], "duration_s": 3.0}}))
    assert main(["simulate", str(file), "--policies", "rr,soft", "--rates", "10,30"]) == 0
    text = capsys.readouterr().out
    assert "4P" not in text
    assert "2P4D, 30 req/s" in text
    assert main(["simulate", str(file), "--policies", "rr", "--json", "--seeds", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"] == 2


def test_a_run_without_requests_has_dashes(tmp_path, capsys):
    file = tmp_path / "idle.yaml"
    paper = {"study": "rates", "workload": "task", "model": "qwen"}
    idle = {"rates": [20.0], "duration_s": 1e-4}
    file.write_text(yaml.safe_dump({**SMALL, "traffic": idle, "paper": paper}))
    assert main(["simulate", str(file), "--policies", "rr,live", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["variants"][0]["rates"][0]["policies"]["live"]["tpot_p50"] is None
    assert report["paper"]["rows"] == []
    assert main(["simulate", str(file), "--policies", "rr,live"]) == 0
    assert "live           -" in capsys.readouterr().out


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    assert main(["simulate", str(file), "--policies", "none"]) == 2
    assert "unknown policy 'none'" in capsys.readouterr().err
    assert main(["simulate"]) == 2
    assert "give a CONFIG" in capsys.readouterr().err
    assert main(["simulate", "--laws"]) == 0
    assert "qwen3-30b-a3b-mi300x" in capsys.readouterr().out
