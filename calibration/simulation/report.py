"""The report as text: one table a rate, and our figures beside the published ones."""

from __future__ import annotations

from typing import Any

from bench.report import table
from calibration.simulation import published

_FACTS = {
    ("synthetic", "tasks"): "published 17-21 % fewer",
    ("synthetic", "languages"): "published 3-10 % fewer",
}

_COLUMNS = (
    ("TPOT P50", "tpot_p50", 2),
    ("P95", "tpot_p95", 2),
    ("P99", "tpot_p99", 2),
    ("TTFT P50", "ttft_p50", 1),
    ("distinct/step", "distinct", 1),
    ("/token", "token_distinct", 1),
    ("batch", "batch", 1),
    ("skew", "skew", 2),
    ("band", "band", 1),
)
_OPTIONAL = (
    ("loads", "loads", 2),
    ("failed", "failed", 1),
    ("retries", "retries", 1),
    ("refits", "refits", 1),
)


def text(report: dict[str, Any]) -> str:
    """Everything, for a terminal."""
    parts = [f"{report['name']}: {_seeds(report['seeds'])}, {report['fidelity']} distinct experts"]
    described: list[str] = []
    for variant in report["variants"]:
        head = describe(variant)
        if head not in described:
            described.append(head)
            parts.append(head)
        for row in variant["rates"]:
            parts.append(f"{title(variant, row)}\n{table(rate_rows(variant, row))}")
    if report["paper"]:
        paper = report["paper"]
        parts.append(f"{paper_title(paper)}\n{table(paper_rows(paper))}")
        parts.append("Why they differ:\n" + "\n".join(f"- {note}" for note in paper["notes"]))
    parts.append(speed_line(report))
    return "\n\n".join(parts)


def describe(variant: dict[str, Any]) -> str:
    """What the figures stand on: requests, facts, law."""
    facts, law = variant["facts"], variant["law_s"]
    source = variant["source"]
    published_fact = next(
        (fact for (kind, name), fact in _FACTS.items() if kind in source and f"'{name}'" in source),
        "not published for this model",
    )
    return "\n".join(
        [
            f"requests  {source}",
            f"          same-domain batches of 32: {100 * facts['same_domain_change']:+.1f} % "
            f"distinct experts against mixed ({published_fact}); Pearson of prefill and decode use "
            f"{facts['prefill_decode_pearson']:.2f} (published for Qwen3-30B: 0.90)",
            f"router    artifact for {variant['pool']}: rho {variant['rho']:.2f}, "
            f"{variant['layers_kept']} layers kept",
            f"step      {variant['law']}: {1e3 * law['base']:.3g} ms + "
            f"{1e3 * law['per_request']:.3g} ms x batch + {1e3 * law['per_distinct']:.3g} ms x "
            f"distinct + {1e3 * law['per_load']:.3g} ms x loads",
            f"          {variant['law_origin']}",
        ]
    )


def title(variant: dict[str, Any], row: dict[str, Any]) -> str:
    """Heading of a rate's table."""
    values = ", ".join(f"{field} = {value}" for field, value in variant["values"].items())
    return ", ".join(filter(None, [values, variant["pool"], f"{row['rate']:g} req/s"]))


def rate_rows(variant: dict[str, Any], row: dict[str, Any]) -> list[list[str]]:
    """Policies at one rate: times in ms, change against the strongest load balancer."""
    best = variant["reference"]
    optional = [
        column
        for column in _OPTIONAL
        if any(policy[column[1]] for policy in row["policies"].values())
    ]
    replicas = {policy["replicas"] for policy in row["policies"].values()}
    if len(replicas) > 1 or not all(float(count).is_integer() for count in replicas):
        optional.append(("replicas", "replicas", 1))
    columns = (*_COLUMNS, *optional)
    head = ["policy", *(name for name, _, _ in columns), f"P50 vs {best}", f"P99 vs {best}"]
    rows = [head]
    for policy, figures in row["policies"].items():
        ratio = figures["ratio"]
        rows.append(
            [
                policy,
                *(number(figures[key], digits) for _, key, digits in columns),
                *(
                    "-" if policy == best else change(ratio[name])
                    for name in ("tpot_p50", "tpot_p99")
                ),
            ]
        )
    return rows


def paper_title(paper: dict[str, Any]) -> str:
    """Heading of the comparison."""
    return (
        f"Ours beside the paper's ({paper['study']}, {paper['workload']}, {paper['model']}); "
        "P50 / P99, change against rr in %; ELDR of the paper stands at band"
    )


def paper_rows(paper: dict[str, Any]) -> list[list[str]]:
    """The comparison, row by row."""
    has_times = paper["study"] == "rates"
    rows = [["case", "policy", "paper ms", "ours ms", "paper", "ours", "distinct/step"]]
    rows[0] += ["TTFT P50 paper", "ours"] if has_times else []
    for row in paper["rows"]:
        times = [row.get("paper_ttft_ms"), row.get("ours_ttft_ms")] if has_times else []
        rows.append(
            [
                row["case"],
                row["policy"],
                _pair(row["paper_ms"], "{:.1f}"),
                _pair(row["ours_ms"], "{:.1f}"),
                _pair(row["paper_change"], "{:+.1f}"),
                _pair(row["ours_change"], "{:+.1f}"),
                f"{row['ours_distinct']:+.1f}",
                *(number(value, 1) for value in times),
            ]
        )
    rows += _mean_rows(paper) if has_times else []
    return rows


def _mean_rows(paper: dict[str, Any]) -> list[list[str]]:
    rows, means = paper["rows"], []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        theirs = [row["paper_change"] for row in own if row["paper_change"]]
        both = [
            _pair(
                [sum(c) / len(c) for c in zip(*changes, strict=True)] if changes else None,
                "{:+.1f}",
            )
            for changes in (theirs, [row["ours_change"] for row in own])
        ]
        distinct = sum(row["ours_distinct"] for row in own) / len(own)
        note = f"{distinct:+.1f}"
        if policy == "band" and (paper["workload"], paper["model"]) == ("task", "qwen"):
            note += f" (paper {published.ACTIVE_EXPERTS_CHANGE:+.1f})"
        means.append(["mean", policy, "", "", *both, note, "", ""])
    return means


def speed_line(report: dict[str, Any]) -> str:
    """How fast it was."""
    speed = report["speed"]
    shared = f" in {speed['jobs']} processes" if speed["jobs"] > 1 else ""
    return (
        f"simulated {speed['virtual_s']:,.0f} s in {speed['wall_s']:.1f} s{shared}: "
        f"{speed['speedup']:.0f} times real time ({speed['runs']} runs, by themselves "
        f"{speed['median']:.0f} times in the median, the slowest {speed['least']:.0f}); "
        f"{speed['requests']:,} requests, {speed['tokens']:,} tokens"
    )


def number(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def change(ratio: dict[str, Any]) -> str:
    """A ratio as a change in percent with its 95 % interval."""
    if ratio["mean"] is None:
        return "-"
    text = f"{100 * (ratio['mean'] - 1):+.1f} %"
    if ratio["ci"] is None:
        return text
    low, high = (100 * (bound - 1) for bound in ratio["ci"])
    return f"{text} [{low:+.1f}, {high:+.1f}]"


def _pair(values: list[float] | None, form: str) -> str:
    return "-" if values is None else " / ".join(form.format(value) for value in values)


def _seeds(number: int) -> str:
    return "1 seed" if number == 1 else f"{number} seeds, 95 % intervals over them"
