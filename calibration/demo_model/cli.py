"""Commands of the demo model: `eldr demo-model train | pack | unpack | report | trace`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.demo_model import packing, reporting, tracing, training
from calibration.demo_model.corpus import DEFAULT_PROMPTS_DIR

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_TRAINED_DIR = Path("build/demo-model-trained")

_DESCRIPTION = "Make, store and measure the bundled demo model (a small trained Qwen3-MoE)."


def add_cli(subparsers: Subparsers) -> None:
    """Add `demo-model` and its commands to a command line.

    Each command sets `func`, which takes the parsed arguments and returns the exit status: 0 done,
    1 a required property is missing (`report --check`), 2 wrong input.
    """
    parser = subparsers.add_parser(
        "demo-model",
        help="make, store and measure the bundled demo model",
        description=_DESCRIPTION,
    )
    add_commands(parser)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands to a parser of their own."""
    commands = parser.add_subparsers(dest="demo_model_command", required=True, metavar="COMMAND")

    train = _add_command(commands, "train", _run_train, "train the model (about 25 min on 2 cores)")
    _add_prompts_option(train)
    _add_path_option(train, "--out", DEFAULT_TRAINED_DIR, "folder to write")
    train.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    train.add_argument(
        "--steps",
        type=int,
        default=training.TrainingOptions.steps,
        help="optimiser steps; default: %(default)s",
    )
    train.add_argument(
        "--max-minutes",
        type=float,
        default=training.TrainingOptions.max_minutes,
        help="stop after this wall-clock time; default: %(default)s",
    )

    pack = _add_command(commands, "pack", _run_pack, "store a trained folder compactly (int8)")
    _add_path_option(pack, "--model", DEFAULT_TRAINED_DIR, "trained Hugging Face folder")
    _add_path_option(pack, "--out", packing.DEFAULT_PACKED_DIR, "folder to write")

    unpack = _add_command(
        commands, "unpack", _run_unpack, "restore a bfloat16 Hugging Face folder; skips if current"
    )
    _add_path_option(unpack, "--packed", packing.DEFAULT_PACKED_DIR, "folder that pack wrote")
    _add_path_option(unpack, "--out", packing.DEFAULT_MODEL_DIR, "folder to write")

    report = _add_command(
        commands, "report", _run_report, "measure loss and routing structure on test prompts"
    )
    _add_path_option(report, "--model", packing.DEFAULT_MODEL_DIR, "unpacked model folder")
    _add_prompts_option(report)
    report.add_argument("--out", type=Path, help="also write the report to this JSON file")
    report.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    report.add_argument(
        "--rows", type=int, default=200, help="test rows a group at most; default: %(default)s"
    )
    report.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 unless the required correlation and expert reduction are reached",
    )

    trace = _add_command(
        commands, "trace", _run_trace, "write a routing trace with the router's logits (.npz)"
    )
    _add_path_option(trace, "--model", packing.DEFAULT_MODEL_DIR, "unpacked model folder")
    _add_prompts_option(trace)
    trace.add_argument("--out", type=Path, required=True, help="file to write")
    trace.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    trace.add_argument(
        "--rows", type=int, default=200, help="rows a group at most; default: %(default)s"
    )
    trace.add_argument(
        "--split",
        choices=("test", "train"),
        default="test",
        help="rows of the corpus: test, which the model has not seen, or train, to learn a cache "
        "score from; default: %(default)s",
    )


def _add_command(
    commands: Subparsers, name: str, run: Callable[[argparse.Namespace], int], help_text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_text, description=help_text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=lambda args: _run_reporting_errors(run, args))
    return parser


def _add_path_option(
    parser: argparse.ArgumentParser, flag: str, default: Path, meaning: str
) -> None:
    parser.add_argument(flag, type=Path, default=default, help=f"{meaning}; default: %(default)s")


def _add_prompts_option(parser: argparse.ArgumentParser) -> None:
    _add_path_option(parser, "--prompts", DEFAULT_PROMPTS_DIR, "folder of the prompt corpus")


def _run_reporting_errors(
    run: Callable[[argparse.Namespace], int], args: argparse.Namespace
) -> int:
    """Run a command; wrong input ends in one line on stderr and status 2, not in a traceback."""
    # A host command line that configures logging keeps its own set-up.
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return run(args)
    except ModuleNotFoundError as err:
        print(
            f"error: the Python package {err.name!r} is not installed: demo-model commands need "
            "torch, transformers, tokenizers, safetensors and tqdm",
            file=sys.stderr,
        )
    except (ValueError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
    return 2


def _run_train(args: argparse.Namespace) -> int:
    record = training.train(
        args.prompts, args.out, seed=args.seed, steps=args.steps, max_minutes=args.max_minutes
    )
    final = record["loss_curve"][-1]["loss"]
    _print_result(
        args,
        {"out": str(args.out), **record},
        f"{args.out}: {record['steps_done']} steps in {record['seconds'] / 60:.1f} min, "
        f"{record['tokens_seen']} tokens, loss {final:.3f}",
    )
    return 0


def _run_pack(args: argparse.Namespace) -> int:
    manifest = packing.pack(args.model, args.out)
    num_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
    _print_result(
        args,
        {"out": str(args.out), "bytes": num_bytes, **manifest},
        f"{args.out}: {len(manifest['files'])} files, {num_bytes / 1e6:.1f} MB",
    )
    return 0


def _run_unpack(args: argparse.Namespace) -> int:
    written = packing.unpack(args.packed, args.out)
    _print_result(
        args,
        {"out": str(args.out), "written": written},
        f"{args.out}: {'unpacked' if written else 'up to date'}",
    )
    return 0


def _run_report(args: argparse.Namespace) -> int:
    result = reporting.report(
        args.model, args.prompts, args.out, seed=args.seed, max_rows=args.rows
    )
    _print_result(args, result, reporting.format_report(result))
    if not args.check:
        return 0
    failures = reporting.failed_requirements(result)
    for failure in failures:
        print(f"requirement missed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _run_trace(args: argparse.Namespace) -> int:
    written = tracing.write_trace(
        args.model, args.prompts, args.out, seed=args.seed, max_rows=args.rows, split=args.split
    )
    _print_result(
        args,
        {"out": str(args.out), **written},
        f"{args.out}: {written['requests']} requests, {written['tokens']} tokens; compare with: "
        f"eldr calibrate compare --ids {args.out} --min-decode-tokens 16",
    )
    return 0


def _print_result(args: argparse.Namespace, result: dict[str, object], text: str) -> None:
    print(json.dumps(result) if args.json else text)
