"""Free memory of a container, read from files as both versions of cgroups write them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cachemgr.memory import host_memory

GIB = 2**30
V2 = ("memory.max", "memory.current", "")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GiB, half of it free."""
    memory = type("svmem", (), {"available": 32 * GIB, "total": 64 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def write(
    root: Path, folder: str, names: tuple[str, str, str], limit: int | str, used: int, cached: int
) -> None:
    path = root / "sys/fs/cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name, prefix = names
    (path / limit_name).write_text(f"{limit}\n")
    (path / usage_name).write_text(f"{used}\n")
    stat = f"anon 7\n{prefix}active_file {cached // 4}\n{prefix}inactive_file {cached * 3 // 4}\n"
    (path / "memory.stat").write_text(stat)


def place(root: Path, lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)


def test_machine_without_cgroups(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == (32 * GIB, 64 * GIB)


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/", "", V2),
        ("0::/pods/one", "pods/one", V2),
        ("0::/pods/one", "", V2),  # the machine's path, seen in a container
        ("0::/pods/one", "pods", V2),  # the limit of what is above
        ("5:cpu:/\n4:memory:/pods/one\n0::/", "memory/pods/one", V1),
        ("4:memory:/pods/one", "memory", V1),
    ],
)
def test_container_has_its_limit_less_what_cannot_be_taken_back(
    tmp_path: Path, line: str, folder: str, names: tuple[str, str, str]
) -> None:
    place(tmp_path, line)
    write(tmp_path, folder, names, 8 * GIB, 7 * GIB, 2 * GIB)
    assert host_memory(tmp_path) == (3 * GIB, 8 * GIB)


def test_smallest_free_share_counts(tmp_path: Path) -> None:
    place(tmp_path, "0::/pods/one")
    write(tmp_path, "pods", V2, 16 * GIB, 15 * GIB, 0)
    write(tmp_path, "pods/one", V2, 8 * GIB, 4 * GIB, 0)
    assert host_memory(tmp_path) == (GIB, 16 * GIB)
    write(tmp_path, "pods", V2, 16 * GIB, 2 * GIB, 0)
    assert host_memory(tmp_path) == (32 * GIB, 64 * GIB)


@pytest.mark.parametrize(("names", "limit"), [(V2, "max"), (V1, 9223372036854771712)])
def test_cgroup_without_a_limit_is_the_machine(
    tmp_path: Path, names: tuple[str, str, str], limit: int | str
) -> None:
    place(tmp_path, "4:memory:/\n0::/")
    write(tmp_path, "memory" if names is V1 else "", names, limit, 7 * GIB, 4 * GIB)
    assert host_memory(tmp_path) == (32 * GIB, 64 * GIB)


def test_cgroup_above_its_limit_has_nothing_free(tmp_path: Path) -> None:
    place(tmp_path, "0::/")
    write(tmp_path, "", V2, 8 * GIB, 9 * GIB, 0)
    assert host_memory(tmp_path) == (0, 8 * GIB)
