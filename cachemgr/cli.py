"""`eldr cache replay` and `eldr cache train`: expert caches on recorded routing."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.parallel import add_jobs

if TYPE_CHECKING:
    from cachemgr.learned import ScoreTable
    from calibration.traces import RoutingTrace

DEFAULT_POLICIES = "lru,lfu,lrfu,min"


def add_cli(subparsers: Any) -> Any:
    """Register `cache` with its `replay` and `train`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned for `eldr`.

    Returns:
        The sub-parsers object of `cache`, for further commands.
    """
    cache = subparsers.add_parser("cache", help="replay expert caches against their bound")
    commands = cache.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_replay(commands)
    _add_train(commands)
    return commands


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="learn a retention score from a trace of the unchanged model",
        description="Fits the score of cache policy learned, and measures it on held-out requests.",
    )
    train.add_argument("--ids", type=Path, required=True, help=".npz with `ids` and `offsets`")
    train.add_argument(
        "--experts", type=int, help="experts a layer (default: as the model, or largest id + 1)"
    )
    train.add_argument(
        "--model", required=True, help="folder of the traced model, or its name if it is not here"
    )
    train.add_argument("--out", type=Path, required=True, help="folder to write")
    train.add_argument(
        "--held-out", type=int, default=100, help="requests to measure on (default 100)"
    )
    train.add_argument("--seed", type=int, default=1, help="seed of --held-out (default 1)")
    train.add_argument(
        "--reach",
        type=int,
        help="layers to look at on each side (default: those whose experts number at most 800)",
    )
    train.add_argument(
        "--batch",
        type=int,
        default=1,
        help="requests that an engine decodes together; a score holds for such batches (default 1)",
    )
    train.add_argument(
        "--capacity",
        type=int,
        help="slots of the measurement (default: 2 x top-k; of batches half of the experts)",
    )
    train.add_argument("--json", action="store_true", help="print one JSON object")
    train.set_defaults(func=_train)


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser(
        "replay",
        help="expert loads of cache policies on a trace, and the least possible",
        description="Replays recorded requests, one at a time, each from an empty cache.",
    )
    replay.add_argument("--ids", type=Path, required=True, help=".npz with `ids` and `offsets`")
    replay.add_argument("--meta", type=Path, help="JSON Lines, one object a request")
    replay.add_argument("--probs", type=Path, help=".npz with the router weights, for gate")
    replay.add_argument("--score", type=Path, help="folder of `eldr cache train`, for learned")
    replay.add_argument("--experts", type=int, help="experts a layer (default: largest id + 1)")
    replay.add_argument("--capacity", type=int, help="slots of a layer")
    replay.add_argument(
        "--policies",
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
    joint = replay.add_argument_group(
        "routing and caching together",
        "Replicas decode batches of requests that a routing policy sent them; a step's demand is "
        "the union of its batch. --policies may be lru, lfu, lrfu (default) and min.",
    )
    joint.add_argument("--joint", action="store_true", help="replay routing, then caches on it")
    joint.add_argument("--replicas", type=int, default=16, help="decode replicas (default 16)")
    joint.add_argument(
        "--concurrency", type=int, default=128, help="requests in flight (default 128)"
    )
    joint.add_argument(
        "--routing",
        default="jsq,band,soft",
        help="routing policies, the reference first (default jsq,band,soft)",
    )
    joint.add_argument(
        "--capacities", default="12,16,20,24", help="slots of a layer (default 12,16,20,24)"
    )
    joint.add_argument(
        "--prefix-tokens", type=int, default=64, help="tokens taken as the prompt (default 64)"
    )
    joint.add_argument("--seeds", type=int, default=2, help="number of seeds (default 2)")
    joint.add_argument(
        "--load-time",
        type=float,
        default=0.0,
        help="time a step waits for each expert it loads, mean over layers; an empty step takes 1, "
        "the read of a resident expert 0.09 (default 0: loads are counted and take no time)",
    )
    joint.add_argument(
        "--routing-lambda", type=float, help="load weight of soft and live (default: as in serving)"
    )
    joint.add_argument(
        "--resident-weight",
        type=float,
        help="what resident experts add in live; 0: caches do not count (default: as in serving)",
    )
    add_jobs(joint)
    replay.set_defaults(func=_replay)


def _replay(args: argparse.Namespace) -> int:
    if args.joint:
        return _joint(args)
    if args.capacity is None:
        raise ValueError("give --capacity, or --joint")
    import numpy as np

    from cachemgr.learned import Learned
    from cachemgr.replay import POLICIES, load_gate_weights, replay
    from calibration.traces import load_trace

    names = _names(args.policies or DEFAULT_POLICIES, POLICIES)
    if args.policies == "all":
        if args.probs is None:
            names.remove("gate")
        if args.score is None:
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
    table = _score(args, trace)
    learned = None if table is None else partial(Learned, table)
    with _Bars() as bars:
        outcomes = replay(
            trace,
            names,
            args.capacity,
            lambda_=args.lambda_,
            budget=args.budget,
            weights_TLk=weights_TLk,
            learned=learned,
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


def _score(args: argparse.Namespace, trace: RoutingTrace) -> ScoreTable | None:
    """The score of --score, checked against the trace."""
    from cachemgr.learned import ScoreTable

    if args.score is None:
        return None
    table = ScoreTable.load(args.score)
    table.check(trace.num_layers, trace.num_experts)
    return table


def _joint(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from bench.report import table
    from cachemgr.joint import POLICIES, joint, num_runs, priced, priced_rows, rows
    from calibration.replay import Arrivals
    from calibration.replay_report import Settings
    from calibration.step_time import StepTimeLaw
    from calibration.traces import load_trace

    names = _names(args.policies or "lrfu", POLICIES)
    if args.policies == "all" and args.score is None:
        names.remove("learned")
    routing = _names(args.routing, ())
    try:
        capacities = [int(text) for text in args.capacities.split(",")]
    except ValueError:
        raise ValueError(
            f"--capacities must be numbers with commas, got {args.capacities!r}"
        ) from None
    if args.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {args.seeds}")
    settings = Settings(
        tuple(routing),
        num_replicas=args.replicas,
        arrivals=Arrivals(concurrency=args.concurrency),
        prefix_tokens=args.prefix_tokens,
        seeds=tuple(range(args.seeds)),
        num_warmup=0 if args.load_time == 0 else args.concurrency,
        law=StepTimeLaw(per_load=args.load_time),
        lambda_=args.routing_lambda,
        resident_weight=args.resident_weight,
        caches_experts=True,
        **({} if args.requests is None else {"num_requests": args.requests}),
    )
    trace = load_trace(args.ids, args.meta, args.experts)
    if args.load_time > 0:
        if len(names) != 1:
            raise ValueError(f"--load-time replays one cache policy, got {', '.join(names)}")
        with _Bars() as bars:
            advance = bars.start("routing x caching", args.seeds * len(routing) * len(capacities))
            figures = priced(
                trace,
                settings,
                capacities,
                names[0],
                args.lambda_,
                _score(args, trace),
                tell=lambda text: advance(1),
                jobs=args.jobs,
            )
        if args.json:
            print(json.dumps({names[0]: figures}))
            return 0
        print(
            f"{args.replicas} replicas, {args.concurrency} requests in flight, {args.seeds} seeds, "
            f"cache policy {names[0]}, {args.load_time:g} a load"
        )
        for capacity in capacities:
            print(table(priced_rows(figures, capacity, routing[0])))
        return 0
    with _Bars() as bars:
        advance = bars.start("routing x caching", num_runs(settings, capacities))
        matrix = joint(
            trace,
            settings,
            capacities,
            names,
            args.lambda_,
            _score(args, trace),
            tell=lambda text: advance(1),
            jobs=args.jobs,
        )
    if args.json:
        cells = {
            name: {
                policy: {str(capacity): asdict(cell) for capacity, cell in cells.items()}
                for policy, cells in by_routing.items()
            }
            for name, by_routing in matrix.items()
        }
        print(json.dumps(cells))
        return 0
    print(
        f"{args.replicas} replicas, {args.concurrency} requests in flight, {args.seeds} seeds: "
        f"expert loads per token, all layers"
    )
    for name in names:
        print(table(rows(matrix, name, routing[0])))
    return 0


def _train(args: argparse.Namespace) -> int:
    from app.model_facts import model_facts
    from cachemgr.joint import Cell, batch_demands, fill
    from cachemgr.learned import Learned
    from cachemgr.policies import check_capacity
    from cachemgr.replay import replay
    from cachemgr.training import split, train
    from calibration.traces import load_trace

    facts = model_facts(args.model) if Path(args.model).is_dir() else None
    num_experts = args.experts if args.experts or facts is None else facts.num_experts
    trace = load_trace(args.ids, num_experts=num_experts)
    if facts is not None and (trace.num_layers, trace.num_experts) != (
        facts.num_moe_layers,
        facts.num_experts,
    ):
        raise ValueError(
            f"{args.ids} has {trace.num_layers} layers x {trace.num_experts} experts, {args.model} "
            f"{facts.num_moe_layers} x {facts.num_experts}: give the model that was traced"
        )
    if args.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {args.batch}")
    default = 2 * trace.top_k if args.batch == 1 else trace.num_experts // 2
    capacity = default if args.capacity is None else args.capacity
    check_capacity(capacity, trace.num_experts, trace.top_k)
    held_out, training = split(trace, args.held_out, args.seed)
    with _Bars() as bars:
        table = train(
            training,
            args.model,
            fingerprint=None if facts is None else facts.fingerprint,
            batch=args.batch,
            seed=args.seed,
            reach=args.reach,
            progress=bars.start("train", len(training.ids_TLk)),
        )
        names = ["lru", "lfu", "lrfu", "learned", "min"]
        if args.batch > 1:
            demands = batch_demands(held_out, args.batch, args.seed)
            num_tokens = len(demands.ids_SRU) * args.batch
            figures = {}
            for name in names:
                fill(cell := Cell([], [], []), demands, num_tokens, name, capacity, 0.03, table)
                figures[name] = {"loads_per_token": cell.loads_per_token[0]}
        else:
            outcomes = replay(
                held_out, names, capacity, learned=partial(Learned, table), progress=bars.start
            )
            figures = {name: outcome.figures() for name, outcome in outcomes.items()}
    loads = {name: row["loads_per_token"] for name, row in figures.items()}
    gap = loads["lrfu"] - loads["min"]
    closed = (loads["lrfu"] - loads["learned"]) / gap if gap else float("nan")
    table.provenance.update(
        seed=args.seed,
        held_out_requests=len(held_out),
        capacity=capacity,
        loads_per_token={name: round(value, 4) for name, value in loads.items()},
    )
    table.save(args.out)
    if args.json:
        print(json.dumps({"closed": closed, **figures}))
        return 0
    print(f"{len(held_out)} held-out requests, batch {args.batch}, {capacity} slots a layer")
    if args.batch > 1:
        print(", ".join(f"{name} {value:.2f}" for name, value in loads.items()), "loads a token")
    else:
        print(_table(figures))
    print(f"{closed:.1%} of the loads between lrfu and min saved; written: {args.out}")
    return 0


def _names(text: str, known: tuple[str, ...]) -> list[str]:
    if text == "all":
        return list(known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{text!r} names no policy{_choice(known)}")
    return list(dict.fromkeys(names))


def _choice(known: tuple[str, ...]) -> str:
    return f": choose from {', '.join(known)}" if known else ""


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
