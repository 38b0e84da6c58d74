"""What `serveConfigV2` of the manifests names builds on a Ray, without its engines."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import serve

from app.config import load_config
from router.actor import actor_name

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def test_the_demo_on_kubernetes_builds(tmp_path: Path) -> None:
    text = (ROOT / "k8s" / "cpu" / "eldr.yaml").read_text()
    (tmp_path / "eldr.yaml").write_text(text.replace("/opt/eldr", str(ROOT)))
    manifest = yaml.safe_load((ROOT / "k8s" / "cpu" / "rayservice.yaml").read_text())
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    build: Any = getattr(import_module(module), name)
    built = build({**application["args"], "config": str(tmp_path / "eldr.yaml")})
    assert isinstance(built, serve.Application)
    config = load_config(tmp_path / "eldr.yaml")
    router = ray.get_actor(actor_name(config.app_name), namespace="eldr")
    assert ray.get(router.stats.remote(), timeout=60)["policy"] == config.router.policy
    ray.kill(router)
