"""The schema: what is refused and how, sweeps, and the shipped files."""

from pathlib import Path

import pytest
import yaml

from app.config_errors import ConfigError
from calibration.simulation.config import load_simulation
from calibration.simulation.experiment import num_runs

from .conftest import SMALL

EXAMPLES = sorted(Path("examples/simulate").glob("*.yaml"))


def _load(tmp_path, **sections):
    data = {**SMALL}
    for name, value in sections.items():
        both = isinstance(value, dict) and isinstance(data.get(name), dict)
        data[name] = {**data[name], **value} if both else value
    file = tmp_path / "simulation.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    return load_simulation(file)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_shipped_files_are_right(path):
    config = load_simulation(path)
    assert num_runs(config) >= 1
    if config.workload.trace is not None:
        assert Path(config.workload.trace).is_file()


def test_there_are_shipped_files():
    assert {"8p8d", "8p16d", "8p24d", "tau", "lambda", "clustering", "signature", "day"} <= {
        path.stem for path in EXAMPLES
    }


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"decode": {"replica": 4}}, "decode.replica: unknown key: did you mean 'replicas'"),
        ({"decode": {"replicas": 0}}, "decode.replicas: must be >= 1, got 0"),
        ({"router": {"policies": ["jsk"]}}, "unknown policy 'jsk': use some of random"),
        ({"router": {"policies": ["rr", "rr"]}}, "names a policy twice"),
        ({"traffic": {"rates": [0.0]}}, "must be > 0 requests per second"),
        ({"traffic": {"rates": []}}, "traffic.rates"),
        ({"step_time": {"law": "magic"}}, "step_time.law: must be one of linear, file, qwen3"),
        ({"step_time": {"law": "file"}}, "step_time.file: is for law: file"),
        ({"workload": {"source": "trace"}}, "workload.trace: is required"),
        ({"workload": {"top_k": 32}}, "workload.top_k: must be < num_experts"),
        (
            {"decode": {"cache_slots": 8}},
            "step_time.per_load_ms: is 0 while decode.cache_slots is set",
        ),
        (
            {"autoscaling": {"min_replicas": 5, "max_replicas": 2}},
            "autoscaling.min_replicas: must be <= max_replicas",
        ),
        (
            {"traffic": {"curve": [{"at_s": 5.0, "factor": 1.0}, {"at_s": 5.0, "factor": 2.0}]}},
            "at_s must rise",
        ),
        (
            {"traffic": {"mix": [{"at_s": 0.0, "weights": {"a": -1.0}}]}},
            "must be >= 0 with a positive sum",
        ),
        ({"sweep": {"router.tai": [0.1]}}, "no field 'router.tai': sweep one of"),
        ({"sweep": {"router.tau": [0.1, 3.0]}}, "router.tau: must be in [0, 1], got 3.0"),
        (
            {"router": {"signature": "magic"}},
            "router.signature: must be one of 'count_idf', 'count'",
        ),
    ],
)
def test_refusals_name_field_value_and_remedy(tmp_path, sections, message):
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, **sections)
    assert message in str(caught.value)


def test_every_problem_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, decode={"replicas": 0}, prefill={"replicas": 0}, color="red")
    assert len(str(caught.value).splitlines()) == 3


def test_a_sweep_is_a_grid(tmp_path):
    config = _load(
        tmp_path, sweep={"router.tau": [0.0, 0.2], "decode.replicas": [4, 8, 16]}, seeds=2
    )
    variants = list(config.variants())
    assert len(variants) == 6
    assert variants[1][0] == {"router.tau": 0.0, "decode.replicas": 8}
    assert variants[1][1].decode.replicas == 8
    assert not variants[1][1].sweep
    assert num_runs(config) == 6 * 2 * len(config.router.policies)


def test_paths_count_from_the_file(tmp_path):
    config = _load(tmp_path, workload={"source": "trace", "trace": "sub/ids.npz"})
    assert config.workload.trace == str(tmp_path / "sub" / "ids.npz")
