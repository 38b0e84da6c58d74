"""Routing traces: the experts each token of each request chose, recorded on a real model.

Axes: N requests, T tokens of all requests, L MoE layers, E experts, k experts a token chooses.

Gate values are optional. Traces mostly hold the router weights of the chosen experts alone: what
the router gave to experts below the top-k cut is lost. Few hold the router's logits of all experts.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

IdArray = NDArray[np.unsignedinteger[Any]]
CountArray = NDArray[np.int64]
FloatArray = NDArray[np.floating[Any]]

WEIGHT_NAMES = ("weights_u8", "probs_u8")


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Expert choices of N requests, token by token.

    Attributes:
        ids_TLk: expert of each token, layer and rank; uint8 or uint16 (T, L, k), distinct over k.
        offsets: tokens of request r are offsets[r]:offsets[r + 1]; int64 (N + 1,), increasing.
        num_experts: E; ids are in [0, E).
        domains: label of each request; empty where unknown.
        weights_TLk: router weight of each choice, None if not recorded; float32 (T, L, k), in
            [0, 1]. Whether the chosen ones sum to 1 depends on the model.
        logits_TLE: router logits of all experts, None if not recorded; floats (T, L, E), finite.
        prefix_tokens_N: how many tokens at the start of each request are its prompt, None if
            unknown; int64 (N,), in [0, tokens].

    Raises:
        ValueError: at construction, if the arrays contradict each other; the message names the
            first bad request, layer or value.
    """

    ids_TLk: IdArray
    offsets: NDArray[np.int64]
    num_experts: int
    domains: tuple[str, ...]
    weights_TLk: FloatArray | None = None
    logits_TLE: FloatArray | None = None
    prefix_tokens_N: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.ids_TLk.ndim != 3 or self.ids_TLk.dtype.kind != "u":
            raise ValueError(
                "expert ids must be unsigned integers of shape (tokens, layers, top-k), got "
                f"{self.ids_TLk.dtype} {self.ids_TLk.shape}"
            )
        if min(self.ids_TLk.shape[1:]) < 1:
            raise ValueError(f"expert ids need layers and choices, got {self.ids_TLk.shape}")
        _check_offsets(self.offsets, len(self.ids_TLk))
        if len(self.domains) != len(self):
            raise ValueError(f"{len(self.domains)} domains for {len(self)} requests")
        if int(self.ids_TLk.max()) >= self.num_experts:
            t, layer, _ = np.argwhere(self.ids_TLk >= self.num_experts)[0]
            request = int(np.searchsorted(self.offsets, t, side="right")) - 1
            raise ValueError(
                f"request {request}, layer {layer}: expert id {self.ids_TLk[t, layer].max()} is "
                f"outside [0, {self.num_experts}): give the right number of experts"
            )
        if self.top_k > 1:
            sorted_TLk = np.sort(self.ids_TLk, axis=2)
            repeats_TL = (sorted_TLk[:, :, 1:] == sorted_TLk[:, :, :-1]).any(axis=2)
            if repeats_TL.any():
                t, layer = np.argwhere(repeats_TL)[0]
                request = int(np.searchsorted(self.offsets, t, side="right")) - 1
                raise ValueError(
                    f"request {request}, layer {layer}: a token names an expert twice "
                    f"({self.ids_TLk[t, layer].tolist()}); its {self.top_k} experts must differ"
                )
        self._check_gates()

    def __len__(self) -> int:
        """N, the number of requests."""
        return len(self.offsets) - 1

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.ids_TLk.shape[1])

    @property
    def top_k(self) -> int:
        """k, experts a token chooses per layer."""
        return int(self.ids_TLk.shape[2])

    @property
    def num_tokens_N(self) -> NDArray[np.int64]:
        """Tokens of each request; int64 (N,)."""
        return np.diff(self.offsets)

    def tokens(self, request: int) -> IdArray:
        """Choices of one request; a view, (tokens, L, k)."""
        return self.ids_TLk[self.offsets[request] : self.offsets[request + 1]]

    def subset(self, requests: Sequence[int] | NDArray[np.int64]) -> RoutingTrace:
        """A trace of some requests, in the given order."""
        chosen = np.asarray(requests, dtype=np.int64)
        rows_T = np.concatenate([np.arange(*self.offsets[r : r + 2]) for r in chosen])
        prefix_N = self.prefix_tokens_N
        return RoutingTrace(
            self.ids_TLk[rows_T],
            np.concatenate([[0], np.cumsum(self.num_tokens_N[chosen])]),
            self.num_experts,
            tuple(self.domains[r] for r in chosen),
            None if self.weights_TLk is None else self.weights_TLk[rows_T],
            None if self.logits_TLE is None else self.logits_TLE[rows_T],
            None if prefix_N is None else prefix_N[chosen],
        )

    def at_least(self, min_tokens: int) -> RoutingTrace:
        """The requests of at least `min_tokens` tokens.

        Raises:
            ValueError: there is none.
        """
        kept = np.flatnonzero(self.num_tokens_N >= min_tokens)
        if not len(kept):
            raise ValueError(
                f"no request has {min_tokens} tokens (the longest has "
                f"{self.num_tokens_N.max()}): ask for fewer"
            )
        return self.subset(kept)

    def _check_gates(self) -> None:
        experts = (*self.ids_TLk.shape[:2], self.num_experts)
        for name, values, shape in (
            ("router weights", self.weights_TLk, self.ids_TLk.shape),
            ("router logits", self.logits_TLE, experts),
        ):
            if values is None:
                continue
            if values.shape != shape or values.dtype.kind != "f":
                raise ValueError(
                    f"{name} must be floats of shape {shape}, got {values.dtype} {values.shape}"
                )
            if not np.isfinite(values).all():
                t, layer, _ = np.argwhere(~np.isfinite(values))[0]
                request = int(np.searchsorted(self.offsets, t, side="right")) - 1
                raise ValueError(f"request {request}, layer {layer}: {name} hold NaN or infinity")
        weights = self.weights_TLk
        if weights is not None and (weights.min() < 0 or weights.max() > 1):
            raise ValueError(
                f"router weights must be in [0, 1], got {weights.min()} to {weights.max()}"
            )
        prefix_N = self.prefix_tokens_N
        if prefix_N is not None:
            if prefix_N.shape != (len(self),):
                raise ValueError(f"prompt lengths have shape {prefix_N.shape}, need ({len(self)},)")
            if (prefix_N < 0).any() or (prefix_N > self.num_tokens_N).any():
                request = int(((prefix_N < 0) | (prefix_N > self.num_tokens_N)).argmax())
                raise ValueError(
                    f"request {request}: a prompt of {prefix_N[request]} tokens does not fit in "
                    f"its {self.num_tokens_N[request]} tokens"
                )


