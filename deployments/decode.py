"""Decode replica: Ray Serve LLM's server that also speaks HTTP itself.

Tokens go from here to the ingress as bytes over HTTP: a Ray object per token costs more than the
decode step of a small model. Serve still sees each stream as one ongoing request, because the
ingress calls `attend` for as long as it lasts: so autoscaling, draining and dashboards stay true.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Iterator
from typing import Any

import ray
import uvicorn
from ray import serve
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from deployments.replica import Heartbeat, set_side_channel

INTERNAL_KEY_HEADER = "x-eldr-internal"
PATHS = {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}
_ATTEND_ARRIVAL_S = 5.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the replica's process belongs to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gate:
    """ASGI layer before the engine's HTTP app: admits the ingress alone, and counts streams."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._key = key.encode()
        self._ended: dict[str, asyncio.Event] = {}
        self._arrived: dict[str, asyncio.Event] = {}
        self.num_running = 0
        self._idle = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        key = headers.get(INTERNAL_KEY_HEADER.encode(), b"")
        if not hmac.compare_digest(key, self._key) or scope["path"] not in PATHS:
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        request_id = headers.get(b"x-request-id", b"").decode()
        ended = self._ended.setdefault(request_id, asyncio.Event())
        if arrived := self._arrived.get(request_id):
            arrived.set()
        self.num_running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()
            ended.set()
            self._ended.pop(request_id, None)

    async def wait_idle(self) -> None:
        """Wait until no stream runs."""
        if self.num_running:
            await self._idle.wait()

    async def wait_ended(self, request_id: str) -> bool:
        """Wait for a stream to end; False if it never came."""
        if request_id not in self._ended:
            arrived = self._arrived.setdefault(request_id, asyncio.Event())
            try:
                await asyncio.wait_for(arrived.wait(), _ATTEND_ARRIVAL_S)
            except TimeoutError:
                return False
            finally:
                self._arrived.pop(request_id, None)
        if ended := self._ended.get(request_id):
            await ended.wait()
        return True


class DecodeServer(LLMServer):
    """Pulls KV and streams tokens over its own HTTP port."""

    async def __init__(  # type: ignore[misc]
        self, llm_config: LLMConfig, *, app_name: str, port_base: int, internal_key: str
    ) -> None:
        host = ray.util.get_node_ip_address()
        set_side_channel(host, port_base)
        await super().__init__(llm_config)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        # Public hook of serve.ingress for late-bound apps; here our own server serves what it
        # builds, because Serve gives HTTP ports to the ingress deployment alone.
        self._gate = Gate(await self.__serve_build_asgi_app__(), internal_key)
        listener = socket.create_server((host, 0), backlog=1024)
        self._url = f"http://{host}:{listener.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                self._gate,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=120,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._heartbeat = Heartbeat(
            app_name,
            "decode",
            self._replica_id,
            self._url,
            lambda: self._gate.num_running,
            self.check_health,
        )
        self._heartbeat.start()

    async def attend(self, replica_id: str, request_id: str) -> bool:
        """Last as long as a stream of this replica does.

        Returns:
            False when the call landed on another replica than the stream: the chosen one is
            draining and Serve no longer routes to it.
        """
        if replica_id != self._replica_id:
            return False
        await self._gate.wait_ended(request_id)
        return True

    async def __del__(self) -> None:
        # Serve has drained the calls it knows of; streams whose call was not pinned may still run.
        await self._heartbeat.stop()
        await self._gate.wait_idle()
        self._server.should_exit = True
        await self._serving
