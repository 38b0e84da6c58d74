"""A bounded uniform sample of recent signatures, for refits.

Axes: R rows kept, D signature length.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from calibration.signature import Float32Array

NUM_PARTS = 8
"""A rolling window forgets an eighth of itself at a time."""


@dataclass(slots=True)
class _Part:
    """Algorithm R over one stretch of time."""

    number: int
    rows: list[Float32Array] = field(default_factory=list)
    num_seen: int = 0


class SignatureReservoir:
    """Uniform sample of the signatures of a rolling window, or of all of them.

    The window consists of equal parts of time, each with a sample of its own (algorithm R), so that
    a burst does not push out what came before it, and memory has a bound at any rate of requests.

    Args:
        size: most signatures kept, >= 1; at least one a part in a window.
        seed: seed of the replacement draws.
        window_s: seconds a signature is kept, > 0; infinite keeps a sample of all.

    Source: Vitter, Random sampling with a reservoir (1985).
    """

    def __init__(self, size: int, seed: int, window_s: float = math.inf) -> None:
        if size < 1:
            raise ValueError(f"reservoir size must be >= 1, got {size}")
        if not window_s > 0:
            raise ValueError(f"reservoir window must be > 0 s, got {window_s}")
        self._num_parts = 1 if window_s == math.inf else NUM_PARTS
        self._part_size = max(1, size // self._num_parts)
        self._part_s = window_s / self._num_parts
        self._rng = random.Random(seed)
        self._parts: deque[_Part] = deque()

    def offer(self, signature_D: Float32Array, now: float) -> None:
        """Take note of a signature; the caller must not change the array afterwards.

        Args:
            signature_D: float32, shape (D,).
            now: seconds; must not run backwards between calls.
        """
        number = int(now / self._part_s)
        if not self._parts or self._parts[-1].number != number:
            self._forget(number)
            self._parts.append(_Part(number))
        part = self._parts[-1]
        part.num_seen += 1
        if len(part.rows) < self._part_size:
            part.rows.append(signature_D)
            return
        row = self._rng.randrange(part.num_seen)
        if row < self._part_size:
            part.rows[row] = signature_D

    def rows(self, now: float) -> list[Float32Array]:
        """The sample, oldest part first; the arrays themselves, not copies."""
        self._forget(int(now / self._part_s))
        return [row for part in self._parts for row in part.rows]

    def signatures(self, now: float) -> Float32Array:
        """Copy of the sample; float32, shape (R, D); (0, 0) if empty."""
        rows = self.rows(now)
        return np.stack(rows) if rows else np.empty((0, 0), dtype=np.float32)

    def clear(self) -> None:
        """Start a new sample."""
        self._parts.clear()

    def _forget(self, number: int) -> None:
        """Drop the parts that have left the window when part `number` is the newest."""
        while self._parts and self._parts[0].number <= number - self._num_parts:
            self._parts.popleft()