def expert_counts(ids_TLk: IdArray, num_experts: int) -> CountArray:
    """Tokens per layer and expert.

    Args:
        ids_TLk: choices; unsigned integers, (T, L, k).
        num_experts: E.

    Returns:
        int64 (L, E); each row sums to T * k.
    """
    num_layers = ids_TLk.shape[1]
    flat = ids_TLk.astype(np.int64) + np.arange(num_layers)[:, None] * num_experts
    counts = np.bincount(flat.ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts)


def expert_weights(
    ids_TLk: IdArray, weights_TLk: FloatArray, num_experts: int
) -> NDArray[np.float64]:
    """Router weight per layer and expert, summed over the tokens that chose the expert.

    Returns:
        float64 (L, E); an expert gets nothing from tokens for which it fell below the top-k cut.
    """
    num_layers = ids_TLk.shape[1]
    flat = ids_TLk.astype(np.int64) + np.arange(num_layers)[:, None] * num_experts
    length = num_layers * num_experts
    sums = np.bincount(flat.ravel(), weights_TLk.ravel(), minlength=length)
    return sums.reshape(num_layers, num_experts).astype(np.float64, copy=False)


def load_trace(
    ids: str | Path,
    meta: str | Path | None = None,
    num_experts: int | None = None,
    probs: str | Path | None = None,
) -> RoutingTrace:
    """Read a trace.

    Args:
        ids: .npz with `ids` (unsigned integers, [layer, rank, token]) and `offsets`. Optional are
            `domain` (strings, one a request), `weights_u8` (router weights of the chosen experts,
            x 255, like `ids`), `logits` (router logits of all experts, [layer, expert, token]) and
            `prefix_tokens` (tokens of each request that are its prompt). Nothing is unpickled.
        meta: JSON Lines, one object a request in the same order; its `domain` names the label.
        num_experts: E; None takes the largest id and adds one, or the experts of `logits`.
        probs: .npz with `probs_u8` or `weights_u8`, `offsets`, and `trace`: the request of `ids`
            that each of its requests is. The result has these requests alone.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the file is no such archive, or its content contradicts itself.
    """
    optional = ("domain", "weights_u8", "logits", "prefix_tokens")
    arrays = _read_npz(Path(ids), ("ids", "offsets"), optional)
    ids_LkT, offsets = arrays["ids"], arrays["offsets"]
    if ids_LkT.dtype.kind == "f":
        what = "NaN" if np.isnan(ids_LkT).any() else str(ids_LkT.dtype)
        raise ValueError(f"{ids}: expert ids must be unsigned integers, got {what}")
    if ids_LkT.ndim != 3 or ids_LkT.dtype.kind not in "ui":
        raise ValueError(
            f"{ids}: `ids` must be integers of shape (layers, top-k, tokens), got "
            f"{ids_LkT.dtype} {ids_LkT.shape}"
        )
    if ids_LkT.size == 0:
        raise ValueError(f"{ids}: `ids` is empty, shape {ids_LkT.shape}")
    if ids_LkT.dtype.kind == "i" and ids_LkT.min() < 0:
        raise ValueError(f"{ids}: expert id {ids_LkT.min()} is below 0")
    if offsets.ndim != 1 or offsets.dtype.kind not in "ui":
        raise ValueError(
            f"{ids}: `offsets` must be a row of integers, got {offsets.dtype} {offsets.shape}"
        )
    largest = int(ids_LkT.max())
    dtype = np.uint8 if largest < 256 else np.uint16
    if largest > np.iinfo(np.uint16).max:
        raise ValueError(f"{ids}: expert id {largest} is beyond 65535")
    try:
        offsets = offsets.astype(np.int64)
        _check_offsets(offsets, ids_LkT.shape[2])
        number = len(offsets) - 1
        logits = arrays.get("logits")
        if logits is not None and logits.ndim != 3:
            raise ValueError(f"`logits` must be (layers, experts, tokens), got {logits.shape}")
        if num_experts is None:
            num_experts = largest + 1 if logits is None else logits.shape[1]
        prefix = arrays.get("prefix_tokens")
        trace = RoutingTrace(
            np.ascontiguousarray(ids_LkT.transpose(2, 0, 1), dtype=dtype),
            offsets,
            num_experts,
            _domains(arrays, None if meta is None else Path(meta), number),
            _weights(arrays, ids_LkT.shape),
            None if logits is None else np.ascontiguousarray(logits.transpose(2, 0, 1)),
            None if prefix is None else prefix.astype(np.int64),
        )
    except ValueError as err:
        raise ValueError(f"{ids}: {err}") from err
    return trace if probs is None else _with_weights(trace, Path(probs))


