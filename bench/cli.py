"""Commands of `eldr bench` that start engines: `serving`, `capture`, `cache` and `step-time`."""

from __future__ import annotations

from typing import Any

from bench import cache, capture, serving, step_time


def add_cli(subparsers: Any) -> None:
    """Register the commands among the sub-parsers of `eldr bench`."""
    serving.add_cli(subparsers)
    capture.add_cli(subparsers)
    cache.add_cli(subparsers)
    step_time.add_cli(subparsers)
