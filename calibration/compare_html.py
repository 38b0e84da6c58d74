"""A comparison of transforms as one HTML page: table and plots, no network needed.

Axes: L MoE layers, E experts, G domains, S seeds.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.compare import LAYER_CHOICES, REFERENCE, Comparison
from calibration.show import NO_DOMAIN, scatter_domains, whole_numbers
from calibration.transforms import CHOSEN_EXPERTS, TRANSFORMS, CountIdf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PANELS = 12
"""Domains with a heat map of their own; smaller ones are named below the map."""

STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#8a94a3",
    "axes.grid": True,
    "axes.labelcolor": "#2b3442",
    "axes.prop_cycle": "cycler('color', ['#3366cc', '#e07b00', '#2a9d5c', '#c0392b', '#8e5bb5', "
    "'#8c6d4f', '#d6529c', '#6b7785', '#9aa31c', '#17a2b8', '#1b3a6b', '#f2a3a3'])",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9.5,
    "grid.color": "#e6e9ee",
    "legend.frameon": False,
    "svg.hashsalt": "eldr",
    "text.color": "#1c2430",
    "xtick.color": "#4a5463",
    "ytick.color": "#4a5463",
}

BARS = dict(
    zip(
        LAYER_CHOICES,
        (
            ("all layers", "#9db8e8"),
            ("selected layers", "#3366cc"),
            ("best layer alone", "#c9cfd8"),
        ),
        strict=True,
    )
)
"""Choice of layers: label and colour of its bars."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0 auto; max-width: 1080px; padding: 32px 24px 64px; background: #fff;
  color: #1c2430; font: 16px/1.55 system-ui, sans-serif; }}
