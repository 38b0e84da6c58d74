"""Capture files: which experts each calibration request used, in prefill and in decode.

A capture is a folder: `capture.json` says what was run, `capture.npz` holds the counts.

Axes: N requests, L MoE layers, E experts.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from calibration.signature import CountArray
from calibration.storage import check_version, read_folder, take, write_folder

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
JSON_NAME = "capture.json"
NPZ_NAME = "capture.npz"


@dataclass(frozen=True, eq=False)
class Capture:
    """Expert counts of N requests on one model.

    Every layer accounts for every token: counts sum over E to tokens * top_k.

    Attributes:
        model_id: name of the model.
        fingerprint: hash of the model's configuration and weights index.
        num_layers: L, MoE layers (dense layers are absent).
        num_experts: E, experts per layer.
        top_k: experts a token chooses per layer.
        max_tokens: output limit of the requests.
        prompts_sha256: SHA-256 of the prompts, in hex; empty if they are unknown.
        versions: versions of engine and tools, by name.
        prefill_counts_NLE: prompt tokens per layer and expert; uint16 or uint32 (N, L, E).
        decode_counts_NLE: decoded tokens per layer and expert; uint16 or uint32 (N, L, E).
        prompt_tokens_N: prompt length; int32 (N,), >= 1.
        decode_tokens_N: tokens the decode counts account for; int32 (N,), >= 1. The last sampled
            token never passes through the experts, so this is one less than the output length.
        domains_N: label of each request, empty if it has none; unicode (N,).
        ids_N: id of each request; unicode (N,).

    Raises:
        ValueError: at construction, if the arrays contradict each other; the message names the
            first bad request and layer. Repeated ids and repeated prompts are only logged.
    """

    model_id: str
    fingerprint: str
    num_layers: int
    num_experts: int
    top_k: int
    max_tokens: int
    prompts_sha256: str
    versions: dict[str, str]
    prefill_counts_NLE: CountArray
    decode_counts_NLE: CountArray
    prompt_tokens_N: NDArray[np.int32]
    decode_tokens_N: NDArray[np.int32]
    domains_N: NDArray[np.str_]
    ids_N: NDArray[np.str_]

    _SCALARS: ClassVar[dict[str, type]] = {
        "model_id": str,
        "fingerprint": str,
        "num_layers": int,
        "num_experts": int,
        "top_k": int,
        "max_tokens": int,
        "prompts_sha256": str,
        "versions": dict,
    }
    _ARRAYS: ClassVar[dict[str, str]] = {  # attribute: name in the file
        "prefill_counts_NLE": "prefill_counts",
        "decode_counts_NLE": "decode_counts",
        "prompt_tokens_N": "prompt_tokens",
        "decode_tokens_N": "decode_tokens",
        "domains_N": "domains",
        "ids_N": "ids",
    }

    def __post_init__(self) -> None:
        self._check_shapes()
        for name, tokens_N, counts_NLE in (
            ("prefill", self.prompt_tokens_N, self.prefill_counts_NLE),
            ("decode", self.decode_tokens_N, self.decode_counts_NLE),
        ):
            self._check_conservation(name, tokens_N, counts_NLE)
        self._warn_of_repeats()

    def __len__(self) -> int:
        """N, the number of requests."""
        return len(self.ids_N)

    def save(self, path: str | Path) -> None:
        """Write the folder `path`, whole or not at all; a capture already there is replaced.

        Raises:
            FileExistsError: `path` exists and is no capture.
            OSError: writing failed; what was at `path` is still there.
        """
        meta = {name: getattr(self, name) for name in self._SCALARS}
        arrays = {stored: getattr(self, name) for name, stored in self._ARRAYS.items()}
        write_folder(
            Path(path), JSON_NAME, {"format_version": FORMAT_VERSION, **meta}, NPZ_NAME, arrays
        )

    @classmethod
    def load(cls, path: str | Path) -> Capture:
        """Read a folder written by `save`.

        Raises:
            FileNotFoundError: `path` is no capture folder.
            ValueError: another format version, a wrong checksum, or contradicting contents.
        """
        meta, arrays = read_folder(Path(path), JSON_NAME, NPZ_NAME)
        where = Path(path) / JSON_NAME
        check_version(meta, FORMAT_VERSION, where)
        values: dict[str, Any] = {
            name: take(meta, name, kind, where) for name, kind in cls._SCALARS.items()
        }
        for name, stored in cls._ARRAYS.items():
            if stored not in arrays:
                raise ValueError(f"{Path(path) / NPZ_NAME} has no array {stored}")
            values[name] = arrays[stored]
        return cls(**values)

    def _check_shapes(self) -> None:
        num_requests = len(self.ids_N) if self.ids_N.ndim == 1 else 0
        if num_requests == 0:
            raise ValueError("capture must have at least one request, got none")
        counts = (num_requests, self.num_layers, self.num_experts)
        expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            "prefill_counts_NLE": (counts, ("uint16", "uint32")),
            "decode_counts_NLE": (counts, ("uint16", "uint32")),
            "prompt_tokens_N": ((num_requests,), ("int32",)),
            "decode_tokens_N": ((num_requests,), ("int32",)),
            "domains_N": ((num_requests,), ("str",)),
            "ids_N": ((num_requests,), ("str",)),
        }
        for name, (shape, dtypes) in expected.items():
            array = getattr(self, name)
            dtype = "str" if array.dtype.kind == "U" else array.dtype.name
            if array.shape != shape or dtype not in dtypes:
                nan = " with NaN" if array.dtype.kind == "f" and np.isnan(array).any() else ""
                raise ValueError(
                    f"capture array {name} must be {' or '.join(dtypes)} of shape {shape}, "
                    f"got {dtype}{nan} of shape {array.shape}"
                )

    def _check_conservation(
        self, name: str, tokens_N: NDArray[np.int32], counts_NLE: CountArray
    ) -> None:
        if (tokens_N < 1).any():
            n = int(np.flatnonzero(tokens_N < 1)[0])
            raise ValueError(
                f"request {self.ids_N.item(n)!r} has {tokens_N[n]} {name} tokens, must have at "
                "least 1: drop it from the capture"
            )
        expected_N = tokens_N.astype(np.int64) * self.top_k
        sums_NL = counts_NLE.sum(axis=2, dtype=np.int64)
        wrong = np.argwhere(sums_NL != expected_N[:, None])
        if len(wrong):
            n, layer = wrong[0]
            raise ValueError(
                f"{name} counts of request {self.ids_N.item(n)!r} sum to {sums_NL[n, layer]} in "
                f"layer {layer}, must be {tokens_N[n]} tokens * top-{self.top_k} = {expected_N[n]} "
                f"({len(wrong)} such rows in all): capture again"
            )

    def _warn_of_repeats(self) -> None:
        repeated_ids = [i for i, times in Counter(self.ids_N.tolist()).items() if times > 1]
        if repeated_ids:
            logger.warning(
                "%d request ids occur more than once, first %r", len(repeated_ids), repeated_ids[0]
            )
        num_distinct = len({counts_LE.tobytes() for counts_LE in self.prefill_counts_NLE})
        if num_distinct < len(self):
            logger.warning(
                "%d of %d requests repeat the prefill counts of another: the same prompt twice?",
                len(self) - num_distinct,
                len(self),
            )
