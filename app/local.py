"""Starting and stopping an application on this machine, or on a cluster that RAY_ADDRESS names."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app import processes
from app.config import EldrConfig
from app.main import build_app, router_settings

READY_TIMEOUT_S = 600.0
METRICS_PORT = 9180


@dataclass
class Running:
    """A running application; `metrics_url` is known of a local run."""

    config: EldrConfig
    run_id: str
    started_s: float
    metrics_url: str | None = None

    @property
    def url(self) -> str:
        return f"http://{self.config.http.host}:{self.config.http.port}"

    def stop(self) -> None:
        """End the application and, on this machine, every process of it."""
        import ray
        from ray import serve

        from router.actor import router_handle

        try:
            ray.kill(router_handle(self.config.app_name), no_restart=True)
        except Exception:
            pass  # it is gone already
        try:
            serve.shutdown()
        finally:
            ray.shutdown()
            if "RAY_ADDRESS" not in os.environ:
                processes.end(self.run_id, exclude=_guards())


def start(config: EldrConfig, progress: Callable[[str], None] = lambda text: None) -> Running:
    """Start an application and wait until it is ready.

    Args:
        config: checked configuration.
        progress: told what is going on, a short text at a time.

    Raises:
        RuntimeError: the port is in use, or it did not become ready.
    """
    global _guard
    begin = time.monotonic()
    _check_port(config)
    run_id = processes.start_run()
    is_local = "RAY_ADDRESS" not in os.environ
    _set_environment(config)
    if is_local:
        _guard = processes.start_guard(run_id)
    progress("starting Ray")
    import ray
    from ray import serve

    metrics_port = _free_port(METRICS_PORT)
    if is_local:
        # Logical CPUs: engines of a small machine share its cores.
        wanted = _num_cpus(config)
        ray.init(
            num_cpus=max(wanted, os.cpu_count() or 1),
            include_dashboard=False,
            configure_logging=True,
            log_to_driver=False,
            logging_level="ERROR",
            _metrics_export_port=metrics_port,
        )
    else:
        ray.init(logging_level="ERROR")
    # Ray sets up the root logger; what follows is for a terminal.
    for name in ("httpx", "httpx2", "ray.serve", "ray"):  # httpx2: openai 3
        logging.getLogger(name).setLevel(logging.ERROR)
    serve.start(http_options={"host": config.http.host, "port": config.http.port})
    from router.actor import create_router

    create_router(config.app_name, router_settings(config))
    metrics_url = f"http://127.0.0.1:{metrics_port}/metrics" if is_local else None
    running = Running(config, run_id, begin, metrics_url)
    progress("starting engines")
    try:
        target = serve.RunTarget(build_app(config), name=config.app_name, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        wait_ready(running, progress)
    except BaseException:
        running.stop()
        raise
    return running


def wait_ready(running: Running, progress: Callable[[str], None]) -> None:
    """Wait for /ready with all replicas; tells how many engines are up.

    Raises:
        RuntimeError: an engine failed to start, or the time is over.
    """
    from ray import serve

    wanted = {
        "prefill": running.config.prefill.num_replicas,
        "decode": running.config.decode.num_replicas,
    }
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        up = _replicas_up(running.url)
        progress(
            "engines up: "
            + ", ".join(f"{role} {up.get(role, 0)}/{number}" for role, number in wanted.items())
        )
        if all(up.get(role, 0) >= number for role, number in wanted.items()):
            return
        status = serve.status().applications.get(running.config.app_name)
        if status is not None and status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            details = "; ".join(
                f"{name}: {d.message}" for name, d in status.deployments.items() if d.message
            )
            raise RuntimeError(f"the application failed to start: {status.message} {details}")
        time.sleep(0.5)
    raise RuntimeError(f"the application was not ready within {READY_TIMEOUT_S:g} s: {up}")


def _free_port(wanted: int) -> int:
    """`wanted` if nobody has it, else any free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no free TCP port on this machine")


def _check_port(config: EldrConfig) -> None:
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex((config.http.host, config.http.port)) == 0:
            raise RuntimeError(
                f"port {config.http.port} on {config.http.host} is in use: end what listens there "
                "(`eldr stop` if it is an older run), or change http.port"
            )


def _replicas_up(url: str) -> dict[str, int]:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as response:
            body: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as err:
        try:
            body = json.load(err)
        except ValueError:
            return {}
    except (OSError, ValueError):
        return {}
    replicas = body.get("replicas")
    return replicas if isinstance(replicas, dict) else {}


def _num_cpus(config: EldrConfig) -> int:
    engines = (config.prefill, config.decode)
    need = sum(e.num_replicas * e.num_cpus * e.tensor_parallel_size for e in engines)
    return int(need + config.http.num_ingress_replicas * 0.1) + 1


def _set_environment(config: EldrConfig) -> None:
    """The one place where this program sets what Ray reads from the environment."""
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1" if config.http.haproxy else "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_ADDRESS" not in os.environ:
        # No load balancer outside has to notice that we go: do not wait for it.
        os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")
        os.environ.setdefault("RAY_SERVE_HAPROXY_NBTHREAD", "1")
        # HAProxy does not start when another one on this machine has its ports.
        for name, port in (("METRICS", 9101), ("STATS", 8404)):
            os.environ.setdefault(f"RAY_SERVE_HAPROXY_{name}_PORT", str(_free_port(port)))
        # Serve's defaults, ten times a second, are a tenth of a core on a small machine.
        os.environ.setdefault("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "1000")
        os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.25")
        # While engines import vLLM on few cores, a proxy that answers late is not a dead one.
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")


_guard: Any = None


def _guards() -> frozenset[int]:
    return frozenset() if _guard is None else frozenset({_guard.pid})
