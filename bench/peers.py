"""The systems that `eldr bench serving` compares with: stock Ray Serve LLM, and SMG before vLLM.

Both get the engines of the application under test: arguments, environment and connector come from
`deployments.engine`; only expert capture is off, which neither can use.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from app.config import EldrConfig
from app.processes import with_descendants
from deployments.engine import Phase, engine_env, engine_kwargs

READY_TIMEOUT_S = 600.0
# Clear of Ray's worker ports, the application's own side channels and the ephemeral ports.
FIRST_PORT = 23000
_LOG_TAIL = 2000


def find_smg() -> str | None:
    """Path of the `smg` program: beside this interpreter, or on PATH."""
    beside = Path(sys.executable).with_name("smg")
    return str(beside) if beside.exists() else shutil.which("smg")


def free_ports(number: int, host: str = "127.0.0.1", base: int = FIRST_PORT) -> list[int]:
    """Ports from `base` on that nobody listens on.

    Raises:
        OSError: there are not enough.
    """
    ports: list[int] = []
    for port in range(base, 32768):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == number:
            return ports
    raise OSError(f"no {number} free ports in [{base}, 32768) on {host}: stop what uses them")


def without_capture(config: EldrConfig) -> EldrConfig:
    """The same application with plain engines."""
    router = config.router.model_copy(update={"capture": False})
    return config.model_copy(update={"router": router})


class Stock:
    """`ray.serve.llm.build_pd_openai_app` as it comes, in a Ray session of its own.

    See `bench/stock.py`.
    """

    def __init__(self, config: EldrConfig, port: int, side_channels: Mapping[Phase, int]) -> None:
        self.url = f"http://{config.http.host}:{port}"
        self._processes = _Processes()
        file = self._processes.folder / "config.yaml"
        file.write_text(config.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "bench.stock", str(file), "--port", str(port)]
        for phase in Phase:
            command += [f"--{phase}-side-channel", str(side_channels[phase])]
        self._processes.start("stock", command, {"RAY_USAGE_STATS_ENABLED": "0"}, without="RAY_")

    def wait(self, body: Mapping[str, Any]) -> None:
        """Wait until it answers `body`.

        Raises:
            RuntimeError: it failed to start.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _answers(self.url, body):
            self._processes.check(deadline)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for it."""
        return self._processes.tree()

    def stop(self) -> None:
        """End it and its Ray session."""
        self._processes.stop(grace_s=30)


class Smg:
    """SMG in PD mode before one prefill and one decode server of plain vLLM."""

    def __init__(self, config: EldrConfig, program: str, side_channels: Mapping[Phase, int]):
        self._host = config.http.host
        ports = free_ports(4, self._host, max(side_channels.values()) + 1)
        self._gateway_port, self._metrics_port = ports[2:]
        self.url = f"http://{self._host}:{self._gateway_port}"
        self._engine_urls = {
            phase: f"http://{self._host}:{port}" for phase, port in zip(Phase, ports, strict=False)
        }
        self._program = program
        self._processes = _Processes()
        for phase, port in zip(Phase, ports, strict=False):
            command = server_command(config, phase, port)
            env = engine_env(config, phase, "cpu")
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channels[phase])
            self._processes.start(str(phase), command, env)

    def wait(self, body: Mapping[str, Any]) -> None:
        """Wait for the servers, start the gateway, and wait until it answers `body`.

        Raises:
            RuntimeError: one of them failed to start.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        for url in self._engine_urls.values():
            while not _is_healthy(url):
                self._processes.check(deadline)
        self._processes.start("gateway", self._gateway_command(), {})
        while not _answers(self.url, body):
            self._processes.check(deadline)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for it."""
        return self._processes.tree()

    def stop(self) -> None:
        """End gateway and servers; their engines end with them."""
        self._processes.stop(grace_s=10)

    def _gateway_command(self) -> list[str]:
        return [
            self._program,
            "launch",
            "--pd-disaggregation",
            *("--backend", "vllm"),
            *("--prefill", self._engine_urls[Phase.PREFILL], "none"),
            *("--decode", self._engine_urls[Phase.DECODE]),
            *("--host", self._host),
            *("--port", str(self._gateway_port)),
            *("--prometheus-port", str(self._metrics_port)),
            *("--log-level", "warn"),
        ]


class _Processes:
    """Child processes with a log file each."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="eldr-bench-")
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def start(
        self, name: str, command: list[str], env: Mapping[str, str], without: str | None = None
    ) -> None:
        """Start a process with this environment and `env`.

        Args:
            name: for messages.
            command: program and arguments.
            env: variables to set.
            without: prefix of variables not to hand on.
        """
        inherited = {
            key: value
            for key, value in os.environ.items()
            if without is None or not key.startswith(without)
        }
        with self._log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, **env},
                start_new_session=True,  # Ctrl-C is ours to handle
            )

    def check(self, deadline: float) -> None:
        """Sleep a moment; RuntimeError if a process has ended or the time is over."""
        for name, process in self._running.items():
            if process.poll() is not None:
                tail = self._log(name).read_text(errors="replace")[-_LOG_TAIL:]
                raise RuntimeError(f"peer {name} ended with {process.returncode}:\n{tail}")
        if time.monotonic() > deadline:
            names = ", ".join(self._running)
            raise RuntimeError(f"peer {names} was not ready within {READY_TIMEOUT_S:g} s")
        time.sleep(0.5)

    def tree(self) -> list[psutil.Process]:
        """The processes and all their descendants."""
        running = [p for p in self._running.values() if p.poll() is None]
        return with_descendants(psutil.Process(process.pid) for process in running)

    def stop(self, grace_s: float) -> None:
        """Terminate all, then kill what is left after `grace_s` seconds."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def server_command(config: EldrConfig, phase: Phase, port: int) -> list[str]:
    """Command line of a plain vLLM API server with the engine of one phase."""
    kwargs = engine_kwargs(without_capture(config), phase, "cpu")
    return [
        sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", config.model.path),
        *("--served-model-name", config.model.served_name),
        *("--host", config.http.host),
        *("--port", str(port)),
        "--disable-uvicorn-access-log",
        *flags(kwargs),
    ]


def flags(kwargs: Mapping[str, Any]) -> list[str]:
    """Engine arguments as vLLM's command line takes them."""
    words: list[str] = []
    for key, value in kwargs.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, (dict, list)):
            words += [f"--{name}", json.dumps(value)]
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def _answers(url: str, body: Mapping[str, Any]) -> bool:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    return _is_ok(request, timeout_s=60.0)


def _is_healthy(url: str) -> bool:
    return _is_ok(urllib.request.Request(f"{url}/health"), timeout_s=5.0)


def _is_ok(request: urllib.request.Request, timeout_s: float) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
