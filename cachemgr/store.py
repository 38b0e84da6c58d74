"""Backing store of expert weights: one file of all experts of one rank, memory-mapped for reading.

A file holds the bytes of every expert in the form that the kernel wants, so that a load is one
copy per tensor. It is written beside its final name and renamed, so it is there whole or not at
all; each tensor carries a SHA-256, which is compared when the file is opened and with the weights
that the engine has loaded. Mapped pages are clean: the operating system may drop them, so the
experts of a model may be larger than RAM. The header names the checkpoint that the weights came
from (`cachemgr.checkpoint`): while that is the same, they need not be loaded again.

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
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 2
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
        layout: kernel that the bytes are packed for, its element type, and the rank's share of
            each expert.
        num_experts: E.
        tensors_L: tensors of each layer; not in the file's name, as packing decides them.
    """

    fingerprint: str
    layout: str
    num_experts: int
    tensors_L: tuple[tuple[TensorSpec, ...], ...]

    @property
    def file_name(self) -> str:
        """Name of the file of this model, kernel and share; known before a weight is loaded."""
        text = json.dumps([self.layout, self.num_experts])
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
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
        store = cls(path, header, mapped)
        for layer, of_layer in enumerate(store._blocks):
            for name, data_EN in of_layer.items():
                if digest(data_EN) != header["sha256_L"][layer][name]:
                    raise StoreError(
                        f"{path} is damaged: {name} of MoE layer {layer} does not have the "
                        "checksum it was written with; delete it, and it is written again at the "
                        "next start"
                    )
        # Checked pages count as this process's memory, by which vLLM sizes its KV cache.
        mapped._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        return store

    def tensor(self, layer: int, name: str) -> Bytes:
        """All experts of one tensor: uint8, shape (E, N), read-only."""
        return self._blocks[layer][name]

    def check_same(self, layer: int, name: str, sha256: str) -> None:
        """Compare with the `digest` of weights that were loaded from the model.

        Raises:
            StoreError: they differ: the model was trained again, or vLLM packs in another way.
        """
        if sha256 != self._digests[layer][name]:
            raise StoreError(
                f"{self.path} holds other weights than the model ({name} of MoE layer {layer}): "
                "the model, or the form that vLLM's kernel wants, has changed since; delete the "
                "file, and it is written again at the next start"
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
            "checkpoint": _NO_DIGEST,
            "sha256_L": [{spec.name: _NO_DIGEST for spec in specs} for specs in key.tensors_L],
        }
        self._offsets, self._size = _offsets(key, _data_start(self._header))
        self._missing = {
            (layer, spec.name) for layer, specs in enumerate(key.tensors_L) for spec in specs
        }
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._fd = -1

    def __enter__(self) -> Self:
        """Make the file; its space is taken layer by layer, as the engine frees it (`scratch`).

        Raises:
            StoreError: the folder cannot be written.
        """
        with self._explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.path)
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.truncate(self._fd, self._size)
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

    def commit(self, checkpoint: str | None = None) -> None:
        """Write the header, flush, and rename to the final name.

        Args:
            checkpoint: SHA-256 of the checkpoint that the weights came from, in hex; None: unknown.

        Raises:
            StoreError: a tensor was not written, or the disk failed.
        """
        if self._missing:
            raise StoreError(f"{self.path}: {len(self._missing)} tensors were not written")
        self._header["checkpoint"] = checkpoint or _NO_DIGEST
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

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        return _explained(f"the expert store {self.path}", self._size)


def stored_checkpoint(path: Path) -> str | None:
    """SHA-256 of the checkpoint that a store file was written from; None: not known.

    Raises:
        StoreError: the file is no expert store, or its header is damaged.
    """
    found = str(_read_header(path)["checkpoint"])
    return None if found == _NO_DIGEST else found


def scratch(folder: Path, nbytes: int) -> mmap.mmap:
    """Memory that the system may write out instead of keeping: a mapped file without a name.

    The file's space is reserved, so a full disk is told here. It is gone when the memory is freed,
    or with the process.

    Raises:
        StoreError: the folder cannot be written or has too little space.
    """
    with _explained(f"weights to the folder {folder} while the model is loaded", nbytes):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)


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


@contextlib.contextmanager
def _explained(what: str, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        reason = (
            "the disk is full"
            if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            else err.strerror or str(err)
        )
        raise StoreError(
            f"cannot write {what}, which needs {nbytes / 2**30:.2f} GiB: {reason}; "
            "free space there or set cache.store_dir to another folder"
        ) from err


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
    if header["format_version"] != FORMAT_VERSION:
        raise StoreError(
            f"{path} has format {header['format_version']} instead of {FORMAT_VERSION}: delete it, "
            "and it is written again at the next start"
        )
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
