"""The schema: defaults, each refusal with its field and remedy, files, and back to YAML."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import BaseModel, ValidationError

from app import config as config_module
from app.config import ConfigError, EldrConfig, load_config
from app.config_errors import fields_by_key
from app.main import planner_settings
from app.model_facts import FactsError, artifact_facts, model_facts
from cachemgr.placement_plan import PlacementPlan
from deployments.vllm_adapter import eplb

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
}
BASE: dict[str, Any] = {
    "model": {"path": "org/name", "served_name": "demo"},
    "router": {"policy": "jsq"},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with dotted keys of `changes` set; the value ... removes a key."""
    result = json.loads(json.dumps(base))
    for path, value in changes.items():
        *sections, key = path.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        if value is ...:
            target.pop(key, None)
        else:
            target[key] = value
    return result


def write(folder: Path, data: Any) -> Path:
    file = folder / "eldr.yaml"
    file.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return file


def write_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MOE | changes))
    (folder / "model.safetensors").write_bytes(b"12345")
    return folder


def write_artifact(folder: Path, model: Path, **changes: Any) -> Path:
    facts = model_facts(model)
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "format_version": 1,
        "model_id": "models/demo",
        "fingerprint": facts.fingerprint,
        "num_layers": facts.num_moe_layers,
        "num_experts": facts.num_experts,
        "top_k": facts.top_k,
        "k": 2,
        "num_requests": 20,
    }
    (folder / "calibration.json").write_text(json.dumps(data | changes))
    return folder


def refusal(folder: Path, changes: dict[str, Any]) -> str:
    file = write(folder, merged(BASE, changes))
    with pytest.raises(ConfigError) as info:
        load_config(file)
    for line in str(info.value).splitlines():
        assert line.startswith(f"{file}: ")
    return str(info.value).replace(f"{file}: ", "")


# --- schema ---------------------------------------------------------------------------------------


def all_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, field in fields_by_key(model).items():
        yield f"{prefix}{key}", field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from all_fields(field.annotation, f"{prefix}{key}.")


@pytest.mark.parametrize(("path", "field"), list(all_fields(EldrConfig)))
def test_every_field_has_one_sentence_of_documentation(path: str, field: Any) -> None:
    text = field.description or ""
    assert text.endswith("."), f"{path} needs a docstring"
    assert ". " not in text, f"{path}: one sentence"


def test_only_the_model_has_fields_without_default() -> None:
    required = [path for path, field in all_fields(EldrConfig) if field.is_required()]
    assert required == ["model", "model.path", "model.served_name"]


def test_defaults() -> None:
    config = EldrConfig.model_validate(BASE)
    assert (config.prefill.num_replicas, config.decode.num_replicas) == (1, 2)
    assert config.kv_transfer.progress_thread == "auto"
    assert config.router.lambda_ is None
    assert config.reservation_ttl_s == 360.0
    assert config.model.trust_remote_code is False


def test_config_is_frozen() -> None:
    config = EldrConfig.model_validate(BASE)
    with pytest.raises(ValidationError):
        config.router.tau = 0.5  # type: ignore[misc]


def test_json_schema_uses_yaml_names_and_carries_the_docstrings() -> None:
    properties = EldrConfig.model_json_schema(by_alias=True)["$defs"]["RouterConfig"]["properties"]
    assert "lambda" in properties
    assert "lambda_" not in properties
    assert properties["tau"]["description"].startswith("Width of the locality band")


