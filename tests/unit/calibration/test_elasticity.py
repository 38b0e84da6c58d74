"""Changes of pool and traffic in replay, on a small trace with clear domains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.cli import main
from calibration import elasticity
from calibration.elasticity import Settings, drift, pool_change
from calibration.step_time import StepTimeLaw
from router.refit import RefitSettings
from tests.builders import build_trace

SETTINGS = Settings(
    num_replicas=4,
    new_replicas=6,
    concurrency=24,
    prefix_tokens=10,
    seeds=(0,),
    num_before=48,
    num_after=192,
    law=StepTimeLaw(0.05, 0.001, 0.004),
    refit=RefitSettings(settle_s=2.0, window_s=10.0, interval_s=3.0),
    ramp_s=3.0,
    bin_size=24,
)


@pytest.fixture(scope="module")
def trace():
    return build_trace(64)


def test_pool_change_refits_once_and_moves_some_homes(trace) -> None:
    report = pool_change(trace, SETTINGS)["variants"]
    assert report["refit"]["taken"] == 1
    assert report["no refit"]["taken"] == 0
    (moved,) = report["refit"]["moved"]["values"]
    assert 0.1 <= moved < 0.8
    assert report["no refit"]["moved"]["values"] == [0.0]
    assert report["jsq"]["distinct"]["values"] == [0.0]
    assert all(len(row["course"]) == 8 for row in report.values())


def test_replica_that_leaves_gets_nothing_more(trace) -> None:
    settings = replace(SETTINGS, num_replicas=6, new_replicas=4)
    report = pool_change(trace, settings)["variants"]
    assert report["refit"]["taken"] == 1
    assert report["refit"]["joined"]["values"] == [0.0]


def test_online_refits_follow_other_domains(trace) -> None:
    settings = replace(SETTINGS, new_replicas=4, num_after=384)
    report = drift(trace, settings)["variants"]
    assert report["static"]["taken"] == 0
    assert report["online"]["taken"] >= 1
    (online,), (static,) = (report[v]["settled"]["values"] for v in ("online", "static"))
    assert online < static < 0


def test_drift_needs_two_domains(trace) -> None:
    one = replace(trace, domains=("math",) * len(trace))
    with pytest.raises(ValueError, match="at least two domains"):
        drift(one, SETTINGS)


def test_recovery_is_counted_in_requests() -> None:
    gains = [-0.02, -0.05, -0.1, -0.08]
    assert elasticity.recovered_after(gains, aim=-0.1, bin_size=50) == 100
    assert elasticity.recovered_after(gains, aim=-0.2, bin_size=50) == np.inf


def test_command(trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(
        tmp_path / "trace.npz",
        ids=trace.ids_TLk.transpose(1, 2, 0),
        offsets=trace.offsets,
        domain=np.array(trace.domains),
    )
    words = ["replay", "--ids", str(tmp_path / "trace.npz"), "--prefix-tokens", "10"]
    words += ["--replicas", "2", "--concurrency", "4", "--requests", "128", "--seeds", "1"]
    words += ["--scenario", "pool-change"]
    assert main([*words, "--new-replicas", "3"]) == 0
    output = capsys.readouterr().out
    assert "2 to 3 replicas" in output
    assert "fitted before" in output
    assert main(words) != 0
    assert "--new-replicas" in capsys.readouterr().err
