"""Stock Ray Serve LLM in a process and a Ray session of its own: what `bench/peers.py` starts.

Ray and Serve run with their defaults. The application under test sets variables that Serve reads
once per session (HAProxy among them); in its session, stock would not be stock.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from app.config import EldrConfig, load_config
from bench.peers import without_capture
from deployments.engine import Phase, engine_env, llm_config


def stock_app(config: EldrConfig, side_channel_ports: Mapping[Phase, int]) -> Any:
    """`build_pd_openai_app` with our engines.

    Serve assigns side-channel ports to connectors that it knows by name; ours gets them by hand.
    """
    from ray.serve.llm import build_pd_openai_app

    configs = {}
    for phase in Phase:
        configs[phase] = llm_config(without_capture(config), phase)
        env = dict(engine_env(config, phase, "cpu"))
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_ports[phase])
        configs[phase].runtime_env = {"env_vars": env}
    return build_pd_openai_app(
        {
            "prefill_config": configs[Phase.PREFILL],
            "decode_config": configs[Phase.DECODE],
            "ingress_deployment_config": {
                "num_replicas": 1,
                "ray_actor_options": {"num_cpus": 0.1},
            },
        }
    )


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--port", type=int, required=True)
    for phase in Phase:
        parser.add_argument(f"--{phase}-side-channel", type=int, required=True)
    args = parser.parse_args()
    config = load_config(args.config)
    ports = {phase: getattr(args, f"{phase}_side_channel") for phase in Phase}
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())

    import ray
    from ray import serve

    # Logical CPUs: engines of a small machine share its cores.
    ray.init(address="local", num_cpus=max(4, os.cpu_count() or 1), include_dashboard=False)
    serve.start(http_options={"host": config.http.host, "port": args.port})
    serve.run(stock_app(config, ports), name="stock")
    done.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