def test_importing_the_schema_needs_no_ray_vllm_or_torch() -> None:
    code = (
        "import sys, app.config, app.errors, app.requests, app.prefill_request, app.cli\n"
        "print([m for m in ('ray', 'vllm', 'torch', 'numpy') if m in sys.modules])"
    )
    root = Path(config_module.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.strip() == "[]"


# --- refusals -------------------------------------------------------------------------------------

BAD_FIELDS = [
    ({"model.path": ...}, ["model.path: is required: Local model folder"]),
    ({"model": ...}, ["model: is required"]),
    ({"model.path": ""}, ["model.path: must not be empty"]),
    ({"model.served_name": 7}, ["model.served_name: must be text", "got 7"]),
    ({"model.dtype": "int8"}, ["model.dtype: must be one of 'auto'", "got 'int8'"]),
    ({"model.dtyp": "auto"}, ["model.dtyp: unknown key: did you mean 'dtype'?"]),
    ({"tau": 0.2}, ["tau: unknown key here: did you mean router.tau?"]),
    ({"decode.tau": 0.2}, ["decode.tau: unknown key here: did you mean router.tau?"]),
    ({"http.zzz": 1}, ["http.zzz: unknown key: accepted are host, port"]),
    ({"num_replicas": 2}, ["did you mean prefill.num_replicas or decode.num_replicas?"]),
    ({"device": "tpu"}, ["device: must be one of 'auto', 'cpu' or 'gpu', got 'tpu'"]),
    ({"decode.num_replicas": 0}, ["decode.num_replicas: must be >= 1, got 0"]),
    ({"decode.num_replicas": True}, ["decode.num_replicas: must be an integer, got true"]),
    ({"decode.num_replicas": "2"}, ["decode.num_replicas: must be an integer, got '2'"]),
    ({"decode.num_replicas": 1.5}, ["decode.num_replicas: must be an integer, got 1.5"]),
    ({"decode.num_replicas": None}, ["must be an integer, got nothing (null)"]),
    ({"prefill.kv_cache_gib": 0}, ["prefill.kv_cache_gib: must be >= 1, got 0"]),
    ({"prefill.env": {"A": 1}}, ["prefill.env.A: must be text (quote it in YAML), got 1"]),
    ({"prefill": 3}, ["prefill: must be a mapping of keys to values, got 3"]),
    ({"router.tau": 1.3}, ["router.tau: must be in [0, 1], got 1.3"]),
    ({"router.tau": float("nan")}, ["router.tau: must be a finite number"]),
    ({"router.lambda": -1}, ["router.lambda: must be >= 0, got -1"]),
    ({"router.policy": "best"}, ["router.policy: must be one of", "'soft' or 'live', got 'best'"]),
    ({"router.select_timeout_s": 0}, ["router.select_timeout_s: must be > 0, got 0"]),
    ({"router.domain_header": "X Y"}, ["router.domain_header:", "got 'X Y'"]),
    ({"kv_transfer.progress_thread": "on"}, ["must be one of 'auto', true or false, got 'on'"]),
    ({"kv_transfer.lease_s": 3}, ["kv_transfer.lease_s: must be >= 5.0, got 3"]),
    ({"http.port": 70000}, ["http.port: must be in [1, 65535], got 70000"]),
    ({"limits.max_body_bytes": 10}, ["limits.max_body_bytes: must be >= 1024, got 10"]),
    ({"limits.max_retries": -1}, ["limits.max_retries: must be >= 0, got -1"]),
    ({"app_name": "a b"}, ["app_name:", "got 'a b'"]),
]
BAD_KWARGS = [
    ({f"prefill.engine_kwargs.{key}": 1}, [f"prefill.engine_kwargs: {key} is set by", "remove it"])
    for key in config_module.OWNED_ENGINE_KWARGS
]
BAD_RELATIONS = [
    (
        {"decode.engine_kwargs": {"dtype": "half", "seed": 1, "model": "x"}},
        ["decode.engine_kwargs: dtype is set by model.dtype; model is set by model.path: remove"],
    ),
    ({"decode.env": {"OMP_NUM_THREADS": "2"}}, ["decode.env: OMP_NUM_THREADS", "omp_threads"]),
    (
        {"model.enable_auto_tool_choice": True},
        ["model.tool_call_parser: is required when model.enable_auto_tool_choice is true"],
    ),
    ({"decode.block_size": 48, "device": "cpu"}, ["decode.block_size: must be a multiple of 32"]),
    ({"prefill.block_size": 24}, ["prefill.block_size: must be a multiple of 16", "got 24"]),
    ({"decode.block_size": 256}, ["decode.block_size: must be <= 255", "switch capture off"]),
    (
        {"prefill.max_num_batched_tokens": 32},
        ["prefill.max_num_batched_tokens: must be >= max_num_seqs (64), got 32", "raise it"],
    ),
    (
        {"device": "gpu", "decode.kv_cache_gib": 2},
        ["decode.kv_cache_gib: sizes CPU engines", "gpu_memory_utilization"],
    ),
    ({"device": "gpu", "decode.omp_threads": 2}, ["decode.omp_threads: is for CPU", "remove it"]),
    ({"device": "cpu", "decode.num_gpus": 1}, ["decode.num_gpus: is 1", "set device: gpu"]),
    (
        {"kv_transfer.side_channel_port_base": 65534},
        ["kv_transfer.side_channel_port_base: 3 workers need ports 65534 to 65536", "lower it"],
    ),
    (
        {"kv_transfer.side_channel_port_base": 7999},
        ["workers use ports 7999 to 8001, among them http.port 8000: move one"],
    ),
    ({"router.policy": "soft"}, ["router.artifact: policy 'soft' needs", "eldr calibrate fit"]),
    ({"router.policy": ...}, ["router.artifact: policy 'live' needs"]),
    (
        {"router.policy": "band", "router.capture": False, "router.artifact": "x"},
        ["router.capture: must be true, got false: policy 'band'", "such as jsq"],
    ),
    (
        {"router.reservation_ttl_s": 10},
        ["router.reservation_ttl_s: is 10 s, below limits.request_timeout_s 300 s", "raise it"],
    ),
    (
        {"limits.request_timeout_s": 60},
        ["limits.prefill_timeout_s: is 120 s, above limits.request_timeout_s 60 s: lower it"],
    ),
    (
        {"router.select_timeout_s": 30},
        ["kv_transfer.lease_s: is 60 s, below the 92 s that may pass", "raise it"],
    ),
    (
        {"device": "cpu", "prefill.enforce_eager": False},
        ["prefill.enforce_eager: must not be false on device cpu while router.capture is on"],
    ),
    (
        {"router.resident_weight": 0.5},
        ["router.resident_weight: is 0.5 and decode engines have no expert cache"],
    ),
    (
        {"cache.enabled": True, "decode.enforce_eager": False},
        ["decode.enforce_eager: must not be false while cache.enabled is true"],
    ),
    (
        {"cache.enabled": True, "cache.policy": "spatio"},
        ["cache.budget: must be >= 1 for policy spatio", "take policy temporal"],
    ),
    (
        {"cache.enabled": True, "cache.budget": 2},
        ["cache.budget: is 2 and policy lrfu loads nothing ahead: take spatio"],
    ),
    (
        {"cache": {"enabled": True, "policy": "spatio", "budget": 9, "slots": 8}},
        ["cache.budget: must be <= 8, the slots of a layer, got 9"],
    ),
    (
        {"device": "cpu", "decode.engine_kwargs": {"enable_expert_parallel": True}},
        ["cache.enabled: must be true for decode.engine_kwargs.enable_expert_parallel", "crashes"],
    ),
    (
        {"decode.engine_kwargs": {"enable_eplb": True}, "cache.enabled": True},
        ["cache.enabled: must be false while decode.engine_kwargs.enable_eplb is true"],
    ),
    (
        {"placement.max_age_s": 60},
        ["placement.max_age_s: is for a plan that vLLM's EPLB reads: remove it"],
    ),
    (
        {"cache.enabled": True, "cache.policy": "static"},
        ["cache.score_file: policy static needs a file with the array hotness_LE"],
    ),
    (
        {"cache.enabled": True, "cache.policy": "learned"},
        ["cache.score_file: policy learned needs the folder that `eldr cache train` wrote"],
    ),
]


@pytest.mark.parametrize(("changes", "texts"), BAD_FIELDS + BAD_KWARGS + BAD_RELATIONS)
def test_bad_configuration_is_refused(
    tmp_path: Path, changes: dict[str, Any], texts: list[str]
) -> None:
    message = refusal(tmp_path, changes)
    for text in texts:
        assert text in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"decode.block_size": 32, "device": "cpu"},
        {"decode.block_size": 48},
        {"decode.block_size": 512, "router.capture": False},
        {"kv_transfer.progress_thread": False},
        {"decode.kv_cache_gib": 1},
        {"router.artifact": None},
        {"decode.engine_kwargs": {"gpu_memory_utilization": 0.8}},
        {"model.enable_auto_tool_choice": True, "model.tool_call_parser": "hermes"},
        {"limits.api_keys_env": "ELDR_API_KEYS"},
        {"http.port": 20003},
        {"cache.policy": "static"},
        {"cache": {"enabled": True, "policy": "spatio", "budget": 8, "slots": 8}},
    ],
)
def test_good_configuration_is_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    load_config(write(tmp_path, merged(BASE, changes)))


