"""Identity of a checkpoint: its content, and that it did not change while it was loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cachemgr.checkpoint import Checkpoint
from cachemgr.store import StoreError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors", "config.json", "README.md"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


def read(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint.read(folder)
    assert checkpoint is not None
    return checkpoint


def flip(path: Path) -> None:
    """Change one bit and keep size and dates, as a restored copy of another training may have."""
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_content_counts_and_place_and_date_do_not(model: Path) -> None:
    first = read(model)
    copy = model.with_name("copy")
    shutil.copytree(model, copy, copy_function=shutil.copyfile)
    (copy / "README.md").write_text("other words")
    assert read(copy).sha256 == first.sha256
    first.check_unchanged()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: flip(folder / "b.safetensors"),
        lambda folder: flip(folder / "config.json"),
        lambda folder: (folder / "a.safetensors").unlink(),
        lambda folder: (folder / "a.safetensors").rename(folder / "c.safetensors"),
        lambda folder: (folder / "model.py").write_text("model"),
    ],
)
def test_any_change_of_what_is_read_counts(model: Path, change: Callable[[Path], object]) -> None:
    first = read(model)
    change(model)
    assert read(model).sha256 != first.sha256


def test_change_while_loading_is_refused(model: Path) -> None:
    first = read(model)
    (model / "b.safetensors").write_bytes(b"new")
    with pytest.raises(StoreError, match=r"^b\.safetensors in .* changed while the model"):
        first.check_unchanged()


def test_folder_without_safetensors_has_no_identity(model: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    assert Checkpoint.read(model) is None
