"""How many experts a decode step activates, on which ranks.

All follows from the joint activity E[a_e a_f]: how often one step activates experts e and f both,
and on its diagonal how often it activates e.

Axes: M recorded steps, T tokens, L MoE layers, E logical experts, P physical experts (slots, in
rank order), R ranks, k experts a token chooses.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cachemgr.placement_plan import IntArray, check_placement, check_slots, copies, slot_ranks

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

Dispatch = Literal["split", "single"]
"""How an engine uses several copies of one expert. "split": a step's tokens are spread over them,
as vLLM and SGLang do, so all may be active. "single": all go to one of them; no stock engine."""

_TINY = 1e-9


def active_probability(rate_LE: NDArray[np.floating[Any]], batch: int) -> FloatArray:
    """Probability that a step activates an expert.

    Args:
        rate_LE: probability that one decoded token chooses the expert, as
            `Artifact.cluster_activation_KLE[k]`; in [0, 1], (L, E).
        batch: tokens of a step, one a request; >= 1.

    Returns:
        1 - (1 - rate)^batch; float64 (L, E). Exact where requests join a batch independently.

    Raises:
        ValueError: a rate is outside [0, 1], or batch < 1.
    """
    rate_LE = np.asarray(rate_LE, dtype=np.float64)
    _check_probabilities("rates", rate_LE)
    _check_batch(batch)
    return np.asarray(1 - (1 - rate_LE) ** batch, dtype=np.float64)


def independent_activity(active_LE: NDArray[np.floating[Any]]) -> FloatArray:
    """Joint activity of experts that are active independently of each other.

    Args:
        active_LE: probability that a step activates an expert; in [0, 1], (L, E).

    Returns:
        E[a_e a_f]; float64 (L, E, E), the probabilities themselves on the diagonal.

    Raises:
        ValueError: a probability is outside [0, 1].
    """
    active_LE = np.asarray(active_LE, dtype=np.float64)
    _check_probabilities("activation probabilities", active_LE)
    joint_LEE = active_LE[:, :, None] * active_LE[:, None, :]
    experts = np.arange(active_LE.shape[1])
    joint_LEE[:, experts, experts] = active_LE
    return joint_LEE


def token_activity(
    ids_TLk: NDArray[np.unsignedinteger[Any]], num_experts: int, batch: int
) -> FloatArray:
    """Joint activity in steps of `batch` tokens drawn independently from recorded ones.

    Args:
        ids_TLk: experts of each recorded token; (T, L, k), distinct over k, T >= 1.
        num_experts: E.
        batch: tokens of a step; >= 1.

    Returns:
        E[a_e a_f]; float64 (L, E, E). Exact: 1 - (1-r_e)^b - (1-r_f)^b + (1-r_e-r_f+r_ef)^b, where
        r_ef is how often one token chooses both.

    Raises:
        ValueError: no token, or batch < 1.
    """
    _check_batch(batch)
    num_tokens, num_layers, _ = ids_TLk.shape
    if num_tokens < 1:
        raise ValueError("joint activity needs at least one recorded token, got none")
    joint_LEE = np.empty((num_layers, num_experts, num_experts))
    for layer in range(num_layers):
        chosen_TE = np.zeros((num_tokens, num_experts), dtype=np.float32)
        np.put_along_axis(chosen_TE, ids_TLk[:, layer].astype(np.int64), 1.0, axis=1)
        both_EE = (chosen_TE.T @ chosen_TE).astype(np.float64) / num_tokens
        rate_E = both_EE.diagonal()
        absent_E = (1 - rate_E) ** batch
        neither_EE = np.maximum(1 - rate_E[:, None] - rate_E + both_EE, 0.0) ** batch
        joint_LEE[layer] = 1 - absent_E[:, None] - absent_E + neither_EE
    return np.asarray(np.clip(joint_LEE, 0.0, 1.0))


def step_activity(is_active_MLE: BoolArray) -> FloatArray:
    """Joint activity in recorded steps: which experts each step's batch used.

    Args:
        is_active_MLE: unions of recorded steps; bool (M, L, E), M >= 1.

    Returns:
        E[a_e a_f]; float64 (L, E, E).

    Raises:
        ValueError: no step.
    """
    if len(is_active_MLE) < 1:
        raise ValueError("joint activity needs at least one recorded step, got none")
    active_LME = is_active_MLE.transpose(1, 0, 2).astype(np.float32)
    together_LEE = active_LME.transpose(0, 2, 1) @ active_LME
    return together_LEE.astype(np.float64) / len(is_active_MLE)


def expected_max_active(
    joint_LEE: FloatArray, placement_LP: IntArray, num_ranks: int, dispatch: Dispatch = "split"
) -> FloatArray:
    """Estimate of the active experts on the fullest rank of each layer.

    The A_r are taken as jointly normal, with the means and covariances that follow from the joint
    activity, and the maximum by Clark's moments (Operations Research 9(2), 1961), least mean
    first. With "single", the choice of copy is taken as blind; an engine that chooses well does
    better.

    Args:
        joint_LEE: E[a_e a_f]; float64 (L, E, E).
        placement_LP: expert of each slot; int64 (L, P).
        num_ranks: R.
        dispatch: how the engine uses copies.

    Returns:
        float64 (L,).

    Raises:
        ValueError: placement and joint activity do not belong together.
    """
    check_pair(joint_LEE, placement_LP, num_ranks)
    means, covariances = [], []
    member_PR = np.eye(num_ranks)[slot_ranks(placement_LP.shape[1], num_ranks)]
    for joint_EE, expert_P in zip(joint_LEE, placement_LP, strict=True):
        joint_PP = physical_joint(joint_EE, expert_P, dispatch)
        active_P = joint_PP.diagonal()
        mean_R = active_P @ member_PR
        covariance_RR = member_PR.T @ joint_PP @ member_PR - np.outer(mean_R, mean_R)
        order = np.argsort(mean_R, kind="stable")
        means.append(mean_R[order])
        covariances.append(covariance_RR[np.ix_(order, order)])
    return _clark_max(np.stack(means), np.stack(covariances))


def resident_share(rate_LE: FloatArray, resident_LE: BoolArray) -> float:
    """Share of expected uses that fall on resident experts: B / E for a blind choice.

    Args:
        rate_LE: how often a token chooses each expert; >= 0, not all 0.
        resident_LE: experts in slots.
    """
    return float(rate_LE[resident_LE].sum() / rate_LE.sum())


def expected_active(
    joint_LEE: FloatArray, placement_LP: IntArray, num_ranks: int, dispatch: Dispatch = "split"
) -> FloatArray:
    """Expected active experts of each rank, per layer; float64 (L, R).

    "Even expected actives" minimises the largest; `lower_bound` bounds it. Raises ValueError as
    `expected_max_active`.
    """
    check_pair(joint_LEE, placement_LP, num_ranks)
    active_LE = joint_LEE.diagonal(axis1=1, axis2=2)
    copies_LE = copies(placement_LP, active_LE.shape[1])
    share_LE = copy_activity(active_LE, copies_LE, dispatch)
    share_LP = np.take_along_axis(share_LE, placement_LP, axis=1)
    mean_LR = share_LP.reshape(len(placement_LP), num_ranks, -1).sum(axis=2)
    return np.asarray(mean_LR, dtype=np.float64)


def lower_bound(
    active_LE: FloatArray, num_ranks: int, num_slots: int, dispatch: Dispatch = "split"
) -> FloatArray:
    """No placement has a smaller largest `expected_active`; the bound of a linear relaxation.

    Relaxed: experts may be cut into parts, and the spare slots may be shared among experts in
    parts. Then the ranks can be exactly even, and what remains is to give the spare slots where
    they add the least activity. A copy of expert e adds at least (R q_e(R) - p_e) / (R - 1), the
    chord of its concave total, so the least chords are taken first. With "single" copies add
    nothing and the bound is the mean.

    Args:
        active_LE: probability that a step activates an expert; (L, E).
        num_ranks: R.
        num_slots: P.
        dispatch: how the engine uses copies.

    Returns:
        float64 (L,).

    Raises:
        ValueError: slots do not fit, or a probability is outside [0, 1].
    """
    active_LE = np.asarray(active_LE, dtype=np.float64)
    _check_probabilities("activation probabilities", active_LE)
    num_experts = active_LE.shape[1]
    check_slots(num_slots, num_experts, num_ranks)
    total_L = active_LE.sum(axis=1)
    if dispatch == "split" and num_ranks > 1:
        everywhere_LE = copy_activity(active_LE, np.full_like(active_LE, num_ranks), dispatch)
        chord_LE = np.sort((num_ranks * everywhere_LE - active_LE) / (num_ranks - 1), axis=1)
        spare_E = np.clip(
            num_slots - num_experts - np.arange(num_experts) * (num_ranks - 1), 0, num_ranks - 1
        )
        total_L = total_L + chord_LE @ spare_E
    return np.asarray(total_L / num_ranks, dtype=np.float64)


def copy_activity(
    active: NDArray[np.floating[Any]], num_copies: NDArray[Any], dispatch: Dispatch
) -> FloatArray:
    """Probability that one of an expert's copies is active.

    With "split" each of n tokens goes to one of c copies. For the Poisson number of tokens that
    gives p = 1 - exp(-m), a copy sees m / c of them: 1 - (1 - p)^(1/c).
    """
    if dispatch == "single":
        return np.asarray(active / num_copies, dtype=np.float64)
    if dispatch != "split":
        raise ValueError(f"dispatch must be 'split' or 'single', got {dispatch!r}")
    return np.asarray(1 - (1 - active) ** (1 / num_copies), dtype=np.float64)


def physical_joint(joint_EE: FloatArray, expert_P: IntArray, dispatch: Dispatch) -> FloatArray:
    """E[a_i a_j] of slots: given that their experts are active, copies are independently so."""
    active_E = joint_EE.diagonal()
    share_E = copy_activity(active_E, np.bincount(expert_P, minlength=len(active_E)), dispatch)
    given_E = np.divide(share_E, active_E, out=np.ones_like(share_E), where=active_E > 0)
    given_P = given_E[expert_P]
    joint_PP: FloatArray = joint_EE[np.ix_(expert_P, expert_P)] * given_P[:, None] * given_P
    if dispatch == "single":
        joint_PP[expert_P[:, None] == expert_P] = 0.0
    np.fill_diagonal(joint_PP, share_E[expert_P])
    return joint_PP


def _clark_max(mean_LR: FloatArray, covariance_LRR: FloatArray) -> FloatArray:
    """Mean of the largest of R jointly normal values, for each layer; float64 (L,)."""
    from scipy.special import ndtr

    mean_L, variance_L = mean_LR[:, 0], covariance_LRR[:, 0, 0]
    with_LR = covariance_LRR[:, 0, :]  # covariance of the largest so far with each value
    for r in range(1, mean_LR.shape[1]):
        other_L, other_variance_L = mean_LR[:, r], covariance_LRR[:, r, r]
        spread_L = np.sqrt(np.maximum(variance_L + other_variance_L - 2 * with_LR[:, r], _TINY**2))
        z_L = (mean_L - other_L) / spread_L
        first_L, second_L = ndtr(z_L), ndtr(-z_L)
        density_L = np.exp(-(z_L**2) / 2) / np.sqrt(2 * np.pi)
        largest_L = mean_L * first_L + other_L * second_L + spread_L * density_L
        square_L = (
            (mean_L**2 + variance_L) * first_L
            + (other_L**2 + other_variance_L) * second_L
            + (mean_L + other_L) * spread_L * density_L
        )
        with_LR = with_LR * first_L[:, None] + covariance_LRR[:, r, :] * second_L[:, None]
        mean_L, variance_L = largest_L, np.maximum(square_L - largest_L**2, 0.0)
    return np.asarray(mean_L, dtype=np.float64)


def check_joint(joint_LEE: FloatArray) -> int:
    """Check a joint activity; returns E."""
    if joint_LEE.ndim != 3 or joint_LEE.shape[1] != joint_LEE.shape[2] or joint_LEE.size == 0:
        raise ValueError(
            "joint activity must have shape (layers, experts, experts), got "
            f"{joint_LEE.shape}; independent_activity() makes it from probabilities"
        )
    _check_probabilities("joint activity", joint_LEE)
    return int(joint_LEE.shape[1])


def check_pair(joint_LEE: FloatArray, placement_LP: IntArray, num_ranks: int) -> None:
    num_experts = check_joint(joint_LEE)
    check_placement(placement_LP, num_experts, num_ranks)
    if len(placement_LP) != len(joint_LEE):
        raise ValueError(
            f"placement has {len(placement_LP)} layers, joint activity {len(joint_LEE)}"
        )


def _check_probabilities(name: str, values: NDArray[np.floating[Any]]) -> None:
    if not ((values >= 0) & (values <= 1)).all():  # also refuses NaN
        raise ValueError(f"{name} must be in [0, 1], got {values.min()} to {values.max()}")


def _check_batch(batch: int) -> None:
    if batch < 1:
        raise ValueError(f"batch must be >= 1, got {batch}")
