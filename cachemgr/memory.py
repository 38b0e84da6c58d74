"""Free memory where a process runs: of the machine, or of the cgroup that bounds it first.

A container's limit ends its processes long before the machine lacks memory. File cache counts as
free, since the kernel takes it back: the mapped store of experts is nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil


class Memory(NamedTuple):
    """Bytes that can be had, and bytes there are."""

    free: int
    total: int


def host_memory(root: Path = Path("/")) -> Memory:
    """Memory of this process's machine, or of the cgroup above it with the smallest free share.

    Args:
        root: where /proc and /sys are.
    """
    virtual = psutil.virtual_memory()
    machine = Memory(virtual.available, virtual.total)
    # Limits above the machine's memory are none; so is cgroup v1's largest number.
    bounds = [bound for bound in _cgroup_memory(root) if bound.total < machine.total]
    return min(machine, *bounds, key=lambda m: m.free / m.total) if bounds else machine


def _cgroup_memory(root: Path) -> list[Memory]:
    """Of each cgroup from this process's up that has a limit; none where there are no cgroups."""
    found = []
    for folder in _memory_cgroups(root):
        for limit, usage, prefix in (
            ("memory.max", "memory.current", ""),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),  # version 1
        ):
            try:
                total = int((folder / limit).read_text())
                used = int((folder / usage).read_text())
                counts = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                cached = sum(int(counts[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
            except (OSError, ValueError, KeyError):  # not of this version, or no limit: "max"
                continue
            if total > 0:
                found.append(Memory(max(0, total - max(0, used - cached)), total))
    return found


def _memory_cgroups(root: Path) -> list[Path]:
    """Folders of this process's memory cgroup and those above it.

    In a container the path may be the machine's, of which only the top is mounted.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = top / path.lstrip("/")
        folders += [own, *(p for p in own.parents if p.is_relative_to(top))]
    return folders
