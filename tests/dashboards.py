"""The expressions of the checked-in dashboards."""

from __future__ import annotations

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "dashboards"
VALUES = {"application": ".*", "model": ".*", "__rate_interval": "1m"}
"""What Grafana puts in place of variables: its choice "All", and a short interval."""


def panel_queries(path: Path) -> list[tuple[str, str]]:
    """Title and expression of each query of a dashboard, without variables."""
    return [
        (panel["title"], re.sub(r"\$(\w+)", lambda found: VALUES[found[1]], target["expr"]))
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
        for target in panel.get("targets", [])
    ]
