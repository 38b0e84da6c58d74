"""Commands of `eldr bench` that start engines: `serving` and `capture`."""

from __future__ import annotations

from typing import Any

from bench import capture, serving


def add_cli(subparsers: Any) -> None:
    """Register the commands among the sub-parsers of `eldr bench`."""
    serving.add_cli(subparsers)
    capture.add_cli(subparsers)
