"""Dashboards and alert rules: what their source writes, read by Prometheus, on metrics that exist.

The checks of PromQL are Prometheus' own (`promtool`); without it these tests fail.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.util import metrics as ray_metrics

from app import metrics
from app.config import EldrConfig
from tests.dashboards import FOLDER, panel_queries

BOARDS = sorted(FOLDER.glob("*.json"))
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


# Of a histogram's series its sum is left out: Ray makes it up from the middles of the buckets.
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count")}


def promtool(*arguments: str | Path) -> None:
    tool = shutil.which("promtool")
    assert tool, "promtool is missing: install Prometheus (Debian: apt-get install prometheus)"
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def expressions() -> list[str]:
    panels = [expr for path in BOARDS for _, expr in panel_queries(path)]
    return panels + [rule["expr"] for rule in RULES]


@functools.cache
def exported() -> set[str]:
    """Names as Prometheus sees them, of our metrics and of the installed vLLM's."""
    names = set()
    made = [
        metrics.IngressMetrics(),
        metrics.ReplicaMetrics("decode"),
        metrics.CacheMetrics(),
        metrics.PlacementMetrics(),
    ]
    ours = [m for one in made for m in vars(one).values() if isinstance(m, ray_metrics.Metric)]
    router = metrics.RouterMetrics("app")
    for metric in [*ours, *router._counters.values(), *router._gauges.values()]:
        kind = next(k for k in ENDINGS if isinstance(metric, getattr(ray_metrics, k.title())))
        names |= {f"ray_{metric.info['name']}{end}" for end in ENDINGS[kind]}
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    upstream = Path(spec.origin).parent
    for path in (
        upstream / "v1" / "metrics" / "loggers.py",
        upstream / "distributed/kv_transfer/kv_connector/v1/nixl/stats.py",
        FOLDER.parent / "deployments" / "vllm_adapter" / "connector.py",
    ):
        text = path.read_text()
        found = re.findall(r'_(counter|gauge|histogram)_cls\(\s*name="vllm:(\w+)"', text)
        if path.name == "connector.py":
            counters = re.findall(r'^    "(\w+)": "', text, re.MULTILINE)
            found += [("counter", f"eldr_cache_{name}") for name in counters]
            found += [("counter", name) for name in re.findall(r'^ +\("(eldr_\w+)", "', text, re.M)]
            assert len(found) == 11
        assert len(found) > 5
        for kind, name in found:
            names |= {f"ray_vllm_{name}{end}" for end in ENDINGS[kind]}
    return names


def test_files_are_what_their_source_writes() -> None:
    spec = importlib.util.spec_from_file_location("panels", FOLDER / "panels.py")
    assert spec is not None
    assert spec.loader is not None
    panels = sys.modules["panels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(panels)
    written = panels.files()
    assert set(written) == {path.name for path in BOARDS}
    for path in BOARDS:
        assert path.read_text() == written[path.name], "run `python dashboards/panels.py`"


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_boards_hold_what_grafana_wants(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    assert board["schemaVersion"] >= 39
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        at = panel["gridPos"]
        mine = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & mine, f"{panel['title']} lies on another panel"
        cells |= mine
        if panel["type"] == "row":
            continue
        assert len(panel["description"]) > 30
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(t["datasource"]["uid"] == "${datasource}" for t in panel["targets"])


def test_promtool_reads_every_expression(tmp_path: Path) -> None:
    panels = [expr for path in BOARDS for _, expr in panel_queries(path)]
    assert len(panels) > 40
    rules = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(panels)]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", path)
    promtool("check", "rules", FOLDER / "alerts.yaml")


def test_alerts_fire_when_they_should() -> None:
    cases = Path(__file__).with_name("alerts.test.yaml")
    promtool("test", "rules", cases)
    tested = re.findall(r'alertname="(\w+)"', cases.read_text())
    assert set(tested) == set(ALERTS)


def test_expressions_name_what_is_exported() -> None:
    known = exported() | {rule["record"] for rule in RULES if "record" in rule}
    named = {n for expr in expressions() for n in re.findall(r"\b(?:ray_|eldr:)[\w:]+", expr)}
    assert named <= known, named - known
    ours = {name for name in known if name.startswith("ray_eldr_") and not name.endswith("_count")}
    assert ours <= named, f"on no panel and in no alert: {ours - named}"


def test_alerts_say_what_to_do() -> None:
    for rule in ALERTS.values():
        assert {"summary", "description", "runbook"} <= rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_readme_has_every_metric_and_alert() -> None:
    text = (FOLDER / "README.md").read_text()
    ours = {n.removesuffix("_bucket") for n in exported() if re.match(r"ray_(vllm_)?eldr_", n)}
    ours = {n for n in ours if not n.endswith("_count") and f"{n}_total" not in ours}
    assert not {name for name in ours | ALERTS.keys() if f"`{name}`" not in text}


def test_advice_names_fields_that_exist() -> None:
    """`section.field` in descriptions and run books."""
    schema = EldrConfig.model_json_schema(by_alias=True)
    texts = [path.read_text() for path in BOARDS] + [(FOLDER / "alerts.yaml").read_text()]
    sections = "|".join(schema["properties"])
    found = {f for text in texts for f in re.findall(rf"\b((?:{sections})(?:\.[a-z_]+)+)", text)}
    assert len(found) > 8
    for field in found:
        node: dict[str, Any] = schema
        for part in field.split("."):
            options = [node, *node.get("anyOf", []), *node.get("allOf", [])]
            refs = [o["$ref"].rsplit("/", 1)[1] for o in options if "$ref" in o]
            for inner in [node, *(schema["$defs"][ref] for ref in refs)]:
                if part in inner.get("properties", {}):
                    node = inner["properties"][part]
                    break
            else:
                pytest.fail(f"{field} is no field of the configuration")
