"""Identity of the checkpoint that an engine loads: the content of its files.

A store written from a checkpoint holds its experts as long as both digests agree, whatever names
and dates say. Reading all bytes once is the price; they need no memory.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cachemgr.store import StoreError

_SUFFIXES = (".safetensors", ".json", ".py")  # weights, how they are read, a model's own code


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Content of a model folder at one time.

    Attributes:
        folder: of the model.
        sha256: over names and contents of its weight, configuration and code files, in hex.
        stat: name, inode, size and time of each of them when it was read.
    """

    folder: Path
    sha256: str
    stat: tuple[tuple[str, int, int, int], ...]

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Hash a folder's files; None: it has no safetensors."""
        stat = _stat(folder)
        if not any(name.endswith(".safetensors") for name, *_ in stat):
            return None
        total = hashlib.sha256()
        for name, *_ in stat:
            with (folder / name).open("rb") as file:
                total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return cls(folder, total.hexdigest(), stat)

    def check_unchanged(self) -> None:
        """Refuse what was loaded since `read`, if the files are not those that were hashed.

        Raises:
            StoreError: a file was changed, replaced, added or removed.
        """
        changed = sorted({entry[0] for entry in set(_stat(self.folder)) ^ set(self.stat)})
        if changed:
            raise StoreError(
                f"{', '.join(changed)} in {self.folder} changed while the model was loaded: "
                "start again when the folder is complete"
            )


def _stat(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    files = []
    for entry in os.scandir(folder):
        if entry.name.endswith(_SUFFIXES) and entry.is_file():
            stat = os.stat(entry.path)
            files.append((entry.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(files))
