"""Real processes: found by their mark and ended, whoever their parent is."""

import os
import subprocess
import sys
import time

from app import processes

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


def marked(run_id: str) -> dict[str, str]:
    return {**os.environ, processes.MARK: run_id}


def test_only_the_marked_run_is_ended() -> None:
    mine = subprocess.Popen(SLEEPER, env=marked("mine"))
    other = subprocess.Popen(SLEEPER, env=marked("other"))
    try:
        assert [p.pid for p in processes.find("mine")] == [mine.pid]
        assert processes.end("mine", grace_s=5) == 1
        assert not processes.find("mine")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_that_ignores_the_signal_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN)\n"
        "print(1, flush=True); time.sleep(60)"
    )
    stubborn = subprocess.Popen(
        [sys.executable, "-c", code], env=marked("stubborn"), stdout=subprocess.PIPE
    )
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    processes.end("stubborn", grace_s=0.5)
    assert not processes.find("stubborn")
    stubborn.stdout.close()


def test_guard_ends_the_run_of_a_killed_driver() -> None:
    code = (
        "from app import processes; import subprocess, sys, time\n"
        "run = processes.start_run()\n"
        "processes.start_guard(run)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(run, flush=True); time.sleep(60)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    run_id = driver.stdout.readline().decode().strip()
    assert processes.find(run_id)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    deadline = time.monotonic() + 15
    while processes.find(run_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes.find(run_id)
