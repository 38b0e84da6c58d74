"""Routing traces: the experts each token of each request chose, recorded on a real model.

Axes: N requests, T tokens of all requests, L MoE layers, E experts, k experts a token chooses.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

IdArray = NDArray[np.unsignedinteger[Any]]
CountArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Expert choices of N requests, token by token.

    Attributes:
        ids_TLk: expert of each token, layer and rank; uint8 or uint16 (T, L, k), distinct over k.
        offsets: tokens of request r are offsets[r]:offsets[r + 1]; int64 (N + 1,), increasing.
        num_experts: E; ids are in [0, E).
        domains: label of each request; empty where unknown.

    Raises:
        ValueError: at construction, if the arrays contradict each other; the message names the
            first bad request, layer or value.
    """

    ids_TLk: IdArray
    offsets: NDArray[np.int64]
    num_experts: int
    domains: tuple[str, ...]

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
        parts = [self.tokens(int(r)) for r in requests]
        lengths = np.array([0, *(len(part) for part in parts)], dtype=np.int64)
        return RoutingTrace(
            np.concatenate(parts),
            np.cumsum(lengths),
            self.num_experts,
            tuple(self.domains[int(r)] for r in requests),
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


def load_trace(
    ids: str | Path, meta: str | Path | None = None, num_experts: int | None = None
) -> RoutingTrace:
    """Read a trace.

    Args:
        ids: .npz with `ids` (unsigned integers, [layer, rank, token]) and `offsets`; `domain`
            (strings, one a request) is optional. Nothing in it is unpickled.
        meta: JSON Lines, one object a request in the same order; its `domain` names the label.
        num_experts: E; None takes the largest id and adds one.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the file is no such archive, or its content contradicts itself.
    """
    arrays = _read_npz(Path(ids), ("ids", "offsets"), ("domain",))
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
        return RoutingTrace(
            np.ascontiguousarray(ids_LkT.transpose(2, 0, 1), dtype=dtype),
            offsets,
            largest + 1 if num_experts is None else num_experts,
            _domains(arrays, None if meta is None else Path(meta), number),
        )
    except ValueError as err:
        raise ValueError(f"{ids}: {err}") from err


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


def _domains(
    arrays: dict[str, NDArray[Any]], meta: Path | None, number: int
) -> tuple[str, ...]:
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
