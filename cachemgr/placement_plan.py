"""The placement plan: which expert each slot of each EP rank holds. Frozen, versioned, checksummed.

Axes: L MoE layers, E logical experts, P physical experts (slots of all ranks, in rank order),
R ranks, C copies of an expert.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.storage import check_version, take

IntArray = NDArray[np.int64]

FORMAT_VERSION = 1


class PlanMismatch(ValueError):
    """The plan was made for another model, or for another number of ranks or slots."""


@dataclass(frozen=True, eq=False)
class PlacementPlan:
    """Where the experts of one decode replica are; every rank reads the same plan.

    Attributes:
        version: counts the plans of a replica upwards.
        created_at: when it was made; Unix time, seconds.
        model_id: name of the model, for people.
        fingerprint: hash of the model's configuration and weights index.
        num_experts: E.
        num_ranks: R.
        physical_to_logical_LP: expert in each slot; int64 (L, P). Rank r owns the slots
            r * P / R to (r + 1) * P / R - 1. Every expert has a slot in every layer.

    Raises:
        ValueError: at construction, if the values contradict each other.
    """

    version: int
    created_at: float
    model_id: str
    fingerprint: str
    num_experts: int
    num_ranks: int
    physical_to_logical_LP: IntArray

    def __post_init__(self) -> None:
        if self.version < 0 or not 0 <= self.created_at < float("inf"):
            raise ValueError(
                f"a plan needs version >= 0 and created_at >= 0, got {self.version} and "
                f"{self.created_at}"
            )
        check_placement(self.physical_to_logical_LP, self.num_experts, self.num_ranks)

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.physical_to_logical_LP.shape[0])

    @property
    def num_slots(self) -> int:
        """P, slots of all ranks in a layer."""
        return int(self.physical_to_logical_LP.shape[1])

    @property
    def rank_of_slot_P(self) -> IntArray:
        """EP rank that owns each slot; int64 (P,)."""
        return slot_ranks(self.num_slots, self.num_ranks)

    @cached_property
    def num_copies_LE(self) -> IntArray:
        """Slots that hold each expert; int64 (L, E), at least 1."""
        return copies(self.physical_to_logical_LP, self.num_experts)

    @cached_property
    def logical_to_physical_LEC(self) -> IntArray:
        """Slots of each expert, ascending, filled up with -1; int64 (L, E, most copies)."""
        slots_LEC = np.full((*self.num_copies_LE.shape, self.num_copies_LE.max()), -1, np.int64)
        next_LE = np.zeros_like(self.num_copies_LE)
        layers = np.arange(self.num_layers)
        for slot in range(self.num_slots):
            experts_L = self.physical_to_logical_LP[:, slot]
            slots_LEC[layers, experts_L, next_LE[layers, experts_L]] = slot
            next_LE[layers, experts_L] += 1
        return slots_LEC

    def save(self, path: str | Path) -> None:
        """Write one JSON file, whole or not at all; a reader sees the old plan or the new one.

        Raises:
            OSError: writing failed; what was at `path` is still there.
        """
        path = Path(path)
        content = self._content()
        text = json.dumps({**content, "sha256": _sha256(content)}, allow_nan=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text + "\n")
            os.chmod(fresh, 0o644)  # mkstemp's file is for its owner alone; workers may be others
            os.replace(fresh, path)
        except OSError:
            Path(fresh).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> PlacementPlan:
        """Read a file written by `save`.

        Raises:
            FileNotFoundError: there is no file `path`.
            ValueError: no JSON object, another format version, a wrong checksum, or values that
                contradict each other.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no placement plan at {path}")
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as err:
            raise ValueError(f"{path} is not valid JSON: {err}") from err
        if not isinstance(stored, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(stored).__name__}")
        check_version(stored, FORMAT_VERSION, path)
        said = stored.pop("sha256", None)
        if said != _sha256(stored):
            raise ValueError(
                f"{path} is damaged or was edited: its content has SHA-256 {_sha256(stored)}, it "
                f"says {said}; write the plan again"
            )
        table = take(stored, "physical_to_logical", list, path)
        try:
            physical_to_logical_LP = np.array(table, dtype=np.int64)
        except (ValueError, TypeError, OverflowError) as err:
            raise ValueError(f"{path}: physical_to_logical is no table of integers") from err
        return cls(
            version=take(stored, "version", int, path),
            created_at=take(stored, "created_at", float, path),
            model_id=take(stored, "model_id", str, path),
            fingerprint=take(stored, "fingerprint", str, path),
            num_experts=take(stored, "num_experts", int, path),
            num_ranks=take(stored, "num_ranks", int, path),
            physical_to_logical_LP=physical_to_logical_LP,
        )

    def verify(
        self, fingerprint: str, num_layers: int, num_experts: int, num_slots: int, num_ranks: int
    ) -> None:
        """Refuse another model or shape.

        Raises:
            PlanMismatch: something differs; the message holds both sides.
        """
        ours = (self.fingerprint, *self.physical_to_logical_LP.shape)
        ours = (ours[0], ours[1], self.num_experts, ours[2], self.num_ranks)
        theirs = (fingerprint, num_layers, num_experts, num_slots, num_ranks)
        if ours != theirs:
            raise PlanMismatch(
                f"placement plan {self.version} is for {_describe(*ours)}, but the engine runs "
                f"{_describe(*theirs)}: make a plan for this engine"
            )

    def _content(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "version": self.version,
            "created_at": float(self.created_at),
            "model_id": self.model_id,
            "fingerprint": self.fingerprint,
            "num_experts": self.num_experts,
            "num_ranks": self.num_ranks,
            "physical_to_logical": self.physical_to_logical_LP.tolist(),
        }


