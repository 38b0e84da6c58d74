"""Placements worked by hand, and the example that DeepSeek publishes for EPLB."""

from __future__ import annotations

import numpy as np

from bench.placement import active_per_rank
from cachemgr.activity import (
    active_probability,
    expected_active,
    expected_max_active,
    independent_activity,
    lower_bound,
    token_activity,
)
from cachemgr.eplb import eplb, linear, round_robin
from cachemgr.migration import MigrationCost, relabel, replan
from cachemgr.placement import place
from cachemgr.placement_plan import num_moves


def test_example_of_eplbs_readme():
    load_LE = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    expected_LP = [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert eplb(load_LE, 16, 8, num_groups=4, num_nodes=2).tolist() == expected_LP


def test_eplb_without_groups():
    # The spare slot goes to expert 0, now two copies of 4.5. Heaviest first: 5, then both copies
    # to the other rank, which is full, then 1: EPLB may put two copies into one rank.
    placed_LP = eplb(np.array([[9.0, 5.0, 1.0]]), 4, 2)
    assert placed_LP.tolist() == [[1, 2, 0, 0]]


def test_linear_and_round_robin():
    assert linear(1, 4, 2, num_slots=6).tolist() == [[0, 1, 2, 3, 0, 1]]
    assert round_robin(1, 6, 2).tolist() == [[0, 2, 4, 1, 3, 5]]


def test_active_probability():
    # 1 - (1/2)^2, 1 - (3/4)^2, never, always.
    active_LE = active_probability(np.array([[0.5, 0.25, 0.0, 1.0]]), batch=2)
    np.testing.assert_allclose(active_LE, [[0.75, 0.4375, 0.0, 1.0]])


def test_joint_activity_of_tokens():
    # Two tokens: one chooses experts 0 and 1, one 0 and 2. A step of two draws (01, 01), (01, 02),
    # (02, 01) or (02, 02): 1 is active in three of the four, 1 and 2 together in two.
    ids_TLk = np.array([[[0, 1]], [[0, 2]]], dtype=np.uint8)
    expected = [[1, 0.75, 0.75], [0.75, 0.75, 0.5], [0.75, 0.5, 0.75]]
    np.testing.assert_allclose(token_activity(ids_TLk, 3, batch=2)[0], expected, atol=1e-12)


def test_even_actives():
    # 0.9 + 0.1 = 0.6 + 0.4: the only even split of four experts on two ranks.
    joint_LEE = independent_activity(np.array([[0.9, 0.6, 0.4, 0.1]]))
    placed_LP = place(joint_LEE, 2)
    assert sorted(map(tuple, placed_LP.reshape(2, 2).tolist())) == [(0, 3), (1, 2)]
    np.testing.assert_allclose(expected_active(joint_LEE, placed_LP, 2).max(axis=1), [1.0])
    np.testing.assert_allclose(lower_bound(np.array([[0.9, 0.6, 0.4, 0.1]]), 2, 4), [1.0])


def test_experts_that_are_active_together_are_parted():
    # All are active half of the time, 0 with 1 and 2 with 3: any split is even in expectation,
    # but {0, 1} would have two active experts in every other step.
    pair_EE = np.array([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]])
    joint_LEE = pair_EE[None]
    placed = {frozenset(rank) for rank in place(joint_LEE, 2).reshape(2, 2).tolist()}
    assert placed in (
        {frozenset({0, 2}), frozenset({1, 3})},
        {frozenset({0, 3}), frozenset({1, 2})},
    )
    together, parted = np.array([[0, 1, 2, 3]]), np.array([[0, 2, 1, 3]])
    np.testing.assert_allclose(expected_max_active(joint_LEE, parted, 2), [1.0], atol=1e-6)
    assert expected_max_active(joint_LEE, together, 2)[0] > 1.3


def test_split_copies_of_a_hot_expert_are_all_active():
    # An expert that is always active is active in each copy. The spare slots go to the cold ones.
    active_LE = np.array([[1.0, 0.2, 0.19, 0.5]])
    joint_LEE = independent_activity(active_LE)
    placed_LP = place(joint_LEE, 2, 6, dispatch="split")
    assert np.bincount(placed_LP[0]).tolist() == [1, 2, 2, 1]
    assert np.bincount(place(joint_LEE, 2, 6, dispatch="single")[0]).tolist() == [2, 1, 1, 2]
    hot_LP = np.array([[0, 1, 2, 0, 3, 1]])
    expected = 1 + (1 - 0.8**0.5) + 0.5
    np.testing.assert_allclose(expected_active(joint_LEE, hot_LP, 2).max(axis=1), [expected])
    np.testing.assert_allclose(expected_active(joint_LEE, hot_LP, 2, "single").max(axis=1), [1.1])


def test_relabelling_needs_no_move_for_swapped_ranks():
    old_LP = np.array([[0, 1, 2, 3, 4, 5]])
    renamed_LP = np.array([[5, 4, 0, 1, 3, 2]])  # ranks 0, 1, 2 are old ranks 2, 0, 1
    assert num_moves(old_LP, renamed_LP, 3).tolist() == [6]
    assert relabel(old_LP, renamed_LP, 3).tolist() == old_LP.tolist()


def test_moves_must_pay():
    # Swapping experts 1 and 3 makes the ranks even: two moves. The gain per step is what the
    # estimate says; between the horizons where it pays once and 1.5 times lies the hysteresis.
    joint_LEE = independent_activity(np.array([[0.9, 0.6, 0.4, 0.1]]))
    old_LP = np.array([[0, 1, 2, 3]])
    even_LP = np.array([[0, 3, 2, 1]])
    before, after = (expected_max_active(joint_LEE, each, 2)[0] for each in (old_LP, even_LP))
    pays_at = 2 * 1.0 / (before - after)
    for horizon, is_moved in ((1.4 * pays_at, False), (1.6 * pays_at, True)):
        outcome = replan(old_LP, joint_LEE, 2, MigrationCost(1.0, 1.0, horizon, hysteresis=1.5))
        assert outcome.num_moves_L.tolist() == [2 * is_moved]
        np.testing.assert_allclose(outcome.gain_L, [(before - after) * is_moved])


def test_active_experts_of_a_step():
    # Two tokens, one layer, ranks {0, 1, 0} and {2, 3, 1}; token 0 chooses 0 and 1, token 1 chooses
    # 1 and 3. vLLM's hash sends token 0 to first copies and token 1 to second copies of two.
    placement_LP = np.array([[0, 1, 0, 2, 3, 1]])
    ids_MbLk = np.array([[[[0, 1]], [[1, 3]]]], dtype=np.uint8)
    assert active_per_rank(ids_MbLk, placement_LP, 2).tolist() == [[[2, 2]]]
    # All to one copy: 0 and 3 have no choice of rank, 1 goes to either.
    assert sorted(active_per_rank(ids_MbLk, placement_LP, 2, "single")[0, 0].tolist()) == [1, 2]