ON_RANKS = {
    "decode.tensor_parallel_size": 2,
    "decode.engine_kwargs": {
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": {"num_redundant_experts": 4},
    },
    "placement.plan": "plans/plan.json",
}
WITHOUT_EPLB = {"decode.engine_kwargs": {"enable_expert_parallel": True}}


def write_plan(folder: Path, num_slots: int = 36, num_ranks: int = 2) -> None:
    model = write_model(folder / "model")
    PlacementPlan(
        version=1,
        created_at=0.0,
        model_id="demo",
        fingerprint=model_facts(model).fingerprint,
        num_experts=32,
        num_ranks=num_ranks,
        physical_to_logical_LP=np.tile(np.arange(num_slots) % 32, (4, 1)),
    ).save(folder / "plans" / "plan.json")


@pytest.mark.parametrize(
    ("changes", "num_slots"),
    [
        ({}, 36),
        ({"placement.max_age_s": 60}, 36),
        (WITHOUT_EPLB | {"cache.enabled": True, "device": "cpu"}, 32),
        ({"placement.plan": "plans/later.json"}, 36),
        ({"decode.tensor_parallel_size": 1}, 36),
    ],
)
def test_plan_that_fits_is_accepted(
    tmp_path: Path, changes: dict[str, Any], num_slots: int
) -> None:
    write_plan(tmp_path, num_slots)
    changes = {"model.path": "model", **ON_RANKS, **changes}
    if changes["decode.tensor_parallel_size"] == 1:
        changes["decode.engine_kwargs"] = changes["decode.engine_kwargs"] | {
            "data_parallel_size": 2
        }
    placement = load_config(write(tmp_path, merged(BASE, changes))).placement
    assert Path(placement.plan or "").parent == tmp_path / "plans"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            WITHOUT_EPLB,
            "placement.plan: cannot reach the decode engines: set "
            "decode.engine_kwargs.enable_eplb: true",
        ),
        (
            {"decode.tensor_parallel_size": 1},
            "placement.plan: is for experts on ranks: set enable_expert_parallel",
        ),
        (
            WITHOUT_EPLB | {"cache.enabled": True, "device": "gpu"},
            "cache.enabled: must be false for a placement plan on device gpu",
        ),
        ({"model.path": "org/name"}, "model.path: must be a model folder for a placement plan"),
        ({"placement.plan": "none/plan.json"}, "none is no folder: create it"),
        (
            WITHOUT_EPLB | {"cache.enabled": True, "placement.plan": "none.json"},
            "none.json (No such file or directory): make one with `eldr cache place`",
        ),
        ({"placement.plan": "eldr.yaml"}, "eldr.yaml is not valid JSON"),
        ({"placement.plan": "model/config.json"}, "config.json is no placement plan"),
        ({"decode.tensor_parallel_size": 4}, "36 slots on 2 ranks, but decode engines run"),
        (
            {"decode.engine_kwargs": ON_RANKS["decode.engine_kwargs"] | {"eplb_config": {}}},
            "run fingerprint",
        ),
    ],
)
def test_plan_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    write_plan(tmp_path)
    message = refusal(tmp_path, {"model.path": "model", **ON_RANKS, **changes})
    assert text in message
    assert len(message.splitlines()) == 1


