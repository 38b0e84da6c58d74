"""The score file: what retention and refinement score experts by, beyond the model's own gates.

For policy learned it is the folder of a `ScoreTable`; for the others one .npz file with any of
these arrays, float32:
    hotness_LE: importance of each expert, for policy static;
    temporal_LEH: the Temporal Router's W^T, added to the native gate by temporal and spatio;
    spatio_LEH: the Spatio Router's W^S; row l predicts the layer after l.
`fingerprint` (text) names the model.

Axes: L MoE layers, E experts, H hidden size.

Source: CacheRouter (arXiv 2609.04895). Both routers start there from the native ones, W^T_l = W^R_l
and W^S_l = W^R_(l+1), which is what the runtime uses where the file gives none.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cachemgr.learned import ScoreTable

Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Contents of a score file; absent arrays are None."""

    hotness_LE: Float32Array | None = None
    temporal_LEH: Float32Array | None = None
    spatio_LEH: Float32Array | None = None


def load_scores(
    path: Path, fingerprint: str, num_layers: int, num_experts: int, hidden_size: int
) -> Scores:
    """Read and check a score file.

    Raises:
        ValueError: it is missing or unreadable, of another model, or an array has the wrong shape
            or numbers that are not finite.
    """
    shapes = {
        "hotness_LE": (num_layers, num_experts),
        "temporal_LEH": (num_layers, num_experts, hidden_size),
        "spatio_LEH": (num_layers, num_experts, hidden_size),
    }
    try:
        stored = np.load(path, allow_pickle=False)
        if isinstance(stored, np.ndarray):
            raise ValueError("it is a single array: store it by name with numpy.savez")
        with stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as err:
        raise ValueError(f"cache.score_file {path} cannot be read as .npz ({err})") from err
    found = str(arrays.pop("fingerprint", ""))
    if found != fingerprint:
        raise ValueError(
            f"cache.score_file {path} was made for model {found or 'without a fingerprint'}, this "
            f"one is {fingerprint}: train or measure the scores again for it"
        )
    if unknown := sorted(set(arrays) - set(shapes)):
        raise ValueError(
            f"cache.score_file {path} has unknown arrays {', '.join(unknown)}: known are "
            f"{', '.join(shapes)}"
        )
    for name, array in arrays.items():
        if array.shape != shapes[name] or not np.isfinite(array).all():
            raise ValueError(
                f"cache.score_file {path}: {name} must be finite numbers of shape {shapes[name]}, "
                f"got shape {array.shape}"
            )
    return Scores(**{name: array.astype(np.float32) for name, array in arrays.items()})


def load_learned(
    path: str | None, fingerprint: str, num_layers: int, num_experts: int
) -> ScoreTable:
    """Read and check the score of policy learned.

    Raises:
        ValueError: none is given, it is missing or damaged, or of another model.
    """
    if path is None:
        raise ValueError(
            "policy learned needs cache.score_file: the folder that `eldr cache train` wrote"
        )
    try:
        table = ScoreTable.load(path)
        table.check(num_layers, num_experts, fingerprint)
    except (OSError, ValueError) as err:
        raise ValueError(f"cache.score_file {path} does not fit ({err})") from err
    return table
