"""Leaving a Ray node: its replicas move and end their streams before the node goes."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

POLL_S = 1.0
# What clients' bytes pass through; the router and the managers start again elsewhere.
_SERVING = ("ServeReplica:", "ProxyActor", "HAProxyManager")


def drain_node(
    timeout_s: int, node_id: str | None = None, progress: Callable[[str], None] = lambda text: None
) -> bool:
    """Have Serve move what it runs on a Ray node elsewhere, and wait until nothing is left.

    Serve starts replacements first. Replicas for which there is no room elsewhere stop
    `graceful_shutdown_timeout_s` before the time is over, so that their streams can end.

    Args:
        timeout_s: seconds until the node is taken away, whatever still runs.
        node_id: the node; None takes the one that this process is on.
        progress: told what is left.

    Returns:
        Whether nothing that serves is left; also true when the head is gone, since nobody can move
        anything then.

    Raises:
        RuntimeError: the cluster refused, with what it said.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    try:
        context = ray.get_runtime_context()
        node_id = node_id or context.get_node_id()
        _ask_to_drain(context.gcs_address, node_id, timeout_s)
        while time.monotonic() < deadline:
            left = _serving_on(node_id)
            if left is None:
                return True
            progress(f"left: {', '.join(sorted(left)) or 'nothing'}")
            if not left:
                return True
            time.sleep(POLL_S)
        return False
    finally:
        ray.shutdown()


def _serving_on(node_id: str) -> list[str] | None:
    """Serve's actors on a node; None when the head does not answer."""
    from ray.util.state import list_actors
    from ray.util.state.exception import RayStateApiException

    here = [("node_id", "=", node_id), ("state", "=", "ALIVE")]
    try:
        actors = list_actors(filters=here, limit=1000)
    except (RayStateApiException, ConnectionError) as err:
        logger.warning("the head does not answer: %r", err)
        return None
    return [actor.class_name for actor in actors if actor.class_name.startswith(_SERVING)]


def _ask_to_drain(address: str, node_id: str, timeout_s: int) -> None:
    # No public Python call does this; the command is what Ray's own autoscaler asks for before it
    # takes a node away. A node may not refuse a "preemption", however busy it is.
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address]
    command += ["--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "the node is being stopped"]
    command += ["--deadline-remaining-seconds", str(timeout_s)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"Ray did not drain node {node_id}: {said}")
