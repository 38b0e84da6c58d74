"""The OpenAI API: routes, keys, limits, and the relay of bytes. No routing decisions."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
import uuid
from typing import Any

from fastapi import FastAPI, Request
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response

from app.access import Access
from app.config import EldrConfig
from app.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    DecodeFailed,
    NoDecodeReplica,
    UnknownModel,
    response_headers,
    to_openai,
    to_sse,
)
from app.metrics import REFRESH_S, IngressMetrics
from app.pd_flow import Answer, PdFlow, PdRequest, ReplicaDied, UpstreamRefused, is_expected
from app.requests import (
    RequestKind,
    needs_local_prefill,
    parse_body,
    validate_chat,
    validate_completion,
)
from deployments.clients import DecodeClient, EngineClient, PrefillClient, RouterClient
from router.service import RouterSettings

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

api = FastAPI(title="Eldr Serve", docs_url=None, redoc_url=None)


class Ingress:
    """One ingress replica. All state is per process; what must be shared is in the router actor.

    `app.main` joins it with `api`: serve.ingress copies what it decorates, so it must see this
    module whole.
    """

    def __init__(
        self,
        config: EldrConfig,
        settings: RouterSettings,
        model_type: str | None,
        internal_key: str,
        prefill: DeploymentHandle[Any],
        decode: DeploymentHandle[Any],
    ) -> None:
        self._config = config
        limits = config.limits
        self._access = Access.from_env(limits.api_keys_env, os.environ, limits.requests_per_minute)
        self._router = RouterClient(config.app_name, settings, config.router.select_timeout_s)
        self._metrics = IngressMetrics()
        self._decode_engines = EngineClient(decode, internal_key, self._router)
        self._flow = PdFlow(
            PrefillClient(
                EngineClient(prefill, internal_key, self._router), self._router, model_type
            ),
            self._router,
            DecodeClient(self._decode_engines),
            limits.prefill_timeout_s,
            limits.max_retries,
            self._metrics,
        )
        self._started = int(time.time())
        self._starting: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None

    async def _ready(self) -> None:
        """Connect to the router once, on the event loop that serves requests."""
        failed = (
            self._starting is not None
            and self._starting.done()
            and (self._starting.cancelled() or self._starting.exception() is not None)
        )
        if self._starting is None or failed:
            self._starting = asyncio.create_task(self._router.start())
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
        await asyncio.shield(self._starting)

    async def _refresh(self) -> None:
        while True:
            self._metrics.refresh()
            await asyncio.sleep(REFRESH_S)

    # ---- OpenAI routes

    @api.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        return await self._complete(request, "chat")

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        return await self._complete(request, "completion")

    @api.get("/v1/models")
    async def models(self, request: Request) -> Response:
        return await self._guarded(request, self._models)

    @api.get("/v1/models/{model:path}")
    async def model(self, request: Request, model: str) -> Response:
        async def one(request: Request) -> Response:
            if model != self._config.model.served_name:
                raise UnknownModel(model, self._config.model.served_name)
            return JSONResponse(self._model_card())

        return await self._guarded(request, one)

    @api.post("/tokenize")
    async def tokenize(self, request: Request) -> Response:
        return await self._guarded(request, self._forward)

    @api.post("/detokenize")
    async def detokenize(self, request: Request) -> Response:
        return await self._guarded(request, self._forward)

    # ---- operators' routes

    @api.get("/health")
    async def health(self) -> Response:
        """Live: this process answers."""
        return JSONResponse({"status": "ok"})

    @api.get("/ready")
    async def ready(self) -> Response:
        """Ready: at least one prefill and one decode engine can take requests."""
        await self._ready()
        numbers = {role: len(self._router.replicas(role)) for role in ("prefill", "decode")}
        is_ready = all(numbers.values())
        body = {"status": "ready" if is_ready else "starting", "replicas": numbers}
        return JSONResponse(body, status_code=200 if is_ready else 503)

    @api.get("/status")
    async def status(self, request: Request) -> Response:
        """The router's view: loads, centroids, counters. Needs the key, if there are any."""

        async def stats(request: Request) -> Response:
            return JSONResponse(await self._router.stats())

        return await self._guarded(request, stats)

    # ---- inside

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    def _model_card(self) -> dict[str, Any]:
        model = self._config.model
        return {
            "id": model.served_name,
            "object": "model",
            "created": self._started,
            "owned_by": "eldr",
            "max_model_len": model.max_model_len,
        }

    async def _guarded(self, request: Request, handler: Any) -> Response:
        """Check the key and turn errors into OpenAI answers, for what is not streamed."""
        request_id = _request_id(request)
        try:
            self._access.check(request.headers.get("authorization"), time.monotonic())
            await self._ready()
            async with asyncio.timeout(self._config.limits.request_timeout_s):
                response: Response = await handler(request)
        except BaseException as err:
            response = self._error_response(err, request_id)
        return response

    async def _forward(self, request: Request) -> Response:
        """Requests that any decode replica can answer without computing."""
        body = parse_body(await self._read(request), self._config.limits)
        name = self._config.model.served_name
        if body.setdefault("model", name) != name:
            raise UnknownModel(str(body["model"]), name)
        replicas = self._router.replicas("decode")
        if not replicas:
            raise NoDecodeReplica("no decode replica is running: wait for /ready")
        replica_id, url = next(iter(replicas.items()))
        stream = await self._decode_engines.post(
            replica_id, url, request.url.path, json.dumps(body).encode(), uuid.uuid4().hex
        )
        try:
            text = await stream.read()
        except ReplicaDied as err:
            raise DecodeFailed("the decode replica broke off: retry") from err
        finally:
            await stream.close()
        return Response(text, stream.status, media_type=stream.content_type)

    async def _complete(self, request: Request, kind: RequestKind) -> Response:
        request_id = _request_id(request)
        arrived = time.perf_counter()
        try:
            self._access.check(request.headers.get("authorization"), time.monotonic())
            body = parse_body(await self._read(request), self._config.limits)
            (validate_chat if kind == "chat" else validate_completion)(body, self._config)
            await self._ready()
        except BaseException as err:
            response = self._error_response(err, request_id)
            self._metrics.finished(kind, response.status_code)
            return response
        pd_request = PdRequest(
            # Unique even when a client sends the same id twice: reservations are keyed by it.
            request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
            kind=kind,
            body=body,
            domain=request.headers.get(self._config.router.domain_header),
            local_prefill=needs_local_prefill(body, kind),
        )
        return Relay(self, pd_request, request_id, arrived)

    async def _read(self, request: Request) -> bytes:
        """The body, given up as soon as it is too large."""
        limit = self._config.limits.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(int(declared), limit)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise BodyTooLarge(size, limit)
            parts.append(part)
        return b"".join(parts)

    def _error_response(self, err: BaseException, request_id: str) -> Response:
        if isinstance(err, asyncio.CancelledError):
            raise err
        if isinstance(err, UpstreamRefused):
            return Response(err.body, err.status, media_type="application/json")
        if isinstance(err, TimeoutError):
            limit = self._config.limits.request_timeout_s
            err = DeadlineExceeded(f"the request ran past its deadline of {limit:g} s")
        if isinstance(err, ReplicaDied):
            err = DecodeFailed(f"{err}: retry")
        if not is_expected(err):
            logger.error("%s: internal error", request_id, exc_info=err)
        status, body = to_openai(err)
        return JSONResponse(body, status, response_headers(err))


