"""Expert store: whole or not at all, and refused when it is not what it should be."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cachemgr.store import (
    ExpertStore,
    StoreError,
    StoreKey,
    StoreWriter,
    TensorSpec,
    digest,
    scratch,
    stored_checkpoint,
)

SPECS = (TensorSpec("w13", "bfloat16", (4, 8), 64), TensorSpec("w2", "bfloat16", (8, 2), 32))


def build_key(**changes: object) -> StoreKey:
    key = StoreKey(fingerprint="f" * 16, layout="vec tp1", num_experts=5, tensors_L=(SPECS,) * 3)
    return replace(key, **changes)  # type: ignore[arg-type]


def data_of(layer: int, name: str) -> np.ndarray:
    nbytes = {"w13": 64, "w2": 32}[name]
    rng = np.random.default_rng(layer * 10 + len(name))
    return rng.integers(256, size=(5, nbytes), dtype=np.uint8)


def write(path: Path, key: StoreKey, checkpoint: str | None = None) -> None:
    with StoreWriter(path, key) as writer:
        for layer in range(3):
            for name in ("w13", "w2"):
                writer.write(layer, name, data_of(layer, name))
        writer.commit(checkpoint)


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    path, key = tmp_path / "new" / "model.experts", build_key()
    write(path, key)
    store = ExpertStore.open(path, key)
    for layer in range(3):
        for name in ("w13", "w2"):
            np.testing.assert_array_equal(store.tensor(layer, name), data_of(layer, name))
            store.check_same(layer, name, digest(data_of(layer, name)))
    with pytest.raises(ValueError, match="read-only"):
        store.tensor(0, "w13")[0, 0] = 1
    assert os.listdir(path.parent) == ["model.experts"]
    assert key.expert_bytes == 96


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_header(path: Path) -> None:
    os.truncate(path, 60)


def flip_data(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-4096] ^= 1  # in the last block
    path.write_bytes(data)


def flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)


def replace_all(path: Path) -> None:
    path.write_bytes(b"something else" * 1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "cut short or changed"),
        (cut_header, "damaged"),
        (flip_data, "damaged: w2 of MoE layer 2"),
        (flip_header, "damaged"),
        (replace_all, "no expert store"),
    ],
)
def test_changed_file_is_refused(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "model.experts"
    write(path, build_key())
    change(path)
    with pytest.raises(StoreError, match=message) as caught:
        ExpertStore.open(path, build_key())
    assert "delete it" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "0" * 16}, "fingerprint 'ffffffffffffffff' instead of"),
        ({"layout": "amx tp1"}, "layout 'vec tp1' instead of 'amx tp1'"),
        ({"num_experts": 6}, "num_experts 5 instead of 6"),
        ({"tensors_L": (SPECS,) * 2}, "3 layers of w13"),
    ],
)
def test_file_of_another_model_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "model.experts"
    write(path, build_key())
    with pytest.raises(StoreError, match=message):
        ExpertStore.open(path, build_key(**change))
    # Packing decides the shapes, and the name is known before: there the file is refused.
    assert (build_key(**change).file_name == build_key().file_name) == ("tensors_L" in change)


def test_weights_that_changed_under_the_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.experts"
    write(path, build_key())
    store = ExpertStore.open(path, build_key())
    with pytest.raises(StoreError, match="other weights than the model"):
        store.check_same(1, "w2", digest(data_of(2, "w2")))


def test_nothing_is_left_without_commit(tmp_path: Path) -> None:
    path = tmp_path / "model.experts"
    with StoreWriter(path, build_key()) as writer:
        writer.write(0, "w2", data_of(0, "w2"))
        with pytest.raises(StoreError, match="5 tensors were not written"):
            writer.commit()
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="must have shape"), StoreWriter(path, build_key()) as w:
        w.write(0, "w2", data_of(0, "w13"))
    assert os.listdir(tmp_path) == []


def test_failed_rewrite_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.experts"
    write(path, build_key())
    with StoreWriter(path, build_key()) as writer:
        writer.write(0, "w2", data_of(0, "w2"))
    ExpertStore.open(path, build_key())


def test_killed_writer_leaves_no_file_and_is_cleaned_up_after(tmp_path: Path) -> None:
    path = tmp_path / "model.experts"
    pid = os.fork()
    if not pid:
        with StoreWriter(path, build_key()) as writer:
            writer.write(0, "w2", data_of(0, "w2"))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not path.exists()
    assert len(os.listdir(tmp_path)) == 1
    write(path, build_key())
    assert os.listdir(tmp_path) == ["model.experts"]


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The file size limit makes the kernel refuse further blocks, as a full disk does.

    Around the calls alone: pytest's own output may be a longer file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(StoreError, match=r"disk is full.*cache\.store_dir"):
        write(tmp_path / "model.experts", build_key())
    # The memory of weights that are being loaded: later the kernel could only kill the process.
    text = r"while the model is loaded.*disk is full"
    with full_disk(), pytest.raises(StoreError, match=text):
        scratch(tmp_path, 8192)
    assert os.listdir(tmp_path) == []


def test_file_names_the_checkpoint_it_was_written_from(tmp_path: Path) -> None:
    path = tmp_path / "model.experts"
    write(path, build_key())
    assert stored_checkpoint(path) is None
    write(path, build_key(), checkpoint="ab" * 32)
    assert stored_checkpoint(path) == "ab" * 32
    ExpertStore.open(path, build_key())
    flip_header(path)
    with pytest.raises(StoreError, match="damaged"):
        stored_checkpoint(path)


def test_scratch_memory_belongs_to_a_file_without_a_name(tmp_path: Path) -> None:
    size = 32 << 20
    before = resident()
    memory = scratch(tmp_path / "new", size)
    memory[:] = b"x" * size
    after = resident()
    assert os.listdir(tmp_path / "new") == []
    assert after["RssAnon"] - before["RssAnon"] < size / 4
    assert after["RssFile"] - before["RssFile"] >= size
    taken = os.statvfs(tmp_path).f_bavail
    memory.close()
    assert os.statvfs(tmp_path).f_bavail > taken


def resident() -> dict[str, int]:
    """Memory of this process in bytes, by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        name: int(value.split()[0]) * 1024
        for name, value in (line.split(":", 1) for line in lines)
        if name.startswith("Rss")
    }


def test_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write the expert store"):
        write(tmp_path / "file" / "model.experts", build_key())
