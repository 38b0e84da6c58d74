"""Finding and ending every process of a local run, also after its driver was killed hard.

A run marks its environment; all its descendants inherit the mark, whoever their parent is by now.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import psutil

MARK = "ELDR_RUN_ID"


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
    for process in list(found.values()):
        try:
            found |= {child.pid: child for child in process.children(recursive=True)}
        except psutil.Error:
            continue
    return [p for pid, p in found.items() if pid not in exclude and pid != os.getpid()]


def end(
    run_id: str | None = None, grace_s: float = 5.0, exclude: frozenset[int] = frozenset()
) -> int:
    """Terminate the processes of a run, then kill what is left. Returns how many there were."""
    total = 0
    for _ in range(3):  # a dying parent may have started one more
        processes = find(run_id, exclude)
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


def _guard(run_id: str) -> None:
    sys.stdin.buffer.read()  # returns when the driver is gone
    end(run_id, exclude=frozenset({os.getppid()}))


if __name__ == "__main__":
    _guard(sys.argv[1])
