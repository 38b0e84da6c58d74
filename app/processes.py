"""Finding and ending every process of a local run, also after its driver was killed hard.

A run marks its environment; all its descendants inherit the mark, whoever their parent is by now.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterable

import psutil

MARK = "ELDR_RUN_ID"
_NOTE_INTERVAL_S = 5.0


def start_run() -> str:
    """Mark this process and all it will start; returns the run's id."""
    run_id = uuid.uuid4().hex
    os.environ[MARK] = run_id
    return run_id


def find(run_id: str | None = None, exclude: frozenset[int] = frozenset()) -> list[psutil.Process]:
    """Processes of a run, or of any run when `run_id` is None.

    Descendants of marked ones are among them: some (Ray's agents) overwrite their environment when
    they set their title.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid in exclude or process.pid == os.getpid():
            continue
        try:
            mark = process.environ().get(MARK)
        except (psutil.Error, OSError):
            continue
        if mark is not None and run_id in (None, mark):
            found[process.pid] = process
    found = {process.pid: process for process in with_descendants(found.values())}
    return [p for pid, p in found.items() if pid not in exclude and pid != os.getpid()]


def with_descendants(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Processes and all that they and their children started, as far as they live."""
    found: list[psutil.Process] = []
    for root in roots:
        found.append(root)
        try:
            found += root.children(recursive=True)
        except psutil.Error:
            continue  # it has ended
    return found


def end(
    run_id: str | None = None,
    grace_s: float = 5.0,
    exclude: frozenset[int] = frozenset(),
    also: Iterable[psutil.Process] = (),
) -> int:
    """Terminate the processes of a run, then kill what is left. Returns how many there were.

    `also` are processes known to belong to it that may no longer be found.
    """
    total = 0
    for _ in range(3):  # a dying parent may have started one more
        processes = find(run_id, exclude)
        known = {p.pid for p in processes} | exclude | {os.getpid()}
        processes += [p for p in also if p.pid not in known and p.is_running()]
        if not processes:
            break
        total += len(processes)
        for process in processes:
            _signal(process, hard=False)
        _, alive = psutil.wait_procs(processes, timeout=grace_s)
        for process in alive:
            _signal(process, hard=True)
        psutil.wait_procs(alive, timeout=2)
    return total


def _signal(process: psutil.Process, *, hard: bool) -> None:
    try:
        process.kill() if hard else process.terminate()
    except psutil.Error:
        pass  # it ended by itself


def start_guard(run_id: str) -> subprocess.Popen[bytes]:
    """Start a small process that ends the run when this one is gone, however it went.

    It holds the reading end of a pipe whose writing end dies with us.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "app.processes", run_id],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def is_guard(process: psutil.Process) -> bool:
    """Whether a process is what `start_guard` starts."""
    try:
        return "app.processes" in process.cmdline()
    except psutil.Error:
        return False


def _guard(run_id: str) -> None:
    """Wait for the driver's end, then end the run.

    Descendants are noted while the driver lives: those that hide their mark cannot be found once
    their parents are gone with it.
    """
    driver = psutil.Process(os.getppid())
    family: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], _NOTE_INTERVAL_S)[0]:
        try:
            family.update(driver.children(recursive=True))
        except psutil.Error:
            break  # it is gone
    end(run_id, also=family)


if __name__ == "__main__":
    _guard(sys.argv[1])
