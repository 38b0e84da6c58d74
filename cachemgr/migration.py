"""From a running placement to a better one, where the gain pays for the moves.

Axes: L MoE layers, E logical experts, P physical experts (slots, in rank order), R ranks,
N candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cachemgr.activity import Dispatch, FloatArray, check_pair, expected_max_active, physical_joint
from cachemgr.placement import descend, in_slots, place
from cachemgr.placement_plan import IntArray, held_by_both, num_moves, slot_ranks


@dataclass(frozen=True, slots=True)
class MigrationCost:
    """What a move costs and what it brings, in one unit of time.

    Attributes:
        step_s_per_active: seconds that one more active expert on the fullest rank adds to a step.
        move_s: seconds of service lost by moving one expert into a rank (its bytes over the link's
            rate, times the part that serving notices).
        horizon_steps: steps that the new placement will be used for.
        hysteresis: the gain must be at least this many times the cost; 1 moves whatever pays.
    """

    step_s_per_active: float
    move_s: float
    horizon_steps: float
    hysteresis: float = 1.5

    def __post_init__(self) -> None:
        for name in ("step_s_per_active", "move_s", "horizon_steps", "hysteresis"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"migration cost: {name} must be >= 0 and finite, got {value}")

    def net_s(self, gain: float, num_moves: int) -> float:
        """Seconds won over the horizon, moves counted `hysteresis` times.

        Args:
            gain: expected active experts fewer on the fullest rank, per step.
            num_moves: experts moved into a rank.
        """
        won_s = gain * self.step_s_per_active * self.horizon_steps
        return won_s - self.hysteresis * num_moves * self.move_s


@dataclass(frozen=True, eq=False)
class Replan:
    """Outcome of `replan`.

    Attributes:
        physical_to_logical_LP: expert of each slot; int64 (L, P). A layer that is not worth moving
            is as it was.
        num_moves_L: experts that a rank must receive; int64 (L,).
        gain_L: estimate of active experts fewer on the fullest rank, per step; float64 (L,).
    """

    physical_to_logical_LP: IntArray
    num_moves_L: IntArray
    gain_L: FloatArray


def replan(
    old_LP: IntArray,
    joint_LEE: FloatArray,
    num_ranks: int,
    cost: MigrationCost,
    *,
    dispatch: Dispatch = "split",
    restarts: int = 2,
    seed: int = 0,
) -> Replan:
    """The placement to go to from a running one; layers decide for themselves.

    Candidates of a layer: to stay, every stage of a descent by swaps from the old placement, and a
    fresh placement with ranks relabelled to need the fewest moves. The one with the largest
    `cost.net_s` is taken, to stay where none is positive.

    Args:
        old_LP: expert of each slot now; int64 (L, P).
        joint_LEE: E[a_e a_f] of the traffic to come; float64 (L, E, E).
        num_ranks: R, as the old placement has it; after a change of ranks there is nothing to keep
            and `place` is meant.
        cost: what moves cost.
        dispatch: how the engine uses copies.
        restarts: as for `place`.
        seed: as for `place`.

    Raises:
        ValueError: placement and joint activity do not belong together.
    """
    check_pair(joint_LEE, old_LP, num_ranks)
    num_slots = old_LP.shape[1]
    fresh_LP = place(
        joint_LEE, num_ranks, num_slots, dispatch=dispatch, restarts=restarts, seed=seed
    )
    fresh_LP = relabel(old_LP, fresh_LP, num_ranks)
    chosen_LP = old_LP.copy()
    gain_L = np.zeros(len(old_LP))
    rank_P = slot_ranks(num_slots, num_ranks)
    for layer, joint_EE in enumerate(joint_LEE):
        old_P = old_LP[layer]
        joint_PP = physical_joint(joint_EE, old_P, dispatch)
        stages = descend(joint_PP, old_P, rank_P, num_ranks)
        swapped = [_keep_slots(old_P, in_slots(old_P, stage_P), num_ranks) for stage_P in stages]
        options_NP = np.stack([old_P, *swapped, fresh_LP[layer]])
        joint_NEE = np.broadcast_to(joint_EE, (len(options_NP), *joint_EE.shape))
        goal_N = expected_max_active(joint_NEE, options_NP, num_ranks, dispatch)
        moves_N = num_moves(np.broadcast_to(old_P, options_NP.shape), options_NP, num_ranks)
        net_N = [
            cost.net_s(float(goal_N[0] - goal), int(moves))
            for goal, moves in zip(goal_N, moves_N, strict=True)
        ]
        best = int(np.argmax(net_N))
        if net_N[best] > 0:
            chosen_LP[layer], gain_L[layer] = options_NP[best], goal_N[0] - goal_N[best]
    return Replan(chosen_LP, num_moves(old_LP, chosen_LP, num_ranks), gain_L)


def relabel(old_LP: IntArray, new_LP: IntArray, num_ranks: int) -> IntArray:
    """The new placement with ranks renamed, layer by layer, so that the fewest experts move.

    Which set of experts is on which rank makes no difference to balance, so the sets are matched
    to the old ones by an exact assignment; an expert that stays in its rank keeps its slot.

    Returns:
        int64 (L, P).

    Raises:
        ValueError: the placements differ in shape.
    """
    from scipy.optimize import linear_sum_assignment

    old_LRE, new_LRE = held_by_both(old_LP, new_LP, num_ranks)
    result_LP = np.empty_like(new_LP)
    for layer in range(len(old_LP)):
        moves_RR = (1 - old_LRE[layer]) @ new_LRE[layer].T
        _, source_R = linear_sum_assignment(moves_RR)
        renamed_P = new_LP[layer].reshape(num_ranks, -1)[source_R].ravel()
        result_LP[layer] = _keep_slots(old_LP[layer], renamed_P, num_ranks)
    return result_LP


def _keep_slots(old_P: IntArray, new_P: IntArray, num_ranks: int) -> IntArray:
    """The new placement with each expert that stays in its rank in its old slot."""
    result_RS = np.full((num_ranks, len(old_P) // num_ranks), -1, dtype=np.int64)
    for rank, (old_S, new_S) in enumerate(
        zip(old_P.reshape(num_ranks, -1), new_P.reshape(num_ranks, -1), strict=True)
    ):
        incoming = sorted(new_S.tolist())
        for slot, expert in enumerate(old_S.tolist()):
            if expert in incoming:
                result_RS[rank, slot] = expert
                incoming.remove(expert)
        result_RS[rank, result_RS[rank] < 0] = incoming
    return result_RS.ravel()
