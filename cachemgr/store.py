"""Backing store of expert weights: one file of all experts of one rank, memory-mapped for reading.

A file holds the bytes of every expert in the form that the kernel wants, so that a load is one
copy per tensor. It is written beside its final name and renamed, so it is there whole or not at
all; each tensor carries a SHA-256, which is compared when the file is opened and with the weights
that the engine has loaded. Mapped pages are clean: the operating system may drop them, so the
experts of a model may be larger than RAM.

Format: magic, length and SHA-256 of the header, header (JSON, fixed length), then one page-aligned
block of `E` experts for each layer and tensor.

Axes: L MoE layers, E experts, N bytes of one expert in one tensor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 1
_MAGIC = b"ELDREXP\x01"
_PREAMBLE = struct.Struct("<8sQ32s")  # magic, bytes of the header, SHA-256 of the header
_PAGE = 4096
_NO_DIGEST = "0" * 64
_WRITE_CHUNK = 64 << 20

Bytes = NDArray[np.uint8]


class StoreError(ValueError):
    """A store file cannot be written, is damaged, or belongs to another model."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One per-expert tensor of a layer, as the kernel reads it.

    Attributes:
        name: name of the parameter.
        dtype: its element type, as torch names it without `torch.`.
        shape: shape of one expert.
        nbytes: N, bytes of one expert.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoreKey:
    """What a file must match to be read.

    Attributes:
        fingerprint: of the model folder (`app.model_facts`).
        layout: kernel that the bytes are packed for, and the rank's share of each expert.
        num_experts: E.
        tensors_L: tensors of each layer.
    """

    fingerprint: str
    layout: str
    num_experts: int
    tensors_L: tuple[tuple[TensorSpec, ...], ...]

    @property
    def file_name(self) -> str:
        """Name that differs between keys, so that several models share one folder."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.fingerprint}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.experts"

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of the first layer: what a load moves."""
        return sum(spec.nbytes for spec in self.tensors_L[0])


def digest(data_EN: Bytes) -> str:
    """SHA-256 of a tensor's experts, in hex."""
    return hashlib.sha256(np.ascontiguousarray(data_EN).data.cast("B")).hexdigest()


class ExpertStore:
    """A mapped store file. Reading is safe from any thread; nothing can be written through it."""

    def __init__(self, path: Path, header: Mapping[str, Any], mapped: Bytes) -> None:
        self.path = path
        self._digests: list[dict[str, str]] = header["sha256_L"]
        offsets, _ = _offsets(_key_of(header), _data_start(header))
        self._blocks: list[dict[str, Bytes]] = [
            {
                name: mapped[start : start + header["num_experts"] * nbytes].reshape(-1, nbytes)
                for name, (start, nbytes) in of_layer.items()
            }
            for of_layer in offsets
        ]

    @classmethod
    def open(cls, path: Path, key: StoreKey) -> Self:
        """Map a file after checking all of it: key, size and checksums.

        Raises:
            StoreError: it is no store file, of another model or kernel, cut short, or damaged.
        """
        header = _read_header(path)
        _check_key(path, header, key)
        _, size = _offsets(key, _data_start(header))
        if (found := path.stat().st_size) != size:
            raise StoreError(
                f"{path} has {found} bytes instead of {size}: it was cut short or changed; "
                "delete it, and it is written again at the next start"
            )
        store = cls(path, header, np.memmap(path, dtype=np.uint8, mode="r"))
        for layer, of_layer in enumerate(store._blocks):
            for name, data_EN in of_layer.items():
                if digest(data_EN) != header["sha256_L"][layer][name]:
                    raise StoreError(
                        f"{path} is damaged: {name} of MoE layer {layer} does not have the "
                        "checksum it was written with; delete it, and it is written again at the "
                        "next start"
                    )
        return store

    def tensor(self, layer: int, name: str) -> Bytes:
        """All experts of one tensor: uint8, shape (E, N), read-only."""
        return self._blocks[layer][name]

    def check_same(self, layer: int, name: str, data_EN: Bytes) -> None:
        """Compare with weights that were loaded from the model.

        Raises:
            StoreError: they differ, so the model was trained again since the file was written.
        """
        if digest(data_EN) != self._digests[layer][name]:
            raise StoreError(
                f"{self.path} holds other weights than the model ({name} of MoE layer {layer}): "
                "the model has changed since; delete the file, and it is written again at the "
                "next start"
            )


