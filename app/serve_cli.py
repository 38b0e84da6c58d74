"""`eldr serve`, `demo`, `stop`, `status` and `drain`."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from app import processes

DEFAULT_URL = "http://127.0.0.1:8000"


def add_cli(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the commands."""
    serve = subparsers.add_parser("serve", help="run an application until interrupted")
    serve.add_argument("config")
    serve.set_defaults(func=_serve)

    demo = subparsers.add_parser("demo", help="run it, send requests of several domains, stop it")
    demo.add_argument("config")
    demo.add_argument("--prompts", default="data/prompts", help="folder of .jsonl prompts")
    demo.add_argument("--per-domain", type=int, default=3, help="requests of each domain")
    demo.add_argument("--max-tokens", type=int, default=48)
    demo.add_argument("--keep", action="store_true", help="stay up afterwards")
    demo.set_defaults(func=_demo)

    stop = subparsers.add_parser("stop", help="end every local application, dead drivers' too")
    stop.set_defaults(func=_stop)

    status = subparsers.add_parser("status", help="replicas, loads and centroids")
    status.add_argument("--url", default=DEFAULT_URL)
    status.set_defaults(func=_status)

    drain = subparsers.add_parser(
        "drain", help="move what serves away from this Ray node, and wait until it is gone"
    )
    drain.add_argument("--timeout", type=int, required=True, help="seconds until the node goes")
    drain.add_argument("--node-id", help="another node than the one that this runs on")
    drain.set_defaults(func=_drain)


def _serve(args: argparse.Namespace) -> int:
    with _running(args.config) as running:
        print(f"ready: {running.url}/v1  (Ctrl-C stops it)", flush=True)
        _wait_for_signal()
        print("stopping", file=sys.stderr)
    return 0


def _demo(args: argparse.Namespace) -> int:
    from app.demo import run_demo

    with _running(args.config) as running:
        run_demo(running.url, running.config, args.prompts, args.per_domain, args.max_tokens)
        if args.keep:
            print(f"ready: {running.url}/v1  (Ctrl-C stops it)", flush=True)
            _wait_for_signal()
        print("stopping", file=sys.stderr)
    return 0


def _stop(args: argparse.Namespace) -> int:
    number = processes.end()
    print(f"ended {number} processes" if number else "nothing is running")
    return 0


def _status(args: argparse.Namespace) -> int:
    try:
        with urllib.request.urlopen(f"{args.url}/status", timeout=5) as response:
            status: dict[str, Any] = json.load(response)
    except OSError as err:
        print(f"no application answers at {args.url}: {err}", file=sys.stderr)
        return 1
    print(f"policy {status['policy']}")
    print(f"{'decode replica':<16} {'load':>4} {'centroid':>8}")
    for replica_id, load in status["loads"].items():
        centroid = status["assignment"].get(replica_id)
        print(f"{replica_id:<16} {load:>4} {'-' if centroid is None else centroid:>8}")
    return 0


def _drain(args: argparse.Namespace) -> int:
    from app.drain import drain_node

    with _Progress() as progress:
        is_empty = drain_node(args.timeout, args.node_id, progress)
    if not is_empty:
        print(f"replicas were left after {args.timeout} s: their streams break", file=sys.stderr)
    return 0 if is_empty else 1


@contextlib.contextmanager
def _running(config_path: str) -> Iterator[Any]:
    """A started application, stopped however the block ends."""
    from app.config import load_config

    config = load_config(config_path)
    from app import local

    with _Progress() as progress:
        running = local.start(config, progress)
    print(f"up in {time.monotonic() - running.started_s:.0f} s", file=sys.stderr)
    if running.metrics_url:
        print(f"metrics: {running.metrics_url}", file=sys.stderr)
    try:
        yield running
    finally:
        # A second Ctrl-C must not leave processes behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        running.stop()


def _wait_for_signal() -> None:
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()


class _Progress:
    """One line that says what is going on and for how long; a line a change without a terminal."""

    def __init__(self) -> None:
        self._text, self._begin = "", time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        passed = time.monotonic() - self._begin
        if self._is_terminal:
            print(f"\r\033[K[{passed:4.0f} s] {text}", end="", file=sys.stderr, flush=True)
        elif text != self._text:
            print(f"[{passed:4.0f} s] {text}", file=sys.stderr, flush=True)
        self._text = text

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            print(file=sys.stderr)
