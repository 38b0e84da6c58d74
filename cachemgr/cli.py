"""`eldr cache replay`: recorded routing through expert caches, against their bound."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DEFAULT_POLICIES = "lru,lfu,lrfu,min"


def add_cli(subparsers: Any) -> Any:
    """Register `cache` with its `replay`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned for `eldr`.

    Returns:
        The sub-parsers object of `cache`, for further commands.
    """
    cache = subparsers.add_parser("cache", help="replay expert caches against their bound")
    commands = cache.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_replay(commands)
    return commands


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser(
        "replay",
        help="expert loads of cache policies on a trace, and the least possible",
        description="Replays recorded requests, one at a time, each from an empty cache.",
    )
    replay.add_argument("--ids", type=Path, required=True, help=".npz with `ids` and `offsets`")
    replay.add_argument("--meta", type=Path, help="JSON Lines, one object a request")
    replay.add_argument("--probs", type=Path, help=".npz with the router weights, for gate")
    replay.add_argument("--experts", type=int, help="experts a layer (default: largest id + 1)")
    replay.add_argument("--capacity", type=int, required=True, help="slots of a layer")
    replay.add_argument(
        "--policies",
        default=DEFAULT_POLICIES,
        help=f"names with commas, or all (default {DEFAULT_POLICIES})",
    )
    replay.add_argument(
        "--requests", type=int, help="replay this many requests, drawn by --seed (default: all)"
    )
    replay.add_argument("--seed", type=int, default=1, help="seed of --requests (default 1)")
    replay.add_argument(
        "--lambda",
        dest="lambda_",
        type=float,
        default=0.03,
        help="decay of lrfu and gate, 0 (LFU) to 1 (LRU) (default 0.03)",
    )
    replay.add_argument(
        "--budget",
        type=int,
        default=0,
        help="candidates of a refinement before each access (default 0: none)",
    )
    replay.add_argument("--expert-bytes", type=float, help="bytes of an expert, for MB per token")
    replay.add_argument(
        "--certify", action="store_true", help="prove the bounds optimal, and check the proof"
    )
    replay.add_argument("--json", action="store_true", help="print one JSON object")
    replay.set_defaults(func=_replay)


def _replay(args: argparse.Namespace) -> int:
    import numpy as np

    from cachemgr.replay import POLICIES, load_gate_weights, replay
    from calibration.traces import load_trace

    names = _names(args.policies, POLICIES)
    if args.policies == "all":
        if args.probs is None:
            names.remove("gate")
        names.remove("learned")
    if args.expert_bytes is not None and not args.expert_bytes > 0:
        raise ValueError(f"--expert-bytes must be above 0, got {args.expert_bytes}")
    trace = load_trace(args.ids, args.meta, args.experts)
    weights_TLk = None
    if args.probs is not None:
        trace, weights_TLk = load_gate_weights(args.probs, trace)
    if args.requests is not None:
        if not 1 <= args.requests <= len(trace):
            raise ValueError(
                f"--requests must be in [1, {len(trace)}], the requests of the trace, got "
                f"{args.requests}"
            )
        rng = np.random.default_rng(args.seed)
        chosen = np.sort(rng.permutation(len(trace))[: args.requests])
        if weights_TLk is not None:
            spans = [slice(trace.offsets[r], trace.offsets[r + 1]) for r in chosen]
            weights_TLk = np.concatenate([weights_TLk[span] for span in spans])
        trace = trace.subset(chosen)
    with _Bars() as bars:
        outcomes = replay(
            trace,
            names,
            args.capacity,
            lambda_=args.lambda_,
            budget=args.budget,
            weights_TLk=weights_TLk,
            prove=args.certify,
            progress=bars.start,
        )
    figures = {name: outcome.figures(args.expert_bytes) for name, outcome in outcomes.items()}
    if args.json:
        print(json.dumps(figures))
        return 0
    print(
        f"{len(trace)} requests, {len(trace.ids_TLk)} tokens, {trace.num_layers} layers x "
        f"{trace.num_experts} experts, top-{trace.top_k}, {args.capacity} slots a layer"
    )
    print(_table(figures))
    if args.certify:
        print("bounds certified: an independent check of each schedule and of its dual prices")
    return 0


def _names(text: str, known: tuple[str, ...]) -> list[str]:
    if text == "all":
        return list(known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--policies names none: choose from {', '.join(known)}, or all")
    return list(dict.fromkeys(names))


def _table(figures: dict[str, dict[str, float]]) -> str:
    """One row a policy; with `min`, also its loads over the least possible."""
    from bench.report import table

    least = figures.get("min", {}).get("loads_per_token")
    with_bytes = any("load_mb_per_token" in row for row in figures.values())
    head = ["policy", "hit %", "adj. hit %", "demand/token", "proactive/token"]
    rows = [head + ["MB/token"] * with_bytes + ["x min"] * (least is not None)]
    for name, row in figures.items():
        cells = [name, f"{100 * row['hit']:.1f}", f"{100 * row['adj_hit']:.1f}"]
        cells += [f"{row['demand_per_token']:.2f}", f"{row['proactive_per_token']:.2f}"]
        if with_bytes:
            cells.append(f"{row['load_mb_per_token']:,.0f}")
        if least is not None:
            cells.append(f"{row['loads_per_token'] / least:.3f}" if least else "-")
        rows.append(cells)
    return table(rows)


class _Bars:
    """Progress bars on stderr, one after the other."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, name: str, total: int) -> Any:
        """A new bar; returns the function that moves it."""
        from tqdm import tqdm

        if self._bar is not None:
            self._bar.close()
        self._bar = tqdm(total=total, desc=name, unit="step", disable=None, leave=False)
        return self._bar.update