def _check_offsets(offsets: NDArray[np.int64], num_tokens: int) -> None:
    if len(offsets) < 2:
        raise ValueError("`offsets` must name at least one request (two entries)")
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise ValueError(
            f"`offsets` must run from 0 to the {num_tokens} tokens of `ids`, got "
            f"{offsets[0]} to {offsets[-1]}"
        )
    lengths = np.diff(offsets)
    if lengths.min() < 1:
        request = int(lengths.argmin())
        raise ValueError(
            f"request {request} has {lengths[request]} tokens: leave out requests without tokens"
        )


def _read_npz(
    path: Path, wanted: Sequence[str], optional: Sequence[str]
) -> dict[str, NDArray[Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"no trace at {path}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not an .npz archive")
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in wanted if name not in archive.files]
            if missing:
                raise ValueError(
                    f"{path}: needs {', '.join(wanted)}; {', '.join(missing)} missing, has "
                    f"{', '.join(archive.files) or 'nothing'}"
                )
            names = [*wanted, *(name for name in optional if name in archive.files)]
            return {name: archive[name] for name in names}
    except (zipfile.BadZipFile, EOFError, OSError, TypeError) as err:
        raise ValueError(f"{path}: not a readable .npz archive: {err}") from err


def _with_weights(trace: RoutingTrace, path: Path) -> RoutingTrace:
    """The requests that the file at `path` has router weights of, with these."""
    arrays = _read_npz(path, ("trace", "offsets"), WEIGHT_NAMES)
    rows, offsets = arrays["trace"].astype(np.int64), arrays["offsets"].astype(np.int64)
    if rows.size == 0 or rows.min() < 0 or rows.max() >= len(trace):
        raise ValueError(
            f"{path}: `trace` must name requests in [0, {len(trace)}): is it of another trace?"
        )
    chosen = trace.subset(rows)
    if not np.array_equal(offsets, chosen.offsets):
        raise ValueError(
            f"{path}: `offsets` differ from the token numbers of these requests: is it of another "
            "trace?"
        )
    tokens, layers, top_k = chosen.ids_TLk.shape
    try:
        weights_TLk = _weights(arrays, (layers, top_k, tokens))
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err
    if weights_TLk is None:
        raise ValueError(f"{path}: needs {' or '.join(WEIGHT_NAMES)}, has neither")
    return replace(chosen, weights_TLk=weights_TLk)


