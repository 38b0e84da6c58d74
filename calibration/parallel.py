"""Independent runs side by side in processes of their own.

A run gets the same arguments and gives the same result wherever it takes place: what is random
comes from its seed, and linear algebra has one thread in every process. Large arrays go to the
workers as memory maps that all of them share.
"""

from __future__ import annotations

import argparse
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

Result = TypeVar("Result")

WORKER_START_S = 2.0
"""Processor time until a worker works: an interpreter, and what it imports."""


def add_jobs(parser: Any) -> None:
    """Add `--jobs` to a parser or a group of one."""
    parser.add_argument(
        "--jobs",
        type=_jobs,
        metavar="N",
        help="processes that share the runs; results do not depend on it (default: the processors "
        "this process may use, or 1 where starting others would take longer than they save)",
    )


def _jobs(text: str) -> int:
    try:
        jobs = int(text)
    except ValueError:
        jobs = 0
    if jobs < 1:
        raise argparse.ArgumentTypeError(f"need a number of processes, 1 or more, got {text!r}")
    return jobs


def choose_jobs(asked: int | None, num_runs: int, expected_s: float) -> int:
    """Processes to use, at most one a run.

    Args:
        asked: number that the user wants; None: the processors that affinity and container leave
            us, as far as that saves time.
        num_runs: runs to share out.
        expected_s: rough time of all runs in one process, seconds.
    """
    if asked is not None:
        return max(1, min(asked, num_runs))
    from joblib import cpu_count

    jobs = max(1, min(cpu_count(), num_runs))
    return jobs if expected_s * (1 - 1 / jobs) > 2 * WORKER_START_S else 1


def run_parallel(
    function: Callable[..., Result],
    calls: Sequence[tuple[Any, ...]],
    jobs: int = 1,
    on_done: Callable[[int], object] = lambda number: None,
) -> list[Result]:
    """Results of `function(*call)`, in the order of the calls.

    Args:
        function: does one run; must not change its arguments, which may be read-only.
        calls: arguments of each run.
        jobs: processes; 1 runs all here, one after the other.
        on_done: told the number of each run that has ended.

    Raises:
        ChildProcessError: a worker died.
        Exception: what the first run to fail raised; runs that have not ended are ended then, as
            they are on an interrupt.
    """
    if jobs == 1:
        from threadpoolctl import threadpool_limits

        results = []
        with threadpool_limits(limits=1):
            for number, call in enumerate(calls):
                results.append(function(*call))
                on_done(number)
        return results
    from joblib import Parallel, delayed, parallel_config
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    done: dict[int, Result] = {}
    tasks = (delayed(_numbered)(number, function, call) for number, call in enumerate(calls))
    try:
        with warnings.catch_warnings():
            # Where an error or an interrupt ends the runs, joblib counts what it drops.
            warnings.filterwarnings("ignore", category=UserWarning, module="joblib")
            with (
                parallel_config("loky", inner_max_num_threads=1, initializer=_ignore_interrupts),
                closing(Parallel(jobs, return_as="generator_unordered")(tasks)) as ended,
            ):
                for number, result in ended:
                    done[number] = result
                    on_done(number)
    except TerminatedWorkerError as err:
        raise ChildProcessError(
            f"one of {jobs} processes ended before its run did, most likely for want of memory: "
            "use fewer --jobs"
        ) from err
    return [done[number] for number in range(len(calls))]


def _numbered(
    number: int, function: Callable[..., Result], call: tuple[Any, ...]
) -> tuple[int, Result]:
    return number, function(*call)


def _ignore_interrupts() -> None:
    """A terminal interrupts all its processes: the parent ends the others, which say nothing.

    But for one that is just starting, and has not come so far.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
