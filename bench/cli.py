"""Commands of `eldr bench` that start engines: `serving`, `capture` and `cache`."""

from __future__ import annotations

from typing import Any

from bench import cache, capture, serving


def add_cli(subparsers: Any) -> None:
    """Register the commands among the sub-parsers of `eldr bench`."""
    serving.add_cli(subparsers)
    capture.add_cli(subparsers)
    cache.add_cli(subparsers)