def _weights(arrays: dict[str, NDArray[Any]], shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    name = next((name for name in WEIGHT_NAMES if name in arrays), None)
    if name is None:
        return None
    weights_LkT = arrays[name]
    if weights_LkT.dtype != np.uint8 or weights_LkT.shape != shape:
        raise ValueError(
            f"`{name}` must be uint8 of shape {shape}, got {weights_LkT.dtype} {weights_LkT.shape}"
        )
    weights_TLk = weights_LkT.transpose(2, 0, 1).astype(np.float32)
    weights_TLk /= np.float32(255)
    return weights_TLk


def _domains(arrays: dict[str, NDArray[Any]], meta: Path | None, number: int) -> tuple[str, ...]:
    if meta is None:
        stored = arrays.get("domain")
        if stored is None:
            return ("",) * number
        if stored.shape != (number,):
            raise ValueError(f"`domain` has shape {stored.shape} for {number} requests")
        return tuple(str(domain) for domain in stored)
    if not meta.is_file():
        raise FileNotFoundError(f"no file {meta}")
    domains = []
    # Not splitlines: texts may hold other line separators, which JSON does not escape.
    lines = [line for line in meta.read_text(encoding="utf-8").split("\n") if line]
    for i, line in enumerate(lines, start=1):
        try:
            domains.append(str(json.loads(line).get("domain") or ""))
        except (ValueError, AttributeError) as err:
            raise ValueError(f"{meta}:{i}: not a JSON object") from err
    if len(domains) != number:
        raise ValueError(f"{meta} has {len(domains)} lines for {number} requests of the trace")
    return tuple(domains)