MANAGED = {"placement.plan": ..., "placement.managed": True, "router.artifact": "artifact"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        (WITHOUT_EPLB | {"cache.enabled": True, "device": "cpu"}, None),
        ({"placement.plan": "plans/plan.json"}, "placement.plan: must be left out while"),
        ({"router.artifact": ...}, "router.artifact: must be set for placement.managed"),
        (WITHOUT_EPLB, "placement.managed: cannot reach the decode engines"),
        ({"decode.engine_kwargs": {"enable_eplb": True}}, "placement.managed: is for experts on"),
        ({"placement.max_age_s": 60}, "placement.max_age_s: is for a plan that"),
        (
            {"decode.engine_kwargs": ON_RANKS["decode.engine_kwargs"] | {"data_parallel_size": 2}},
            "placement.managed: must be false with data_parallel_size",
        ),
    ],
)
def test_managed_placement(tmp_path: Path, changes: dict[str, Any], text: str | None) -> None:
    write_plan(tmp_path, 36)
    write_artifact(tmp_path / "artifact", tmp_path / "model")
    changes = {"model.path": "model", **ON_RANKS, **MANAGED, **changes}
    if text is not None:
        assert text in refusal(tmp_path, changes)
        return
    config = load_config(write(tmp_path, merged(BASE, changes)))
    settings = planner_settings(config)
    assert (settings.num_ranks, settings.batch) == (2, config.decode.max_num_seqs)
    assert settings.num_spare == (4 if config.decode.has_eplb else 0)
    assert settings.artifact == str(tmp_path / "artifact")


