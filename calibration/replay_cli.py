"""`eldr replay`: recorded requests through the live router's policies."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibration.parallel import add_jobs

DEFAULT_PREFIX = 64
DEFAULT_POLICIES = "jsq,rr,p2c,random,domain,band,soft,live"


def add_cli(subparsers: Any) -> None:
    """Register `replay` among the sub-parsers of `eldr`."""
    parser = subparsers.add_parser(
        "replay",
        help="route recorded requests by any policy, and compare",
        description="Replays recorded requests on virtual time through the live router's policies.",
    )
    parser.add_argument("--ids", type=Path, required=True, help=".npz with `ids` and `offsets`")
    parser.add_argument("--meta", type=Path, help="JSON Lines with each request's `domain`")
    parser.add_argument("--experts", type=int, help="experts a layer (default: largest id + 1)")
    parser.add_argument("--replicas", type=int, default=8, help="decode replicas (default 8)")
    parser.add_argument(
        "--concurrency", type=int, default=128, help="requests in flight (default 128)"
    )
    parser.add_argument(
        "--prefix-tokens",
        type=int,
        help="tokens taken as the prompt (default: the prompt where the trace knows it, else 64)",
    )
    parser.add_argument(
        "--min-tokens", type=int, help="shortest request to take (default: twice the prefix)"
    )
    parser.add_argument("--policies", default=DEFAULT_POLICIES, help=f"default {DEFAULT_POLICIES}")
    parser.add_argument(
        "--reference", help="policy to compare with (default: the strongest load balancer)"
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default 5)")
    parser.add_argument(
        "--requests", type=int, help="measured requests a run (default: ten times --concurrency)"
    )
    parser.add_argument(
        "--arrivals",
        choices=("closed", "poisson", "bursty"),
        default="closed",
        help="closed loop, or open ones (default closed)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        help="requests per unit of time of open arrivals (default: what keeps --concurrency "
        "in flight under jsq)",
    )
    parser.add_argument("--tau", type=float, default=0.1, help="band width (default 0.1)")
    parser.add_argument(
        "--lambda",
        dest="lambda_",
        type=float,
        help="load weight (default 0.5 in soft, 0.4 in live)",
    )
    parser.add_argument("--max-load", type=float, help="load bound of live (default 1.5)")
    parser.add_argument(
        "--draw",
        choices=("shuffle", "independent"),
        default="shuffle",
        help="serve every request once before any comes again, or draw with replacement: then "
        "copies of one run at the same time, which flatters locality (default shuffle)",
    )
    parser.add_argument(
        "--start",
        choices=("spread", "together"),
        default="spread",
        help="start from a steady state, or all requests at their first token (default spread)",
    )
    parser.add_argument(
        "--layers",
        choices=("all", "selected"),
        default="all",
        help="layers of the signature (default all)",
    )
    parser.add_argument(
        "--step-law",
        type=_law,
        metavar="BASE,REQUEST,DISTINCT",
        default="1,0.01,0.09",
        help="time of a step: base, per request, per distinct expert (default 1,0.01,0.09)",
    )
    parser.add_argument(
        "--bound",
        action="store_true",
        help="also search for the assignment that a clairvoyant would choose (slow)",
    )
    parser.add_argument(
        "--scenario",
        choices=("pool-change", "drift"),
        help="change the pool (to --new-replicas) or the domains in the middle of a run, with "
        "--policies' first policy against jsq",
    )
    parser.add_argument("--new-replicas", type=int, help="decode replicas after the change")
    add_jobs(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=_command)


def _law(text: str) -> Any:
    from calibration.step_time import StepTimeLaw

    try:
        base, per_request, per_distinct = (float(part) for part in text.split(","))
        return StepTimeLaw(base, per_request, per_distinct)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"need three numbers such as 1,0.01,0.09: {err}") from err


def _command(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from bench.report import table
    from calibration import replay_report
    from calibration.replay import Arrivals
    from calibration.traces import load_trace
    from router.policy import make_policy

    policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    if not policies:
        raise ValueError(f"--policies must name a policy, got {args.policies!r}")
    for name in ("seeds", "replicas", "concurrency"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be >= 1, got {getattr(args, name)}")
    if args.reference is not None and args.reference not in policies:
        raise ValueError(
            f"--reference {args.reference!r} must be one of --policies {args.policies}"
        )
    for name in policies:
        make_policy(
            name, tau=args.tau, lambda_=args.lambda_, max_load=args.max_load
        )  # refuses before anything runs
    trace = load_trace(args.ids, args.meta, args.experts)
    if args.scenario is not None:
        from calibration import elasticity

        if args.jobs is not None:
            raise ValueError(f"--scenario runs in one process: leave out --jobs {args.jobs}")
        policy = "soft" if args.policies == DEFAULT_POLICIES else policies[0]
        return elasticity.command(args, trace, policy)
    prefix_tokens = args.prefix_tokens
    if prefix_tokens is None and trace.prefix_tokens_N is None:
        prefix_tokens = DEFAULT_PREFIX
    settings = replay_report.Settings(
        policies=policies,
        num_replicas=args.replicas,
        arrivals=Arrivals("closed", args.concurrency),
        prefix_tokens=prefix_tokens,
        min_tokens=args.min_tokens,
        seeds=range(args.seeds),
        num_requests=10 * args.concurrency if args.requests is None else args.requests,
        num_warmup=2 * args.concurrency,
        law=args.step_law,
        tau=args.tau,
        lambda_=args.lambda_,
        max_load=args.max_load,
        draw=args.draw,
        start=args.start,
        layers=args.layers,
    )
    if args.arrivals != "closed":
        rate = replay_report.open_rate(trace, settings) if args.rate is None else args.rate
        arrivals = Arrivals(args.arrivals, args.concurrency, rate)
        settings = replace(settings, arrivals=arrivals)
    with tqdm(total=len(policies) * args.seeds, desc="replay", unit="run") as bar:

        def on_run(policy: str, seed: int) -> None:
            bar.set_postfix_str(f"{policy}, seed {seed}")
            bar.update()

        figures = replay_report.run(trace, settings, on_run, args.jobs)
    report = replay_report.summary(figures, settings, args.reference)
    if args.bound:
        seeds = tqdm(settings.seeds, desc="clairvoyant", unit="seed")
        report["clairvoyant"] = replay_report.clairvoyant(trace, settings, seeds)
    if args.json:
        print(json.dumps(report))
        return 0
    print(
        f"{args.replicas} replicas x {args.concurrency / args.replicas:g} requests, "
        f"{args.arrivals}, {args.seeds} seeds x {settings.num_requests} requests; change against "
        f"{report['reference']} with its 95 % interval"
    )
    print(table(replay_report.rows(report)))
    if args.bound:
        bound = report["clairvoyant"]["distinct"]
        print(f"\nclairvoyant, even loads: {replay_report.change(bound['mean'], bound['ci'])}")
    return 0
