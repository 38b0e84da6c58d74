"""`eldr drain` on three Ray nodes: a replica moves, and the call that it answers ends first."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

CALL_S = 6.0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S", "1")
    head = {"num_cpus": 0, "include_dashboard": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    # Proxies of nodes on one machine would want one port.
    serve.start(proxy_location="HeadOnly", http_options={"port": 0})
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@serve.deployment(ray_actor_options={"num_cpus": 1}, graceful_shutdown_timeout_s=20)
class Slow:
    async def __call__(self, seconds: float) -> str:
        import asyncio

        await asyncio.sleep(seconds)
        return ray.get_runtime_context().get_node_id()


def drain(node_id: str, timeout_s: int, address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli", "drain", "--timeout", str(timeout_s)]
    return subprocess.run(
        [*command, "--node-id", node_id],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
    )


def test_a_replica_leaves_a_node_after_its_calls(cluster: Cluster) -> None:
    handle = serve.run(Slow.bind(), route_prefix=None)
    first = handle.remote(0.0).result(timeout_s=30)
    begin = time.monotonic()
    call = handle.remote(CALL_S)
    done = drain(first, 60, cluster.address)
    assert done.returncode == 0, done.stderr
    assert "ServeReplica" in done.stderr
    assert "left: nothing" in done.stderr
    assert time.monotonic() - begin >= CALL_S
    assert call.result(timeout_s=5) == first  # not cut off, nor begun anew
    assert handle.remote(0.0).result(timeout_s=30) != first