def test_engines_get_no_plan_by_hand(tmp_path: Path) -> None:
    for name in (eplb.PLAN_PATH, eplb.FINGERPRINT, eplb.MAX_AGE_S):
        message = refusal(tmp_path, {"decode.env": {name: "x"}})
        assert f"{name} is set by placement." in message


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"router.tau": 2, "http.port": 0, "x": 1})
    assert [line.split(":")[0] for line in message.splitlines()] == ["router.tau", "http.port", "x"]
    message = refusal(tmp_path, {"limits.request_timeout_s": 60, "decode.block_size": 24})
    assert len(message.splitlines()) == 2


def test_a_pasted_api_key_is_refused_and_not_repeated(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"limits.api_keys_env": "sk-secret-1"})
    assert "limits.api_keys_env: must be the name of an environment variable" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n", "must be a mapping of sections such as `model:`, got a list"),
        ("3", "got 3"),
        ("model: {path: a/b, served_name: c}\n1: 2\n", "1: keys must be text, got 1"),
        ("? [a]\n: 3\n", "line 1, column 3"),
        ("a: [1\n", "line 2, column 1"),
        ("a: !!python/object/apply:os.system ['true']\n", "line 1, column 4"),
        ("http:\n  port: 1\n  port: 2\n", "line 3, column 3: duplicate key 'port'"),
        ("http: {}\nmodel: {}\nhttp: {}\n", "duplicate key 'http', first given on line 1"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as info:
        load_config(file)
    assert str(info.value).startswith(f"{file}: ")
    assert expected in str(info.value)


def test_missing_folder_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot read the file"):
        load_config(tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "x.yaml")


def test_config_error_is_a_value_error_with_its_problems(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"router\.tau") as info:
        load_config(write(tmp_path, merged(BASE, {"router.tau": 2})))
    assert isinstance(info.value, ConfigError)
    assert [problem.path for problem in info.value.problems] == ["router.tau"]


# --- resolution -----------------------------------------------------------------------------------


def test_paths_count_from_the_file(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "demo")
    artifact = write_artifact(tmp_path / "cal", model)
    (tmp_path / "conf").mkdir()
    for given in ("../models/demo", str(model)):
        changes = {"model.path": given, "router": {"policy": "soft", "artifact": "../cal"}}
        config = load_config(write(tmp_path / "conf", merged(BASE, changes)))
        assert config.model.path == str(model)
        assert config.model.is_local
        assert config.router.artifact == str(artifact)


def test_a_folder_wins_over_a_hub_id_of_the_same_name(tmp_path: Path) -> None:
    assert not load_config(write(tmp_path, BASE)).model.is_local
    write_model(tmp_path / "org" / "name")
    assert load_config(write(tmp_path, BASE)).model.path == str(tmp_path / "org" / "name")


def test_resolved_yaml_loads_to_the_same(tmp_path: Path) -> None:
    changes = {"router.lambda": 2, "decode.engine_kwargs": {"seed": 1}, "decode.env": {"A": "é"}}
    config = load_config(write(tmp_path, merged(BASE, changes)))
    text = config.to_yaml()
    assert yaml.safe_load(text)["router"]["reservation_ttl_s"] == 360.0
    again = load_config(write(tmp_path, text))
    assert again.to_yaml() == text
    assert again.reservation_ttl_s == config.reservation_ttl_s
    assert again.decode == config.decode


# --- model and artifact files ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ["./none", "../none", "/none/at/all", "a/b/c", "~none/x"])
def test_missing_local_model_is_refused(tmp_path: Path, path: str) -> None:
    message = refusal(tmp_path, {"model.path": path})
    assert message.startswith("model.path: cannot read ")
    assert "config.json" in message
    assert "hub id org/name" in message


def test_dense_model_is_refused_while_capture_is_on(tmp_path: Path) -> None:
    write_model(tmp_path / "dense", num_experts=None)
    message = refusal(tmp_path, {"model.path": "./dense"})
    assert "is not a Mixture-of-Experts model" in message
    assert "router.capture: false" in message
    changes = {"model.path": "./dense", "router.capture": False}
    assert load_config(write(tmp_path, merged(BASE, changes)))


def test_too_long_context_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    message = refusal(tmp_path, {"model.path": "./m", "model.max_model_len": 4096})
    assert "model.max_model_len: must be <= 2048" in message
    assert "got 4096" in message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slots": 3}, "cache.slots: must give >= 4 slots, since a token uses 4 experts"),
        ({"fraction": 0.05}, "cache.fraction: must give >= 4 slots"),
        ({"slots": 33}, "cache.slots: must be <= 32, the experts of a layer, got 33: lower it"),
        (
            {"fraction": 0.25, "policy": "spatio", "budget": 9},
            "cache.budget: must be <= 8, the slots of a layer, got 9",
        ),
    ],
)
def test_slots_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    write_model(tmp_path / "m")
    message = refusal(tmp_path, {"model.path": "./m", "cache": {"enabled": True, **changes}})
    assert text in message
    assert len(message.splitlines()) == 1
    load_config(write(tmp_path, merged(BASE, {"model.path": "./m", "cache": changes})))


