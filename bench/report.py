"""What the benches share: spreads over rounds, progress lines, and a clean standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """A value per round, summed up."""

    median: float
    lo: float
    hi: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median, least and greatest. Raises ValueError when there are no values."""
        if not values:
            raise ValueError("no rounds were measured")
        return cls(median(values), min(values), max(values))

    def as_dict(self, digits: int = 3) -> dict[str, float]:
        return {name: round(getattr(self, name), digits) for name in ("median", "lo", "hi")}

    def text(self, digits: int) -> str:
        return f"{self.median:,.{digits}f} ({self.lo:,.{digits}f}..{self.hi:,.{digits}f})"


def ratios(ours: Sequence[float], peers: Sequence[float]) -> Spread:
    """Ours / peer, round by round: what slows a whole round cancels out.

    Raises:
        ValueError: the two differ in their number of rounds.
    """
    return Spread.of([a / b for a, b in zip(ours, peers, strict=True)])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def progress_line() -> Callable[[str], None]:
    """A function that prints to stderr what it is told, unless it was the last thing told."""
    last = ""

    def tell(text: str) -> None:
        nonlocal last
        if text != last:
            print(text, file=sys.stderr, flush=True)
        last = text

    return tell


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what engines and libraries print to stderr: stdout is for the report alone."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
