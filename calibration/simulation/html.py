"""The report as one HTML file: tables and plots inline, nothing fetched."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.simulation import report as text_report
from calibration.simulation.experiment import Cell, Setting
from calibration.storage import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0 1.5rem }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left }
pre { white-space: pre-wrap; background: #f6f6f6; padding: .8rem }
svg { max-width: 100%; height: auto }
"""

_COURSE = (
    ("replicas", "decode replicas"),
    ("in_flight", "requests in flight"),
    ("skew", "largest / mean load"),
    ("distinct", "distinct experts"),
)


def write_html(path: Path, report: dict[str, Any], settings: list[Setting]) -> None:
    """Write the file, whole or not at all.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    parts = [f"<h1>{html.escape(report['name'])}</h1>"]
    parts.append(f"<p>{html.escape(text_report.speed_line(report))}</p>")
    for variant, setting in zip(report["variants"], settings, strict=True):
        parts.append(f"<pre>{html.escape(text_report.describe(variant))}</pre>")
        if len(variant["rates"]) > 1:
            parts.append(_svg(_rates_figure(variant)))
        for row in variant["rates"]:
            parts.append(f"<h2>{html.escape(text_report.title(variant, row))}</h2>")
            parts.append(_table(text_report.rate_rows(variant, row)))
        if _has_course(setting):
            for rate, cells in setting.cells.items():
                parts.append(f"<h2>Course of seed 0 at {rate:g} req/s</h2>")
                parts.append(_svg(_course_figure(cells)))
    if any(variant["values"] for variant in report["variants"]):
        parts.append("<h2>Sweep</h2>" + _svg(_sweep_figure(report)))
    if paper := report["paper"]:
        parts.append(f"<h2>{html.escape(text_report.paper_title(paper))}</h2>")
        parts.append(_table(text_report.paper_rows(paper)))
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in paper["notes"])
        parts.append(f"<p>Why they differ:</p><ul>{notes}</ul>")
    body = "\n".join(parts)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(report['name'])}</title><style>{_STYLE}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )
    write_text(path, page)


def _table(rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    lines = [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows[1:]
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _has_course(setting: Setting) -> bool:
    config = setting.config
    return bool(config.autoscaling or config.failures or config.traffic.curve or config.traffic.mix)


def _rates_figure(variant: dict[str, Any]) -> Figure:
    """TPOT P50, P99 and distinct experts over the rate, a line a policy."""
    figure, axes = _figure(3)
    rates = [row["rate"] for row in variant["rates"]]
    for axis, (name, label) in zip(
        axes,
        (
            ("tpot_p50", "TPOT P50, ms"),
            ("tpot_p99", "TPOT P99, ms"),
            ("distinct", "distinct experts a layer and step"),
        ),
        strict=True,
    ):
        for policy in variant["rates"][0]["policies"]:
            values = [row["policies"][policy][name] for row in variant["rates"]]
            axis.plot(rates, [np.nan if v is None else v for v in values], marker="o", label=policy)
        axis.set_xlabel("requests per second")
        axis.set_ylabel(label)
    axes[0].legend(fontsize=8)
    return figure


def _sweep_figure(report: dict[str, Any]) -> Figure:
    """Change of TPOT P50 and P99 against the reference for each variant, with intervals."""
    figure, axes = _figure(2)
    variants = report["variants"]
    labels = [", ".join(str(value) for value in variant["values"].values()) for variant in variants]
    policies = [p for p in variants[0]["rates"][0]["policies"] if p != variants[0]["reference"]]
    for axis, name in zip(axes, ("tpot_p50", "tpot_p99"), strict=True):
        for shift, policy in enumerate(policies):
            for column, variant in enumerate(variants):
                ratios = [
                    row["policies"][policy]["ratio"][name]
                    for row in variant["rates"]
                    if policy in row["policies"]
                ]
                means = [100 * (r["mean"] - 1) for r in ratios if r["mean"] is not None]
                if not means:
                    continue
                x = column + (shift - len(policies) / 2) * 0.08
                bounds = [r["ci"] for r in ratios if r["ci"] is not None]
                if len(bounds) == 1:
                    axis.vlines(x, *(100 * (b - 1) for b in bounds[0]), color=f"C{shift}")
                label = policy if column == 0 else None
                axis.plot(x, float(np.mean(means)), "o", color=f"C{shift}", label=label)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xticks(range(len(labels)), labels, rotation=20, ha="right")
        axis.set_ylabel(f"{name.replace('_', ' ')}, change in %")
    axes[0].legend(fontsize=8)
    axes[0].set_xlabel(", ".join(variants[0]["values"]))
    return figure


def _course_figure(cells: dict[str, Cell]) -> Figure:
    """Replicas, load, skew, distinct experts and TPOT over time, a line a policy."""
    figure, axes = _figure(len(_COURSE) + 1)
    for policy, cell in cells.items():
        run = cell.runs[0]
        last = run.samples[-1].at_s if run.samples else 0.0
        unit, unit_s = ("hours", 3600) if last > 2 * 3600 else ("minutes", 60)
        at = np.array([sample.at_s for sample in run.samples]) / unit_s
        for axis, (name, label) in zip(axes, _COURSE, strict=False):
            axis.plot(at, [getattr(sample, name) for sample in run.samples], label=policy)
            axis.set_ylabel(label)
        if len(run.arrived_M):
            edges = np.linspace(run.arrived_M[0], run.arrived_M[-1], 61)
            where = np.clip(np.searchsorted(edges, run.arrived_M, side="right") - 1, 0, 59)
            medians = [
                np.median(run.tpot_M[where == i]) * 1e3 if (where == i).any() else np.nan
                for i in range(60)
            ]
            axes[-1].plot((edges[:-1] + edges[1:]) / 2 / unit_s, medians, label=policy)
    axes[-1].set_ylabel("TPOT P50, ms")
    for axis in axes:
        axis.set_xlabel(unit)
    axes[0].legend(fontsize=8)
    axes[0].set_ylim(bottom=0)
    return figure


def _figure(columns: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure as NewFigure

    rows = -(-columns // 3)
    figure = NewFigure(figsize=(4.2 * min(columns, 3), 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, min(columns, 3), squeeze=False)
    axes = list(grid.flat)
    for unused in axes[columns:]:
        unused.remove()
    return figure, axes[:columns]


def _svg(figure: Figure) -> str:
    import matplotlib as mpl

    stream = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "eldr"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    drawing = stream.getvalue()
    return drawing[drawing.index("<svg") :]
