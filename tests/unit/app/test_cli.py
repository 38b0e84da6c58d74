"""The `eldr` command: configuration checks, lazy groups, and how errors come out."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app import cli
from app.errors import NoDecodeReplica

GOOD = "model: {path: org/name, served_name: demo}\nrouter: {policy: jsq}\n"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the groups by fakes: one module a keyword, with its `add_cli`."""

    def install(group: cli.Group, **modules: Callable[[Any], Any]) -> None:
        for name, add_cli in modules.items():
            module = types.ModuleType(name)
            module.add_cli = add_cli  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(cli, "GROUPS", (group,))

    return install


def adds(name: str, func: Callable[[argparse.Namespace], Any]) -> Callable[[Any], None]:
    def add_cli(subparsers: Any) -> None:
        subparsers.add_parser(name).set_defaults(func=func)

    return add_cli


def test_config_check_prints_the_resolved_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    assert cli.main(["config", "check", str(tmp_path / "a.yaml")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert yaml.safe_load(out)["decode"]["num_replicas"] == 2


def test_config_check_tells_problems_on_stderr_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(GOOD + "tau: 3\nhttp: {port: 0}\n")
    assert cli.main(["config", "check", str(tmp_path / "a.yaml")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2
    assert "router.tau" in err


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "schema"]) == 0
    assert "properties" in json.loads(capsys.readouterr().out)


def test_config_check_starts_fast_and_imports_no_engine(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    code = (
        "import sys\nfrom app.cli import main\n"
        f"code = main(['config', 'check', {str(tmp_path / 'a.yaml')!r}])\n"
        "heavy = [m for m in ('ray', 'vllm', 'torch', 'numpy', 'scipy') if m in sys.modules]\n"
        "sys.exit(code or (3 if heavy else 0))"
    )
    start = time.perf_counter()
    root = Path(cli.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    # About 0.2 s on an idle core; the bound leaves room for a busy machine.
    assert time.perf_counter() - start < 5


def test_help_lists_all_commands_without_importing_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in (
        "config",
        "serve",
        "demo",
        "stop",
        "status",
        "demo-model",
        "calibrate",
        "bench",
    ):
        assert f"    {command}" in out


@pytest.mark.parametrize("args", [[], ["nonsense"], ["config"], ["config", "check"]])
def test_usage_errors_exit_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    assert "usage: eldr" in capsys.readouterr().err


def test_top_level_group(groups: Any) -> None:
    groups(cli.Group({"one": "h", "two": "h"}, ("fake_a",)), fake_a=adds("two", lambda args: 7))
    assert cli.main(["two"]) == 7
    assert cli.main(["--traceback", "two"]) == 7


def test_own_nesting_gives_every_module_the_same_subparsers(groups: Any) -> None:
    groups(
        cli.Group({"bench": "h"}, ("fake_a", "fake_b"), nest="own"),
        fake_a=adds("router", lambda args: 1),
        fake_b=adds("serve", lambda args: None),
    )
    assert cli.main(["bench", "router"]) == 1
    assert cli.main(["bench", "serve"]) == 0


def test_first_nesting_hands_on_what_the_first_module_returns(groups: Any) -> None:
    def add_cli(subparsers: Any) -> Any:
        nested = subparsers.add_parser("calibrate").add_subparsers(required=True)
        nested.add_parser("fit").set_defaults(func=lambda args: 1)
        return nested

    groups(
        cli.Group({"calibrate": "h"}, ("fake_a", "fake_b"), nest="first"),
        fake_a=add_cli,
        fake_b=adds("capture", lambda args: 2),
    )
    assert cli.main(["calibrate", "fit"]) == 1
    assert cli.main(["calibrate", "capture"]) == 2


@pytest.mark.parametrize("nest", [None, "own", "first"])
def test_missing_modules_only_matter_to_their_own_commands(
    nest: str | None, groups: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    groups(cli.Group({"x": "h"}, ("no_such_module_1", "no_such_module_2"), nest=nest))
    (tmp_path / "a.yaml").write_text(GOOD)
    assert cli.main(["config", "check", str(tmp_path / "a.yaml")]) == 0
    capsys.readouterr()
    assert cli.main(["x", "--flag", "y"]) == 2
    err = capsys.readouterr().err
    assert "not available here" in err
    assert "no_such_module_1 cannot be imported" in err
    assert "Traceback" not in err


def test_one_missing_module_leaves_the_others_and_is_told_on_a_usage_error(
    groups: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    groups(
        cli.Group({"bench": "h"}, ("no_such_module", "fake_a"), nest="own"),
        fake_a=adds("router", lambda args: 0),
    )
    assert cli.main(["bench", "router"]) == 0
    assert cli.main(["bench", "serve"]) == 2
    assert "no_such_module cannot be imported" in capsys.readouterr().err


def test_a_missing_dependency_is_named(groups: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "fake_dep.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError) as info:
        __import__("fake_dep")
    text = cli._import_text("fake_dep", info.value)
    assert "install the package that provides 'no_such_package'" in text


@pytest.mark.parametrize(
    ("error", "status", "has_traceback"),
    [
        (ValueError("bad value"), 2, False),
        (FileNotFoundError("no file"), 1, False),
        (NoDecodeReplica("none there"), 1, False),
        (KeyError("a bug"), 1, True),
        (KeyboardInterrupt(), 130, False),
    ],
)
def test_errors_of_commands(
    error: BaseException,
    status: int,
    has_traceback: bool,
    groups: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def func(args: argparse.Namespace) -> int:
        raise error

    groups(cli.Group({"x": "h"}, ("fake_a",)), fake_a=adds("x", func))
    assert cli.main(["x"]) == status
    err = capsys.readouterr().err
    assert ("Traceback" in err) == has_traceback
    assert str(error) in err


def test_traceback_flag_shows_where_an_error_came_from(
    groups: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def func(args: argparse.Namespace) -> int:
        raise ValueError("bad value")

    groups(cli.Group({"x": "h"}, ("fake_a",)), fake_a=adds("x", func))
    assert cli.main(["--traceback", "x"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_every_real_group_names_its_commands_and_modules() -> None:
    commands = [name for group in cli.GROUPS for name in group.commands]
    assert len(commands) == len(set(commands))
    for group in cli.GROUPS:
        assert group.modules
        assert group.nest is None or len(group.commands) == 1
