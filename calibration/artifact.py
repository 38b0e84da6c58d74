"""The calibration artifact: what fit learned and the router loads. Frozen, versioned, checksummed.

Axes: N calibration requests, L MoE layers, E experts, K clusters (= centroids), D = S * E signature
length with S kept layers, R reservoir rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from calibration.signature import Float32Array, IndexArray, SignatureTransform
from calibration.storage import check_version, read_folder, take, write_folder

FORMAT_VERSION = 1
JSON_NAME = "calibration.json"
NPZ_NAME = "arrays.npz"
MAX_RESERVOIR = 1024


class ArtifactMismatch(ValueError):
    """The artifact was made for another model than the one that is served."""


@dataclass(frozen=True, eq=False)
class Artifact:
    """One fit, for one model and workload.

    Attributes:
        model_id: name of the model the counts came from.
        fingerprint: hash of the model's configuration and weights index.
        num_layers: L, MoE layers.
        num_experts: E, experts per layer.
        top_k: experts a token chooses per layer.
        workload: name of the calibration traffic.
        prompts_sha256: SHA-256 of the calibration prompts, in hex; empty if unknown.
        num_requests: N, requests fitted on.
        k: K, number of centroids.
        tau: band width suggested to the router, cosine units.
        seed: seed of layer selection and clustering.
        scores: quality figures by name: rho (peak of the greedy curve), rho_all_layers, ...
        versions: versions of what made the capture and the fit, by name.
        idf_LE: IDF weights of all layers; float32 (L, E).
        layer_mask: kept layers, ascending; int64 (S,).
        layer_order: layers in the order the greedy search took them; int64 (L,).
        rho_curve_L: rho after each greedy round; float64 (L,).
        layer_rho_L: rho of each layer alone; float64 (L,).
        centroids_KD: unit centroids; float32 (K, D).
        assignments_N: cluster of each calibration request; int64 (N,).
        domains_N: label of each calibration request; unicode (N,).
        reservoir_RD: signatures of some calibration requests, R <= 1024; float32 (R, D).
        reservoir_rows_R: which request each reservoir row is; int64 (R,).
        cluster_activation_KLE: expected expert choices per decoded token; float32 (K, L, E), each
            row over E sums to top_k.
        domain_clusters: label to the fewest clusters holding at least half of its requests.

    Raises:
        ValueError: at construction, if shapes or values contradict each other.
    """

    model_id: str
    fingerprint: str
    num_layers: int
    num_experts: int
    top_k: int
    workload: str
    prompts_sha256: str
    num_requests: int
    k: int
    tau: float
    seed: int
    scores: dict[str, float]
    versions: dict[str, str]
    idf_LE: Float32Array
    layer_mask: IndexArray
    layer_order: IndexArray
    rho_curve_L: NDArray[np.float64]
    layer_rho_L: NDArray[np.float64]
    centroids_KD: Float32Array
    assignments_N: IndexArray
    domains_N: NDArray[np.str_]
    reservoir_RD: Float32Array
    reservoir_rows_R: IndexArray
    cluster_activation_KLE: Float32Array
    domain_clusters: dict[str, list[int]]

    _SCALARS: ClassVar[dict[str, type]] = {
        "model_id": str,
        "fingerprint": str,
        "num_layers": int,
        "num_experts": int,
        "top_k": int,
        "workload": str,
        "prompts_sha256": str,
        "num_requests": int,
        "k": int,
        "tau": float,
        "seed": int,
        "scores": dict,
        "versions": dict,
        "domain_clusters": dict,
    }
    _ARRAYS: ClassVar[dict[str, str]] = {  # name: dtype kind
        "idf_LE": "f",
        "layer_mask": "i",
        "layer_order": "i",
        "rho_curve_L": "f",
        "layer_rho_L": "f",
        "centroids_KD": "f",
        "assignments_N": "i",
        "domains_N": "U",
        "reservoir_RD": "f",
        "reservoir_rows_R": "i",
        "cluster_activation_KLE": "f",
    }

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_values()

    @cached_property
    def transform(self) -> SignatureTransform:
        """Counts to signature, with this artifact's IDF and mask."""
        return SignatureTransform(self.idf_LE, self.layer_mask)

    @property
    def reservoir_domains_R(self) -> NDArray[np.str_]:
        """Label of each reservoir row."""
        return self.domains_N[self.reservoir_rows_R]

    @property
    def reservoir_clusters_R(self) -> IndexArray:
        """Cluster of each reservoir row."""
        return self.assignments_N[self.reservoir_rows_R]

    def save(self, path: str | Path) -> None:
        """Write the folder `path`, whole or not at all; an artifact already there is replaced.

        Raises:
            FileExistsError: `path` exists and is no artifact.
            OSError: writing failed; what was at `path` is still there.
        """
        meta = {name: getattr(self, name) for name in self._SCALARS}
        arrays = {name: getattr(self, name) for name in self._ARRAYS}
        write_folder(
            Path(path), JSON_NAME, {"format_version": FORMAT_VERSION, **meta}, NPZ_NAME, arrays
        )

    @classmethod
    def load(cls, path: str | Path) -> Artifact:
        """Read a folder written by `save`.

        Raises:
            FileNotFoundError: `path` is no artifact folder.
            ValueError: another format version, a wrong checksum, or contradicting contents.
        """
        meta, arrays = read_folder(Path(path), JSON_NAME, NPZ_NAME)
        where = Path(path) / JSON_NAME
        check_version(meta, FORMAT_VERSION, where)
        values: dict[str, Any] = {
            name: take(meta, name, kind, where) for name, kind in cls._SCALARS.items()
        }
        for name in cls._ARRAYS:
            if name not in arrays:
                raise ValueError(f"{Path(path) / NPZ_NAME} has no array {name}")
            values[name] = arrays[name]
        return cls(**values)

    def unpack_experts(self, bits: bytes) -> NDArray[np.bool_]:
        """A set of experts of each layer, bool (L, E), from bits; each layer has whole bytes.

        Raises:
            ValueError: the bits are of another model.
        """
        bits_N = np.frombuffer(bits, dtype=np.uint8)
        if bits_N.size != self.num_layers * -(-self.num_experts // 8):
            raise ValueError(
                f"{bits_N.size} bytes are no experts of {self.num_layers} layers of "
                f"{self.num_experts}: another model than the artifact's"
            )
        bits_LB = bits_N.reshape(self.num_layers, -1)
        return np.unpackbits(bits_LB, axis=1, count=self.num_experts).astype(np.bool_)

    def verify_model(
        self, fingerprint: str, model_id: str, num_layers: int, num_experts: int, top_k: int
    ) -> None:
        """Refuse to route for another model than the one calibrated on.

        The fingerprint and the three numbers must agree; the id is only named in the message,
        since one model may be served under several names.

        Raises:
            ArtifactMismatch: something differs; the message holds both fingerprints.
        """
        ours = (self.fingerprint, self.num_layers, self.num_experts, self.top_k)
        theirs = (fingerprint, num_layers, num_experts, top_k)
        if ours != theirs:
            raise ArtifactMismatch(
                f"artifact is for {_describe(self.model_id, *ours)}, but the served model is "
                f"{_describe(model_id, *theirs)}: capture and fit again on the served model"
            )

    def _check_shapes(self) -> None:
        n, layers, experts = self.num_requests, self.num_layers, self.num_experts
        length, rows = len(self.layer_mask) * experts, len(self.reservoir_rows_R)
        shapes = {
            "idf_LE": (layers, experts),
            "layer_mask": (len(self.layer_mask),),
            "layer_order": (layers,),
            "rho_curve_L": (layers,),
            "layer_rho_L": (layers,),
            "centroids_KD": (self.k, length),
            "assignments_N": (n,),
            "domains_N": (n,),
            "reservoir_RD": (rows, length),
            "reservoir_rows_R": (rows,),
            "cluster_activation_KLE": (self.k, layers, experts),
        }
        for name, kind in self._ARRAYS.items():
            array = getattr(self, name)
            if array.dtype.kind != kind or array.shape != shapes[name]:
                raise ValueError(
                    f"artifact array {name} must have dtype kind {kind!r} and shape "
                    f"{shapes[name]}, got {array.dtype} {array.shape}"
                )

    def _check_values(self) -> None:
        for name, kind in self._ARRAYS.items():
            if kind == "f" and not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"artifact array {name} must be finite")
        if not 0 <= self.tau <= 1:
            raise ValueError(f"artifact tau must be in [0, 1], got {self.tau}")
        if self.k < 1 or self.top_k < 1:
            raise ValueError(f"artifact needs k >= 1 and top_k >= 1, got {self.k}, {self.top_k}")
        if len(self.reservoir_rows_R) > MAX_RESERVOIR:
            raise ValueError(f"reservoir must have at most {MAX_RESERVOIR} rows")
        _check_indices("assignments_N", self.assignments_N, self.k)
        _check_indices("reservoir_rows_R", self.reservoir_rows_R, self.num_requests)
        for label, clusters in self.domain_clusters.items():
            _check_indices(f"domain_clusters[{label!r}]", np.asarray(clusters), self.k)
        norms_K = np.linalg.norm(self.centroids_KD, axis=1)
        if (np.abs(norms_K - 1) > 1e-3).any():
            raise ValueError(f"centroids must have norm 1, got {norms_K.min()} to {norms_K.max()}")
        _ = self.transform  # checks idf_LE and layer_mask


def _check_indices(name: str, indices: NDArray[Any], bound: int) -> None:
    if indices.size and (indices.min() < 0 or indices.max() >= bound):
        raise ValueError(
            f"artifact {name} must be in [0, {bound}), got {indices.min()} to {indices.max()}"
        )


def _describe(
    model_id: str, fingerprint: str, num_layers: int, num_experts: int, top_k: int
) -> str:
    return (
        f"{model_id!r} (fingerprint {fingerprint}, {num_layers} MoE layers, {num_experts} experts, "
        f"top-{top_k})"
    )
