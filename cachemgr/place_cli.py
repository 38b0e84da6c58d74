"""`eldr cache place`: a placement plan of a decode replica's experts on its EP ranks."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachemgr.activity import FloatArray
    from calibration.artifact import Artifact
    from calibration.traces import CountArray

DEFAULT_MOVE_PRICE = 67.0  # planner.MOVE_PRICE, without its imports
DEFAULT_HORIZON_STEPS = 3000  # vLLM's step_interval between two calls of its policy
DEFAULT_HYSTERESIS = 1.5  # MigrationCost.hysteresis


def add_cli(subparsers: Any) -> None:
    """Register `place` among the sub-parsers of `cache`."""
    place = subparsers.add_parser(
        "place",
        help="plan which expert-parallel rank of a decode replica has which experts",
        description="Plans for the experts that a cluster's decode steps are expected to activate, "
        "and compares with other placements. With --from: goes from a running plan to a better "
        "one where that pays for the moves.",
    )
    place.add_argument("--artifact", type=Path, required=True, help="calibration artifact, folder")
    place.add_argument("--cluster", type=int, required=True, help="of the replica, from 0")
    place.add_argument("--batch", type=int, required=True, help="requests that decode in one step")
    place.add_argument("--ranks", type=int, help="EP ranks (with --from: the plan's)")
    place.add_argument(
        "--slots",
        type=int,
        help="slots of all ranks (default: the experts; with --from: the plan's)",
    )
    place.add_argument(
        "--ids",
        type=Path,
        help=".npz with `ids` and `offsets`: plan for the choices recorded of the cluster's "
        "requests, which also tell which experts are active together",
    )
    place.add_argument("--out", type=Path, help="plan file to write (default: none)")
    moves = place.add_argument_group("from a running plan")
    moves.add_argument(
        "--from", dest="from_plan", type=Path, metavar="PLAN", help="the plan that the engine has"
    )
    moves.add_argument(
        "--move-price",
        type=float,
        default=DEFAULT_MOVE_PRICE,
        help="cost of moving an expert, in reads of one from device memory (default %(default)s)",
    )
    moves.add_argument(
        "--horizon",
        type=float,
        default=DEFAULT_HORIZON_STEPS,
        help="decode steps that the new plan will be used for (default %(default)s)",
    )
    moves.add_argument(
        "--hysteresis",
        type=float,
        default=DEFAULT_HYSTERESIS,
        help="least gain, as a multiple of the cost (default %(default)s)",
    )
    place.add_argument("--json", action="store_true", help="print one JSON object")
    place.set_defaults(func=_place)


def _place(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from bench.report import table
    from cachemgr.eplb import eplb, linear, round_robin
    from cachemgr.migration import MigrationCost
    from cachemgr.placement import figures, place, plan_report
    from cachemgr.placement_plan import PlacementPlan, check_slots
    from cachemgr.planner import check_model, make_plan, next_plan
    from calibration.artifact import Artifact

    artifact = Artifact.load(args.artifact)
    layers, experts = artifact.num_layers, artifact.num_experts
    old = None if args.from_plan is None else PlacementPlan.load(args.from_plan)
    if old is not None:
        check_model(old, artifact)
        _same("--ranks", args.ranks, old.num_ranks)
        _same("--slots", args.slots, old.num_slots)
        ranks, slots = old.num_ranks, old.num_slots
    elif args.ranks is None:
        raise ValueError("give --ranks, or --from with the plan that the engine has")
    else:
        ranks, slots = args.ranks, experts if args.slots is None else args.slots
        check_slots(slots, experts, ranks)
    cost = MigrationCost(1.0, args.move_price, args.horizon, args.hysteresis)
    joint_LEE, load_LE = _activity(args, artifact)
    placements = {"linear": linear(layers, experts, ranks, slots)}
    if slots == experts:
        placements["round robin"] = round_robin(layers, experts, ranks)
    placements["EPLB"] = eplb(load_LE, slots, ranks)
    now = time.time()
    if old is None:
        plan = make_plan(artifact, place(joint_LEE, ranks, slots), ranks, 1, now)
    else:
        plan, outcome = next_plan(old, joint_LEE, cost, now)
        placements["current"] = old.physical_to_logical_LP
    placements["ours"] = plan.physical_to_logical_LP
    current_LP = placements.get("current")
    compared = {
        name: figures(joint_LEE, placed_LP, ranks, current_LP=current_LP)
        for name, placed_LP in placements.items()
    }
    if args.out is not None:
        plan.save(args.out)
    if args.json:
        told = {name: asdict(one) for name, one in compared.items()}
        moves = None if old is None else compared["ours"].num_moves
        print(json.dumps({"version": plan.version, "num_moves": moves, "placements": told}))
        return 0
    print(
        f"{artifact.model_id}: {layers} layers x {experts} experts, cluster {args.cluster} of "
        f"{artifact.k}, batch {args.batch}, {slots} slots on {ranks} ranks"
    )
    print(table(plan_report(compared)))
    print(f"bound of the linear program: max E[active] >= {compared['ours'].bound:.3f}")
    if old is not None:
        print(
            f"{outcome.num_moves_L.sum()} of {layers * experts} experts move, in "
            f"{(outcome.num_moves_L > 0).sum()} of {layers} layers"
        )
    if args.out is not None:
        print(f"written: {args.out}, version {plan.version}")
    return 0


def _same(option: str, given: int | None, of_plan: int) -> None:
    if given is not None and given != of_plan:
        raise ValueError(
            f"{option} is {given}, but the plan of --from has {of_plan}: experts cannot move "
            "between engines of different shape; leave --from out for a plan from nothing"
        )


def _activity(args: argparse.Namespace, artifact: Artifact) -> tuple[FloatArray, CountArray | Any]:
    """Joint activity (L, E, E) and loads (L, E) of the cluster's steps."""
    from cachemgr.activity import independent_activity, token_activity
    from cachemgr.planner import cluster_activity

    active_LE = cluster_activity(artifact, args.cluster, args.batch)
    if args.ids is None:
        return independent_activity(active_LE), artifact.cluster_activation_KLE[args.cluster]
    import numpy as np

    from calibration.traces import expert_counts, load_trace

    trace = load_trace(args.ids, num_experts=artifact.num_experts)
    ours, theirs = ((one.num_layers, one.num_experts, one.top_k) for one in (trace, artifact))
    if ours != theirs:
        raise ValueError(
            f"{args.ids} was recorded on (layers, experts, top-k) {ours}, the artifact has "
            f"{theirs}: record the artifact's model"
        )
    counts_NLE = np.stack(
        [expert_counts(trace.tokens(r), trace.num_experts) for r in range(len(trace))]
    )
    nearest_N = (artifact.transform.batch(counts_NLE) @ artifact.centroids_KD.T).argmax(axis=1)
    chosen = np.flatnonzero(nearest_N == args.cluster)
    if not len(chosen):
        raise ValueError(
            f"none of the {len(trace)} requests of {args.ids} is nearest to cluster "
            f"{args.cluster}: take another cluster, or leave --ids out"
        )
    ids_TLk = trace.subset(chosen).ids_TLk
    joint_LEE = token_activity(ids_TLk, trace.num_experts, args.batch)
    return joint_LEE, expert_counts(ids_TLk, trace.num_experts)
