"""Placement plans of decode replicas: what activity to plan for, the first plan, the next one.

`Planner` decides, `PlanKeeper` reads and writes the files for it; both belong to a node's manager.

Axes: K clusters, L MoE layers, E logical experts, P physical experts (slots), R ranks, D signature
length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cachemgr.activity import (
    FloatArray,
    active_probability,
    expected_active,
    independent_activity,
)
from cachemgr.eplb import linear
from cachemgr.migration import MigrationCost, Replan, replan
from cachemgr.placement import rank_balance
from cachemgr.placement_plan import IntArray, PlacementPlan, num_moves
from calibration.artifact import Artifact

logger = logging.getLogger(__name__)

MIN_STEPS = 200
"""Decode steps that a measured activity needs; fewer are mostly chance."""

MOVE_PRICE = 67.0
"""One expert over a 50 GB/s link, in reads of one from memory of 3.35 TB/s: H200, 400 Gb/s."""


def cluster_activity(artifact: Artifact, cluster: int | None, batch: int) -> FloatArray:
    """How often a step of a decode replica is expected to activate each expert.

    Args:
        artifact: says how often each cluster's decoded tokens choose an expert.
        cluster: of the replica; None: the mean of all, for one without a centroid.
        batch: tokens of a step, one a request; >= 1.

    Returns:
        float64 (L, E), in [0, 1].

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
    return active_probability(rate_LE.clip(0.0, 1.0), batch)


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


def nearest_cluster(artifact: Artifact, centroid: int | None, home: bytes | None) -> int | None:
    """Cluster of the artifact that a decode replica serves.

    Args:
        artifact: the one that the router has.
        centroid: of the replica, as the router numbers it.
        home: its vector after a refit, little-endian float32 (D,); None: that of the artifact.

    Returns:
        The cluster whose centroid is nearest; None for a replica without a centroid.

    Raises:
        ValueError: the vector is not of this artifact's signature space.
    """
    if home is None:
        return centroid if centroid is not None and centroid < artifact.k else None
    home_D = np.frombuffer(home, dtype="<f4")
    if home_D.shape != artifact.centroids_KD.shape[1:]:
        raise ValueError(
            f"a centroid of {artifact.model_id!r} has {artifact.centroids_KD.shape[1]} values, the "
            f"router gave {len(home_D)}: it has another artifact than placement plans are made from"
        )
    return int((artifact.centroids_KD @ home_D).argmax())


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """How a node's manager makes the plans of its decode replicas.

    Attributes:
        artifact: folder of the calibration artifact.
        folder: of the plan files.
        num_ranks: R of each replica.
        num_spare: slots beyond the experts.
        batch: requests that decode in one step, for expected activity.
        interval_s: seconds between two looks at a replica.
        cost: of moving experts.
    """

    artifact: str
    folder: str
    num_ranks: int
    num_spare: int
    batch: int
    interval_s: float
    cost: MigrationCost


def plan_file(folder: str, replica_id: str) -> Path:
    """Where a replica's plan is."""
    return Path(folder).expanduser() / f"{replica_id}.json"


@dataclass(slots=True)
class _Member:
    plan: PlacementPlan
    cluster: int | None = None
    num_moves: int = 0
    is_planned: bool = False
    counted: tuple[int, IntArray] | None = None  # steps and uses when the window began
    measured_LE: FloatArray | None = None


