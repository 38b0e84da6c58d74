"""A model whose experts dominate: a decode engine with a cache never has them all in memory."""

from __future__ import annotations

import os
import re
import struct
import threading
from pathlib import Path

import psutil
import pytest

from app.config import CacheConfig
from bench.step_time import widen_experts
from calibration.capture import Prompt
from tests.e2e.conftest import MODEL
from tests.e2e.test_expert_cache import Engine, expected

NUM_LAYERS = 6
WIDTH = 960  # columns of an expert: ten times the demo model's, zeros beyond them
FEW_BLOCKS = 48  # of KV: a gigabyte of it would hide what loading takes


class PeakMemory(threading.Thread):
    """The most anonymous memory that any child of this process has had, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._ended = 0, threading.Event()

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        this = psutil.Process()
        while not self._ended.is_set():
            children = this.children(recursive=True)
            for _ in range(100):
                self.peak = max([self.peak, *(anonymous(child.pid) for child in children)])
                if self._ended.wait(0.003):
                    return


def anonymous(pid: int) -> int:
    try:
        found = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:  # it has ended
        return 0
    return int(found[1]) * 1024 if found else 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widen_experts(MODEL, tmp_path_factory.mktemp("wide") / "model", WIDTH)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


def start(model: Path, store: Path) -> Engine:
    cache = CacheConfig(enabled=True, fraction=0.125, policy="lru", store_dir=str(store))
    return Engine(cache, model, num_gpu_blocks_override=FEW_BLOCKS)


@pytest.mark.parametrize("attempt", ["writes the store", "finds the store"])
def test_loading_takes_the_memory_of_a_layer(
    reference: dict[str, dict[str, list[int]]],
    prompts: list[Prompt],
    wide: Path,
    store: Path,
    attempt: str,
) -> None:
    some = prompts[::3]
    assert bool(list(store.glob("*.experts"))) == (attempt == "finds the store")
    with PeakMemory() as memory:
        engine = start(wide, store)
        try:
            assert engine.answers(some, attempt, limit=3) == expected(reference, some)
            stats = engine.call("eldr_cache_stats")
        finally:
            engine.close()
    experts = stats["full_bytes"]
    assert experts > 400e6
    assert stats["slot_bytes"] * 8 == experts
    # While it serves, it has its slots; on the way there, one layer in the kernel's form, and what
    # the allocator has not given back yet of the layer before.
    above = memory.peak - stats["anonymous_bytes"]
    assert above < 2 * experts / NUM_LAYERS, (memory.peak, stats)
    assert sorted(p.suffix for p in store.iterdir()) == [".experts", ".lock"]


def test_model_trained_again_is_refused(
    wide: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One weight of the last layer differs; sizes, dates and every other layer do not."""
    path = wide / "model.safetensors"
    name = f"model.layers.{NUM_LAYERS - 1}.mlp.experts.63.up_proj.weight"
    before = path.stat()
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length).decode()
        found = re.search(rf'"{re.escape(name)}":{{.*?"data_offsets":\[(\d+),', header)
        assert found
        offset = 8 + length + int(found[1])
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(RuntimeError):
        start(wide, store).close()
    errors = capfd.readouterr()
    assert re.search(
        r"holds other weights than the model \(w13_weight of MoE layer 5\)", str(errors)
    )