class StoreWriter:
    """Writes one file layer by layer; `commit` gives it its name.

    Used as a context manager: without `commit`, or after an error, no file is left.
    """

    def __init__(self, path: Path, key: StoreKey) -> None:
        self.path, self._key = path, key
        self._header = {
            "format_version": FORMAT_VERSION,
            **asdict(key),
            "sha256_L": [{spec.name: _NO_DIGEST for spec in specs} for specs in key.tensors_L],
        }
        self._offsets, self._size = _offsets(key, _data_start(self._header))
        self._missing = {
            (layer, spec.name) for layer, specs in enumerate(key.tensors_L) for spec in specs
        }
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._fd = -1

    def __enter__(self) -> Self:
        """Reserve the file's space.

        Raises:
            StoreError: the folder cannot be written or has too little space.
        """
        with self._explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.path)
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.posix_fallocate(self._fd, 0, self._size)
            except BaseException:
                self._discard()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._discard()

    def write(self, layer: int, name: str, data_EN: Bytes) -> None:
        """Write one tensor of one layer.

        Raises:
            StoreError: the disk is full or cannot be written.
        """
        start, nbytes = self._offsets[layer][name]
        if data_EN.shape != (self._key.num_experts, nbytes):
            raise ValueError(
                f"{name} of MoE layer {layer} must have shape "
                f"{(self._key.num_experts, nbytes)}, got {data_EN.shape}"
            )
        data = np.ascontiguousarray(data_EN).data.cast("B")
        with self._explained():
            for begin in range(0, len(data), _WRITE_CHUNK):
                _pwrite_all(self._fd, data[begin : begin + _WRITE_CHUNK], start + begin)
        self._header["sha256_L"][layer][name] = digest(data_EN)  # type: ignore[index]
        self._missing.discard((layer, name))

    def commit(self) -> None:
        """Write the header, flush, and rename to the final name.

        Raises:
            StoreError: a tensor was not written, or the disk failed.
        """
        if self._missing:
            raise StoreError(f"{self.path}: {len(self._missing)} tensors were not written")
        text = _encode(self._header)
        preamble = _PREAMBLE.pack(_MAGIC, len(text), hashlib.sha256(text).digest())
        with self._explained():
            _pwrite_all(self._fd, memoryview(preamble + text), 0)
            os.fsync(self._fd)
            os.replace(self._temporary, self.path)

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as err:
            gib = self._size / 2**30
            reason = (
                "the disk is full"
                if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                else err.strerror or str(err)
            )
            raise StoreError(
                f"cannot write the expert store {self.path}, which needs {gib:.2f} GiB: {reason}; "
                "free space there or set cache.store_dir to another folder"
            ) from err


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock: of the engines that start on one node, one writes and the others wait.

    Raises:
        StoreError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as err:
        raise StoreError(
            f"cannot use folder {path.parent} for the expert store ({err.strerror}): set "
            "cache.store_dir to a folder that can be written"
        ) from err
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _offsets(key: StoreKey, start: int) -> tuple[list[dict[str, tuple[int, int]]], int]:
    """Offset and bytes per expert of each layer's tensors, and the size of the file."""
    position, result = start, []
    for specs in key.tensors_L:
        of_layer = {}
        for spec in specs:
            of_layer[spec.name] = (position, spec.nbytes)
            position = _round_up(position + key.num_experts * spec.nbytes)
        result.append(of_layer)
    return result, position


def _round_up(value: int) -> int:
    return -(-value // _PAGE) * _PAGE


def _encode(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def _data_start(header: Mapping[str, Any]) -> int:
    # The length does not depend on the digests: all of them have 64 digits.
    return _round_up(_PREAMBLE.size + len(_encode(header)))


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        preamble = stream.read(_PREAMBLE.size)
        if len(preamble) < _PREAMBLE.size or not preamble.startswith(_MAGIC):
            raise StoreError(
                f"{path} is no expert store of this version: delete it, or set cache.store_dir to "
                "another folder"
            )
        _, length, expected = _PREAMBLE.unpack(preamble)
        text = stream.read(min(length, os.fstat(stream.fileno()).st_size))
    if hashlib.sha256(text).digest() != expected:
        raise StoreError(
            f"{path} is damaged (its header does not have its checksum): delete it, and it is "
            "written again at the next start"
        )
    header: dict[str, Any] = json.loads(text)
    return header


def _key_of(header: Mapping[str, Any]) -> StoreKey:
    return StoreKey(
        fingerprint=header["fingerprint"],
        layout=header["layout"],
        num_experts=header["num_experts"],
        tensors_L=tuple(
            tuple(TensorSpec(s["name"], s["dtype"], tuple(s["shape"]), s["nbytes"]) for s in specs)
            for specs in header["tensors_L"]
        ),
    )


def _check_key(path: Path, header: Mapping[str, Any], key: StoreKey) -> None:
    found = _key_of(header)
    if found == key:
        return
    for field in ("fingerprint", "layout", "num_experts"):
        has, needs = getattr(found, field), getattr(key, field)
        if has != needs:
            raise StoreError(
                f"{path} was written for another model or kernel ({field} {has!r} instead of "
                f"{needs!r}): delete it, or set cache.store_dir to another folder"
            )
    raise StoreError(
        f"{path} has other tensors than the model ({len(found.tensors_L)} layers of "
        f"{_names(found.tensors_L)} instead of {len(key.tensors_L)} of {_names(key.tensors_L)}): "
        "delete it, or set cache.store_dir to another folder"
    )


def _names(tensors_L: Sequence[Sequence[TensorSpec]]) -> str:
    return ", ".join(f"{s.name} {list(s.shape)} {s.dtype}" for s in (tensors_L or [()])[0])


def _remove_abandoned(path: Path) -> None:
    """Remove what writers of this file left that were killed; the caller holds the lock."""
    for file in path.parent.glob(f".{path.name}.*.tmp"):
        file.unlink(missing_ok=True)


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
