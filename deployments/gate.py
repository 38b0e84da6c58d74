"""What stands before a replica's HTTP app. Imports no engine: the ingress shares its names."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

INTERNAL_KEY_HEADER = "x-eldr-internal"
PATHS = {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}


class Gate:
    """ASGI layer before the engine's HTTP app: admits the ingress alone, and counts requests."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._key = key.encode()
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = dict(scope["headers"]).get(INTERNAL_KEY_HEADER.encode(), b"")
        if not hmac.compare_digest(key, self._key) or scope["path"] not in PATHS:
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        self.num_running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    async def wait_idle(self, quiet_s: float = 0.0) -> None:
        """Wait until no request runs, nor has run at the end of `quiet_s` seconds after."""
        while True:
            await self._idle.wait()
            if not quiet_s:
                return
            await asyncio.sleep(quiet_s)
            if not self.num_running:
                return
