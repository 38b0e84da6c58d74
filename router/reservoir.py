"""A bounded uniform sample of signatures, for refits.

Axes: R rows kept, D signature length.
"""

from __future__ import annotations

import random

import numpy as np

from calibration.signature import Float32Array


class SignatureReservoir:
    """Algorithm R: after n signatures each of them is kept with probability min(1, size / n).

    Args:
        size: most signatures kept, >= 1.
        seed: seed of the replacement draws.

    Source: Vitter, Random sampling with a reservoir (1985).
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"reservoir size must be >= 1, got {size}")
        self._size = size
        self._rng = random.Random(seed)
        self._rows: list[Float32Array] = []
        self.num_seen = 0

    def offer(self, signature_D: Float32Array) -> None:
        """Take note of a signature; the caller must not change the array afterwards."""
        self.num_seen += 1
        if len(self._rows) < self._size:
            self._rows.append(signature_D)
            return
        row = self._rng.randrange(self.num_seen)
        if row < self._size:
            self._rows[row] = signature_D

    def signatures(self) -> Float32Array:
        """Copy of the sample; float32, shape (R, D); (0, 0) if empty."""
        if not self._rows:
            return np.empty((0, 0), dtype=np.float32)
        return np.stack(self._rows)

    def clear(self) -> None:
        """Start a new sample."""
        self._rows.clear()
        self.num_seen = 0
