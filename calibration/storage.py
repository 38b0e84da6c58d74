"""Files written whole or not at all: texts, and folders of a JSON and a checked .npz file."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


def write_folder(
    path: Path, json_name: str, meta: Mapping[str, Any], npz_name: str, arrays: Arrays
) -> None:
    """Write both files beside `path`, then rename; an earlier folder of the same kind is replaced.

    The SHA-256 of the .npz file is stored in the JSON file as `arrays_sha256`.

    Raises:
        FileExistsError: `path` exists and does not hold `json_name`; nothing was touched.
        OSError: writing failed; what was at `path` is still there.
    """
    path = Path(path)
    if path.exists() and not (path / json_name).is_file():
        raise FileExistsError(
            f"{path} exists and holds no {json_name}: give a new folder or one to replace"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        fresh = work / "fresh"
        fresh.mkdir()
        np.savez_compressed(fresh / npz_name, **arrays)  # type: ignore[arg-type]
        stored = {**meta, "arrays_sha256": file_sha256(fresh / npz_name)}
        text = json.dumps(stored, indent=2, ensure_ascii=False, allow_nan=False)
        (fresh / json_name).write_text(text + "\n", encoding="utf-8")
        _swap(fresh, path, work / "replaced")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def read_folder(path: Path, json_name: str, npz_name: str) -> tuple[dict[str, Any], Arrays]:
    """Read both files and compare the .npz file with its SHA-256.

    Raises:
        FileNotFoundError: one of the files is missing.
        ValueError: the JSON is not an object, the checksum differs, or the arrays are unreadable
            (pickled objects are refused).
    """
    path = Path(path)
    for name in (json_name, npz_name):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} has no file {name}: is it the right folder?")
    try:
        meta = json.loads((path / json_name).read_text(encoding="utf-8"))
    except ValueError as err:
        raise ValueError(f"{path / json_name} is not valid JSON: {err}") from err
    if not isinstance(meta, dict):
        raise ValueError(f"{path / json_name} must hold a JSON object, got {type(meta).__name__}")
    found = file_sha256(path / npz_name)
    if meta.get("arrays_sha256") != found:
        raise ValueError(
            f"{path / npz_name} is damaged or from another run: its SHA-256 is {found}, "
            f"{json_name} says {meta.get('arrays_sha256')}; write the folder again"
        )
    try:
        with np.load(path / npz_name, allow_pickle=False) as stored:
            return meta, {name: stored[name] for name in stored.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as err:
        raise ValueError(f"{path / npz_name} is not a readable .npz file: {err}") from err


def write_text(path: Path, text: str) -> None:
    """Write a text file as `write_whole` does."""
    write_whole(path, lambda fresh: fresh.write_text(text, encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a file, then rename it to `path`; its folder is made if missing.

    Raises:
        OSError: writing failed; what was at `path` is still there.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
        fresh = Path(work) / path.name
        write(fresh)
        fresh.replace(path)


def take(mapping: Mapping[str, Any], key: str, kind: type, where: object) -> Any:
    """Value of `key`, checked to be of `kind`; ValueError names the file and what was found."""
    value = mapping.get(key)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where}: {key} must be {kind.__name__}, got {value!r}")
    return value


def check_version(meta: Mapping[str, Any], supported: int, where: object) -> None:
    """Refuse another format version than the supported one with a ValueError."""
    if meta.get("format_version") != supported:
        raise ValueError(
            f"{where}: format_version {meta.get('format_version')!r} is not supported, this code "
            f"reads {supported}; make the folder again with this version"
        )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _swap(fresh: Path, path: Path, replaced: Path) -> None:
    """Rename `fresh` to `path`; an existing `path` comes back if that fails."""
    had_old = path.exists()
    if had_old:
        path.rename(replaced)
    try:
        fresh.rename(path)
    except OSError:
        if had_old:
            replaced.rename(path)
        raise
