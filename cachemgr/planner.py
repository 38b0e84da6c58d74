"""Placement plans of decode replicas: what activity to plan for, the first plan, the next one.

Axes: K clusters, L MoE layers, E logical experts, P physical experts (slots), R ranks.
"""

from __future__ import annotations

from dataclasses import replace

from cachemgr.activity import FloatArray, active_probability, independent_activity
from cachemgr.eplb import linear
from cachemgr.migration import MigrationCost, Replan, replan
from cachemgr.placement_plan import IntArray, PlacementPlan
from calibration.artifact import Artifact

MOVE_PRICE = 67.0
"""One expert over a 50 GB/s link, in reads of one from memory of 3.35 TB/s: H200, 400 Gb/s."""


def cluster_activity(artifact: Artifact, cluster: int | None, batch: int) -> FloatArray:
    """Joint activity that a decode replica expects.

    Args:
        artifact: says how often each cluster's decoded tokens choose an expert.
        cluster: of the replica; None: the mean of all, for one without a centroid.
        batch: tokens of a step, one a request; >= 1.

    Returns:
        E[a_e a_f], experts taken as independent; float64 (L, E, E).

    Raises:
        ValueError: the artifact has no such cluster, or batch < 1.
    """
    if cluster is None:
        rate_LE = artifact.cluster_activation_KLE.mean(axis=0)
    elif 0 <= cluster < artifact.k:
        rate_LE = artifact.cluster_activation_KLE[cluster]
    else:
        raise ValueError(f"cluster must be in [0, {artifact.k}), got {cluster}")
    # Rates are means of float32: an expert that every token chooses may come out above 1.
    return independent_activity(active_probability(rate_LE.clip(0.0, 1.0), batch))


def make_plan(
    artifact: Artifact, placement_LP: IntArray, num_ranks: int, version: int, now: float
) -> PlacementPlan:
    """A plan for the artifact's model. Raises ValueError: the placement does not fit it."""
    return PlacementPlan(
        version=version,
        created_at=now,
        model_id=artifact.model_id,
        fingerprint=artifact.fingerprint,
        num_experts=artifact.num_experts,
        num_ranks=num_ranks,
        physical_to_logical_LP=placement_LP,
    )


def as_loaded(artifact: Artifact, num_ranks: int, num_slots: int) -> PlacementPlan:
    """Version 0: where an engine has its experts before any plan. Raises ValueError."""
    placed_LP = linear(artifact.num_layers, artifact.num_experts, num_ranks, num_slots)
    return make_plan(artifact, placed_LP, num_ranks, 0, 0.0)


def next_plan(
    old: PlacementPlan, joint_LEE: FloatArray, cost: MigrationCost, now: float
) -> tuple[PlacementPlan, Replan]:
    """The plan after `old`, and what changes. It has the next version also where nothing moves.

    Raises:
        ValueError: the plan does not belong to the joint activity.
    """
    outcome = replan(old.physical_to_logical_LP, joint_LEE, old.num_ranks, cost)
    fresh = replace(
        old,
        version=old.version + 1,
        created_at=now,
        physical_to_logical_LP=outcome.physical_to_logical_LP,
    )
    return fresh, outcome


def check_model(plan: PlacementPlan, artifact: Artifact) -> None:
    """Refuse a plan of another model than the artifact's.

    Raises:
        ValueError: they differ; the message holds both.
    """
    ours = (plan.fingerprint, plan.num_layers, plan.num_experts)
    theirs = (artifact.fingerprint, artifact.num_layers, artifact.num_experts)
    if ours != theirs:
        text = "{!r} (fingerprint {}, {} MoE layers, {} experts)"
        raise ValueError(
            f"plan {plan.version} is for {text.format(plan.model_id, *ours)}, the artifact for "
            f"{text.format(artifact.model_id, *theirs)}: take a plan and an artifact of one model"
        )
