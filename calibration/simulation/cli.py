"""`eldr simulate`: a whole deployment on virtual time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from calibration.parallel import add_jobs


def add_cli(subparsers: Any) -> None:
    """Register `simulate` among the sub-parsers of `eldr`."""
    parser = subparsers.add_parser(
        "simulate",
        help="a whole deployment on virtual time",
        description="Simulates prefill, routing, decode, autoscaling and failures with the live "
        "router's own objects. CONFIG is a YAML file such as those in examples/simulate/.",
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="YAML file")
    parser.add_argument("--seeds", type=int, help="number of seeds, instead of the file's")
    parser.add_argument(
        "--rates", type=_numbers, metavar="R,R", help="requests per second, instead of the file's"
    )
    parser.add_argument("--policies", metavar="P,P", help="policies, instead of the file's")
    add_jobs(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    parser.add_argument("--laws", action="store_true", help="list the named step-time laws")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of CONFIG")
    parser.set_defaults(func=_command)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"need numbers such as 20,100: {err}") from err


def _command(args: argparse.Namespace) -> int:
    from threadpoolctl import threadpool_limits
    from tqdm import tqdm

    from calibration.simulation import experiment, html, report
    from calibration.simulation.config import SimulationConfig, load_simulation

    if args.schema:
        print(json.dumps(SimulationConfig.model_json_schema(by_alias=True), indent=2))
        return 0
    if args.laws:
        print(_laws())
        return 0
    if args.config is None:
        raise ValueError("give a CONFIG such as examples/simulate/8p16d.yaml")
    config = load_simulation(args.config)
    given = {
        "seeds": args.seeds,
        "traffic.rates": args.rates,
        "router.policies": args.policies and [name.strip() for name in args.policies.split(",")],
    }
    config = config.with_values({k: v for k, v in given.items() if v is not None}, keep_sweep=True)
    with (
        threadpool_limits(limits=1),
        tqdm(total=experiment.num_runs(config), desc="simulate", unit="run") as bar,
    ):

        def on_run(text: str) -> None:
            bar.set_postfix_str(text)
            bar.update()

        outcome = experiment.run_all(config, on_run, args.jobs)
    summary = experiment.summary(config, outcome)
    if args.html:
        html.write_html(args.html, summary, outcome.settings)
    print(json.dumps(summary) if args.json else report.text(summary))
    if args.html and not args.json:
        print(f"\nwrote {args.html}")
    return 0


def _laws() -> str:
    from bench.report import table
    from calibration.simulation.laws import LAWS

    rows = [["law", "base ms", "per request ms", "per distinct ms"]]
    for name, known in LAWS.items():
        law = known.law
        terms = (law.base, law.per_request, law.per_distinct)
        rows.append([name, *(f"{1e3 * term:.3f}" for term in terms)])
    origins = "\n".join(f"{name}: {known.origin}" for name, known in LAWS.items())
    return f"{table(rows)}\n\n{origins}"
