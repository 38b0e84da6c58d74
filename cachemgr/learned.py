"""A retention score learned from traces of an unchanged model.

The score of an expert is an estimate of gamma^(steps until its next use - 1), linear in

- decayed counts of its own uses, at several half-lives (square roots: a use adds less to an expert
  that is hot already), and
- what the layers around have just chosen: this token's choices up to this layer, and the last
  token's choices of the layers above, which have not run yet.

The neighbours make the difference: which experts a token takes in one layer says much about the
other layers, now and for the next tokens. Fitted by ridge regression, in closed form. A step costs
a weighted sum of the counts, and a sum of one row of a matrix for each choice in the window.

Axes: N requests that a replay steps together (1 in the runtime), L MoE layers, E experts, R rows
(n * L + l), H half-lives, W layers of the window, S steps, P rows of its matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cachemgr.types import BoolArray, FloatArray
from calibration.storage import Arrays, check_version, read_folder, take, write_folder

FORMAT_VERSION = 2
JSON_NAME, NPZ_NAME = "score.json", "score.npz"
HALF_LIVES = (2.0, 8.0, 32.0, 128.0)
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """Weights of the score; what `eldr cache train` writes.

    Attributes:
        model_id: model whose routing it was fitted to.
        fingerprint: of that model (`app.model_facts`); None: not known, the shape alone is checked.
        half_lives: of the decayed counts, in steps; H of them.
        gamma: discount of the target, in (0, 1).
        own_LHE: weight of an expert's own root count; float32 (L, H, E).
        window_LWEE: weight of a choice in layer l + w - reach; float32 (L, W, E, E), W odd.
        bias_LE: float32 (L, E).
        provenance: training data and figures, for the reader.

    Raises:
        ValueError: at construction, if shapes or values contradict each other.
    """

    model_id: str
    fingerprint: str | None
    half_lives: tuple[float, ...]
    gamma: float
    own_LHE: Floats
    window_LWEE: Floats
    bias_LE: Floats
    provenance: dict[str, object]

    def __post_init__(self) -> None:
        num_layers, num_experts = self.bias_LE.shape if self.bias_LE.ndim == 2 else (0, 0)
        own = (num_layers, len(self.half_lives), num_experts)
        width = self.window_LWEE.shape[1] if self.window_LWEE.ndim == 4 else 0
        window = (num_layers, width, num_experts, num_experts)
        if (
            not num_layers
            or self.own_LHE.shape != own
            or self.window_LWEE.shape != window
            or width % 2 != 1
        ):
            raise ValueError(
                f"score weights of shapes {self.own_LHE.shape}, {self.window_LWEE.shape}, "
                f"{self.bias_LE.shape} do not belong together"
            )
        if not all(0 < half_life < np.inf for half_life in self.half_lives):
            raise ValueError(f"half-lives must be above 0, got {self.half_lives}")
        if not 0 < self.gamma < 1:
            raise ValueError(f"gamma must be in (0, 1), got {self.gamma}")
        for name in ("own_LHE", "window_LWEE", "bias_LE"):
            array = getattr(self, name)
            if array.dtype != np.float32 or not np.isfinite(array).all():
                raise ValueError(f"{name} must be finite float32, got {array.dtype}")

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.bias_LE.shape[0])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.bias_LE.shape[1])

    @property
    def reach(self) -> int:
        """Layers that the window extends to each side."""
        return int(self.window_LWEE.shape[1]) // 2

    def check(self, num_layers: int, num_experts: int, fingerprint: str | None = None) -> None:
        """Refuse another model.

        Raises:
            ValueError: other layers or experts, or another fingerprint where both are known.
        """
        if (self.num_layers, self.num_experts) != (num_layers, num_experts):
            raise ValueError(
                f"the score is for {self.num_layers} layers x {self.num_experts} experts "
                f"({self.model_id}), not {num_layers} x {num_experts}: train one for this model"
            )
        if None not in (fingerprint, self.fingerprint) and fingerprint != self.fingerprint:
            raise ValueError(
                f"the score is for {self.model_id} with fingerprint {self.fingerprint}, not "
                f"{fingerprint}: train one for this model"
            )

    def save(self, path: str | Path) -> None:
        """Write the folder whole; see `calibration.storage.write_folder` for errors.

        The window is stored as float16, to which `training.train` has rounded it.
        """
        meta = {
            "format_version": FORMAT_VERSION,
            "model_id": self.model_id,
            "fingerprint": self.fingerprint,
            "num_layers": self.num_layers,
            "num_experts": self.num_experts,
            "half_lives": list(self.half_lives),
            "gamma": self.gamma,
            "provenance": self.provenance,
        }
        arrays: Arrays = {
            "own": self.own_LHE,
            "window": self.window_LWEE.astype(np.float16),
            "bias": self.bias_LE,
        }
        write_folder(Path(path), JSON_NAME, meta, NPZ_NAME, arrays)

    @classmethod
    def load(cls, path: str | Path) -> ScoreTable:
        """Read what `save` wrote; nothing in it is unpickled.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: damaged, of another version, or contradicting itself.
        """
        meta, arrays = read_folder(Path(path), JSON_NAME, NPZ_NAME)
        check_version(meta, FORMAT_VERSION, path)
        missing = [name for name in ("own", "window", "bias") if name not in arrays]
        if missing:
            raise ValueError(f"{path}: {NPZ_NAME} has no {', '.join(missing)}")
        half_lives = take(meta, "half_lives", list, path)
        if not all(isinstance(half_life, int | float) for half_life in half_lives):
            raise ValueError(f"{path}: half_lives must be numbers, got {half_lives}")
        fingerprint = meta.get("fingerprint")
        try:
            return cls(
                take(meta, "model_id", str, path),
                None if fingerprint is None else take(meta, "fingerprint", str, path),
                tuple(float(half_life) for half_life in half_lives),
                take(meta, "gamma", float, path),
                arrays["own"],
                arrays["window"].astype(np.float32),
                arrays["bias"],
                take(meta, "provenance", dict, path),
            )
        except ValueError as err:
            raise ValueError(f"{path}: {err}") from err


class History:
    """What the score looks at: decayed counts and the last choices of every layer.

    Args:
        num_requests: N; 1 in the runtime.
        num_layers: L.
        num_experts: E.
        half_lives: of the counts, in steps.
        reach: layers that the window extends to each side.
    """

    def __init__(
        self,
        num_requests: int,
        num_layers: int,
        num_experts: int,
        half_lives: tuple[float, ...],
        reach: int,
    ) -> None:
        self.num_layers, self.num_experts, self.reach = num_layers, num_experts, reach
        self._decay_H1 = np.power(0.5, 1 / np.array(half_lives, dtype=np.float32))[:, None]
        shape = (num_requests, num_layers, len(half_lives), num_experts)
        self._counts_NLHE = np.zeros(shape, dtype=np.float32)
        # Layers beyond the ends choose nothing: `reach` of padding on each side.
        padded = (num_requests, num_layers + 2 * reach, num_experts)
        self._now_NLE = np.zeros(padded, dtype=np.bool_)
        self._before_NLE = np.zeros(padded, dtype=np.bool_)

    def observe(self, rows: slice, demand_RE: BoolArray) -> None:
        """Take in a step: of one layer, or of all layers of the first requests."""
        if len(demand_RE) == 1 and self.num_layers > 1:
            request, layer = divmod(rows.start, self.num_layers)
            counts_HE = self._counts_NLHE[request, layer]
            counts_HE *= self._decay_H1
            counts_HE += demand_RE[0]
            self._now_NLE[request, layer + self.reach] = demand_RE[0]
            return
        requests = self._requests(rows)
        demand_NLE = demand_RE.reshape(-1, self.num_layers, self.num_experts)
        counts_NLHE = self._counts_NLHE[requests]
        counts_NLHE *= self._decay_H1
        counts_NLHE += demand_NLE[:, :, None]
        self._before_NLE[requests] = self._now_NLE[requests]
        self._now_NLE[requests, self.reach : self.reach + self.num_layers] = demand_NLE

    def own(self, request: int, layer: int, out_HE: Floats) -> None:
        """Write a layer's root counts; (H, E)."""
        np.sqrt(self._counts_NLHE[request, layer], out=out_HE)

    def window(self, request: int, layer: int) -> BoolArray:
        """Last choices of the layers around, when layers are observed in turn; (W * E,)."""
        return self._now_NLE[request, layer : layer + 2 * self.reach + 1].ravel()

    def features(self, rows: slice, layer: int) -> tuple[Floats, BoolArray]:
        """Root counts and choices around of requests whose layers are observed all at once.

        Layers above `layer` have not run when it is scored: they show their step before.

        Returns:
            Root counts, float32 (N, H, E), and choices, bool (N, W * E).
        """
        requests = self._requests(rows)
        own_NHE = np.sqrt(self._counts_NLHE[requests, layer])
        split, end = layer + self.reach + 1, layer + 2 * self.reach + 1
        window_NWE = np.concatenate(
            (self._now_NLE[requests, layer:split], self._before_NLE[requests, split:end]), axis=1
        )
        return own_NHE, window_NWE.reshape(len(window_NWE), -1)

    def reset(self, rows: slice) -> None:
        """Forget the requests or the layer of `rows`."""
        start, stop, _ = rows.indices(len(self._counts_NLHE) * self.num_layers)
        for row in range(start, stop):
            request, layer = divmod(row, self.num_layers)
            self._counts_NLHE[request, layer] = 0
            self._now_NLE[request, layer + self.reach] = 0
            self._before_NLE[request, layer + self.reach] = 0

    def _requests(self, rows: slice) -> slice:
        start, stop, _ = rows.indices(len(self._counts_NLHE) * self.num_layers)
        if start % self.num_layers or stop % self.num_layers:
            raise ValueError(
                f"rows {start} to {stop} must be one layer, or all {self.num_layers} layers of "
                f"some requests"
            )
        return slice(start // self.num_layers, stop // self.num_layers)


class Learned:
    """Retention by a `ScoreTable`.

    Scores are asked of one layer after the other, or of all layers of many requests at once; in one
    object, always the same of the two.

    Args:
        table: weights of this model.
        num_requests: N; 1 in the runtime.
    """

    name = "learned"

    def __init__(self, table: ScoreTable, num_requests: int = 1) -> None:
        num_layers, num_experts = table.num_layers, table.num_experts
        self._history = History(
            num_requests, num_layers, num_experts, table.half_lives, table.reach
        )
        window_LXE = table.window_LWEE.reshape(num_layers, -1, num_experts)
        # Kept in bytes, in steps of an expert's own size: to read the picked rows takes most of
        # the time, and a step of a large model reads a hundred kilobytes of them in float32.
        peak_L1E = np.abs(window_LXE).max(axis=1, keepdims=True)
        step_L1E = np.where(peak_L1E > 0, peak_L1E / 127, 1).astype(np.float32)
        self._window_LXE = np.rint(window_LXE / step_L1E).astype(np.int8)
        self._step_LE = step_L1E[:, 0]
        self._own_LHE = table.own_LHE / step_L1E
        self._bias_LE = table.bias_LE / self._step_LE
        self._num_layers = num_layers
        # A layer's score is one product: root counts times their weights lie above the rows that
        # the window picks, and are added to the bias. Where most of the window is chosen, what is
        # missing is taken off the bias plus the sum of all.
        num_own = len(table.half_lives)
        self._picked_XE = np.empty(self._window_LXE.shape[1:], dtype=np.int8)
        self._terms_XE = np.empty((num_own + len(self._picked_XE), num_experts), dtype=np.float32)
        self._own_terms_HE = self._terms_XE[:num_own]
        self._signs_X = np.ones(len(self._terms_XE), dtype=np.float32)
        self._signs_of_most_X = np.append(self._signs_X[:num_own], -self._signs_X[num_own:])
        self._bias_of_most_LE = self._bias_LE + self._window_LXE.sum(axis=1, dtype=np.float32)

    def observe(self, rows: slice, demand_RE: BoolArray) -> None:
        """See `Retention.observe`."""
        self._history.observe(rows, demand_RE)

    def scores(self, rows: slice) -> FloatArray:
        """See `Retention.scores`."""
        if rows.stop - rows.start == 1 and self._num_layers > 1:
            request, layer = divmod(rows.start, self._num_layers)
            self._history.own(request, layer, self._own_terms_HE)
            np.multiply(self._own_terms_HE, self._own_LHE[layer], out=self._own_terms_HE)
            around_X = self._history.window(request, layer)
            signs_X, bias_LE = self._signs_X, self._bias_LE
            if 2 * np.count_nonzero(around_X) > len(around_X):
                around_X = ~around_X
                signs_X, bias_LE = self._signs_of_most_X, self._bias_of_most_LE
            rows_P = around_X.nonzero()[0]
            end = len(self._own_terms_HE) + len(rows_P)
            picked_PE = self._picked_XE[: len(rows_P)]
            # Without a mode that cannot fail, take works on a copy of `out`.
            self._window_LXE[layer].take(rows_P, axis=0, out=picked_PE, mode="clip")
            self._terms_XE[len(self._own_terms_HE) : end] = picked_PE
            scores_E: FloatArray = np.dot(signs_X[:end], self._terms_XE[:end])
            scores_E += bias_LE[layer]
            scores_E *= self._step_LE[layer]
            return scores_E[None]
        num_requests = (rows.stop - rows.start) // self._num_layers
        scores_NLE = np.empty(
            (num_requests, self._num_layers, self._bias_LE.shape[1]), dtype=np.float32
        )
        for layer in range(self._num_layers):
            own_NHE, window_NX = self._history.features(rows, layer)
            scores_NLE[:, layer] = np.einsum("nhe,he->ne", own_NHE, self._own_LHE[layer])
            window_XE = self._window_LXE[layer].astype(np.float32)
            scores_NLE[:, layer] += window_NX.astype(np.float32) @ window_XE
        scores_NLE += self._bias_LE
        scores_NLE *= self._step_LE
        return scores_NLE.reshape(-1, self._bias_LE.shape[1])

    def reset(self, rows: slice) -> None:
        """See `Retention.reset`."""
        self._history.reset(rows)