def test_cache_paths_count_from_the_file(tmp_path: Path) -> None:
    changes = {"cache": {"store_dir": "store", "score_file": "~/scores.npz"}}
    cache = load_config(write(tmp_path, merged(BASE, changes))).cache
    assert cache.store_dir == str(tmp_path / "store")
    assert cache.score_file == "~/scores.npz"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (None, "cannot read"),
        ({"num_layers": "2"}, "field 'num_layers' has the wrong type, got '2'"),
        ({"num_layers": 3}, "(3 MoE layers, 32 experts, fingerprint unknown), but"),
        ({"num_experts": 16}, "(4 MoE layers, 16 experts, fingerprint unknown), but"),
        ({"fingerprint": "0" * 16}, "fingerprint 0000000000000000), but"),
    ],
)
def test_learned_score_of_another_model_is_refused(
    tmp_path: Path, changes: dict[str, Any] | None, text: str
) -> None:
    facts = model_facts(write_model(tmp_path / "m"))
    score: dict[str, Any] = {
        "model_id": "m",
        "fingerprint": None,
        "num_layers": facts.num_moe_layers,
        "num_experts": facts.num_experts,
    }
    cache = {"enabled": True, "policy": "learned", "score_file": "score"}
    config = {"model.path": "./m", "cache": cache}
    if changes is not None:
        (tmp_path / "score").mkdir()
        for known in (None, facts.fingerprint):
            (tmp_path / "score" / "score.json").write_text(
                json.dumps(score | {"fingerprint": known})
            )
            load_config(write(tmp_path, merged(BASE, config)))
        (tmp_path / "score" / "score.json").write_text(json.dumps(score | changes))
    message = refusal(tmp_path, config)
    assert message.startswith("cache.score_file: ")
    assert text in message
    assert "`eldr cache train`" in message


def soft(**changes: Any) -> dict[str, Any]:
    return {"model.path": "./m", "router": {"policy": "soft", "artifact": "cal"}} | changes


def test_artifact_for_another_number_of_replicas_is_refused(tmp_path: Path) -> None:
    write_artifact(tmp_path / "cal", write_model(tmp_path / "m"), k=8)
    never = {"decode.num_replicas": 16, "router.refit": {"when": "never"}}
    message = refusal(tmp_path, merged(soft(), never))
    text = (
        "router.artifact: artifact has K=8 centroids but decode.num_replicas is 16: refit with "
        "`eldr calibrate fit --k 16`"
    )
    assert message == text + ", or let the router do it with router.refit.when: pool"
    # The domain oracle knows clusters by their index, so it cannot follow a refit.
    domain = {"decode.num_replicas": 16, "router.policy": "domain"}
    assert refusal(tmp_path, merged(soft(), domain)) == text
    # A policy that uses no centroids does not care.
    load_config(write(tmp_path, merged(BASE, soft(**{"router.policy": "jsq"}))))