class Relay(Response):
    """Runs one request and passes its bytes on as they come.

    Both legs end with the client's connection, the deadline, or the answer, whichever is first.
    """

    def __init__(
        self, ingress: Ingress, request: PdRequest, client_request_id: str, arrived: float
    ) -> None:
        # Response.__init__ renders a body and headers; there are none yet.
        self.background = None
        self._ingress, self._request = ingress, request
        self._client_request_id, self._arrived = client_request_id, arrived
        self._has_begun = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(_cancel_on_disconnect(receive, task))
        ingress, kind = self._ingress, self._request.kind
        status = 499  # the client went away
        ingress._metrics.active(kind, +1)
        try:
            async with asyncio.timeout(ingress._config.limits.request_timeout_s):
                status = await self._run(send)
        except asyncio.CancelledError:
            if not watcher.done():
                raise
            logger.info("%s: client went away", self._request.request_id)
        except Exception as err:
            status = await self._fail(err, scope, receive, send)
        finally:
            watcher.cancel()
            ingress._metrics.active(kind, -1)
            ingress._metrics.finished(kind, status)

    async def _run(self, send: Any) -> int:
        answer = await self._ingress._flow.open(self._request)
        try:
            await send(self._start(answer))
            self._has_begun = True
            first, last, num_events = 0.0, 0.0, 0
            async for chunk in answer.stream.chunks():
                last = time.perf_counter()
                first = first or last
                num_events += chunk.count(b"data: {")
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            metrics = self._ingress._metrics
            metrics.answered(self._request.kind, last - self._arrived)
            if self._request.body.get("stream"):
                metrics.phase("stream", last - first)
                metrics.streamed(
                    answer.placement.policy, first - self._arrived, last - first, num_events
                )
            if answer.fallback:
                metrics.fell_back(answer.fallback)
            return answer.stream.status
        finally:
            await answer.close()

    def _start(self, answer: Answer) -> dict[str, Any]:
        headers = {
            "content-type": answer.stream.content_type,
            "x-eldr-decode-replica": answer.placement.replica_id,
            "x-eldr-policy": answer.placement.policy,
        }
        if answer.placement.similarity is not None:
            headers["x-eldr-similarity"] = f"{answer.placement.similarity:.4f}"
        if answer.fallback:
            headers["x-eldr-fallback"] = answer.fallback
        if answer.num_retries:
            headers["x-eldr-retries"] = str(answer.num_retries)
        return {
            "type": "http.response.start",
            "status": answer.stream.status,
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        }

    async def _fail(self, err: Exception, scope: Any, receive: Any, send: Any) -> int:
        """Answer with an error object, or end a stream that has begun with an error event."""
        response = self._ingress._error_response(err, self._client_request_id)
        if not self._has_begun:
            await response(scope, receive, send)
            return response.status_code
        if isinstance(err, TimeoutError):
            err = DeadlineExceeded("the request ran past its deadline")
        elif isinstance(err, ReplicaDied):
            err = DecodeFailed("the decode replica died while it answered: retry")
        await send({"type": "http.response.body", "body": to_sse(err), "more_body": False})
        return response.status_code


async def _cancel_on_disconnect(receive: Any, task: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def _request_id(request: Request) -> str:
    """The request's x-request-id if it is a sane one, else a new one.

    Serve sets the header where a client sent none, and sends it back with every answer.
    """
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