class Planner:
    """Plans of some decode replicas. Pure: the caller gives time and measurements.

    A plan is proposed when a replica is new, when its cluster changes, and when enough steps were
    measured since the last look; from the second on only if it moves something (`replan`). What is
    proposed counts once it is accepted.

    Args:
        settings: ranks, batch, cost.
        artifact: what clusters are expected to activate.
    """

    def __init__(self, settings: PlannerSettings, artifact: Artifact) -> None:
        self.settings, self._artifact = settings, artifact
        num_slots = artifact.num_experts + settings.num_spare
        self._loaded = as_loaded(artifact, settings.num_ranks, num_slots)
        self._members: dict[str, _Member] = {}

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._members

    def add(self, replica_id: str, running: PlacementPlan | None = None) -> None:
        """A replica that has its experts as loaded, or by a plan that was accepted before.

        Raises:
            ValueError: the plan is for another model or another number of ranks or slots.
        """
        loaded = self._loaded
        plan = loaded if running is None else running
        plan.verify(
            loaded.fingerprint,
            loaded.num_layers,
            loaded.num_experts,
            loaded.num_slots,
            loaded.num_ranks,
        )
        self._members[replica_id] = _Member(plan)

    def propose(
        self,
        replica_id: str,
        centroid: int | None,
        home: bytes | None,
        uses: tuple[int, IntArray] | None,
        now: float,
    ) -> PlacementPlan | None:
        """The plan that the replica is to go to, or None to stay.

        Args:
            replica_id: one that was added.
            centroid: as for `nearest_cluster`.
            home: as for `nearest_cluster`.
            uses: decode steps and in how many of them each expert was active, int64 (L, E), since
                the start of its worker; None: not measured.
            now: Unix time, seconds.

        Raises:
            ValueError: see `nearest_cluster`, or the counts are not of this model.
        """
        member = self._members[replica_id]
        cluster = nearest_cluster(self._artifact, centroid, home)
        is_measured = self._measure(member, uses)
        if cluster == member.cluster and member.is_planned:
            if not is_measured:
                return None
            assert member.measured_LE is not None
            active_LE = member.measured_LE
        else:  # what was measured so far is another traffic
            member.cluster, member.counted, member.measured_LE = cluster, uses, None
            active_LE = self._expected(cluster)
        member.is_planned = True
        joint_LEE = independent_activity(active_LE)
        plan, outcome = next_plan(member.plan, joint_LEE, self.settings.cost, now)
        is_first = member.plan.version == 0
        return plan if is_first or outcome.num_moves_L.any() else None

    def accept(self, replica_id: str, plan: PlacementPlan) -> None:
        """The plan was written: the replica goes to it."""
        member = self._members[replica_id]
        moves_L = num_moves(
            member.plan.physical_to_logical_LP, plan.physical_to_logical_LP, plan.num_ranks
        )
        member.num_moves += int(moves_L.sum())
        member.plan = plan

    def reject(self, replica_id: str) -> None:
        """The plan could not be written: propose again."""
        self._members[replica_id].is_planned = False

    def forget(self, replica_id: str) -> None:
        """A replica stops."""
        self._members.pop(replica_id, None)

    def status(self, replica_id: str) -> dict[str, Any]:
        """Figures of a replica.

        Returns:
            {"version": of its plan, "num_moves": experts moved since it was added,
            "expected_balance", "measured_balance": active experts on the rank that expects most
            over the mean of ranks, mean over layers; None where not measured}.
        """
        member = self._members[replica_id]
        measured_LE = member.measured_LE
        return {
            "version": member.plan.version,
            "num_moves": member.num_moves,
            "expected_balance": balance(self._expected(member.cluster), member.plan),
            "measured_balance": None if measured_LE is None else balance(measured_LE, member.plan),
        }

    def _expected(self, cluster: int | None) -> FloatArray:
        return cluster_activity(self._artifact, cluster, self.settings.batch)

    def _measure(self, member: _Member, uses: tuple[int, IntArray] | None) -> bool:
        """Whether the window since the last look is long enough; then it begins anew."""
        if uses is None:
            return False
        num_steps, uses_LE = uses
        shape = (self._artifact.num_layers, self._artifact.num_experts)
        if uses_LE.shape != shape:
            raise ValueError(f"expert counts must have shape {shape}, got {uses_LE.shape}")
        if member.counted is None or num_steps < member.counted[0]:  # a worker that is new
            member.counted = (0, np.zeros_like(uses_LE))
        steps = num_steps - member.counted[0]
        if steps < MIN_STEPS:
            return False
        member.measured_LE = (uses_LE - member.counted[1]) / steps
        member.counted = uses
        return True


def balance(active_LE: FloatArray, plan: PlacementPlan) -> float:
    """Active experts on the rank that expects most over the mean of ranks, mean over layers."""
    mean_LR = expected_active(
        independent_activity(active_LE), plan.physical_to_logical_LP, plan.num_ranks
    )
    return rank_balance(mean_LR)


class PlanKeeper:
    """The plans of a node's decode replicas and their files. One caller at a time.

    A keeper that was started again goes on from the files.

    Args:
        clock: Unix time, seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._planner: Planner | None = None

    def place(
        self, settings: PlannerSettings, replica_id: str, report: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Look at a replica, and write its next plan where it is to have one.

        Args:
            settings: of the application.
            replica_id: who asks.
            report: {"centroid", "home": see `nearest_cluster`, "num_steps", "uses_LE": what
                `eldr_expert_uses` of one of its workers says, or None}.

        Returns:
            {"path": file of its plan, and what `Planner.status` says}.

        Raises:
            OSError: the artifact cannot be read or the plan cannot be written.
            ValueError: the artifact, the plan that is there, or the report does not fit.
        """
        planner = self._planner
        if planner is None or planner.settings != settings:
            planner = self._planner = Planner(settings, Artifact.load(settings.artifact))
        path = plan_file(settings.folder, replica_id)
        if replica_id not in planner:
            planner.add(replica_id, PlacementPlan.load(path) if path.exists() else None)
        uses = None
        if report["uses_LE"]:
            uses = (report["num_steps"], np.array(report["uses_LE"], dtype=np.int64))
        plan = planner.propose(replica_id, report["centroid"], report["home"], uses, self._clock())
        if plan is not None:
            try:
                plan.save(path)
            except OSError:
                planner.reject(replica_id)
                raise
            planner.accept(replica_id, plan)
            logger.info("placement of %s: version %d", replica_id, plan.version)
        return {"path": str(path), **planner.status(replica_id)}

    def forget(self, replica_id: str) -> None:
        """A replica stops: its plan is of no use to another."""
        if self._planner is not None and replica_id in self._planner:
            self._planner.forget(replica_id)
            plan_file(self._planner.settings.folder, replica_id).unlink(missing_ok=True)
