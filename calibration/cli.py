"""`eldr calibrate fit`, `eldr calibrate show` and `eldr calibrate compare`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibration.transforms import ExpertUse

EXIT_BAD_INPUT = 2


def add_cli(subparsers: Any) -> Any:
    """Register `calibrate` with its `fit`, `show` and `compare`.

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
    _add_compare(commands)
    return commands


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="compare signature transforms",
        description="How well six signatures of the prompt predict the experts of decode: fitted "
        "on one half of the requests, measured on the other.",
    )
    compare.add_argument("capture", type=Path, nargs="?", metavar="DIR", help="capture folder")
    compare.add_argument("--ids", type=Path, help="instead of DIR: a trace, .npz")
    compare.add_argument("--meta", type=Path, help="JSON Lines with each request's `domain`")
    compare.add_argument(
        "--probs", type=Path, help=".npz with router weights; only its requests are taken"
    )
    compare.add_argument("--experts", type=int, help="experts a layer (default: largest id + 1)")
    compare.add_argument(
        "--prefix-tokens",
        type=int,
        default=64,
        help="first tokens of a request that stand for its prompt, unless the trace says "
        "(default 64)",
    )
    compare.add_argument(
        "--min-decode-tokens",
        type=int,
        help="leave out requests with fewer tokens after the prompt (default: --prefix-tokens)",
    )
    compare.add_argument("--seeds", type=int, default=5, help="number of splits (default 5)")
    compare.add_argument("--pairs", type=int, default=30_000, help="pairs drawn (default 30000)")
    compare.add_argument("--k", type=int, default=8, help="clusters in the plot (default 8)")
    compare.add_argument("--title", help="heading of the page (default: the input's name)")
    compare.add_argument(
        "--out", type=Path, default=Path("compare.html"), help="page to write (compare.html)"
    )
    compare.add_argument("--json", action="store_true", help="print one JSON object")
    compare.set_defaults(func=lambda args: _guarded(_compare, args))


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


def _compare(args: argparse.Namespace) -> None:
    from bench.report import table
    from calibration.compare import compare
    from calibration.compare_html import render
    from calibration.storage import write_text

    if args.seeds < 1:
        raise ValueError(f"--seeds must be >= 1, got {args.seeds}")
    use, source, facts = _expert_use(args)
    result = compare(use, seeds=range(1, args.seeds + 1), k=args.k, num_pairs=args.pairs)
    title = f"Signature transforms on {args.title or source}"
    write_text(args.out, render(result, title, facts))
    if args.json:
        print(json.dumps({"source": source, **facts, **result.as_dict(), "page": str(args.out)}))
        return
    shape = f"{result.num_layers} layers x {result.num_experts} experts"
    print(f"{source}: {result.num_requests} requests, {shape}, {args.seeds} seeds")
    print("".join(f"{name}: {value}\n" for name, value in facts.items()))
    print(table(result.table()))
    print(f"\nwritten: {args.out}")


def _expert_use(args: argparse.Namespace) -> tuple[ExpertUse, str, dict[str, str]]:
    """What to compare on, its name, and how it was made."""
    from calibration.counts import Capture
    from calibration.traces import load_trace
    from calibration.transforms import ExpertUse

    if (args.capture is None) == (args.ids is None):
        raise ValueError("give either a capture folder or a trace (--ids), and not both")
    if args.capture is not None:
        if args.meta is not None or args.probs is not None:
            raise ValueError("--meta and --probs belong to a trace (--ids), not to a capture")
        capture = Capture.load(args.capture)
        return ExpertUse.from_capture(capture), capture.model_id, {"gate values": "not recorded"}
    trace = load_trace(args.ids, args.meta, args.experts, args.probs)
    prefix = args.prefix_tokens
    least = prefix if args.min_decode_tokens is None else args.min_decode_tokens
    use = ExpertUse.from_trace(trace, prefix, least)
    is_known = trace.prefix_tokens_N is not None
    facts = {
        "prompt": "as recorded" if is_known else f"the first {prefix} tokens",
        "decode": f"the rest, at least {least} tokens (requests left out: {len(trace) - len(use)})",
        "gate values": "not recorded" if use.gates == "none" else f"of {use.gates}",
    }
    return use, args.ids.stem, facts


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