def check_placement(physical_to_logical_LP: IntArray, num_experts: int, num_ranks: int) -> None:
    """Check that every rank has as many slots and every expert at least one.

    Raises:
        ValueError: names the first layer and expert at fault.
    """
    if physical_to_logical_LP.ndim != 2 or physical_to_logical_LP.dtype != np.int64:
        raise ValueError(
            "a placement must be int64 of shape (layers, slots), got "
            f"{physical_to_logical_LP.dtype} {physical_to_logical_LP.shape}"
        )
    num_layers, num_slots = physical_to_logical_LP.shape
    check_slots(num_slots, num_experts, num_ranks)
    if num_layers < 1:
        raise ValueError("a placement needs at least one layer")
    if physical_to_logical_LP.min() < 0 or physical_to_logical_LP.max() >= num_experts:
        raise ValueError(
            f"experts of a placement must be in [0, {num_experts}), got "
            f"{physical_to_logical_LP.min()} to {physical_to_logical_LP.max()}"
        )
    missing = np.argwhere(copies(physical_to_logical_LP, num_experts) == 0)
    if len(missing):
        layer, expert = missing[0]
        raise ValueError(f"layer {layer}: expert {expert} has no slot; each needs one")


def check_slots(num_slots: int, num_experts: int, num_ranks: int) -> None:
    """Check the numbers alone. Raises ValueError."""
    if num_ranks < 1 or num_experts < 1 or num_slots < num_experts or num_slots % num_ranks:
        raise ValueError(
            f"{num_slots} slots on {num_ranks} ranks for {num_experts} experts: slots must be a "
            "multiple of the ranks and at least as many as the experts"
        )


def copies(physical_to_logical_LP: IntArray, num_experts: int) -> IntArray:
    """Slots that hold each expert; int64 (L, E)."""
    num_layers = len(physical_to_logical_LP)
    flat = physical_to_logical_LP + np.arange(num_layers)[:, None] * num_experts
    counts = np.bincount(flat.ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts)


def slot_ranks(num_slots: int, num_ranks: int) -> IntArray:
    """EP rank that owns each slot; int64 (P,)."""
    return np.arange(num_slots, dtype=np.int64) // (num_slots // num_ranks)


def num_moves(old_LP: IntArray, new_LP: IntArray, num_ranks: int) -> IntArray:
    """Experts that some rank must receive, per layer: in its new slots but not in its old ones.

    Returns:
        int64 (L,). An expert that only changes slots within a rank is no move.

    Raises:
        ValueError: the placements differ in shape.
    """
    old_LRE, new_LRE = held_by_both(old_LP, new_LP, num_ranks)
    return np.asarray((new_LRE > old_LRE).sum(axis=(1, 2)), dtype=np.int64)


def _held(placement_LP: IntArray, num_experts: int, num_ranks: int) -> NDArray[np.int64]:
    """1 where a rank holds an expert; int64 (L, R, E)."""
    held_LRE = np.zeros((len(placement_LP), num_ranks, num_experts), dtype=np.int64)
    rank_P = slot_ranks(placement_LP.shape[1], num_ranks)
    held_LRE[np.arange(len(placement_LP))[:, None], rank_P, placement_LP] = 1
    return held_LRE


def held_by_both(
    old_LP: IntArray, new_LP: IntArray, num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if old_LP.shape != new_LP.shape:
        raise ValueError(
            f"old and new placement must have one shape, got {old_LP.shape} and {new_LP.shape}"
        )
    num_experts = int(max(old_LP.max(), new_LP.max())) + 1
    check_placement(old_LP, num_experts, num_ranks)
    check_placement(new_LP, num_experts, num_ranks)
    return _held(old_LP, num_experts, num_ranks), _held(new_LP, num_experts, num_ranks)


def _sha256(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(
    fingerprint: str, num_layers: int, num_experts: int, num_slots: int, num_ranks: int
) -> str:
    return (
        f"fingerprint {fingerprint}, {num_layers} MoE layers, {num_experts} experts, {num_slots} "
        f"slots on {num_ranks} ranks"
    )
