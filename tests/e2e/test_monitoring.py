"""A real Prometheus scrapes the service and evaluates every panel and rule.

Grafana itself is not run: it would ask Prometheus for the same expressions.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.dashboards import FOLDER, panel_queries
from tests.e2e.conftest import Service, wait_until

TOP_K = 4
# Panels of what a healthy service without an expert cache may not have: events, other policies.
MAY_BE_EMPTY = {
    "Band",
    "KV transfers that failed",
    "Moved share",
    "Refits",
    "Reservation events",
    "Retries and fallbacks",
}


class Prometheus:
    """A server of its own that scrapes one target every second."""

    def __init__(self, target: str, folder: Path) -> None:
        tool = shutil.which("prometheus")
        assert tool, "prometheus is missing: install it (Debian: apt-get install prometheus)"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(FOLDER / "alerts.yaml")],
            "scrape_configs": [{"job_name": "eldr", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    tool,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stderr=log,
            )
        wait_until(self._is_ready, 30, f"Prometheus is ready: see {folder / 'prometheus.log'}")

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expr: str) -> list[float]:
        """Values now, without those that are no number."""
        values = [float(one["value"][1]) for one in self.get("query", query=expr)["result"]]
        return [value for value in values if not math.isnan(value)]

    def total(self, name: str, labels: str = "") -> float:
        return sum(self.values(f"sum({name}{{{labels}}})"))


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    target = service.metrics_url.removeprefix("http://").removesuffix("/metrics")
    server = Prometheus(target, tmp_path_factory.mktemp("prometheus"))
    yield server
    server.process.terminate()
    server.process.wait(timeout=30)


def ask(service: Service, text: str, **fields: Any) -> int:
    """Status of a request of 8 tokens, streamed."""
    body = {
        "model": "eldr-demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    return httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=120).status_code


def test_counts_are_those_of_the_requests(service: Service, prometheus: Prometheus) -> None:
    """One request at a time: each step has the experts of one token."""
    counted = {
        "requests": ("ray_eldr_requests_total", 'status="200"'),
        "refused": ("ray_eldr_requests_total", 'status="400"'),
        "ttft": ("ray_eldr_ttft_seconds_count", ""),
        "e2e": ("ray_eldr_e2e_seconds_count", ""),
        "prefill": ("ray_eldr_phase_seconds_count", 'phase="prefill"'),
        "route": ("ray_eldr_phase_seconds_count", 'phase="route"'),
        "first_byte": ("ray_eldr_phase_seconds_count", 'phase="first_byte"'),
        "stream": ("ray_eldr_phase_seconds_count", 'phase="stream"'),
        "selections": ("ray_eldr_router_selections_total", ""),
        "decisions": ("ray_eldr_router_decision_seconds_bucket_total", 'le="+Inf"'),
        "scored": ("ray_eldr_router_scored_total", ""),
        "steps": ("ray_vllm_eldr_decode_steps_total", ""),
        "distinct": ("ray_vllm_eldr_distinct_experts_total", ""),
    }

    def now() -> dict[str, float]:
        return {key: prometheus.total(*what) for key, what in counted.items()}

    # These tests are the first on this service: nothing is still on its way to Prometheus.
    before = now()
    for i in range(3):
        assert ask(service, f"Count to {i}.") == 200
    assert ask(service, "Hello", stream=False) == 200
    assert ask(service, "Hello", max_tokens="many") == 400
    expected = {
        "requests": 4,
        "refused": 1,
        "ttft": 3,
        "e2e": 4,
        "prefill": 4,
        "route": 4,
        "first_byte": 4,
        "stream": 3,
        "selections": 4,
        "decisions": 4,
        "scored": 4,
    }
    grown: dict[str, float] = {}

    def is_all_there() -> bool:
        grown.update({key: value - before[key] for key, value in now().items()})
        return {key: grown[key] for key in expected} == expected and grown["steps"] >= 4 * 7

    wait_until(is_all_there, 40, f"counts of the requests; expected {expected}, got {grown}")
    assert grown["distinct"] == pytest.approx(TOP_K * grown["steps"])


def test_every_panel_has_data(service: Service, prometheus: Prometheus) -> None:
    # Decode computes the prompt of such a request alone, and says why.
    assert ask(service, "Hello", stream=False, n=2, max_tokens=2) == 200
    boards = {path.stem: panel_queries(path) for path in sorted(FOLDER.glob("*.json"))}
    must = [q for board in ("eldr-overview", "eldr-locality") for q in boards[board]]
    must = [(title, expr) for title, expr in must if title not in MAY_BE_EMPTY]
    empty: list[tuple[str, str]] = []

    def is_full() -> bool:
        ask(service, "Name a colour.")  # gauges of engines that are idle are forgotten
        empty[:] = [(title, expr) for title, expr in must if not prometheus.values(expr)]
        return not empty and prometheus.total("ray_eldr_routing_fallbacks_total") == 1

    wait_until(is_full, 60, f"data on panels {empty}")
    for title, expr in boards["eldr-overview"] + boards["eldr-locality"]:
        for value in prometheus.values(expr):
            assert 0 <= value < math.inf, (title, expr)
    for title, expr in boards["eldr-cache"]:
        assert prometheus.values(expr) == [], f"{title}: no replica has an expert cache"


def test_no_alert_of_a_healthy_service(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    wanted = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    assert len(rules) == sum(len(group["rules"]) for group in wanted)
    assert {rule["health"] for rule in rules} == {"ok"}, json.dumps(rules, indent=1)
    alerts = prometheus.get("alerts")["alerts"]
    assert [a["labels"]["alertname"] for a in alerts if a["state"] == "firing"] == []
