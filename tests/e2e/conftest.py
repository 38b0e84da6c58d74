"""Real engines, started once per test session: a reference engine, then the service."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from app import processes
from calibration.capture import Prompt, read_prompts, sample

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "build" / "demo-model"
PORT = 8731
MAX_TOKENS = 24
LABELS = ("code", "math", "medical", "legal", "commonsense", "en", "zh", "ru", "fr")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e" in item.nodeid:
            item.add_marker(pytest.mark.e2e)


def demo_config() -> dict[str, Any]:
    """What `make serve` serves."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    return config


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """27 prompts: three of each domain and language, from the test split."""
    pool = [p for p in read_prompts(ROOT / "data" / "prompts", "test") if len(p.text) < 1200]
    chosen = []
    for label in LABELS:
        chosen += sample([p for p in pool if p.label == label], 3, seed=1)
    return chosen


@pytest.fixture(scope="session")
def reference(prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Greedy tokens of one plain vLLM engine, without connector, by prompt id."""
    folder = tmp_path_factory.mktemp("reference")
    questions = folder / "prompts.json"
    questions.write_text(json.dumps({p.id: p.text for p in prompts}))
    answers = folder / "answers.json"
    script = Path(__file__).parent / "reference_engine.py"
    arguments = [MODEL, demo_config()["model"]["dtype"], questions, answers, str(MAX_TOKENS)]
    subprocess.run([sys.executable, script, *arguments], check=True, cwd=ROOT)
    result: dict[str, Any] = json.loads(answers.read_text())
    return result


@dataclass
class Service:
    """The service as a user starts it: `eldr serve` in a process of its own."""

    url: str
    process: subprocess.Popen[bytes]
    run_id: str
    metrics_url: str

    def pid_of_decode(self, replica_id: str) -> int:
        """Process of a decode replica: the one that listens on its port."""
        url = self.status()["replicas"]["decode"][replica_id]
        port = int(url.rsplit(":", 1)[1])
        (pid,) = {
            c.pid
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid
        }
        return int(pid)

    def ready(self) -> dict[str, int]:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as response:
                numbers: dict[str, int] = json.load(response)["replicas"]
                return numbers
        except OSError:
            return {"prefill": 0, "decode": 0}

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/status", timeout=10) as response:
            status: dict[str, Any] = json.load(response)
            return status


def run_ids() -> set[str]:
    """Marks of all runs on this machine."""
    marks = set()
    for process in processes.find():
        with contextlib.suppress(psutil.Error, OSError, KeyError):
            marks.add(process.environ()[processes.MARK])
    return marks


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    """Poll until a condition holds; fails with `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.25)
    pytest.fail(f"not within {timeout_s:g} s: {what}")


@contextlib.contextmanager
def serving(config: dict[str, Any], folder: Path) -> Iterator[Service]:
    """The demo served with this configuration on another port; ended hard, which must leave nothing
    behind."""
    config["model"]["path"] = str(MODEL)
    config["router"]["artifact"] = str(ROOT / "models" / "demo" / "calibration")
    config["http"] = {"port": PORT}
    path = folder / "eldr.yaml"
    path.write_text(yaml.safe_dump(config))
    before = run_ids()
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "serve", path],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
        )
    assert process.stdout is not None
    line = process.stdout.readline().decode()  # "ready: …", or nothing when it failed
    if not line.startswith("ready"):
        process.kill()
        pytest.fail(f"the service did not start:\n{(folder / 'serve.log').read_text()[-4000:]}")
    (run_id,) = run_ids() - before
    (metrics_url,) = re.findall(
        r"^metrics: (\S+)$", (folder / "serve.log").read_text(), re.MULTILINE
    )
    try:
        yield Service(f"http://127.0.0.1:{PORT}", process, run_id, metrics_url)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(timeout=90)
        processes.end(run_id)


@pytest.fixture(scope="session")
def service(
    reference: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The demo's configuration with small limits."""
    config = {**demo_config(), "limits": {"max_body_bytes": 200_000, "max_n": 4}}
    with serving(config, tmp_path_factory.mktemp("service")) as running:
        yield running
