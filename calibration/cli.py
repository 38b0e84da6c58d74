"""`eldr calibrate fit` and `eldr calibrate show`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXIT_BAD_INPUT = 2


def add_cli(subparsers: Any) -> Any:
    """Register `calibrate` with its `fit` and `show`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned for `eldr`.

    Returns:
        The sub-parsers object of `calibrate`, for further commands. Every command sets `func`, a
        function of the parsed arguments that returns the exit code.
    """
    calibrate = subparsers.add_parser("calibrate", help="fit and inspect routing artifacts")
    commands = calibrate.add_subparsers(dest="calibrate_command", required=True)

    fit = commands.add_parser("fit", help="fit an artifact to a capture")
    fit.add_argument("capture", type=Path, metavar="DIR", help="capture folder")
    fit.add_argument("--k", type=int, required=True, help="clusters: one per decode replica")
    fit.add_argument("--out", type=Path, required=True, help="artifact folder to write")
    fit.add_argument("--tau", type=float, default=0.1, help="band width in [0, 1] (default 0.1)")
    fit.add_argument("--seed", type=int, default=1, help="seed (default 1)")
    fit.add_argument("--workload", default="unnamed", help="name of the traffic")
    fit.set_defaults(func=lambda args: _guarded(_fit, args))

    show = commands.add_parser("show", help="print an artifact and draw it")
    show.add_argument("artifact", type=Path, metavar="ARTIFACT", help="artifact folder")
    show.add_argument("--out", type=Path, default=None, help="folder for the pictures")
    show.add_argument(
        "--capture", type=Path, default=None, help="capture to draw instead of the reservoir"
    )
    show.set_defaults(func=lambda args: _guarded(_show, args))
    return commands


def _fit(args: argparse.Namespace) -> None:
    from calibration.counts import Capture
    from calibration.fit import fit
    from calibration.show import describe

    artifact = fit(
        Capture.load(args.capture), args.k, tau=args.tau, seed=args.seed, workload=args.workload
    )
    artifact.save(args.out)
    print(describe(artifact))
    print(f"\nwritten: {args.out}")


def _show(args: argparse.Namespace) -> None:
    from calibration.artifact import Artifact
    from calibration.counts import Capture
    from calibration.show import show

    capture = None if args.capture is None else Capture.load(args.capture)
    for path in show(Artifact.load(args.artifact), capture, args.out):
        print(f"written: {path}")


def _guarded(command: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Exit code of a command; bad input ends with one line on stderr instead of a traceback."""
    try:
        command(args)
    except (ValueError, OSError) as err:
        if getattr(args, "traceback", False):
            raise
        print(f"eldr calibrate {args.calibrate_command}: error: {err}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0
