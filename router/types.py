"""Data types at the border of the routing core.

Axes: K decode replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
CountArray = NDArray[np.integer[Any]]


class FallbackReason(StrEnum):
    """Why a request was routed by load alone although the policy looks at signatures."""

    NO_SIGNATURE = "no_signature"
    """The prefill side sent no expert counts."""
    BAD_SIGNATURE = "bad_signature"
    """The counts break conservation, or have the wrong shape or type."""
    NO_ARTIFACT = "no_artifact"
    """The router holds no calibration artifact."""
    ROUTER_AWAY = "router_away"
    """The caller could not reach the router and chose by itself."""
    NO_CENTROID = "no_centroid"
    """None of the replicas that may be chosen has a centroid."""
    ZERO_SIGNATURE = "zero_signature"
    """Mask and IDF left nothing of the counts, so no centroid is nearer than another."""


@dataclass(slots=True)
class Decision:
    """What a policy answers; not frozen, which would make it three times as slow to make.

    Attributes:
        index: position of the chosen replica in the arrays the policy was given.
        band_size: replicas in the locality band; None for policies without a band.
        fallback: why the choice went by load alone; None if it did not.
    """

    index: int
    band_size: int | None = None
    fallback: FallbackReason | None = None


class Selection(NamedTuple):
    """A decode replica chosen and reserved for one request.

    Attributes:
        request_id: key of the reservation; give it to `release` exactly once.
        replica_id: the chosen decode replica.
        policy: name of the policy that chose.
        similarity: cosine of the signature with the chosen replica's centroid, or its mean cosine
            with what runs there, as the policy wants it; in [-1, 1]; None without a signature or
            a centroid.
        band_size: replicas in the locality band; None for policies without a band.
        centroid: index of the chosen replica's centroid; None if it has none.
        fallback: why the choice went by load alone; None if it did not.
    """

    request_id: str
    replica_id: str
    policy: str
    similarity: float | None
    band_size: int | None
    centroid: int | None
    fallback: FallbackReason | None


class NoReplica(LookupError):
    """No replica may be chosen: the set is empty or all of it is excluded."""
