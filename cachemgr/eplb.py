"""Placements others use: linear, round robin, and DeepSeek's EPLB from its published description.

Axes: L MoE layers, E logical experts, P physical experts (slots), G expert groups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachemgr.placement_plan import IntArray, check_slots

FloatArray = NDArray[np.float64]


def linear(num_layers: int, num_experts: int, num_ranks: int, num_slots: int = 0) -> IntArray:
    """Experts in order of their number, spare slots filled from expert 0 on: how vLLM starts.

    Args:
        num_layers: L.
        num_experts: E.
        num_ranks: R.
        num_slots: P; 0 for as many as experts.

    Returns:
        Expert of each slot; int64 (L, P).

    Raises:
        ValueError: slots do not fit.
    """
    check_slots(num_slots or num_experts, num_experts, num_ranks)
    slots_P = np.arange(num_slots or num_experts, dtype=np.int64) % num_experts
    return np.tile(slots_P, (num_layers, 1))


def round_robin(num_layers: int, num_experts: int, num_ranks: int) -> IntArray:
    """Expert e on rank e mod R, no copies; int64 (L, E). Raises ValueError as `linear`."""
    check_slots(num_experts, num_experts, num_ranks)
    slots_P = np.arange(num_experts, dtype=np.int64).reshape(-1, num_ranks).T.ravel()
    return np.tile(slots_P, (num_layers, 1))


def eplb(
    load_LE: NDArray[np.float64] | NDArray[np.int64],
    num_slots: int,
    num_ranks: int,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> IntArray:
    """DeepSeek's Expert Parallelism Load Balancer.

    If the nodes divide the groups, hierarchical: groups are packed onto nodes, experts are
    replicated within their node, copies are packed onto the node's ranks. Else global: the same
    with one group and one node. A copy carries its expert's load over its number of copies; each
    further copy goes to the expert whose copies carry most; packing takes the heaviest first and
    gives it to the lightest pack that has room.

    Args:
        load_LE: load of each expert; >= 0 and finite, (L, E).
        num_slots: P, a multiple of the ranks.
        num_ranks: R, a multiple of the nodes.
        num_groups: G, groups of group-limited routing; divides E.
        num_nodes: servers that the ranks are on.

    Returns:
        Expert of each slot; int64 (L, P).

    Raises:
        ValueError: the numbers do not divide as they must.

    Source: README of deepseek-ai/EPLB (MIT), whose example is a golden test.
    """
    load_LE = np.asarray(load_LE, dtype=np.float64)
    num_experts = load_LE.shape[1]
    check_slots(num_slots, num_experts, num_ranks)
    if num_groups < 1 or num_nodes < 1 or num_experts % num_groups or num_ranks % num_nodes:
        raise ValueError(
            f"{num_groups} groups must divide {num_experts} experts and {num_nodes} nodes must "
            f"divide {num_ranks} ranks"
        )
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    return np.stack(
        [_layer(load_E, num_slots, num_ranks, num_groups, num_nodes) for load_E in load_LE]
    )


def _layer(
    load_E: FloatArray, num_slots: int, num_ranks: int, num_groups: int, num_nodes: int
) -> IntArray:
    experts_GE = np.arange(len(load_E)).reshape(num_groups, -1)
    slots = []
    for groups in _pack(load_E[experts_GE].sum(axis=1), num_nodes):
        experts = experts_GE[groups].ravel()
        held = np.concatenate(
            [np.arange(len(experts)), _spares(load_E[experts], num_slots // num_nodes)]
        )
        share = load_E[experts] / np.bincount(held)
        slots += [experts[held[pack]] for pack in _pack(share[held], num_ranks // num_nodes)]
    return np.asarray(np.concatenate(slots), dtype=np.int64)


def _spares(load_E: FloatArray, num_slots: int) -> IntArray:
    """Experts that get the slots beyond one each, in the order they are given."""
    copies_E = np.ones(len(load_E))
    chosen = np.empty(num_slots - len(load_E), dtype=np.int64)
    for i in range(len(chosen)):
        chosen[i] = np.argmax(load_E / copies_E)
        copies_E[chosen[i]] += 1
    return chosen


def _pack(load_N: FloatArray, num_packs: int) -> list[list[int]]:
    """Items of each pack, equally many, in the order they were put in."""
    room = len(load_N) // num_packs
    if room == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    weights = np.zeros(num_packs)
    for item in np.argsort(-load_N, kind="stable"):
        lightest = int(np.argmin(weights))
        packs[lightest].append(int(item))
        weights[lightest] += load_N[item]
        if len(packs[lightest]) == room:
            weights[lightest] = np.inf
    return packs
