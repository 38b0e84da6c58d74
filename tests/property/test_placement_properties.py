"""Invariants of placements, against exhaustive search where instances are small."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linprog

from cachemgr.activity import (
    copy_activity,
    expected_active,
    expected_max_active,
    independent_activity,
    lower_bound,
    step_activity,
    token_activity,
)
from cachemgr.eplb import eplb, linear
from cachemgr.migration import MigrationCost, relabel, replan
from cachemgr.placement import place
from cachemgr.placement_plan import check_placement, num_moves

DISPATCHES = st.sampled_from(["split", "single"])


@st.composite
def recorded_steps(draw, max_experts=8):
    """Unions of a few recorded steps: bool (M, L, E)."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 2), st.integers(2, max_experts)))
    return draw(arrays(bool, shape))


@st.composite
def instances(draw):
    """A joint activity, ranks, slots and a way of using copies."""
    joint_LEE = step_activity(draw(recorded_steps()))
    num_experts = joint_LEE.shape[1]
    num_ranks = draw(st.integers(1, 4))
    least = -(-num_experts // num_ranks)
    per_rank = draw(st.integers(least, min(num_experts, least + 2)))
    return joint_LEE, num_ranks, num_ranks * per_rank, draw(DISPATCHES)


def partitions(experts: tuple[int, ...], size: int):
    """Every split of experts into sets of `size`; ranks without names."""
    if not experts:
        yield ()
        return
    first, rest = experts[0], experts[1:]
    for others in combinations(rest, size - 1):
        left = tuple(e for e in rest if e not in others)
        for more in partitions(left, size):
            yield (first, *others, *more)


@st.composite
def small_instances(draw):
    """Activity of experts that fill the ranks exactly, few enough to try every placement."""
    num_ranks, per_rank = draw(st.sampled_from([(2, 2), (2, 3), (2, 4), (3, 2), (4, 2), (3, 3)]))
    num_experts = num_ranks * per_rank
    steps_MLE = draw(arrays(bool, (draw(st.integers(1, 8)), 1, num_experts)))
    if draw(st.booleans()):
        return step_activity(steps_MLE), num_ranks
    active_LE = draw(arrays(np.float64, (1, num_experts), elements=st.floats(0, 1)))
    return independent_activity(active_LE), num_ranks


def sum_of_squares(joint_EE, placed_P, num_ranks):
    ranks = placed_P.reshape(num_ranks, -1)
    return sum(joint_EE[np.ix_(experts, experts)].sum() for experts in ranks)


@settings(max_examples=100)
@given(small_instances())
def test_descent_finds_the_best_of_all_placements(instance):
    joint_LEE, num_ranks = instance
    num_experts = joint_LEE.shape[1]
    every = np.array(list(partitions(tuple(range(num_experts)), num_experts // num_ranks)))
    best = min(sum_of_squares(joint_LEE[0], placed_P, num_ranks) for placed_P in every)
    ours = sum_of_squares(joint_LEE[0], place(joint_LEE, num_ranks, restarts=8)[0], num_ranks)
    assert best - 1e-9 <= ours <= best * 1.02 + 1e-6
    evenest = (
        expected_active(
            np.broadcast_to(joint_LEE, (len(every), *joint_LEE.shape[1:])), every, num_ranks
        )
        .max(axis=1)
        .min()
    )
    bound = lower_bound(joint_LEE.diagonal(axis1=1, axis2=2), num_ranks, num_experts)[0]
    assert bound <= evenest + 1e-9


@given(instances())
def test_place_is_valid_and_repeatable(instance):
    joint_LEE, num_ranks, num_slots, dispatch = instance
    placed_LP = place(joint_LEE, num_ranks, num_slots, dispatch=dispatch, seed=3)
    check_placement(placed_LP, joint_LEE.shape[1], num_ranks)
    for rank_S in placed_LP.reshape(-1, num_slots // num_ranks):
        assert len(set(rank_S.tolist())) == len(rank_S)  # no two copies in one rank
    again_LP = place(joint_LEE, num_ranks, num_slots, dispatch=dispatch, seed=3)
    np.testing.assert_array_equal(placed_LP, again_LP)


@given(instances())
def test_no_placement_is_under_the_bound(instance):
    joint_LEE, num_ranks, num_slots, dispatch = instance
    active_LE = joint_LEE.diagonal(axis1=1, axis2=2)
    bound_L = lower_bound(active_LE, num_ranks, num_slots, dispatch)
    placed_LP = place(joint_LEE, num_ranks, num_slots, dispatch=dispatch)
    active_LR = expected_active(joint_LEE, placed_LP, num_ranks, dispatch)
    assert (bound_L <= active_LR.max(axis=1) + 1e-9).all()


@given(instances())
def test_bound_is_the_optimum_of_its_linear_program(instance):
    joint_LEE, num_ranks, num_slots, dispatch = instance
    active_LE = joint_LEE.diagonal(axis1=1, axis2=2)
    num_experts = active_LE.shape[1]
    counts = np.arange(1, num_ranks + 1)
    for active_E, bound in zip(
        active_LE, lower_bound(active_LE, num_ranks, num_slots, dispatch), strict=True
    ):
        # x[e, c]: part of expert e that has c copies; least total activity that fills the slots.
        total_EC = counts * copy_activity(active_E[:, None], counts, dispatch)
        one_each = np.kron(np.eye(num_experts), np.ones(num_ranks))
        all_slots = np.tile(counts, num_experts)
        program = linprog(
            total_EC.ravel(),
            A_eq=np.vstack([one_each, all_slots]),
            b_eq=[*np.ones(num_experts), num_slots],
        )
        np.testing.assert_allclose(bound, program.fun / num_ranks, atol=1e-6)


@given(instances(), st.integers(0, 99))
def test_relabelling_keeps_ranks_sets_and_never_needs_more_moves(instance, seed):
    joint_LEE, num_ranks, num_slots, dispatch = instance
    rng = np.random.default_rng(seed)
    num_layers, num_experts, _ = joint_LEE.shape
    old_LP = linear(num_layers, num_experts, num_ranks, num_slots)
    new_LP = eplb(rng.random((num_layers, num_experts)), num_slots, num_ranks)
    named_LP = relabel(old_LP, new_LP, num_ranks)
    assert (num_moves(old_LP, named_LP, num_ranks) <= num_moves(old_LP, new_LP, num_ranks)).all()
    for new_P, named_P in zip(new_LP, named_LP, strict=True):
        assert rank_sets(new_P, num_ranks) == rank_sets(named_P, num_ranks)
    np.testing.assert_allclose(
        expected_max_active(joint_LEE, new_LP, num_ranks, dispatch),
        expected_max_active(joint_LEE, named_LP, num_ranks, dispatch),
        rtol=0.1,  # the estimate takes ranks one after the other, so their order shows a little
        atol=1e-6,
    )
    # An expert that stays in its rank stays in its slot, unless a copy of it was there too.
    moved_LP = named_LP != old_LP
    for layer, slot in np.argwhere(moved_LP):
        rank = slice(slot // (num_slots // num_ranks) * (num_slots // num_ranks), None)
        rank = slice(rank.start, rank.start + num_slots // num_ranks)
        was = np.count_nonzero(old_LP[layer, rank] == named_LP[layer, slot])
        stayed = np.count_nonzero(
            (old_LP[layer, rank] == named_LP[layer, slot]) & ~moved_LP[layer, rank]
        )
        assert was == stayed


def rank_sets(placed_P, num_ranks):
    return sorted(sorted(rank) for rank in placed_P.reshape(num_ranks, -1).tolist())


@given(instances(), st.floats(0, 100), st.floats(0, 3))
def test_replan_pays_or_stays(instance, horizon, hysteresis):
    joint_LEE, num_ranks, num_slots, dispatch = instance
    num_layers, num_experts, _ = joint_LEE.shape
    old_LP = linear(num_layers, num_experts, num_ranks, num_slots)
    cost = MigrationCost(1.0, 1.0, horizon, hysteresis)
    outcome = replan(old_LP, joint_LEE, num_ranks, cost, dispatch=dispatch)
    check_placement(outcome.physical_to_logical_LP, num_experts, num_ranks)
    for layer in range(num_layers):
        moves, gain = int(outcome.num_moves_L[layer]), float(outcome.gain_L[layer])
        if moves or gain:
            assert cost.net_s(gain, moves) > 0
        else:
            np.testing.assert_array_equal(outcome.physical_to_logical_LP[layer], old_LP[layer])
    # Once there, the same traffic asks for nothing more.
    settled = replan(
        outcome.physical_to_logical_LP, joint_LEE, num_ranks, MigrationCost(1.0, 1.0, 0.0)
    )
    assert settled.num_moves_L.sum() == 0


@given(st.integers(0, 999))
def test_token_activity_is_that_of_all_batches(seed):
    rng = np.random.default_rng(seed)
    num_tokens, num_experts, top_k = 3, 5, 2
    ids_TLk = np.stack(
        [rng.permutation(num_experts)[None, :top_k] for _ in range(num_tokens)]
    ).astype(np.uint8)
    batches = np.stack(np.meshgrid(*[np.arange(num_tokens)] * 3), axis=-1).reshape(-1, 3)
    active_MLE = np.zeros((len(batches), 1, num_experts), dtype=bool)
    for step, batch in enumerate(batches):
        active_MLE[step, 0, ids_TLk[batch, 0].ravel()] = True
    np.testing.assert_allclose(
        token_activity(ids_TLk, num_experts, 3), step_activity(active_MLE), atol=1e-6
    )
