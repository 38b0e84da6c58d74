"""Experts of one decode replica onto its EP ranks, so that no rank has many active experts at once.

A decode step reads the weights of every expert that the batch activates, and the slowest rank ends
it: what counts is E[max over ranks of A_r], A_r = active experts on rank r (balancing activated
experts, not tokens, is METRO's idea, which ELDR takes up). The maximum depends on the means of the
A_r, on their spreads, and on how they move together. The planner minimises

    E[sum over r of A_r^2]

per layer. It needs only E[a_e a_f], the joint activity of two experts, and has a cheap exact change
under a swap. For independent experts it is the evenness of expected actives and nothing else; with
recorded joint activity it also parts experts that are active together. `expected_max_active`
estimates the goal itself from the same numbers. How good both are is measured in README.md.

Axes: L MoE layers, E logical experts, P physical experts (slots, in rank order), R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cachemgr.activity import (
    Dispatch,
    FloatArray,
    check_joint,
    copy_activity,
    expected_active,
    expected_max_active,
    lower_bound,
    physical_joint,
)
from cachemgr.placement_plan import IntArray, check_slots, num_moves

_NO_GAIN = 1e-9
_TINY = 1e-12
_MAX_SWAPS = 10_000


def place(
    joint_LEE: FloatArray,
    num_ranks: int,
    num_slots: int | None = None,
    *,
    dispatch: Dispatch = "split",
    restarts: int = 2,
    seed: int = 0,
) -> IntArray:
    """A placement from nothing.

    Heaviest first onto the lightest rank, then swaps of two experts while the best one improves
    the objective; the same from `restarts` random placements; the best result is taken. Spare
    slots: with "single", to the expert whose copies are active most; with "split" to the expert
    whose further copy adds the least activity, since there a copy never takes activity away. No
    rank gets two copies of one expert.

    Args:
        joint_LEE: E[a_e a_f]; float64 (L, E, E).
        num_ranks: R.
        num_slots: P, a multiple of R, from E to E * R; None for E.
        dispatch: how the engine uses copies.
        restarts: random starts besides the greedy one; >= 0.
        seed: of the random starts; the same arguments give the same placement.

    Returns:
        Expert of each slot; int64 (L, P), ascending within a rank.

    Raises:
        ValueError: the numbers do not fit, or joint_LEE is no joint activity.
    """
    num_experts = check_joint(joint_LEE)
    num_slots = num_experts if num_slots is None else num_slots
    check_slots(num_slots, num_experts, num_ranks)
    if num_slots > num_experts * num_ranks:
        raise ValueError(
            f"{num_slots} slots are more than one per expert and rank "
            f"({num_experts} x {num_ranks}): ask for at most {num_experts * num_ranks}"
        )
    if restarts < 0:
        raise ValueError(f"restarts must be >= 0, got {restarts}")
    rng = np.random.default_rng(seed)
    placed_LP = np.empty((len(joint_LEE), num_slots), dtype=np.int64)
    for layer, joint_EE in enumerate(joint_LEE):
        expert_P = _items(joint_EE.diagonal(), num_slots, num_ranks, dispatch)
        joint_PP = physical_joint(joint_EE, expert_P, dispatch)
        starts = [_heaviest_first(expert_P, joint_PP.diagonal(), num_ranks)]
        starts += [
            _heaviest_first(expert_P, rng.random(num_slots), num_ranks) for _ in range(restarts)
        ]
        results = [_descend_to_end(joint_PP, expert_P, start_P, num_ranks) for start_P in starts]
        best_P = min(results, key=lambda rank_P: _objective(joint_PP, rank_P))
        placed_LP[layer] = in_slots(expert_P, best_P)
    return placed_LP


@dataclass(frozen=True, slots=True)
class Figures:
    """How even a placement is. Active experts are those of the fullest rank, per step.

    Attributes:
        max_active: estimate of their number, mean over layers.
        max_active_sum: the same, summed over layers.
        max_expected: experts active on the rank that expects most, mean over layers.
        bound: no placement on as many slots has a smaller `max_expected`.
        balance: `max_expected` over its mean over ranks, mean over layers; 1 is even.
        num_moves: experts that a rank must receive, all layers; None: from nowhere.
    """

    max_active: float
    max_active_sum: float
    max_expected: float
    bound: float
    balance: float
    num_moves: int | None = None


def figures(
    joint_LEE: FloatArray,
    placement_LP: IntArray,
    num_ranks: int,
    *,
    current_LP: IntArray | None = None,
    dispatch: Dispatch = "split",
) -> Figures:
    """Figures of one placement.

    Args:
        joint_LEE: E[a_e a_f]; float64 (L, E, E).
        placement_LP: expert of each slot; int64 (L, P).
        num_ranks: R.
        current_LP: the placement that moves are counted from.
        dispatch: how the engine uses copies.

    Raises:
        ValueError: the placement does not belong to the joint activity.
    """
    goal_L = expected_max_active(joint_LEE, placement_LP, num_ranks, dispatch)
    mean_LR = expected_active(joint_LEE, placement_LP, num_ranks, dispatch)
    active_LE = joint_LEE.diagonal(axis1=1, axis2=2)
    bound_L = lower_bound(active_LE, num_ranks, placement_LP.shape[1], dispatch)
    moves = None
    if current_LP is not None:
        moves = int(num_moves(current_LP, placement_LP, num_ranks).sum())
    return Figures(
        max_active=float(goal_L.mean()),
        max_active_sum=float(goal_L.sum()),
        max_expected=float(mean_LR.max(axis=1).mean()),
        bound=float(bound_L.mean()),
        balance=rank_balance(mean_LR),
        num_moves=moves,
    )


def rank_balance(active_LR: FloatArray) -> float:
    """Active experts on the fullest rank over the mean of ranks, mean over layers; 1 is even."""
    even_L = np.maximum(active_LR.mean(axis=1), _TINY)
    return float((np.maximum(active_LR.max(axis=1), _TINY) / even_L).mean())


def plan_report(compared: dict[str, Figures]) -> list[tuple[str, ...]]:
    """Rows of a table of placements by name; the first row is the head.

    Returns:
        Per placement: estimated active experts on the fullest rank, mean over layers and summed,
        the largest expected actives, its gap to the linear bound in percent, and, where they were
        counted, moves.
    """
    head = ("placement", "E[max active]", "sum over layers", "max E[active]", "gap to bound %")
    has_moves = any(one.num_moves is not None for one in compared.values())
    rows: list[tuple[str, ...]] = [(*head, "moves") if has_moves else head]
    for name, one in compared.items():
        gap = 100 * (one.max_expected / max(one.bound, _TINY) - 1)
        row: tuple[str, ...] = (
            name,
            f"{one.max_active:.3f}",
            f"{one.max_active_sum:.1f}",
            f"{one.max_expected:.3f}",
            f"{gap:.2f}",
        )
        rows.append((*row, str(one.num_moves)) if has_moves else row)
    return rows


def _items(active_E: FloatArray, num_slots: int, num_ranks: int, dispatch: Dispatch) -> IntArray:
    """Expert of each slot, not yet on ranks: one copy each, spare slots where they serve best."""
    copies_E = np.ones(len(active_E), dtype=np.int64)
    for _ in range(num_slots - len(active_E)):
        now_E = copy_activity(active_E, copies_E, dispatch)
        if dispatch == "single":
            merit_E = now_E
        else:
            more_E = copy_activity(active_E, copies_E + 1, dispatch)
            merit_E = copies_E * now_E - (copies_E + 1) * more_E
        copies_E[np.argmax(np.where(copies_E < num_ranks, merit_E, -np.inf))] += 1
    return np.repeat(np.arange(len(active_E), dtype=np.int64), copies_E)


def _heaviest_first(expert_P: IntArray, weight_P: FloatArray, num_ranks: int) -> IntArray:
    """Rank of each item: heaviest first to the lightest rank with room; int64 (P,).

    Experts with copies come first, each to as many ranks with most room: an order that cannot get
    stuck with two copies for one rank.
    """
    room_R = np.full(num_ranks, len(expert_P) // num_ranks)
    load_R = np.zeros(num_ranks)
    rank_P = np.empty(len(expert_P), dtype=np.int64)
    copies_E = np.bincount(expert_P)

    def put(items: IntArray | np.intp, ranks: IntArray | np.intp) -> None:
        rank_P[items] = ranks
        room_R[ranks] -= 1
        load_R[ranks] += weight_P[items]

    for expert in np.flatnonzero(copies_E > 1):
        put(np.flatnonzero(expert_P == expert), np.lexsort((load_R, -room_R))[: copies_E[expert]])
    for item in np.argsort(-weight_P, kind="stable"):
        if copies_E[expert_P[item]] == 1:
            put(item, np.argmin(np.where(room_R > 0, load_R, np.inf)))
    return rank_P


def descend(
    joint_PP: FloatArray, expert_P: IntArray, rank_P: IntArray, num_ranks: int
) -> Iterator[IntArray]:
    """Ranks of the items after each swap, the best swap first, until none improves."""
    # Two copies in one rank cost more than all else together.
    cost_PP = joint_PP + len(expert_P) * (expert_P[:, None] == expert_P)
    np.fill_diagonal(cost_PP, joint_PP.diagonal())
    own_P = cost_PP.diagonal()
    pair_PP = 2 * (own_P[:, None] + own_P) - 4 * cost_PP
    rank_P = rank_P.copy()
    with_PR = cost_PP @ np.eye(num_ranks)[rank_P]  # cost of an item with the items of each rank
    items = np.arange(len(rank_P))
    for _ in range(_MAX_SWAPS):
        move_PP = with_PR[:, rank_P] - with_PR[items, rank_P][:, None]  # item to another's rank
        change_PP = 2 * (move_PP + move_PP.T) + pair_PP
        change_PP[rank_P[:, None] == rank_P] = 0.0
        i, j = divmod(int(change_PP.argmin()), len(rank_P))
        if change_PP[i, j] > -_NO_GAIN:
            return
        difference_P = cost_PP[:, j] - cost_PP[:, i]
        with_PR[:, rank_P[i]] += difference_P
        with_PR[:, rank_P[j]] -= difference_P
        rank_P[i], rank_P[j] = rank_P[j], rank_P[i]
        yield rank_P.copy()


def _descend_to_end(
    joint_PP: FloatArray, expert_P: IntArray, rank_P: IntArray, num_ranks: int
) -> IntArray:
    for stage_P in descend(joint_PP, expert_P, rank_P, num_ranks):
        rank_P = stage_P
    return rank_P


def in_slots(expert_P: IntArray, rank_P: IntArray) -> IntArray:
    """Experts of the slots, ascending within a rank, from the rank of each item."""
    order_P: IntArray = np.lexsort((expert_P, rank_P))
    return expert_P[order_P]


def _objective(joint_PP: FloatArray, rank_P: IntArray) -> float:
    """E[sum over ranks of A_r^2]."""
    return float(joint_PP[rank_P[:, None] == rank_P].sum())
