"""Signature arithmetic: IDF, layer mask, unit norm. The only implementation; fit and router use it.

Axes: N requests, L MoE layers, E experts, S kept layers, D = S * E signature length.

Source: ELDR (arXiv 2607.00466), expert signature.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

CountArray = NDArray[np.integer[Any]]
Float32Array = NDArray[np.float32]
IndexArray = NDArray[np.int64]

MIN_NORM = 1e-9


def compute_idf(counts_NLE: CountArray) -> Float32Array:
    """Weight of each expert: high if few calibration requests touch it, 0 if all do.

    Args:
        counts_NLE: prompt tokens per request, layer and expert; integers >= 0, shape (N, L, E).

    Returns:
        w = ln((N + 1) / (df + 1)) with df the number of requests with count > 0; float32, shape
        (L, E), >= 0.

    Raises:
        ValueError: counts_NLE is not three-dimensional, has no request, or is not of integers.
    """
    if counts_NLE.dtype.kind not in "iu":
        raise ValueError(f"counts_NLE must be integers, got {counts_NLE.dtype}")
    if counts_NLE.ndim != 3 or counts_NLE.shape[0] == 0:
        raise ValueError(f"counts_NLE must have shape (N >= 1, L, E), got {counts_NLE.shape}")
    df_LE = np.count_nonzero(counts_NLE, axis=0)
    idf_LE: Float32Array = np.log((counts_NLE.shape[0] + 1) / (df_LE + 1)).astype(np.float32)
    return idf_LE


@dataclass(frozen=True, eq=False)
class SignatureTransform:
    """Expert counts to signature: counts * IDF over the kept layers, one global L2 norm.

    Attributes:
        idf_LE: IDF weights of all layers; float32, shape (L, E), finite, >= 0.
        layer_mask: kept layers, ascending; int64, shape (S,), S >= 1.

    Raises:
        ValueError: at construction, if either is not as described.
    """

    idf_LE: Float32Array
    layer_mask: IndexArray
    _idf_SE: Float32Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        idf_LE = np.ascontiguousarray(self.idf_LE, dtype=np.float32)
        mask = np.asarray(self.layer_mask, dtype=np.int64)
        if idf_LE.ndim != 2 or not np.isfinite(idf_LE).all() or (idf_LE < 0).any():
            raise ValueError(
                f"idf_LE must be a finite matrix (L, E) >= 0, got shape {idf_LE.shape}"
            )
        num_layers = len(idf_LE)
        if mask.ndim != 1 or len(mask) == 0 or (np.diff(mask) <= 0).any():
            raise ValueError(f"layer_mask must be ascending layer indices, got {mask.tolist()}")
        if mask[0] < 0 or mask[-1] >= num_layers:
            raise ValueError(
                f"layer_mask must hold layers in [0, {num_layers}), got {mask.tolist()}"
            )
        object.__setattr__(self, "idf_LE", idf_LE)
        object.__setattr__(self, "layer_mask", mask)
        object.__setattr__(self, "_idf_SE", np.ascontiguousarray(idf_LE[mask]))

    @property
    def length(self) -> int:
        """D, the length of a signature."""
        return self._idf_SE.size

    def __call__(self, counts_LE: CountArray | Float32Array) -> Float32Array:
        """Signature of one request.

        Args:
            counts_LE: prompt tokens per layer and expert; whole numbers >= 0, shape (L, E).

        Returns:
            float32, shape (D,), non-negative, of norm 1; all zeros if nothing is left of the counts
            (the norm is clipped at 1e-9).
        """
        signature_D: Float32Array = np.multiply(
            counts_LE.take(self.layer_mask, axis=0), self._idf_SE, dtype=np.float32
        ).ravel()
        signature_D /= max(float(signature_D @ signature_D) ** 0.5, MIN_NORM)
        return signature_D

    def batch(self, counts_NLE: CountArray) -> Float32Array:
        """Signatures of many requests; float32, shape (N, D), row n as `self(counts_NLE[n])`."""
        signatures_ND = np.empty((len(counts_NLE), self.length), dtype=np.float32)
        for signature_D, counts_LE in zip(signatures_ND, counts_NLE, strict=True):
            signature_D[:] = self(counts_LE)
        return signatures_ND