def test_another_number_of_replicas_is_fitted_by_the_router(tmp_path: Path) -> None:
    write_artifact(tmp_path / "cal", write_model(tmp_path / "m"), k=8, num_requests=16)
    load_config(write(tmp_path, merged(BASE, soft(**{"decode.num_replicas": 16}))))
    message = refusal(tmp_path, soft(**{"decode.num_replicas": 17}))
    assert message.endswith("from the artifact's 16 signatures: it needs one a replica")
    too_few = {"decode.num_replicas": 16, "router.reservoir_size": 15}
    message = refusal(tmp_path, merged(soft(), too_few))
    assert "router.reservoir_size: must be >= decode.num_replicas (16) for a refit" in message


def test_numbers_of_signatures_agree() -> None:
    from app.model_facts import MAX_SIGNATURES
    from calibration.artifact import MAX_RESERVOIR

    assert MAX_SIGNATURES == MAX_RESERVOIR


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 3}, {"num_experts": 64}, {"top_k": 8}, {"fingerprint": "0123456789abcdef"}],
)
def test_artifact_for_another_model_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    model = write_model(tmp_path / "m")
    write_artifact(tmp_path / "cal", model, **change)
    message = refusal(tmp_path, soft())
    assert "router.artifact: artifact was fitted for models/demo" in message
    assert str(next(iter(change.values()))) in message
    assert model_facts(model).fingerprint in message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read"),
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ('{"format_version": 1, "model_id": "x"}', "field 'fingerprint' must be of type str"),
    ],
)
def test_broken_artifact_is_refused(tmp_path: Path, content: str | None, text: str) -> None:
    write_model(tmp_path / "m")
    if content is not None:
        (tmp_path / "cal").mkdir()
        (tmp_path / "cal" / "calibration.json").write_text(content)
    message = refusal(tmp_path, soft())
    assert message.startswith("router.artifact: ")
    assert text in message


# --- model facts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "num_moe_layers", "num_experts"),
    [
        ({}, 4, 32),
        ({"mlp_only_layers": [0, 2]}, 2, 32),
        ({"mlp_only_layers": [0, 1, 2, 3]}, 0, 0),
        ({"decoder_sparse_step": 2}, 2, 32),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 1, 32),
        ({"first_k_dense_replace": 1}, 3, 32),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 1, 32),
        ({"moe_layer_freq": [0, 1, 1]}, 2, 32),
        ({"num_experts": None, "num_local_experts": 8}, 4, 8),
        ({"num_experts": None, "n_routed_experts": 64}, 4, 64),
        ({"num_experts": None}, 0, 0),
        ({"num_experts": 1}, 0, 0),
        ({"num_experts": None, "text_config": {"num_experts": 16}}, 4, 16),
    ],
)
def test_model_facts(
    tmp_path: Path, changes: dict[str, Any], num_moe_layers: int, num_experts: int
) -> None:
    facts = model_facts(write_model(tmp_path, **changes))
    assert (facts.num_moe_layers, facts.num_experts) == (num_moe_layers, num_experts)
    assert facts.top_k == (4 if num_experts else 0)
    assert facts.is_moe == bool(num_experts)
    assert facts.model_type == "qwen3_moe"


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "default"}, 2048),
    ],
)
def test_context_length_follows_rope_scaling(tmp_path: Path, rope: Any, length: int) -> None:
    assert model_facts(write_model(tmp_path, rope_scaling=rope)).max_position_embeddings == length


def test_fingerprint_follows_architecture_and_weights(tmp_path: Path) -> None:
    model = write_model(tmp_path / "a")
    first = model_facts(model).fingerprint
    assert len(first) == 16
    assert int(first, 16) >= 0
    assert model_facts(write_model(tmp_path / "b")).fingerprint == first
    same = write_model(tmp_path / "c", max_position_embeddings=99, transformers_version="5")
    assert model_facts(same).fingerprint == first
    assert model_facts(write_model(tmp_path / "d", num_experts=16)).fingerprint != first
    (model / "model.safetensors").write_bytes(b"123456")
    assert model_facts(model).fingerprint != first


@pytest.mark.parametrize("content", ["{", "[]", '{"num_experts": "many"}'])
def test_broken_model_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(FactsError, match=r"config\.json"):
        model_facts(tmp_path)


def test_artifact_facts_reads_what_the_check_needs(tmp_path: Path) -> None:
    facts = artifact_facts(write_artifact(tmp_path / "cal", write_model(tmp_path / "m"), k=5))
    assert (facts.k, facts.num_layers, facts.num_experts, facts.top_k) == (5, 4, 32, 4)