h1 {{ font-size: 26px; margin: 0 0 4px; }}
h2 {{ font-size: 19px; margin: 44px 0 6px; }}
p {{ margin: 6px 0 14px; max-width: 78ch; }}
.facts {{ color: #566070; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14.5px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 5px 14px 5px 0; text-align: right; white-space: nowrap; }}
th {{ border-bottom: 2px solid #c9cfd8; font-weight: 600; }}
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {{ text-align: left; }}
tr.first td {{ border-top: 1px solid #e6e9ee; }}
tr.reference {{ background: #eef3fc; }}
img {{ display: block; width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="facts">{facts}</p>
{body}
</body>
</html>
"""


def render(result: Comparison, title: str, facts: Mapping[str, str]) -> str:
    """The page as text.

    Args:
        result: what to show.
        title: heading, such as the name of model and workload.
        facts: further facts for the line below it, by name.
    """
    from matplotlib import rc_context

    seeds = f"{len(result.seeds)} seed{'s' if len(result.seeds) > 1 else ''}"
    shape = f"{result.num_requests} requests, {result.num_layers} MoE layers, "
    shape += f"{result.num_experts} experts, {seeds}"
    with rc_context(STYLE):
        sections = [
            _section("rho by transform and layers", _rho_text(result), _table(result)),
            _section("Transforms", "", _image(_draw_rho(result), "rho by transform, with range")),
            _section(
                "Layers",
                "rho on the held-out half as the greedy search takes one layer after another, "
                f"mean over seeds. Band: range of {CountIdf.name} over seeds; dashed: the same on "
                "the half that chose the layers. The cut is at the peak of the dashed line.",
                _image(_draw_curves(result), "rho by number of layers"),
            ),
            _section(
                "Expert use by domain",
                _heat_text(result),
                _image(_draw_heat(result), "heat map of expert use by domain"),
            ),
            _section(
                "Signatures",
                f"{CountIdf.name} signatures of all requests on their two main axes, with the "
                f"centroids of balanced k-means (K = {len(result.picture.centroids_KD)}).",
                _image(_draw_projection(result), "projection of signatures"),
            ),
        ]
    line = "; ".join([shape, *(f"{name} {value}" for name, value in facts.items())])
    return PAGE.format(title=html.escape(title), facts=html.escape(line), body="\n".join(sections))


def _rho_text(result: Comparison) -> str:
    text = (
        "Spearman's rho between the distance of two requests' prompt signatures and the distance "
        "of their decode expert use, over random pairs. Weights and layers are learned on one half "
        "of the requests (rho in fit), rho held out is that of the other half: mean over seeds, "
        f"least and greatest in brackets. The reference, {' on '.join(REFERENCE)} layers, is what "
        "routing uses; differences to it are taken seed by seed."
    )
    if result.gates == CHOSEN_EXPERTS:
        text += (
            " Gate probabilities are recorded for the chosen experts only, so mass below the "
            "top-k cut is missing and this row is nearer to counts than the paper's."
        )
    return text


def _heat_text(result: Comparison) -> str:
    text = (
        "Choices of each expert per decoded token, less the mean over domains. Red: the domain "
        "uses the expert more than the others do."
    )
    left_out = result.picture.domains[MAX_PANELS:]
    if left_out:
        text += f" Not drawn: {', '.join(left_out)}."
    if result.picture.domains == [""]:
        text += " No request has a label, so there is nothing to compare."
    return text


def _section(heading: str, text: str, content: str) -> str:
    paragraph = f"<p>{html.escape(text)}</p>\n" if text else ""
    return f"<h2>{html.escape(heading)}</h2>\n{paragraph}{content}"


def _table(result: Comparison) -> str:
    header, *rows = result.table()
    lines = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>"]
    last = ""
    for row in rows:
        names = ["first"] if row[0] != last else []
        names += ["reference"] if row[:2] == REFERENCE else []
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f'<tr class="{" ".join(names)}">{cells}</tr>')
        last = row[0]
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _image(figure: Figure, description: str) -> str:
    """The figure as an embedded SVG; as an image, so that ids of several figures cannot clash."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    data = base64.b64encode(stream.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(description)}" src="data:image/svg+xml;base64,{data}">'


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def _draw_rho(result: Comparison) -> Figure:
    """Bars with whiskers, three a transform."""
    figure = _figure(10.5, 4.2)
    axes = figure.subplots()
    names = [transform.name for transform in TRANSFORMS]
    width = 0.26
    for offset, layers in enumerate(LAYER_CHOICES, start=-1):
        rows = [row for row in result.rows if row.layers == layers]
        at = [names.index(row.transform) + offset * width for row in rows]
        means = [row.rho.mean for row in rows]
        spread = [
            [row.rho.mean - row.rho.lo for row in rows],
            [row.rho.hi - row.rho.mean for row in rows],
        ]
        label, color = BARS[layers]
        axes.bar(at, means, width * 0.92, color=color, label=label)
        axes.errorbar(at, means, spread, fmt="none", ecolor="#1c2430", elinewidth=1, capsize=3)
        for x, row in zip(at, rows, strict=True):
            axes.annotate(
                f"{row.rho.mean:.2f}",
                (x, max(row.rho.hi, 0)),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
    for name in result.not_recorded:
        axes.annotate(
            "not\nrecorded",
            (names.index(name), 0),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            color="#8a94a3",
        )
    axes.axhline(0, color="#8a94a3", linewidth=0.8)
    axes.grid(axis="x", visible=False)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel("rho, held out")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure


def _draw_curves(result: Comparison) -> Figure:
    figure = _figure(10.5, 4.2)
    axes = figure.subplots()
    whole_numbers(axes)
    rounds = np.arange(1, result.num_layers + 1)
    for name, curves in result.curves.items():
        is_reference = name == CountIdf.name
        held_out_SL = curves.held_out_SL
        (line,) = axes.plot(
            rounds,
            held_out_SL.mean(axis=0),
            label=name,
            linewidth=2.4 if is_reference else 1.4,
            marker="o" if result.num_layers == 1 else None,
            zorder=3 if is_reference else 2,
        )
        if is_reference:
            color = line.get_color()
            axes.fill_between(
                rounds,
                held_out_SL.min(axis=0),
                held_out_SL.max(axis=0),
                color=color,
                alpha=0.13,
                linewidth=0,
            )
            axes.plot(
                rounds, curves.fitted_SL.mean(axis=0), "--", color=color, label=f"{name}, in fit"
            )
    axes.set_xlabel("layers taken")
    axes.set_ylabel("rho, held out")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _draw_heat(result: Comparison) -> Figure:
    """One map of layers and experts per domain, on one scale."""
    picture = result.picture
    panels = min(len(picture.domains), MAX_PANELS)
    columns = 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    figure = _figure(10.5, 0.5 + 2.3 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    largest = float(np.percentile(np.abs(picture.deviation_GLE), 99.5)) or 1.0
    image = None
    for panel, axes in enumerate(grid.ravel()):
        if panel >= panels:
            axes.set_visible(False)
            continue
        image = axes.imshow(
            picture.deviation_GLE[panel],
            cmap="RdBu_r",
            vmin=-largest,
            vmax=largest,
            aspect="auto",
            interpolation="nearest",
        )
        axes.grid(visible=False)
        name = picture.domains[panel] or NO_DOMAIN
        axes.set_title(f"{name} ({picture.domain_sizes[panel]} requests)", loc="left")
        if panel >= panels - columns:  # the lowest of its column
            axes.set_xlabel("expert")
            axes.tick_params(labelbottom=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("MoE layer")
    assert image is not None
    bar = figure.colorbar(image, ax=grid, shrink=min(1.0, 1.6 / rows), pad=0.015, extend="both")
    bar.set_label("choices per token,\nless mean over domains")
    return figure


def _draw_projection(result: Comparison) -> Figure:
    figure = _figure(10.5, 5.6)
    axes = figure.subplots()
    picture = result.picture
    scatter_domains(axes, picture.signatures_ND, picture.domains_N, picture.centroids_KD)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
