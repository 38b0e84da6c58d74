"""The `eldr` command: configuration checks here, all other groups in the modules that own them.

A group's modules are imported only when one of its commands is given, so that
`eldr config check` starts at once and needs neither Ray nor vLLM, and a group whose packages are
missing does not take the others with it. A module joins by `add_cli(subparsers)`, which adds its
commands and sets `func(args) -> int` on each; it may return nested subparsers for the modules
listed after it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Group:
    """Commands that come from the same modules.

    Attributes:
        commands: top-level command names and their help.
        modules: what to import, in order.
        nest: how modules share one command: "own" when we add it and each module gets its nested
            subparsers, "first" when the first module adds it and returns them for the others,
            None when the module adds top-level commands.
    """

    commands: dict[str, str]
    modules: tuple[str, ...]
    nest: str | None = None


GROUPS = (
    Group(
        {
            "serve": "run an application from a configuration",
            "demo": "train the demo model if needed, and serve it",
            "stop": "stop an application and end its processes",
            "status": "show replicas, load and health",
            "drain": "empty this Ray node before it is stopped",
        },
        ("app.serve_cli",),
    ),
    Group({"dashboards": "bring the Grafana dashboards to a server"}, ("app.dashboards_cli",)),
    Group({"demo-model": "build the small MoE model of the examples"}, ("calibration.demo_model",)),
    Group(
        {"calibrate": "capture expert counts, fit and inspect calibration artifacts"},
        ("calibration.cli", "calibration.capture_cli"),
        nest="first",
    ),
    Group(
        {"replay": "route recorded requests by any policy, and compare"},
        ("calibration.replay_cli",),
    ),
    Group({"simulate": "a whole deployment on virtual time"}, ("calibration.simulation.cli",)),
    Group(
        {"cache": "replay expert caches against their bound, plan experts on ranks"},
        ("cachemgr.cli", "cachemgr.place_cli"),
        nest="first",
    ),
    Group(
        {"bench": "measure routing and serving"},
        ("bench.router", "bench.kmeans", "bench.cli"),
        nest="own",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args_given = list(sys.argv[1:] if argv is None else argv)
    parser, subparsers = _base_parser()
    _add_config(subparsers)
    missing, num_mounted = _mount_for(args_given, subparsers)
    if missing and not num_mounted:
        print("eldr: this command is not available here", *missing, sep="\n  ", file=sys.stderr)
        return EXIT_USAGE
    try:
        args = parser.parse_args(args_given)
    except SystemExit as err:
        if err.code and missing:
            print("commands may be missing", *missing, sep="\n  ", file=sys.stderr)
        return int(err.code or 0)
    try:
        status = int(args.func(args) or 0)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; without this Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as err:
        if args.traceback or not _is_expected(err):
            traceback.print_exc()
        print(f"eldr: {err}", file=sys.stderr)
        return EXIT_USAGE if isinstance(err, ValueError) else 1


def _base_parser() -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(
        prog="eldr", description="Expert-locality-aware serving of MoE models."
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error came from (for bug reports)"
    )
    return parser, parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _mount_for(args_given: Sequence[str], subparsers: Any) -> tuple[list[str], int]:
    """Add the commands: those of the group that is asked for in full, the others by name.

    Returns:
        One text for each module of that group that cannot be imported, and how many were mounted.
    """
    command = next((arg for arg in args_given if not arg.startswith("-")), None)
    result: tuple[list[str], int] = ([], 0)
    for group in GROUPS:
        if command in group.commands:
            result = _mount(group, subparsers)
        else:
            for name, text in group.commands.items():
                subparsers.add_parser(name, help=text)
    return result


def _mount(group: Group, subparsers: Any) -> tuple[list[str], int]:
    missing, num_mounted, target = [], 0, subparsers
    if group.nest == "own":
        ((name, text),) = group.commands.items()
        parser = subparsers.add_parser(name, help=text)
        target = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module_name in group.modules:
        try:
            module = importlib.import_module(module_name)
        except ImportError as err:
            missing.append(_import_text(module_name, err))
            if group.nest == "first" and not num_mounted:
                break  # the others have nothing to nest in
            continue
        nested = module.add_cli(target)
        num_mounted += 1
        if group.nest == "first" and nested is not None:
            target = nested
    return missing, num_mounted


def _import_text(module: str, err: ImportError) -> str:
    text = f"{module} cannot be imported ({err})"
    if err.name and err.name != module:
        return f"{text}: install the package that provides {err.name!r}, then retry"
    return text


def _is_expected(err: Exception) -> bool:
    """Errors that a user caused or must act on; all others are bugs and keep their traceback."""
    from app.errors import EldrError

    return isinstance(err, EldrError | ValueError | OSError)


def _add_config(subparsers: Any) -> None:
    parser = subparsers.add_parser("config", help="check a configuration, print its schema")
    nested = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = nested.add_parser(
        "check", help="print FILE with all defaults, or every problem in it (exit status 2)"
    )
    check.add_argument("file", metavar="FILE", help="YAML configuration")
    check.set_defaults(func=_check_config)
    schema = nested.add_parser("schema", help="print the JSON schema of configurations")
    schema.set_defaults(func=_print_schema)


def _check_config(args: argparse.Namespace) -> int:
    from app.config import ConfigError, load_config

    try:
        config = load_config(args.file)
    except ConfigError as err:
        print(err, file=sys.stderr)
        return EXIT_USAGE
    print(config.to_yaml(), end="")
    return 0


def _print_schema(args: argparse.Namespace) -> int:
    from app.config import EldrConfig

    print(json.dumps(EldrConfig.model_json_schema(by_alias=True), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
